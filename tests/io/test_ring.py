"""A ring: work in order, each with a buffer of its own, which is not reused before its point is reached."""

import threading
from collections.abc import Callable

import pytest

from flatcake.io.device import Point
from flatcake.io.engine import Buffer
from flatcake.io.ring import Ring
from tests.fakes import WAIT_S, FakeEvent, host_buffer

PAGE = 4096


class At:
    """A ring whose work is noted, and whose watched points are looked at when told."""

    def __init__(self, buffers: int) -> None:
        self.started: list[tuple[int, Buffer]] = []
        self.watched: list[tuple[Point, Callable[[], None]]] = []
        self.ring: Ring[int] = Ring(
            [host_buffer(PAGE) for _ in range(buffers)],
            lambda work, buffer: self.started.append((work, buffer)),
            lambda point, then: self.watched.append((point, then)),
        )

    def put(self, *work: int) -> None:
        for each in work:
            self.ring.put(each)

    @property
    def numbers(self) -> list[int]:
        return [work for work, _ in self.started]

    def look(self) -> None:
        watched, self.watched = self.watched, []
        for point, then in watched:
            if point.done():
                then()
            else:
                self.watched.append((point, then))


def test_work_starts_in_order_and_the_rest_waits() -> None:
    at = At(2)
    at.put(0, 1, 2, 3, 4)
    assert at.numbers == [0, 1] and not at.watched and not at.ring.is_idle()
    at.ring.check()
    for _ in range(3):
        at.ring.give_back(at.started.pop(0)[1])
    assert at.numbers == [3, 4]
    for _, buffer in at.started:
        at.ring.give_back(buffer)
    assert at.ring.is_idle()


def test_a_buffer_that_was_collected_by_a_question_is_used() -> None:
    at, events = At(2), [FakeEvent(), FakeEvent()]
    at.put(0, 1, 2)
    for (_, buffer), event in zip(at.started, events, strict=True):
        at.ring.give_back(buffer, event)
    events[0].reach()
    assert not at.ring.is_idle()
    at.look()
    assert at.numbers == [0, 1, 2]
    at.ring.check()


def test_a_buffer_on_its_way_is_watched_only_while_work_waits() -> None:
    at, event = At(1), FakeEvent()
    at.put(0)
    at.ring.give_back(at.started[0][1], event)
    assert not at.watched and not at.ring.is_idle()
    at.put(1, 2)
    at.look()
    assert at.numbers == [0] and len(at.watched) == 1
    event.reach()
    at.look()
    assert at.numbers == [0, 1] and not at.watched
    at.ring.give_back(at.started[1][1])
    assert at.numbers == [0, 1, 2]


def test_the_buffer_used_last_is_taken_first() -> None:
    at = At(3)
    at.put(0, 1, 2)
    buffers = [buffer for _, buffer in at.started]
    for buffer in buffers:
        at.ring.give_back(buffer)
    assert at.ring.is_idle()
    at.put(3)
    assert at.started[-1][1] is buffers[-1]


def test_what_waits_can_be_dropped() -> None:
    at = At(1)
    at.put(0, 1, 2)
    assert at.ring.drop() == [1, 2] and at.ring.drop() == []
    at.ring.give_back(at.started[0][1])
    assert at.numbers == [0] and at.ring.is_idle()


def test_a_buffer_that_comes_back_twice_is_noticed() -> None:
    at = At(1)
    at.put(0)
    at.ring.give_back(at.started[0][1])
    with pytest.raises(AssertionError):
        at.ring.give_back(at.started[0][1])


def test_work_that_ends_at_once_does_not_pile_up() -> None:
    done: list[int] = []
    ring: Ring[int]

    def start(work: int, buffer: Buffer) -> None:
        done.append(work)
        if work + 1 < 10_000:
            ring.put(work + 1)
        ring.give_back(buffer)

    ring = Ring([host_buffer(PAGE)], start, lambda point, then: None)
    ring.put(0)
    assert done == list(range(10_000)) and ring.is_idle()


def test_many_threads_give_back_and_nothing_is_lost() -> None:
    done, lock, all_done = [0], threading.Lock(), threading.Event()
    ring: Ring[int]

    def start(work: int, buffer: Buffer) -> None:
        def end() -> None:
            with lock:
                done[0] += 1
                if done[0] == 400:
                    all_done.set()
            ring.give_back(buffer)

        threading.Thread(target=end).start()

    ring = Ring([host_buffer(PAGE) for _ in range(4)], start, lambda point, then: None)
    for first in range(0, 400, 100):
        threading.Thread(target=lambda first=first: [ring.put(first + n) for n in range(100)]).start()
    assert all_done.wait(WAIT_S)
