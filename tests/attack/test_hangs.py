"""Transfers that do not return: what waits beside them, what is lost, and that all is whole once they have."""

import threading
from pathlib import Path

import numpy as np
import pytest

from flatcake.clock import ManualClock
from flatcake.gva import Medium
from flatcake.io.device import Stream
from flatcake.io.kvikio import KvikioEngine
from flatcake.io.memory import Fault
from flatcake.io.restore import Restore
from flatcake.io.seam import Files
from flatcake.io.sizing import RingSize
from flatcake.io.staged import StagedEngine
from flatcake.store import Store
from flatcake.units import MS, SECOND
from tests.fakes import FakeCuda, FakeKvikio
from tests.io.contract import PAGE
from tests.stores import (
    MEDIA,
    TURNS,
    WAIT_S,
    Memory,
    check,
    eventually,
    fence,
    make_config,
    make_store,
    make_tokens,
    memory_engine,
    restore,
    save,
    simple_layout,
)

REGION = 12
"""Pages of one restore."""


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout(page_count=REGION * 16))


@MEDIA
def test_reads_that_hang_on_all_slots_cost_only_their_own(memory: Memory, medium: Medium) -> None:
    clock = ManualClock()
    with make_store(memory, clock=clock) as store:
        engine, tokens = memory_engine(store, medium), make_tokens("a", 6)
        other = Medium.SSD if medium is Medium.DRAM else Medium.DRAM
        save(store, memory, "s", tokens, TURNS[medium])
        save(store, memory, "t", make_tokens("b", 6), TURNS[other])
        engine.inject(Fault(kind="hang", verb="read", batches=None))
        slots = store.plane.parts.window.slots
        with store.lease(store.match(tokens)) as lease:
            stuck = [store.restore(lease, REGION * n + np.arange(REGION)) for n in range(slots)]
        eventually(store, lambda: engine.held == slots)
        with store.lease(store.match(make_tokens("b", 6))) as lease:  # A slot is all that these lack.
            waiting = [store.restore(lease, REGION * (8 + n) + np.arange(REGION), timeout_ns=SECOND) for n in range(6)]
        fence(store)
        assert not any(handle.done() for handle in (*stuck, *waiting))
        clock.advance(2 * SECOND)
        eventually(store, lambda: all(handle.done() for handle in waiting))
        assert {handle.result().reason for handle in waiting} == {"deadline"}
        clock.advance(100 * SECOND)
        eventually(store, lambda: all(handle.done() for handle in stuck))
        assert {(handle.result().reason, handle.result().blocks) for handle in stuck} == {("deadline", 0)}
        assert not any(handle.wait_layer(0, verified=True) for handle in (*stuck, *waiting))
        memory.fill(seed=5)
        before = memory.snapshot()
        store.reset()
        assert store.stats().draining_scopes == 1, "an extent under a read may not be used again"
        engine.heal()
        engine.let_go()
        check(store)
        assert memory.is_equal(before), "a late scatter"
        save(store, memory, "s", tokens, TURNS[medium])
        assert restore(store, memory, tokens).blocks == 6
        check(store)


@MEDIA
def test_writes_that_hang_keep_their_space_and_nothing_else(memory: Memory, medium: Medium) -> None:
    clock = ManualClock()
    with make_store(memory, clock=clock) as store:
        engine, name = memory_engine(store, medium), medium.name.lower()
        used_bytes = store.stats().media[name].used_bytes
        engine.inject(Fault(kind="hang", verb="write", batches=None))
        saves = [store.save(f"s{n}", make_tokens(n, 4), 8 * n + np.arange(8), TURNS[medium]) for n in range(6)]
        eventually(store, lambda: engine.held == store.plane.parts.save_window.slots)
        clock.advance(130 * SECOND)
        eventually(store, lambda: all(handle.result(0) is not None for handle in saves))
        assert {handle.result(WAIT_S).reason for handle in saves} == {"deadline"}
        assert all(handle.reusable(WAIT_S) for handle in saves)
        fence(store)
        held = store.stats()
        assert held.plans == len({id(s) for s in saves[: held.plans]}) > 0 and held.blocks == 0
        store.reset()
        assert store.stats().media[name].used_bytes > 0, "space under a write was given away"
        engine.heal()
        engine.let_go()
        check(store)
        assert store.stats().media[name].used_bytes == used_bytes and store.stats().blocks == 0
        assert save(store, memory, "s", make_tokens("a", 4), TURNS[medium]).written_blocks == 4


