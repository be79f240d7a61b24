"""Callers that cancel, mistype and come too late: nothing of theirs stays behind."""

import gc
import os
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from flatcake.clock import ManualClock
from flatcake.errors import ClosedError, ConfigError
from flatcake.gva import Medium
from flatcake.io.device import CpuDevice
from flatcake.io.memory import Fault
from flatcake.io.pump import Pump
from flatcake.io.seam import Files
from flatcake.placement import Decision, TurnSignals
from flatcake.store import Store
from flatcake.units import SECOND
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

STORM = 10_000 if "FLATCAKE_NIGHTLY" in os.environ else 2_000


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout())


def baseline(store: Store) -> dict[str, int]:
    """Everything that grows with what is under way."""
    fence(store)
    plane, parts = store.plane, store.plane.parts
    stats = store.stats()
    return {
        "leases": stats.leases,
        "plans": stats.plans,
        "restores": len(plane._restores),
        "active": len(plane._active),
        "queued": len(plane._queued),
        "saves": len(plane._saves) + len(store._saves),
        "free slots": parts.window.free_slots,
        "free save slots": parts.save_window.free_slots,
        "waiting": len(parts.window._waiting) + len(parts.save_window._waiting),
        "timers": len(parts.pump._timers),
        "watched": len(parts.pump._watched),
        "record users": sum(record.users for record in parts.book._records.values()),
        "threads": threading.active_count(),
    }


# -- storms ---------------------------------------------------------------------------------------------


@MEDIA
def test_a_storm_of_cancels_leaves_nothing(memory: Memory, medium: Medium) -> None:
    with make_store(memory) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens, TURNS[medium])
        assert restore(store, memory, tokens).blocks == 6
        check(store)
        before, streams = baseline(store), len(store.plane.parts.streams)
        dead = []
        with store.lease(store.match(tokens)) as lease:
            for number in range(STORM):
                handle = store.restore(lease, np.arange(12))
                handle.cancel()
                assert handle.done()
                if number % 500 == 0:
                    dead.append(weakref.ref(handle))
                    fence(store)
        check(store)
        assert baseline(store) == before
        assert len(store.plane.parts.streams) <= streams + store._config.io.restores_max
        del handle
        gc.collect()
        assert not [each for each in dead if each() is not None]
        assert restore(store, memory, tokens).blocks == 6


def test_cancelled_restores_go_at_once_though_no_slot_is_free(memory: Memory) -> None:
    with make_store(memory) as store:
        ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 6)
        save(store, memory, "s", tokens)
        ssd.inject(Fault(kind="hang", verb="read", batches=None))
        with store.lease(store.match(tokens)) as lease:
            slots = store.plane.parts.window.slots
            stuck = [store.restore(lease, np.arange(12)) for _ in range(slots)]
            eventually(store, lambda: ssd.held == slots)
            before = baseline(store)
            waiting = [store.restore(lease, np.arange(12)) for _ in range(500)]
            now = baseline(store)
            assert now["active"] == store._config.io.restores_max and now["queued"] and now["waiting"]
            for handle in waiting:
                handle.cancel()
            assert baseline(store) == before
            for handle in stuck:
                handle.cancel()
        assert not any(handle.result().blocks for handle in stuck)
        ssd.heal()
        ssd.let_go()
        check(store)
        assert restore(store, memory, tokens).blocks == 6


def test_saves_given_up_leave_nothing_though_no_slot_is_free(memory: Memory) -> None:
    clock = ManualClock()
    with make_store(memory, clock=clock) as store:
        ssd = memory_engine(store, Medium.SSD)
        ssd.inject(Fault(kind="hang", verb="write", batches=None))
        first = store.save("first", make_tokens("first", 12), np.arange(24))
        eventually(store, lambda: ssd.held == store.plane.parts.save_window.slots)
        before = baseline(store)
        late = [store.save(f"s{n}", make_tokens(n, 1), np.arange(2), timeout_ns=SECOND) for n in range(20)]
        fence(store)
        clock.advance(2 * SECOND)
        fence(store)
        assert [handle.result(WAIT_S).reason for handle in late] == ["deadline"] * 20
        now = baseline(store)
        assert now == before
        ssd.heal()
        ssd.let_go()
        assert first.result(WAIT_S).written_blocks == 12
        check(store)


# -- too late before it began ---------------------------------------------------------------------------


def test_saves_that_are_late_from_the_start_are_forgotten(memory: Memory) -> None:
    config = make_config(memory, io={"saves_max": 2})
    with make_store(memory, config) as store:
        begun = store.plane.save

        def late_save(*arguments: Any, **named: Any) -> Any:
            handle = begun(*arguments, **named)
            fence(store)
            return handle

        store.plane.save = late_save  # type: ignore[method-assign]
        for number in range(50):
            late = store.save("s", make_tokens(number, 2), np.arange(4), timeout_ns=0, deferred=number % 2 == 0)
            found = late.result(WAIT_S)
            assert found is not None and found.reason == "deadline"
            check(store)
        assert not store._saves
        store.plane.save = begun  # type: ignore[method-assign]
        assert save(store, memory, "s", make_tokens("a", 2)).written_blocks == 2


def test_restores_that_are_late_from_the_start_are_forgotten(memory: Memory) -> None:
    with make_store(memory) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens)
        for timeout_ns in (0, -5):
            with store.lease(store.match(tokens)) as lease:
                late = store.restore(lease, np.arange(12), timeout_ns=timeout_ns)
            assert late.result().blocks in (0, 6)
            check(store)


