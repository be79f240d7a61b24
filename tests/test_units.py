"""Sizes and durations as text."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake.errors import ConfigError
from flatcake.units import (
    DIRECT_BYTES,
    MS,
    SECOND,
    US,
    GiB,
    KiB,
    MiB,
    TiB,
    align_up,
    format_bytes,
    parse_bytes,
    parse_ns,
)

SIZES = {"": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
SIZES |= {"kB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
TIMES = {"": 1, "ns": 1, "us": 1000, "ms": 1000**2, "s": 1000**3, "min": 60 * 1000**3, "h": 3600 * 1000**3}


def test_constants() -> None:
    assert (KiB, MiB, GiB, TiB, DIRECT_BYTES) == (2**10, 2**20, 2**30, 2**40, 4096)
    assert (US, MS, SECOND) == (10**3, 10**6, 10**9)


@given(st.integers(0, 1 << 62))
def test_parse_keeps_whole_numbers(value: int) -> None:
    assert parse_bytes(value) == parse_ns(value) == value
    assert parse_bytes(str(value)) == parse_ns(str(value)) == value


@given(st.integers(0, 1 << 40), st.sampled_from(sorted(SIZES)), st.sampled_from(["", " ", "  "]), st.booleans())
def test_parse_bytes_scales_exactly(count: int, unit: str, gap: str, lower: bool) -> None:
    assert parse_bytes(f"{gap}{count}{gap}{unit.lower() if lower else unit}{gap}") == count * SIZES[unit]


@given(st.integers(0, 1 << 40), st.sampled_from(sorted(TIMES)))
def test_parse_ns_scales_exactly(count: int, unit: str) -> None:
    assert parse_ns(f"{count}{unit}") == count * TIMES[unit]


@given(st.integers(0, 10**9), st.integers(0, 999_999), st.sampled_from(sorted(SIZES)))
def test_parse_bytes_takes_fractions_that_are_whole_bytes_and_no_others(whole: int, tail: int, unit: str) -> None:
    text = f"{whole}.{tail:06d}"
    exact = Fraction(text) * SIZES[unit]
    if exact.denominator == 1:
        assert parse_bytes(text + unit) == exact
    else:
        with pytest.raises(ConfigError, match="a whole number of the smallest unit"):
            parse_bytes(text + unit)


@pytest.mark.parametrize(
    "bad", ["", " ", "KiB", "-1", "-1KiB", "1e3", "1.KiB", ".5KiB", "1 K iB", "0x10", "1_000", "1,5MiB", "nan"]
)
def test_parse_refuses_what_is_not_a_number_with_a_unit(bad: str) -> None:
    with pytest.raises(ConfigError, match="expected a size such as 64GiB"):
        parse_bytes(bad)
    with pytest.raises(ConfigError, match="expected a duration such as 500ms"):
        parse_ns(bad)


def test_parse_refuses_the_other_kind_of_unit() -> None:
    with pytest.raises(ConfigError, match="'5s': expected a size"):
        parse_bytes("5s")
    with pytest.raises(ConfigError, match="'5MiB': expected a duration"):
        parse_ns("5MiB")


@pytest.mark.parametrize("bad", [True, False, 1.0, None, b"1", [1]])
def test_parse_refuses_other_types(bad: object) -> None:
    with pytest.raises(ConfigError, match="expected a size"):
        parse_bytes(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a duration"):
        parse_ns(bad)  # type: ignore[arg-type]


def test_parse_refuses_negative_numbers() -> None:
    with pytest.raises(ConfigError, match="-1: expected a size such as 64GiB, 0 or more"):
        parse_bytes(-1)


@given(st.integers(0, 1 << 60))
def test_format_bytes_reads_back_within_its_four_digits(size_bytes: int) -> None:
    number, unit = format_bytes(size_bytes).split()
    assert abs(Fraction(number) * SIZES[unit] - size_bytes) <= Fraction(size_bytes, 1000)
    assert Fraction(number) >= 1 or size_bytes == 0


@pytest.mark.parametrize(("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * TiB, "3 TiB")])
def test_format_bytes_examples(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 1 << 60), st.integers(1, 1 << 30))
def test_align_up_is_the_first_multiple_not_below(value: int, step: int) -> None:
    aligned = align_up(value, step)
    assert aligned % step == 0
    assert value <= aligned < value + step
