"""What a block size costs in padding, since every piece is padded to 4 KiB.

Pure arithmetic over one size.
"""

from typing import NamedTuple

from flatcake.units import DIRECT_BYTES, align_up

BLOCK_TOKENS = (16, 32, 64, 128, 256, 512)
PADDING_MAX = 0.05
"""Padding per byte of payload that is not worth a larger block."""


class Padding(NamedTuple):
    """What one block size costs in padding."""

    block_tokens: int
    piece_bytes: int
    share: float
    """Padding per byte of payload."""


def padding(token_bytes: int) -> list[Padding]:
    """Padding of a piece to 4 KiB for each usual block size.

    Args:
        token_bytes: Bytes of one token in one layer, all components; at least 1.
    """
    sizes = [(tokens, align_up(tokens * token_bytes, DIRECT_BYTES)) for tokens in BLOCK_TOKENS]
    return [Padding(tokens, size, size / (tokens * token_bytes) - 1) for tokens, size in sizes]


def best_block(token_bytes: int) -> Padding:
    """The smallest block with at most 5 % padding, or else the one with the least."""
    sizes = padding(token_bytes)
    good = [size for size in sizes if size.share <= PADDING_MAX]
    return good[0] if good else min(sizes, key=lambda size: size.share)