def test_a_deadline_beyond_all_clocks_is_none(memory: Memory) -> None:
    clock = ManualClock()
    pump = Pump(CpuDevice(Files()), clock)
    pump.at(1 << 100, lambda: None)
    reached = threading.Event()
    pump.post(lambda: None)
    pump.post(reached.set)
    assert reached.wait(WAIT_S)
    pump.post(reached.clear)
    pump.close(WAIT_S * SECOND)
    assert not reached.is_set()
    with make_store(memory) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens)
        with store.lease(store.match(tokens), hold_ns=1 << 100) as lease:
            assert store.restore(lease, np.arange(12), timeout_ns=1 << 100).result().blocks == 6
        check(store)


# -- mistakes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["soon", [1], object()], ids=type)
def test_a_wrong_time_is_a_mistake_that_costs_nothing(memory: Memory, wrong: Any) -> None:
    with make_store(memory) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens)
        with pytest.raises(ConfigError, match="expected"):
            store.lease(store.match(tokens), hold_ns=wrong)
        with store.lease(store.match(tokens)) as lease:
            with pytest.raises(ConfigError, match="expected"):
                store.restore(lease, np.arange(12), timeout_ns=wrong)
            with pytest.raises(ConfigError, match="expected"):
                store.restore(lease, np.arange(12), skip_blocks=wrong)
        with pytest.raises(ConfigError, match="expected"):
            store.save("t", make_tokens("b", 2), np.arange(4), timeout_ns=wrong)
        check(store)


class Broken:
    """A placement of the user's that fails."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def place(self, signals: TurnSignals) -> Decision:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [RuntimeError("no"), None, Decision(2, "ssd", 1), Decision(2, 7, 1)],  # type: ignore[arg-type]
    ids=["raises", "none", "text", "7"],
)
def test_a_placement_that_fails_pins_nothing(memory: Memory, answer: Any) -> None:
    with make_store(memory) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens[:24])
        good, store.catalog._placement = store.catalog._placement, Broken(answer)
        with pytest.raises((RuntimeError, AttributeError, ValueError)):
            store.save("s", tokens, np.arange(12))
        check(store)
        store.catalog._placement = good
        assert save(store, memory, "s", tokens).written_blocks == 3
        check(store)


def test_a_turn_that_is_none_of_ours_pins_nothing(memory: Memory) -> None:
    with make_store(memory) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens[:24])
        with pytest.raises(ConfigError, match="turn="):
            store.save("s", tokens, np.arange(12), turn={"index": 2})
        check(store)


# -- reset ----------------------------------------------------------------------------------------------


def test_no_restore_delivers_after_reset_has_returned(memory: Memory) -> None:
    """The pump is held still, so that it is reset itself that ends them."""
    with make_store(memory) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens)
        go, stands = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            assert go.wait(WAIT_S)

        store.plane.parts.pump.post(stand)
        assert stands.wait(WAIT_S)
        with store.lease(store.match(tokens)) as lease:
            handle = store.restore(lease, np.arange(12))
        store.reset()
        assert handle.done() and handle.result().reason == "reset"
        go.set()
        check(store)


def test_a_restore_that_races_with_reset_is_a_miss(memory: Memory) -> None:
    with make_store(memory) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens)
        begun = store.plane.restore

        def reset_first(*arguments: Any, **named: Any) -> Any:
            store.reset()
            return begun(*arguments, **named)

        store.plane.restore = reset_first  # type: ignore[method-assign]
        with store.lease(store.match(tokens)) as lease:
            result = store.restore(lease, np.arange(12)).result()
        assert (result.blocks, result.reason) == (0, "reset")
        check(store)


def test_a_closed_store_refuses(memory: Memory) -> None:
    with make_store(memory) as store:
        pass
    for call in (lambda: store.match(make_tokens("a", 2)), store.reset):
        with pytest.raises(ClosedError):
            call()


# -- faults of our own ----------------------------------------------------------------------------------


class FailsOnce:
    """A copier whose n-th copy raises, as one does that gets no memory."""

    def __init__(self, inner: Any, at: str, nth: int) -> None:
        self.inner, self.at, self.left = inner, at, nth

    def start(self, *arguments: Any, **named: Any) -> Any:
        copy = self.inner.start(*arguments, **named)
        real = getattr(copy, self.at)

        def call(*given: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                raise MemoryError("no memory")
            return real(*given)

        setattr(copy, self.at, call)
        return copy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("at", ["scatter", "fetch_sums", "gather"])
def test_a_copy_that_raises_costs_no_slot(memory: Memory, at: str, nth: int) -> None:
    with make_store(memory) as store:
        tokens = make_tokens("a", 12)
        save(store, memory, "s", tokens)
        parts = store.plane.parts
        whole = parts.copier
        for turn in range(2 * parts.window.slots):  # More often than there are slots.
            broken = parts.copier = FailsOnce(whole, at, nth)  # type: ignore[assignment]
            if at == "gather":
                found = store.save(f"t{turn}", make_tokens(turn, 12), np.arange(24)).result(WAIT_S)
                assert found is not None and (found.written_blocks, found.reason) == (0, "internal error")
            else:
                with store.lease(store.match(tokens)) as lease:
                    handle = store.restore(lease, np.arange(24))
                assert (handle.result().blocks, handle.result().reason) == (0, "internal error")
            assert broken.left <= 0
            check(store)
        parts.copier = whole
        assert restore(store, memory, tokens).blocks == 12
        assert save(store, memory, "t", make_tokens("t", 12)).written_blocks == 12
        check(store)
