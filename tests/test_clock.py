"""Clocks that are passed in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake.clock import Clock, ManualClock, MonotonicClock


def test_monotonic_clock_never_goes_backwards() -> None:
    clock = MonotonicClock()
    times = [clock.now_ns() for _ in range(1000)]
    assert times == sorted(times)
    assert all(type(now_ns) is int for now_ns in times)


@given(st.integers(0, 1 << 62), st.lists(st.integers(0, 1 << 40)))
def test_manual_clock_moves_only_when_told(start_ns: int, steps: list[int]) -> None:
    clock = ManualClock(start_ns)
    for count, step_ns in enumerate(steps):
        assert clock.now_ns() == clock.now_ns() == start_ns + sum(steps[:count])
        clock.advance(step_ns)
    assert clock.now_ns() == start_ns + sum(steps)


def test_manual_clock_refuses_to_go_backwards() -> None:
    clock = ManualClock(5)
    with pytest.raises(AssertionError):
        clock.advance(-1)
    assert clock.now_ns() == 5


def test_both_are_clocks() -> None:
    clocks: list[Clock] = [ManualClock(), MonotonicClock()]
    assert clocks[0].now_ns() == 0
    assert clocks[1].now_ns() > 0
