"""The checksum against a brute-force model, and against the ways in which storage hands out wrong bytes."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.errors import ShapeError
from flatcake.kernels import checksum
from flatcake.kernels.checksum import finish, piece_seeds, sum_bytes, sum_parts, unfinish

Words = npt.NDArray[np.uint32]
TRIALS = 4000
WORDS = 64
PAYLOADS = ("random", "zeros", "constant", "bfloat16")


def model_sum(payload: bytes, seed: int, first_word: int = 0) -> int:
    """`sum_bytes` word by word, in Python's integers."""
    low, everything = (1 << 32) - 1, (1 << 64) - 1
    key = (seed + 1) * checksum.SPREAD & everything
    key ^= key >> 32
    total = 0
    for number in range(-(-len(payload) // 8)):
        word = int.from_bytes(payload[8 * number : 8 * number + 8].ljust(8, b"\0"), "little")
        x = word ^ (key + (first_word + number) * checksum.WEYL & everything)
        product = (x & low) * (x >> 32)
        total += (product & low) ^ (product >> 32)
    return total & low


def records(payloads: Words, seeds: Words) -> Words:
    return finish(sum_bytes(payloads, seeds), payloads.shape[1] * 4, seeds)


def random_payloads(kind: str, rng: np.random.Generator) -> Words:
    if kind == "zeros":
        return np.zeros((TRIALS, WORDS), np.uint32)
    if kind == "constant":
        return np.repeat(rng.integers(0, 1 << 32, (TRIALS, 1), dtype=np.uint32), WORDS, axis=1)
    if kind == "bfloat16":  # values near 1 of either sign, two in a word: few bits differ
        signs = rng.integers(0, 2, (TRIALS, 2 * WORDS)).astype(np.uint16) << 15
        return np.ascontiguousarray(signs | np.uint16(0x3F80)).view(np.uint32)
    return rng.integers(0, 1 << 32, (TRIALS, WORDS), dtype=np.uint32)


def flip_top_bits(bit: int, count: int) -> Callable[[Words, np.random.Generator], Words]:
    def damage(payloads: Words, rng: np.random.Generator) -> Words:
        at = rng.permuted(np.tile(np.arange(WORDS), (TRIALS, 1)), axis=1)[:, :count]
        damaged = payloads.copy()
        damaged[np.arange(TRIALS)[:, None], at] ^= np.uint32(1 << bit)
        return damaged

    return damage


def flip_neighbours(payloads: Words, rng: np.random.Generator) -> Words:
    """Top bits of four words in a parallelogram, where keys in arithmetic progression could cancel."""
    damaged, rows = payloads.copy(), np.arange(TRIALS)
    left, right = rng.integers(0, 15, TRIALS) * 2 + 1, rng.integers(16, 31, TRIALS) * 2 + 1
    for at in (left, left + 2, right, right + 2):
        damaged[rows, np.minimum(at, WORDS - 1)] ^= np.uint32(1 << 31)
    return damaged


def swap_words(payloads: Words, rng: np.random.Generator) -> Words:
    damaged, rows = payloads.copy(), np.arange(TRIALS)
    left = rng.integers(0, WORDS, TRIALS)
    right = (left + rng.integers(1, WORDS, TRIALS)) % WORDS
    damaged[rows, left], damaged[rows, right] = payloads[rows, right], payloads[rows, left]
    return damaged


def swap_halves(payloads: Words, rng: np.random.Generator) -> Words:
    """The two 32-bit halves of one 64-bit word, the factors of one product."""
    damaged, rows = payloads.copy(), np.arange(TRIALS)
    at = rng.integers(0, WORDS // 2, TRIALS) * 2
    damaged[rows, at], damaged[rows, at + 1] = payloads[rows, at + 1], payloads[rows, at]
    return damaged


def permute_words(payloads: Words, rng: np.random.Generator) -> Words:
    return rng.permuted(payloads, axis=1)


def shift_words(payloads: Words, rng: np.random.Generator) -> Words:
    return np.roll(payloads, 2, axis=1)


def zero_everything(payloads: Words, rng: np.random.Generator) -> Words:
    return np.zeros_like(payloads)


def invert_everything(payloads: Words, rng: np.random.Generator) -> Words:
    return ~payloads


def tear(payloads: Words, rng: np.random.Generator) -> Words:
    """The tail is another piece's: a write that stopped half way."""
    damaged = payloads.copy()
    damaged[:, WORDS // 2 :] = np.roll(payloads, 1, axis=0)[:, WORDS // 2 :]
    return damaged


DAMAGES: dict[str, Callable[[Words, np.random.Generator], Words]] = {
    "one_bit": flip_top_bits(7, 1),
    "two_top_bits": flip_top_bits(31, 2),
    "four_top_bits": flip_top_bits(31, 4),
    "all_top_bits": flip_top_bits(31, WORDS),
    "two_signs_of_low_halves": flip_top_bits(15, 2),
    "two_lowest_bits": flip_top_bits(0, 2),
    "parallelogram": flip_neighbours,
    "swapped_words": swap_words,
    "swapped_halves": swap_halves,
    "permuted_words": permute_words,
    "shifted_words": shift_words,
    "zeroed": zero_everything,
    "inverted": invert_everything,
    "torn": tear,
}


@pytest.mark.parametrize("kind", PAYLOADS)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_changes_the_record(name: str, kind: str) -> None:
    rng = np.random.default_rng([3, *name.encode(), *kind.encode()])
    payloads = random_payloads(kind, rng)
    seeds = rng.integers(0, 1 << 32, TRIALS, dtype=np.uint32)
    damaged = DAMAGES[name](payloads, rng)
    differs = (payloads != damaged).any(axis=1)
    same = records(payloads, seeds) == records(damaged, seeds)
    assert not same[differs].any(), f"{same[differs].sum()} of {differs.sum()} damaged payloads passed"
    assert same[~differs].all()


@pytest.mark.parametrize("kind", PAYLOADS)
def test_right_bytes_under_another_seed_fail(kind: str) -> None:
    """Another session's piece, another layer's, or one from before the extent was used again."""
    rng = np.random.default_rng(4)
    payloads = random_payloads(kind, rng)
    keys = rng.integers(0, 1 << 64, (TRIALS, 2), dtype=np.uint64)
    generations = rng.integers(1, 100, TRIALS).astype(np.uint64)
    layers = rng.integers(0, 60, TRIALS)
    seeds = piece_seeds(keys, layers, generations, 7)
    wanted = records(payloads, seeds)
    others = [
        piece_seeds(np.roll(keys, 1, axis=0), layers, generations, 7),
        piece_seeds(keys, layers + 1, generations, 7),
        piece_seeds(keys, layers, generations - np.uint64(1), 7),
        piece_seeds(keys, layers, generations, 8),
        piece_seeds(keys[:, ::-1].copy(), layers, generations, 7),
        seeds + np.uint32(1),
        seeds ^ np.uint32(1 << 31),
    ]
    for other in others:
        assert not (records(payloads, other) == wanted).any()


def test_swapped_pieces_fail_at_both_places() -> None:
    rng = np.random.default_rng(5)
    payloads = random_payloads("random", rng)
    seeds = rng.integers(0, 1 << 32, TRIALS, dtype=np.uint32)
    assert not (records(np.roll(payloads, 1, axis=0), seeds) == records(payloads, seeds)).any()


@pytest.mark.parametrize("words", [1, 2, 64, 1024])
def test_zeros_beside_a_zeroed_record_fail(words: int) -> None:
    seeds = np.arange(20_000, dtype=np.uint32)
    assert records(np.zeros((len(seeds), words), np.uint32), seeds).all()


def test_length_is_part_of_the_record() -> None:
    seeds = np.arange(TRIALS, dtype=np.uint32)
    sums = np.zeros(TRIALS, np.uint32)
    assert not (finish(sums, 4096, seeds) == finish(sums, 8192, seeds)).any()


def test_finish_loses_nothing() -> None:
    sums = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    assert len(np.unique(finish(sums, 4096, np.uint32(9)))) == len(sums)


def test_unfinish_is_the_way_back() -> None:
    rng = np.random.default_rng(6)
    sums, seeds = rng.integers(0, 1 << 32, (2, 1 << 16), dtype=np.uint32)
    sizes = rng.integers(0, 1 << 40, len(sums))
    recorded = finish(sums, sizes, seeds)
    assert np.array_equal(unfinish(recorded, sizes, seeds), sums)
    assert (unfinish(recorded, sizes + 4, seeds) != sums).all() and (unfinish(recorded ^ 1, sizes, seeds) != sums).all()


def test_constant_payloads_of_different_constants_differ() -> None:
    constants = np.repeat(np.arange(TRIALS, dtype=np.uint32)[:, None], WORDS, axis=1)
    assert len(np.unique(records(constants, np.full(TRIALS, 77, np.uint32)))) == TRIALS


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, (1 << 32) - 1), st.integers(0, 1 << 30))
def test_sum_equals_model(payload: bytes, seed: int, first_word: int) -> None:
    payload = payload[: len(payload) // 4 * 4]
    assert sum_bytes(payload, seed, first_word=first_word).tolist() == [model_sum(payload, seed, first_word)]


def test_sum_takes_signed_bits_of_a_seed() -> None:
    assert sum_bytes(b"abcd", np.int32(-5)) == sum_bytes(b"abcd", np.uint32((1 << 32) - 5))


def test_sum_in_chunks_equals_sum_in_parts() -> None:
    rng = np.random.default_rng(6)
    data = rng.integers(0, 256, (3, 8 * 70_000), dtype=np.uint8)
    seeds = np.array([1, 2, 3], np.uint32)
    cut = 8 * 12_345
    split = sum_bytes(data[:, :cut], seeds) + sum_bytes(data[:, cut:], seeds, first_word=cut // 8)
    assert np.array_equal(sum_bytes(data, seeds), split)
    assert np.array_equal(
        sum_bytes(data, seeds), [sum_bytes(row, seed)[0] for row, seed in zip(data, seeds, strict=True)]
    )


def test_sum_of_many_small_pieces_equals_one_by_one() -> None:
    data = np.random.default_rng(7).integers(0, 1 << 32, (5000, 20), dtype=np.uint32)
    seeds = np.arange(5000, dtype=np.uint32)
    sums = sum_bytes(data, seeds)
    for row in range(0, 5000, 611):
        assert sums[row] == model_sum(data[row].tobytes(), row)


def test_sum_parts_leaves_padding_out() -> None:
    rng = np.random.default_rng(8)
    pieces = rng.integers(0, 256, (4, 128), dtype=np.uint8)
    parts = [(0, 12), (16, 40), (96, 8)]
    seeds = np.arange(4, dtype=np.uint32)
    sums = sum_parts(pieces, parts, seeds)
    expected = [
        sum(
            model_sum(row[at : at + size].tobytes(), seed, first)
            for (at, size), first in zip(parts, (0, 2, 7), strict=True)
        )
        & 0xFFFFFFFF
        for seed, row in enumerate(pieces)
    ]
    assert sums.tolist() == expected
    pieces[:, 12:16] ^= 255
    pieces[:, 104:] ^= 255
    assert np.array_equal(sum_parts(pieces, parts, seeds), sums)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="4-byte multiples"):
        sum_bytes(b"abc", 0)
    with pytest.raises(ShapeError, match="one for each of 1 pieces"):
        sum_bytes(b"abcd", np.zeros(2, np.uint32))
    with pytest.raises(ShapeError, match="leaves a piece"):
        sum_parts(np.zeros((1, 8), np.uint8), [(4, 8)], np.zeros(1, np.uint32))
    with pytest.raises(ShapeError, match="expected uint64"):
        piece_seeds(np.zeros((3, 3), np.uint64), 0, np.zeros(3, np.uint64), 0)
