"""A store whose media fail, stall and lie, against a dictionary: what a step may have left, and what it must have."""

import errno
import os
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flatcake.clock import ManualClock
from flatcake.gva import Medium
from flatcake.io.memory import Fault
from flatcake.io.restore import Restore
from flatcake.io.save import Save
from flatcake.messages import KeyArray
from flatcake.store import TICK_NS
from flatcake.units import SECOND
from tests.stores import (
    TURNS,
    WAIT_S,
    Memory,
    Pages,
    branch,
    check,
    fence,
    make_config,
    make_store,
    make_tokens,
    memory_engine,
    simple_layout,
)

NIGHTLY = "FLATCAKE_NIGHTLY" in os.environ
PLACES = 24
LONGEST = 6
TIMEOUT_NS = 5 * SECOND
Key = tuple[int, int]

MEDIA = st.sampled_from(list(Medium))
FAULTS = st.builds(
    Fault,
    kind=st.sampled_from(["error", "short", "torn", "delay", "hang", "reorder"]),
    verb=st.sampled_from(["read", "write", None]),
    first=st.integers(0, 4),
    batches=st.integers(1, 3),
    transfer=st.integers(0, 2),
    error=st.sampled_from([errno.EIO, errno.ENOSPC]),
    moved_bytes=st.sampled_from([0, 100, 4096, 5000, 8192]),
)


@dataclass(eq=False)
class Pending:
    """A handle, and the pages that are its own."""

    handle: Restore | Save
    keys: KeyArray
    place: int
    epoch: int
    may_lie: set[Key] = field(default_factory=set)


