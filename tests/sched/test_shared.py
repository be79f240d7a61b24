"""The time that restores had for themselves: adds up to the time in which any was under way."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake.sched.shared import SharedClock


def test_one_alone_has_all_of_the_time() -> None:
    clock = SharedClock()
    begun = clock.begin(1_000)
    assert clock.end(begun, 1_700) == 700
    begun = clock.begin(5_000)
    assert clock.end(begun, 5_010) == 10


def test_two_that_overlap_share_what_they_overlap() -> None:
    clock = SharedClock()
    first = clock.begin(0)
    second = clock.begin(100)
    assert clock.end(first, 300) == 100 + 100
    assert clock.end(second, 350) == 100 + 50


def test_time_that_steps_back_stands_still() -> None:
    clock = SharedClock()
    begun = clock.begin(100)
    assert clock.end(begun, 50) == 0


def test_more_ends_than_begins_are_noticed() -> None:
    clock = SharedClock()
    clock.end(clock.begin(0), 1)
    with pytest.raises(AssertionError):
        clock.end(0.0, 2)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 10_000)), min_size=1, max_size=30))
def test_shares_are_those_of_brute_force(spans: list[tuple[int, int]]) -> None:
    jobs = [(start, start + length) for start, length in spans]
    edges = sorted({edge for job in jobs for edge in job})
    want = [0.0] * len(jobs)
    for low, high in pairwise(edges):
        inside = [number for number, (start, end) in enumerate(jobs) if start <= low and high <= end]
        for number in inside:
            want[number] += (high - low) / len(inside)
    clock, begun, got = SharedClock(), {}, {}
    steps = [(end, 0, number) for number, (_, end) in enumerate(jobs)]
    steps += [(start, 1, number) for number, (start, _) in enumerate(jobs)]
    for now_ns, is_begin, number in sorted(steps):
        if is_begin:
            begun[number] = clock.begin(now_ns)
        else:
            got[number] = clock.end(begun[number], now_ns)
    assert all(abs(got[number] - want[number]) <= 1 for number in got)
    busy = sum(high - low for low, high in pairwise(edges) if any(a <= low and high <= b for a, b in jobs))
    assert abs(sum(got.values()) - busy) <= len(jobs)
