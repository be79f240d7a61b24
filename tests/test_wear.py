"""The write budget against exact arithmetic, and its record on the disk."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.units import SECOND, GiB
from flatcake.wear import DAY_NS, DAY_S, UNKNOWN, Wear, WriteBudget, decode_wear, encode_wear

STEPS = st.lists(st.tuples(st.integers(0, 3 * DAY_NS), st.integers(0, 200)), max_size=30)


@settings(max_examples=200, deadline=None)
@given(daily=st.integers(1, 150), steps=STEPS)
def test_the_budget_is_a_bucket_that_holds_a_day_and_fills_at_a_days_rate(
    daily: int, steps: list[tuple[int, int]]
) -> None:
    budget, now_ns, level = WriteBudget(daily), 0, Fraction(daily)
    for wait_ns, size_bytes in steps:
        now_ns += wait_ns
        level = min(Fraction(daily), level + Fraction(daily * wait_ns, DAY_NS))
        assert budget.left_bytes(now_ns) == level // 1
        assert budget.allows(size_bytes, now_ns) == (size_bytes <= level)
        if size_bytes <= level:
            budget.spend(size_bytes, now_ns)
            level -= size_bytes
    assert budget.left_bytes(now_ns) == level // 1


@settings(max_examples=100, deadline=None)
@given(daily=st.integers(1, 10**15), steps=STEPS)
def test_over_any_time_no_more_is_allowed_than_came_and_a_days_bytes(daily: int, steps: list[tuple[int, int]]) -> None:
    budget, now_ns, spent = WriteBudget(daily), 0, 0
    for wait_ns, share in steps:
        now_ns += wait_ns
        size_bytes = daily * share // 100
        if budget.allows(size_bytes, now_ns):
            budget.spend(size_bytes, now_ns)
            spent += size_bytes
        assert spent <= daily + daily * now_ns // DAY_NS


def test_without_a_bound_everything_is_allowed() -> None:
    budget = WriteBudget()
    budget.spend(1 << 60, 5)
    budget.resume(0, 0, 7)
    assert budget.allows(1 << 60, 5) and budget.left_bytes(5) is None


def test_what_is_larger_than_a_day_is_never_allowed() -> None:
    budget = WriteBudget(100)
    assert not budget.allows(101, 10 * DAY_NS) and budget.allows(100, 10 * DAY_NS)


def test_a_caller_with_an_older_time_changes_nothing_but_what_it_spends() -> None:
    budget = WriteBudget(100)
    budget.spend(60, 5 * DAY_NS)
    budget.spend(30, 4 * DAY_NS)
    assert budget.left_bytes(5 * DAY_NS) == 10
    with pytest.raises(AssertionError):
        budget.spend(11, 5 * DAY_NS)


@pytest.mark.parametrize(
    ("left", "idle_s", "found"),
    [
        (30, 0, 30),
        (30, DAY_S // 2, 80),
        (30, DAY_S, 100),
        (30, 50 * 365 * DAY_S, 100),  # The clock stepped forward, or the store was closed for long.
        (30, -50 * 365 * DAY_S, 30),  # It stepped back.
        (0, 0, 0),
        (500, 0, 100),  # The bound was lowered meanwhile.
        (UNKNOWN, 0, 100),  # There was none.
    ],
)
def test_a_restart_goes_on_where_the_last_run_left_off(left: int, idle_s: int, found: int) -> None:
    budget = WriteBudget(100)
    budget.resume(left, idle_s, 7 * SECOND)
    assert budget.left_bytes(7 * SECOND) == found


@given(st.integers(0, 2**61), st.integers(0, 2**61), st.integers(-1, 2**60), st.integers(0, 2**40))
def test_a_record_comes_back(dram: int, ssd: int, left: int, wall_s: int) -> None:
    wear = Wear(dram_bytes=dram, ssd_bytes=ssd, left_bytes=left, wall_s=wall_s)
    assert decode_wear(encode_wear(wear)) == wear


def test_a_damaged_record_is_none() -> None:
    body = encode_wear(Wear(ssd_bytes=GiB, wall_s=1))
    for bit in range(len(body) * 8):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_wear(bytes(flipped)) is None
    for wrong in (body[:-1], body + b"\0", b"", None, 7, "text", bytes(len(body))):
        assert decode_wear(wrong) is None
    assert decode_wear(encode_wear(Wear(ssd_bytes=-5))) is None
