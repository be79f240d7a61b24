"""The handle of a restore: who waits for what, who owns the pages, and what the result says."""

import threading

import numpy as np
import pytest

from flatcake.clock import ManualClock
from flatcake.errors import ShapeError
from flatcake.io.device import CpuDevice, DoneEvent
from flatcake.io.plan import Wanted, make_tiles
from flatcake.io.restore import Restore
from flatcake.io.seam import Files
from flatcake.layout import LaneTable
from flatcake.messages import Runs
from tests.builders import make_geometry, make_limits
from tests.fakes import FakeEvent
from tests.stores import WAIT_S

LAYERS, BLOCKS = 3, 5
RUNS = Runs(np.array([[1, 0, 9, 1, 0, BLOCKS, 0]]))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100)


def make_restore(clock: ManualClock, runs: Runs, wanted: Wanted | None = None) -> Restore:
    tiles = make_tiles(runs, LaneTable.of(make_geometry(*[4096] * LAYERS)), make_limits(), wanted)
    return Restore(CpuDevice(Files()), clock, tiles, blocks=BLOCKS, block_tokens=16, layers=LAYERS)


@pytest.fixture
def restore(clock: ManualClock) -> Restore:
    return make_restore(clock, RUNS)


class Waiter:
    """A thread that waits for something of a restore."""

    def __init__(self, call) -> None:
        self.found = []
        self._thread = threading.Thread(target=lambda: self.found.append(call()))
        self._thread.start()

    def value(self):
        self._thread.join(WAIT_S)
        assert self.found, "the wait never ended"
        return self.found[0]


def test_a_wait_for_a_layer_ends_when_it_is_queued_and_not_with_another(restore: Restore) -> None:
    waiter = Waiter(lambda: restore.wait_layer(1))
    restore.note_layers([0], DoneEvent())
    restore.note_layers([2], DoneEvent())
    assert not waiter.found and restore.wait_layer(0) and restore.wait_layer(2)
    restore.note_layers([1], DoneEvent())
    assert waiter.value() is True


def test_the_device_waits_for_the_event_of_the_layer(restore: Restore) -> None:
    event = FakeEvent()
    restore.note_layers([0], event)
    waiter = Waiter(lambda: restore.wait_layer(0))  # On the CPU the caller itself waits.
    assert not waiter.found
    event.reach()
    assert waiter.value() is True


def test_a_verified_wait_ends_with_the_verdict(restore: Restore) -> None:
    restore.note_layers([0], DoneEvent())
    waiter = Waiter(lambda: restore.wait_layer(0, verified=True))
    assert restore.wait_layer(0) and not waiter.found
    restore.note_verified([0])
    assert waiter.value() is True


@pytest.mark.parametrize("verified", [False, True])
def test_a_bad_block_ends_every_wait_and_the_smallest_counts(restore: Restore, verified: bool) -> None:
    restore.note_layers([0], DoneEvent())
    waiters = [Waiter(lambda layer=layer: restore.wait_layer(layer, verified=verified)) for layer in (1, 2)]
    restore.note_bad(3, "later")
    assert [waiter.value() for waiter in waiters] == [False, False] and not restore.wait_layer(0)
    restore.note_bad(2, "first")
    restore.note_bad(4, "last")
    assert not restore.done()
    assert restore.settle() == 2
    restore.end()
    result = restore.result()
    assert (result.blocks, result.tokens, result.reason) == (2, 32, "first")


def test_a_result_waits_for_the_end_and_tells_the_times(restore: Restore, clock: ManualClock) -> None:
    waiter = Waiter(restore.result)
    clock.advance(7)
    restore.note_layers([0], DoneEvent())
    clock.advance(3)
    assert not waiter.found and restore.settle() == BLOCKS and not restore.done()
    restore.end()
    result = waiter.value()
    assert (result.blocks, result.tokens, result.reason) == (BLOCKS, 80, "")
    assert (result.first_layer_ns, result.total_ns) == (7, 10)


def test_cancel_releases_all_and_says_after_what_the_pages_are_free(restore: Restore, clock: ManualClock) -> None:
    restore.last_event = event = FakeEvent()
    waiters = [Waiter(lambda: restore.wait_layer(2)), Waiter(lambda: restore.result().reason)]
    clock.advance(5)
    assert restore.cancel() is event
    assert [waiter.value() for waiter in waiters] == [False, "cancelled"]
    assert restore.cancel("again") is event
    restore.note_layers([2], DoneEvent())
    restore.end()
    result = restore.result()
    assert (result.blocks, result.reason, result.total_ns, result.first_layer_ns) == (0, "cancelled", 5, None)
    assert not restore.wait_layer(2)


def test_cancel_after_the_books_are_settled_changes_nothing(restore: Restore) -> None:
    restore.settle()
    restore.cancel()
    assert not restore.done() and not restore.dropped
    restore.end()
    assert restore.result().blocks == BLOCKS


def test_a_layer_in_which_nothing_moves_is_ready_at_once(clock: ManualClock) -> None:
    restore = make_restore(clock, RUNS, np.repeat([[True], [False], [True]], BLOCKS, axis=1))
    called = []
    restore.on_layer(1, lambda: called.append(1))
    assert restore.wait_layer(1, verified=True) and called == [1]
    waiter = Waiter(lambda: restore.wait_layer(0))
    assert not waiter.found
    restore.note_layers([0], DoneEvent())
    assert waiter.value() is True


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_there_is_no_such_layer(restore: Restore, layer: int) -> None:
    with pytest.raises(ShapeError, match=f"layer {layer}: expected 0 … 2"):
        restore.wait_layer(layer)


def test_a_layer_is_told_once_and_at_once_if_it_is_there(restore: Restore) -> None:
    told: list[str] = []
    restore.on_layer(1, lambda: told.append("later"))
    restore.note_layers([0], DoneEvent())
    assert not told
    restore.note_layers([1], DoneEvent())
    restore.on_layer(1, lambda: told.append("now"))
    restore.end()
    assert told == ["later", "now"]


def test_the_end_is_told_once_and_at_once_if_it_has_come(restore: Restore) -> None:
    told: list[int] = []
    restore.on_end(lambda: told.append(restore.result().blocks))
    restore.on_layer(2, lambda: told.append(-1))  # never comes
    restore.cancel()
    assert restore.done() and not told  # reads may still be in flight
    restore.end()
    restore.on_end(lambda: told.append(7))
    assert told == [0, 7]
