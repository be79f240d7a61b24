"""Checksum of one piece: a seeded, order-free sum of mixed words, then a finish with the length.  Beyond the paper.

Pure numpy: no GPU, no I/O.  `kernels.scatter` and `kernels.gather` compute the same sum on the device, so a piece
that was summed on one side can be verified on the other.

A piece's payload is its components' parts, in order, without padding.  Each part is cut in 64-bit words (a part of an
odd number of 32-bit words is followed by 32 zero bits), counted on over the piece.  Word `i` becomes

    x = word ^ (spread(seed) + i * WEYL)        p = low32(x) * high32(x)        mixed = low32(p) ^ high32(p)

and the mixed words are added modulo 2**32.  Both factors of the product hold data, so the change that a flipped bit
makes depends on its neighbours and its key.  A multiplication by constants (multiply, xor-shift, multiply, xor-shift)
is weaker: two flipped top bits cancelled in one of 2**11 to 2**18 trials, here in one of 2**32, the ideal.  The worst
pattern known here is two words with all 64 bits inverted: one of 2**23.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from flatcake.errors import ShapeError

SUM_KIND = 1
"""Names this algorithm in checksum records; another algorithm gets another number."""

WEYL = 0x9E3779B97F4A7C15
"""Step between the keys of neighbouring words: odd, so that no two words of a piece share a key."""
SPREAD = 0xD1342543DE82EF95
"""Makes a 64-bit key of a 32-bit seed."""

_WORDS_CHUNK = 1 << 16
_LOW = 0xFFFFFFFF
_ALL = 0xFFFFFFFFFFFFFFFF

Sums = npt.NDArray[np.uint32]


def piece_seeds(
    keys: npt.NDArray[np.uint64], layers: npt.ArrayLike, generations: npt.NDArray[np.uint64], layout: int
) -> Sums:
    """Hash what a piece must be into its 32-bit seed, so that the right bytes in the wrong place fail.

    Args:
        keys: uint64 [n, 2], the block's key.
        layers: integer [n] or one for all, 0 or more.
        generations: uint64 [n] or [1], generation of the extent that holds the piece.
        layout: 64-bit digest of the store's layout.

    Returns:
        uint32 [n].

    Raises:
        ShapeError: `keys` is not uint64 [n, 2].
    """
    return seeds_of(block_states(keys, layout), np.asarray(layers).astype(np.uint64), generations)


def block_states(keys: npt.NDArray[np.uint64], layout: int) -> npt.NDArray[np.uint64]:
    """The part of `piece_seeds` that is the same for all pieces of a block: uint64 [n] of keys uint64 [n, 2].

    Raises:
        ShapeError: `keys` is not uint64 [n, 2].
    """
    if keys.ndim != 2 or keys.shape[1] != 2 or keys.dtype != np.uint64:
        raise ShapeError(f"keys: {keys.dtype} {list(keys.shape)}: expected uint64 [blocks, 2]")
    state = np.full(len(keys), layout & _ALL, np.uint64)
    return _mix64(_mix64(state, keys[:, 0]), keys[:, 1])


def seeds_of(
    states: npt.NDArray[np.uint64], layers: npt.NDArray[np.uint64], generations: npt.NDArray[np.uint64]
) -> Sums:
    """The rest of `piece_seeds`, for the states of each piece's block; all uint64 [n]."""
    return (_mix64(_mix64(states, layers), generations) >> np.uint64(32)).astype(np.uint32)


