"""The scribe: tasks in order, one at a time, and an end within its time."""

import threading

import pytest

from flatcake.io.scribe import Scribe
from tests.fakes import WAIT_S

WAIT_NS = int(WAIT_S * 1e9)


def test_tasks_run_in_order_and_the_end_comes_last() -> None:
    done: list[object] = []
    scribe = Scribe(lambda: done.append("end"))
    for number in range(100):
        assert scribe.post(lambda number=number: done.append(number))  # type: ignore[misc]
    assert scribe.close(WAIT_NS) and scribe.close(0)
    assert done == [*range(100), "end"] and not scribe.post(lambda: done.append("late"))
    assert len(done) == 101


def test_a_task_that_raises_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    scribe = Scribe(lambda: None)
    scribe.post(lambda: 1 // 0)
    scribe.post(lambda: done.append(1))
    assert scribe.close(WAIT_NS) and done == [1] and "a task of the scribe failed" in caplog.text


def test_close_does_not_wait_longer_than_it_may() -> None:
    gate, done = threading.Event(), list[str]()
    scribe = Scribe(lambda: done.append("end"))
    scribe.post(lambda: gate.wait(WAIT_S))
    scribe.post(lambda: done.append("task"))
    assert not scribe.close(1_000_000) and not done
    gate.set()
    assert scribe.close(WAIT_NS) and done == ["task", "end"]
