"""The window: fixed slots, each in one hand, and those who wait served in order."""

from collections.abc import Callable

import numpy as np
import pytest

from flatcake.io.device import CpuDevice, Point
from flatcake.io.engine import Buffer
from flatcake.io.seam import Files
from flatcake.io.window import Window
from tests.fakes import FakeEvent


class Watch:
    """Points that are watched; `look` calls back for those that have been reached."""

    def __init__(self) -> None:
        self.points: list[tuple[Point, Callable[[], None]]] = []

    def __call__(self, point: Point, then: Callable[[], None]) -> None:
        self.points.append((point, then))

    def look(self) -> None:
        points, self.points = self.points, []
        for point, then in points:
            if point.done():
                then()
            else:
                self.points.append((point, then))


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def window(watch: Watch) -> Window:
    return Window(CpuDevice(Files()), slots=3, slot_bytes=8192, when=watch)


def take_all(window: Window) -> list[Buffer]:
    slots = [window.take() for _ in range(window.slots)]
    return [slot for slot in slots if slot is not None]


def test_slots_are_equal_apart_and_aligned(window: Window) -> None:
    slots = [window.take() for _ in range(3)]
    assert window.take() is None and window.free_slots == 0 and window.size_bytes == 3 * 8192
    addresses = sorted(slot.address for slot in slots if slot is not None)
    assert np.diff(addresses).tolist() == [8192, 8192] and addresses[0] % 4096 == 0
    assert all(slot is not None and slot.tensor.numel() == 8192 and slot.host is not None for slot in slots)


def test_those_who_wait_are_served_in_order_and_once(window: Window) -> None:
    slots = [window.take() for _ in range(3)]
    seen: list[tuple[str, bool]] = []
    for name in "abc":
        window.wait(lambda name=name: seen.append((name, window.take() is not None)))
    assert not seen
    for slot in slots[:2]:
        assert slot is not None
        window.give_back(slot)
    assert seen == [("a", True), ("b", True)] and window.free_slots == 0
    last = slots[2]
    assert last is not None
    window.give_back(last)
    assert seen[2:] == [("c", True)]


def test_a_slot_that_one_who_waited_does_not_want_goes_to_the_next(window: Window) -> None:
    slots = [window.take() for _ in range(3)]
    seen: list[str] = []
    window.wait(lambda: seen.append("gave up"))
    window.wait(lambda: seen.append("took") if window.take() is not None else None)
    assert slots[0] is not None
    window.give_back(slots[0])
    assert seen == ["gave up", "took"] and window.free_slots == 0


def test_a_slot_is_free_when_its_point_is_reached_and_not_before(window: Window, watch: Watch) -> None:
    events, slots = [FakeEvent() for _ in range(3)], take_all(window)
    for line, (event, slot) in enumerate(zip(events, slots, strict=True)):
        window.give_back(slot, event, line)
    assert window.take() is None and not watch.points
    events[1].reach()
    assert window.take() is slots[1] and window.take() is None
    events[0].reach()
    window.collect()
    assert window.free_slots == 1 and window.take() is slots[0]


def test_only_the_first_point_of_a_line_is_asked_for(window: Window) -> None:
    class Asked(FakeEvent):
        times = 0

        def done(self) -> bool:
            self.times += 1
            return super().done()

    events = [Asked() for _ in range(3)]
    for event, slot, line in zip(events, take_all(window), ("one", "one", "other"), strict=True):
        window.give_back(slot, event, line)
    before = [event.times for event in events]
    window.collect()
    assert [event.times for event in events] == [before[0] + 1, before[1], before[2] + 1] and not window.free_slots
    events[1].reach()
    events[0].reach()
    window.collect()
    assert window.free_slots == 2


def test_slots_on_their_way_are_watched_while_somebody_waits(window: Window, watch: Watch) -> None:
    events, slots = [FakeEvent() for _ in range(3)], take_all(window)
    window.give_back(slots[0], events[0], 0)
    got: list[Buffer | None] = []
    for name in "ab":
        window.wait(lambda name=name: got.append(window.take()))
    for number in (1, 2):
        window.give_back(slots[number], events[number], number)
    assert len(watch.points) == 1, "one watch serves all"
    watch.look()
    assert not got
    events[1].reach()
    watch.look()
    assert got == [slots[1]] and len(watch.points) == 1


def test_a_slot_that_somebody_else_has_collected_goes_to_who_waits(window: Window, watch: Watch) -> None:
    events, slots = [FakeEvent() for _ in range(3)], take_all(window)
    for number in range(3):
        window.give_back(slots[number], events[number], number)
    got: list[Buffer | None] = []
    window.wait(lambda: got.append(window.take()))
    for event in events[:2]:
        event.reach()
    assert window.take() is slots[0] and window.free_slots == 1, "both are collected"
    watch.look()
    assert got == [slots[1]], "a slot is free while somebody waits"


def test_a_slot_that_is_given_back_twice_is_noticed(window: Window) -> None:
    slot = window.take()
    assert slot is not None
    window.give_back(slot)
    with pytest.raises(AssertionError):
        window.give_back(slot)