def sum_bytes(
    payload: bytes | bytearray | memoryview | npt.NDArray[Any], seeds: npt.ArrayLike, *, first_word: int = 0
) -> Sums:
    """Sum the mixed words of one part (or of a payload without gaps) of each piece, as the kernels do.

    Args:
        payload: One piece as bytes or a 1-D array, or n pieces as a 2-D array [n, elements]; rows may be strided.
            A row is a multiple of 4 bytes.
        seeds: uint32 [n], or one number for a single piece.
        first_word: 64-bit words of the piece's payload before this part (`KVTable.starts`).

    Returns:
        uint32 [n], unfinished: add the parts of a piece, then `finish`.

    Raises:
        ShapeError: Sizes differ from the above.

    Cost: 0.2 to 0.3 CPU seconds per GB, 1.5 MiB of scratch; an odd number of 32-bit words costs a copy.
    """
    words = _words64(payload)
    keys = _spread(np.atleast_1d(np.asarray(seeds)))
    if keys.shape != (len(words),):
        raise ShapeError(f"seeds {list(keys.shape)}: expected one for each of {len(words)} pieces")
    columns = max(1, min(words.shape[1], _WORDS_CHUNK))
    rows = max(1, min(len(words), _WORDS_CHUNK // columns))
    steps = np.arange(columns, dtype=np.uint64) * np.uint64(WEYL)
    scratch = np.empty((2, rows * columns), np.uint64)
    sums = np.zeros(len(words), np.uint64)
    for column in range(0, words.shape[1], columns):
        shifted = keys + np.uint64((first_word + column) * WEYL & _ALL)
        for row in range(0, len(words), rows):
            chunk = words[row : row + rows, column : column + columns]
            sums[row : row + rows] += _sum_chunk(chunk, shifted[row : row + rows], steps, scratch)
    return (sums & np.uint64(_LOW)).astype(np.uint32)


def sum_parts(pieces: npt.NDArray[np.uint8], parts: Sequence[tuple[int, int]], seeds: npt.ArrayLike) -> Sums:
    """Sum n whole pieces, padding left out.

    Args:
        pieces: uint8 [n, piece_bytes]; rows may be strided.
        parts: `(offset_bytes, size_bytes)` of each component's part, in order (`KVTable.parts`).
        seeds: uint32 [n].

    Returns:
        uint32 [n], unfinished.

    Raises:
        ShapeError: A part leaves the piece, or sizes differ from the above.
    """
    sums = np.zeros(len(pieces), np.uint32)
    first_word = 0
    for offset_bytes, size_bytes in parts:
        if offset_bytes + size_bytes > pieces.shape[1]:
            raise ShapeError(f"part {offset_bytes}+{size_bytes}: leaves a piece of {pieces.shape[1]} bytes")
        part = pieces[:, offset_bytes : offset_bytes + size_bytes]
        sums += sum_bytes(part, seeds, first_word=first_word)
        first_word += -(-size_bytes // 8)
    return sums


def finish(sums: npt.ArrayLike, payload_bytes: npt.ArrayLike, seeds: npt.ArrayLike) -> Sums:
    """Mix length and seed into unfinished sums: uint32 [n] in, what is recorded, uint32 [n], out.

    One to one for a given length and seed, so finishing loses nothing.
    """
    return _mix32(_low32(sums) ^ _salt(payload_bytes, seeds))


def unfinish(recorded: npt.ArrayLike, payload_bytes: npt.ArrayLike, seeds: npt.ArrayLike) -> Sums:
    """What `finish` was given: the unfinished sums, uint32 [n], that must be found for these recorded ones."""
    return _unmix32(_low32(recorded)) ^ _salt(payload_bytes, seeds)


def _low32(value: npt.ArrayLike) -> Sums:
    """The low halves of integers of any kind, so that what follows wraps."""
    given = np.atleast_1d(np.asarray(value))
    return given if given.dtype == np.uint32 else given.astype(np.int64).astype(np.uint32)


def _salt(payload_bytes: npt.ArrayLike, seeds: npt.ArrayLike) -> Sums:
    return _mix32(_low32(payload_bytes) * np.uint32(0x9E3779B1) + _low32(seeds))


def _mix32(x: Sums) -> Sums:
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def _unmix32(x: Sums) -> Sums:
    # The steps of `_mix32` backwards, with the inverses of its factors modulo 2**32.
    x = x ^ (x >> np.uint32(16))
    x *= np.uint32(0x43021123)
    x ^= (x >> np.uint32(15)) ^ (x >> np.uint32(30))
    x *= np.uint32(0x1D69E2A5)
    x ^= x >> np.uint32(16)
    return x


def _mix64(state: npt.NDArray[np.uint64], value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Take another value in."""
    x = state ^ value
    x += np.uint64(WEYL)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _spread(seeds: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    keys = ((seeds.astype(np.int64) & _LOW).astype(np.uint64) + np.uint64(1)) * np.uint64(SPREAD)
    return keys ^ (keys >> np.uint64(32))


def _words64(payload: bytes | bytearray | memoryview | npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """View (or, when odd, copy) payloads as 64-bit words [n, words]."""
    data = payload if isinstance(payload, np.ndarray) else np.frombuffer(payload, np.uint8)
    data = data[None, :] if data.ndim == 1 else data
    if data.ndim != 2 or data.shape[1] * data.itemsize % 4:
        raise ShapeError(f"payload of shape {list(data.shape)}: expected [pieces, elements], rows of 4-byte multiples")
    if data.shape[1] * data.itemsize % 8 == 0 and (data.strides[1] == data.itemsize or not data.size):
        return data.view(np.uint64)
    half = np.ascontiguousarray(data).view(np.uint32)
    padded = np.zeros((len(half), half.shape[1] + half.shape[1] % 2), np.uint32)
    padded[:, : half.shape[1]] = half
    return padded.view(np.uint64)


def _sum_chunk(
    words: npt.NDArray[np.uint64],
    keys: npt.NDArray[np.uint64],
    steps: npt.NDArray[np.uint64],
    scratch: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    # Everything stays in the second-level cache; the sum's high half is noise that the caller cuts off.
    x, y = (half[: words.size].reshape(words.shape) for half in scratch)
    np.add(steps[: words.shape[1]], keys[:, None], out=x)
    np.bitwise_xor(x, words, out=x)
    np.right_shift(x, np.uint64(32), out=y)
    np.bitwise_and(x, np.uint64(_LOW), out=x)
    np.multiply(x, y, out=x)
    np.right_shift(x, np.uint64(32), out=y)
    np.bitwise_xor(x, y, out=x)
    return np.asarray(x.sum(axis=1, dtype=np.uint64))
