"""The queue against brute force with exact fractions, and the rounding that floats alone would get wrong."""

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.gva import OFFSET_BYTES_LIMIT
from flatcake.sched.hrrn import TIME_NS_LIMIT, ResponseRatioQueue

Waiting = dict[int, tuple[int, int]]  # number -> (size_bytes, arrival_ns)


def brute_force(waiting: Waiting, now_ns: int) -> int:
    """Highest ratio; then the smaller, the older, the lower number."""

    def rank(number: int) -> tuple[Fraction, int, int, int]:
        size_bytes, arrival_ns = waiting[number]
        return -Fraction(now_ns - arrival_ns, size_bytes), size_bytes, arrival_ns, number

    return min(waiting, key=rank)


def drain(waiting: Waiting, now_ns: int, step_ns: int) -> None:
    """Pop everything, comparing each pop with brute force."""
    queue, left = ResponseRatioQueue(), dict(waiting)
    for number, (size_bytes, arrival_ns) in waiting.items():
        queue.add(number, size_bytes=size_bytes, arrival_ns=arrival_ns)
    while left:
        queue.check()
        best = queue.best(now_ns)
        assert best == brute_force(left, now_ns)
        assert queue.oldest() == min((arrival_ns, number) for number, (_, arrival_ns) in left.items())
        queue.remove(best)
        del left[best]
        now_ns += step_ns
    assert queue.best(now_ns) is None and queue.oldest() is None and len(queue) == 0


sizes = st.one_of(st.integers(1, 4), st.integers(1, 1 << 34), st.integers(OFFSET_BYTES_LIMIT - 4, OFFSET_BYTES_LIMIT))
times = st.one_of(st.integers(0, 6), st.integers(0, 1 << 44))


@given(st.lists(st.tuples(sizes, times), max_size=40), times, st.sampled_from([0, 1, 3_000_000]))
@settings(max_examples=150, deadline=None)
def test_best_matches_brute_force(requests: list[tuple[int, int]], later_ns: int, step_ns: int) -> None:
    now_ns = max((arrival_ns for _, arrival_ns in requests), default=0) + later_ns
    drain(dict(enumerate(requests)), now_ns, step_ns)


@given(st.lists(st.integers(1, 1 << 20), min_size=2, max_size=30), st.integers(1, 7), st.integers(1, 7))
@settings(max_examples=80, deadline=None)
def test_exact_ties_go_to_the_smaller(sizes: list[int], numerator: int, denominator: int) -> None:
    now_ns = 1 << 30
    waits = [size * numerator // denominator for size in sizes]
    drain({n: (size, now_ns - wait) for n, (size, wait) in enumerate(zip(sizes, waits, strict=True))}, now_ns, 0)


@given(
    st.integers(1 << 40, OFFSET_BYTES_LIMIT - 64),
    st.integers(1 << 58, TIME_NS_LIMIT - 1),
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), min_size=2, max_size=30),
)
@settings(max_examples=150, deadline=None)
def test_ratios_closer_than_a_float_can_tell(size: int, wait_ns: int, nudges: list[tuple[int, int]]) -> None:
    now_ns = TIME_NS_LIMIT - 1
    waiting = {n: (size + more, now_ns - wait_ns + later) for n, (more, later) in enumerate(nudges)}
    drain({n: (s, min(a, now_ns)) for n, (s, a) in waiting.items()}, now_ns, 0)


@given(st.integers(0, 1 << 32), st.sampled_from(["random", "staircase", "tied", "few_sizes", "equal"]))
@settings(max_examples=15, deadline=None)
def test_thousands_waiting_with_adds_and_removes_between(seed: int, shape: str) -> None:
    random, count, now_ns = Random(seed), 3_000, 1 << 40
    make = {
        "random": lambda n: (random.randint(1, 1 << 32), random.randint(0, now_ns)),
        "staircase": lambda n: (n + 1, now_ns - (n + 1) ** 2),  # larger and older: each wins at some time
        "tied": lambda n: (3 * (n + 1), now_ns - 7 * (n + 1)),
        "few_sizes": lambda n: (1 << random.randint(20, 24), now_ns - random.randint(0, 50)),
        "equal": lambda n: (4096, now_ns),
    }[shape]
    left: Waiting = {}
    queue = ResponseRatioQueue()
    for number in range(count):
        left[number] = make(number)
        queue.add(number, size_bytes=left[number][0], arrival_ns=left[number][1])
    for step in range(6):
        gone = queue.best(now_ns)
        assert gone == brute_force(left, now_ns)
        for number in {gone, random.choice(sorted(left)), random.choice(sorted(left))}:
            queue.remove(number)
            del left[number]
        left[count + step] = make(step)
        queue.add(count + step, size_bytes=left[count + step][0], arrival_ns=left[count + step][1])
        now_ns += random.choice([0, 1, 1 << 30])
    queue.check()
    assert set(left) == {number for number in range(count + 6) if number in queue}


def test_ratio_is_not_lost_beside_one() -> None:
    """In 32-bit floats `1 + wait / size` of both is 1.0; the older large one has waited far longer for its size."""
    queue = ResponseRatioQueue()
    queue.add(0, size_bytes=4 << 30, arrival_ns=0)
    queue.add(1, size_bytes=1 << 30, arrival_ns=8)
    assert queue.best(10) == 0
    assert queue.best(11) == 1  # 11/4 < 3/1


def test_order_changes_with_time_alone() -> None:
    queue = ResponseRatioQueue()
    queue.add(7, size_bytes=400, arrival_ns=0)
    queue.add(3, size_bytes=100, arrival_ns=75)
    assert [queue.best(now_ns) for now_ns in (75, 99, 100, 101)] == [7, 7, 3, 3]  # at 100 both are at 1/4


@pytest.mark.parametrize(("size_bytes", "arrival_ns"), [(0, 0), (OFFSET_BYTES_LIMIT + 1, 0), (1, -1)])
def test_values_beyond_the_exact_range_are_refused(size_bytes: int, arrival_ns: int) -> None:
    queue = ResponseRatioQueue()
    with pytest.raises(AssertionError):
        queue.add(0, size_bytes=size_bytes, arrival_ns=arrival_ns)
    assert len(queue) == 0


def test_the_present_is_not_before_an_arrival() -> None:
    queue = ResponseRatioQueue()
    queue.add(0, size_bytes=1, arrival_ns=10)
    with pytest.raises(AssertionError):
        queue.best(9)