def as_set(keys: KeyArray) -> set[Key]:
    return {(int(a), int(b)) for a, b in keys}


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(simple_layout(layers=2, dim=8, page_count=PLACES * LONGEST * 2))
        self.clock = ManualClock()
        config = make_config(
            self.memory,
            blocks=48,
            file_blocks=24,
            dram_blocks=24,
            timeouts={"restore_ns": TIMEOUT_NS, "save_ns": TIMEOUT_NS, "lease_ns": TIMEOUT_NS},
            capacity={"dram_idle_ns_max": SECOND},
            retention={"ttl_ns": 3 * TIMEOUT_NS},
        )
        self.store = make_store(self.memory, config, clock=self.clock)
        self.engines = {medium: memory_engine(self.store, medium) for medium in Medium}
        self.places = list(range(PLACES))
        self.pending: list[Pending] = []
        self.epoch = 0
        self.maybe: set[Key] = set()
        """Keys that may be there: saved, or being saved, since the last reset."""
        self.sure: set[Key] = set()
        """Keys that must be there."""
        self.savers: dict[Key, set[int]] = {}
        """Sessions that have tried to save each key since the last reset, or since it was deleted with its only one."""
        self.reclaimed = 0
        self.faulty = False

    # -- steps ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.places)
    @rule(tail=st.integers(0, 5), blocks=st.integers(0, LONGEST), session=st.integers(0, 4), medium=MEDIA)
    def save(self, tail: int, blocks: int, session: int, medium: Medium) -> None:
        keys, place = self.store.keys(self.tokens(tail, blocks)), self.places.pop()
        pages = self.pages(place, len(keys))
        self.memory.stamp(keys, pages)
        handle = self.store.save(f"s{session}", keys, pages, TURNS[medium])
        self.maybe |= as_set(keys)
        for key in as_set(keys):
            self.savers.setdefault(key, set()).add(session)
        self.pending.append(Pending(handle, keys, place, self.epoch))
        self.settle()

    @precondition(lambda self: self.places)
    @rule(tail=st.integers(0, 5), blocks=st.integers(0, LONGEST), cancel=st.booleans(), hold=st.booleans())
    def restore(self, tail: int, blocks: int, cancel: bool, hold: bool) -> None:
        keys, place = self.store.keys(self.tokens(tail, blocks)), self.places.pop()
        match = self.store.match(keys)
        lease = self.store.lease(match)
        assert match.blocks == lease.blocks
        found = as_set(keys[: lease.blocks])
        assert found <= self.maybe, "a hit of what was never saved, or before a reset"
        for key in keys[: lease.blocks + 1][lease.blocks :]:
            assert (int(key[0]), int(key[1])) not in self.sure, "a block that must be there is not"
        keys = keys[: lease.blocks]
        pages = self.pages(place, len(keys))
        self.memory.stamp(keys ^ np.uint64(1), pages)
        handle = self.store.restore(lease, pages)
        self.pending.append(Pending(handle, keys, place, self.epoch))
        if cancel:
            handle.cancel()
        if not hold:
            lease.close()
        self.settle()

    @rule(medium=MEDIA, fault=FAULTS)
    def inject(self, medium: Medium, fault: Fault) -> None:
        self.faulty = True
        self.engines[medium].inject(fault)

    @rule()
    def heal(self) -> None:
        for engine in self.engines.values():
            engine.heal()
        self.faulty = any(engine.held for engine in self.engines.values())

    @rule(medium=MEDIA, hung=st.booleans())
    def go_on(self, medium: Medium, hung: bool) -> None:
        (self.engines[medium].let_go if hung else self.engines[medium].release)()
        self.settle()

    @rule(step_ns=st.sampled_from([TICK_NS, 2 * SECOND, 2 * TIMEOUT_NS]))
    def wait(self, step_ns: int) -> None:
        self.clock.advance(step_ns)
        self.settle()

    @rule()
    def reset(self) -> None:
        self.store.reset()
        self.epoch += 1
        self.maybe, self.sure, self.savers = set(), set(), {}
        for entry in self.pending:
            if isinstance(entry.handle, Restore):
                assert entry.handle.done(), "a restore outlived a reset"
        self.settle()

    @rule(session=st.integers(0, 4))
    def delete(self, session: int) -> None:
        self.store.delete_session(f"s{session}")
        self.sure = set()  # What others share with it may lie in its scopes.
        for key, savers in list(self.savers.items()):
            if savers == {session}:  # What another has saved, too, may lie in a scope of its own by now, and stay.
                del self.savers[key]
                self.maybe.discard(key)
        for entry in self.pending:
            entry.epoch = -1  # Whether a save outlives this depends on whose it is.
        self.settle()

    @rule(session=st.integers(0, 4), hold_ns=st.sampled_from([SECOND, 4 * TIMEOUT_NS]))
    def pin(self, session: int, hold_ns: int) -> None:
        self.store.pin(f"s{session}", hold_ns=hold_ns)

    @rule(session=st.integers(0, 4))
    def unpin(self, session: int) -> None:
        self.store.unpin(f"s{session}")

    @precondition(lambda self: self.pending)
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        entry = self.pending[pick % len(self.pending)]
        if isinstance(entry.handle, Restore):
            entry.handle.cancel()
            self.settle()

    # -- what must hold ---------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        self.store.catalog.check()
        self.store.plane.parts.book.check()
        for window in (self.store.plane.parts.window, self.store.plane.parts.save_window):
            assert 0 <= window.free_slots <= window.slots

    def settle(self) -> None:
        """Let the pump run, and look at the handles that are over."""
        for _ in range(12):
            fence(self.store)
        counts = self.store.stats().counts
        reclaimed = counts["reclaimed_scopes"] + counts.get("expired_scopes", 0)
        if reclaimed != self.reclaimed:
            self.reclaimed, self.sure = reclaimed, set()
        for entry in list(self.pending):
            if isinstance(entry.handle, Restore):
                if entry.handle.done():
                    self.pending.remove(entry)
                    self.end_restore(entry.handle, entry)
            elif (result := entry.handle.result(0)) is not None:
                self.pending.remove(entry)
                assert entry.handle.reusable(WAIT_S)
                self.places.append(entry.place)
                assert result.written_blocks <= len(entry.keys) and (not result.reason or not result.written_blocks)
                if not result.reason and entry.epoch == self.epoch and not self.faulty:
                    self.sure |= as_set(entry.keys)

    def end_restore(self, handle: Restore, entry: Pending) -> None:
        result, pages = handle.result(), self.pages(entry.place, len(entry.keys))
        good = entry.keys[: result.blocks]
        assert self.memory.stamped_blocks(good, pages[: 2 * result.blocks]) == result.blocks, "wrong bytes"
        assert bool(result.reason) == (result.blocks < len(entry.keys))
        if result.reason:
            self.sure -= as_set(entry.keys)
            self.memory.stamp(entry.keys ^ np.uint64(3), pages)
            fence(self.store)
            assert self.memory.stamped_blocks(entry.keys ^ np.uint64(3), pages) == len(entry.keys), "a late scatter"
        self.places.append(entry.place)

    def tokens(self, tail: int, blocks: int) -> Pages:
        prompt = make_tokens("prompt", min(2, blocks))
        return branch(prompt, f"tail {tail}", max(0, blocks - 2))

    def pages(self, place: int, blocks: int) -> Pages:
        return place * LONGEST * 2 + np.arange(2 * blocks)

    def teardown(self) -> None:
        try:
            for engine in self.engines.values():
                engine.heal()
                engine.release()
                engine.let_go()
            self.settle()
            self.clock.advance(2 * TIMEOUT_NS)  # Leases that nobody closed.
            self.settle()
            check(self.store)
            assert not self.pending, "a handle that never ended"
            plane = self.store.plane
            assert not (plane._restores or plane._saves or plane._deadlines or plane._queued or self.store._saves)
            self.store.reset()
            assert all(medium.used_bytes == 0 for medium in self.store.stats().media.values()), "lost space"
        finally:
            for engine in self.engines.values():
                engine.heal()
                engine.let_go()
            assert self.store.close()


Machine.TestCase.settings = settings(
    max_examples=1000 if NIGHTLY else 25,
    stateful_step_count=60 if NIGHTLY else 40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestMachine = Machine.TestCase