def test_a_late_write_never_reaches_the_next_tenant(memory: Memory) -> None:
    """Given up and reset, then the pool is filled again and again, and only then the write lands."""
    clock = ManualClock()
    config = make_config(memory, blocks=32, file_blocks=16, io={"verify": "off"})
    with make_store(memory, config, clock=clock) as store:
        ssd = memory_engine(store, Medium.SSD)
        ssd.inject(Fault(kind="hang", verb="write", batches=1))
        late = store.save("late", make_tokens("late", 4), np.arange(8))
        eventually(store, lambda: ssd.held == 1)
        clock.advance(130 * SECOND)
        found = late.result(WAIT_S)
        assert found is not None and found.reason == "deadline"
        store.reset()
        for turn in range(12):
            save(store, memory, f"s{turn}", make_tokens(turn, 7))
        kept = [turn for turn in range(12) if store.match(make_tokens(turn, 7)).blocks]
        assert kept and store.stats().counts["reclaimed_scopes"] > 4
        ssd.let_go()
        check(store)
        for turn in kept:
            assert restore(store, memory, make_tokens(turn, 7)).blocks == 7


@pytest.mark.leaves("stores")  # Its transfers return after the pump has ended.
def test_close_with_hung_writes_and_reads_lets_every_waiter_go(memory: Memory) -> None:
    config = make_config(memory, timeouts={"close_ns": 20_000_000})
    store = make_store(memory, config)
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 6)
    save(store, memory, "s", tokens)
    ssd.inject(Fault(kind="hang", batches=None))
    lease = store.lease(store.match(tokens))
    reads = [store.restore(lease, np.arange(REGION)) for _ in range(3)]
    writes = [store.save(f"s{n}", make_tokens(n, 6), np.arange(REGION)) for n in range(3)]
    never = store.save("never", make_tokens("never", 2), np.arange(4), deferred=True)
    eventually(store, lambda: ssd.held > 3)
    assert not store.close()
    assert {handle.result().reason for handle in reads} == {"closed"}
    assert {handle.result(WAIT_S).reason for handle in (*writes, never)} == {"closed"}
    assert all(handle.reusable(WAIT_S) for handle in (*writes, never))
    never.start()
    lease.close()
    memory.fill(seed=1)
    before = memory.snapshot()
    ssd.let_go()
    assert store.close() and store.close()
    assert memory.is_equal(before)


class Ringed(FakeCuda):
    """A GPU whose copies are made at once, beside a store's host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.new_stream()

    def stream_of(self, stream: object) -> Stream:
        return stream or self.current


def put_ring(store: Store) -> tuple[FakeKvikio, StagedEngine]:
    """Have the SSD medium read and written through a small ring, by a kvikio that hangs when told."""
    fence(store)
    kvikio, parts = FakeKvikio(), store.plane.parts
    assert parts.pool is not None and isinstance(parts.media, dict)
    device = parts.device = Ringed()
    parts.streams.clear()
    inner = KvikioEngine(kvikio, parts.pool.paths, parts.pump.watch, threads=4, task_bytes=PAGE, direct=True)
    ring = StagedEngine(inner, device, Files(), RingSize(parts.window.slot_bytes, reads=2, writes=1), parts.pump.watch)
    parts.media[Medium.SSD] = parts.media[Medium.SSD]._replace(engine=ring)
    return kvikio, ring


@pytest.mark.leaves("stores")  # Its transfers return after the pump has ended.
def test_what_hangs_behind_a_ring_costs_its_own_and_a_later_close_ends_it(memory: Memory, tmp_path: Path) -> None:
    clock = ManualClock()
    store = make_store(memory, make_config(memory, [tmp_path], timeouts={"close_ns": 50 * MS}), clock=clock)
    kvikio, ring = put_ring(store)
    for name in "abcd":
        save(store, memory, name, make_tokens(name, 6), TURNS[Medium.SSD])

    def begin() -> list[Restore]:
        leases = [store.lease(store.match(make_tokens(name, 6))) for name in "abcd"]
        found = [store.restore(lease, REGION * n + np.arange(REGION)) for n, lease in enumerate(leases)]
        for lease in leases:
            lease.close()
        return found

    gate = kvikio.gate = threading.Event()
    stuck, late = begin(), store.save("e", make_tokens("e", 6), REGION * 8 + np.arange(REGION))
    eventually(store, lambda: len(kvikio.futures) > 0)
    clock.advance(1000 * SECOND)
    eventually(store, lambda: all(handle.done() for handle in stuck))
    assert {handle.result().reason for handle in stuck} == {"deadline"}
    ended = late.result(WAIT_S)
    assert ended is not None and ended.written_blocks == 0 and ended.reason
    gate.set()
    eventually(store, lambda: store.stats().plans == 0)
    assert [restore(store, memory, make_tokens(name, 6)).blocks for name in "abcd"] == [6] * 4
    check(store)
    ring.check()
    gate = kvikio.gate = threading.Event()
    started = len(kvikio.futures)
    stuck = begin()
    eventually(store, lambda: len(kvikio.futures) > started)
    assert not store.close()
    assert {handle.result().reason for handle in stuck} == {"closed"}
    memory.fill(seed=7)
    before = memory.snapshot()
    gate.set()
    for future in kvikio.futures:
        future.wait()
    assert store.close() and memory.is_equal(before)
    assert not any(file.closes != 1 for file in kvikio.files)
