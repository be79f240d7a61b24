"""Where pieces lie inside an extent, and how much room a scope's next extent gets.  Paper §3.2.

Pure.  An extent with room for n blocks is one record lane, then one lane per layer with n pieces each:

    | records | layer 0: piece 0 … n-1 | layer 1: piece 0 … n-1 | … |

Differs from §3.2: the paper appends a layer-major segment per turn, so a session of T turns costs
layers × T reads.  Lanes are cut once per extent, a turn appends to all of them, and any number of turns
restores in layers × extents reads.  The paper's way is the same extent cut for exactly one turn: the
setting `layout="segments"`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from flatcake.errors import ConfigError
from flatcake.geometry import Geometry
from flatcake.units import DIRECT_BYTES, align_up

LayoutName = Literal["lanes", "segments"]
Int64Array = npt.NDArray[np.int64]

RECORD_HEADER_BYTES = 64
RECORD_BYTES_PER_PIECE = 8


@dataclass(frozen=True, eq=False, slots=True)
class LaneTable:
    """Lane arithmetic of one geometry: sizes of pieces, records and extents, offsets of lanes."""

    piece_bytes: Int64Array
    """int64 [layers]: padded bytes of one piece."""
    prefix_bytes: Int64Array
    """int64 [layers]: bytes of one block in the layers before this one."""
    block_bytes: int
    """Bytes of one block over all layers."""
    piece_bytes_max: int
    """Of the largest layer."""

    @classmethod
    def of(cls, geometry: Geometry) -> "LaneTable":
        return cls.of_pieces([geometry.piece_bytes(layer) for layer in range(geometry.layer_count)])

    @classmethod
    def of_pieces(cls, piece_bytes: Sequence[int]) -> "LaneTable":
        """The same from the padded bytes of a piece of each layer."""
        sizes = np.array(piece_bytes, np.int64)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)[:-1]])
        return cls(sizes, before, int(sizes.sum()), int(sizes.max()))

    @property
    def layer_count(self) -> int:
        return len(self.piece_bytes)

    def record_bytes(self, room_blocks: int) -> int:
        """Bytes of the record lane of an extent with room for `room_blocks`."""
        return align_up(RECORD_HEADER_BYTES + room_blocks * self.layer_count * RECORD_BYTES_PER_PIECE, DIRECT_BYTES)

    def extent_bytes(self, room_blocks: int) -> int:
        """Bytes of a whole extent with room for `room_blocks`."""
        return self.record_bytes(room_blocks) + room_blocks * self.block_bytes

    def record_sizes(self, rooms: Int64Array) -> Int64Array:
        """`record_bytes` for whole arrays."""
        row_bytes = self.layer_count * RECORD_BYTES_PER_PIECE
        return (rooms * row_bytes + (RECORD_HEADER_BYTES + DIRECT_BYTES - 1)) // DIRECT_BYTES * DIRECT_BYTES

    def extent_sizes(self, rooms: Int64Array) -> Int64Array:
        """`extent_bytes` for whole arrays."""
        return self.record_sizes(rooms) + rooms * self.block_bytes

    def room_blocks(self, size_bytes: int) -> int:
        """The most blocks for which `extent_bytes` is at most `size_bytes`; 0 if not even one fits."""
        bytes_per_block = self.block_bytes + self.layer_count * RECORD_BYTES_PER_PIECE
        room = max(0, (size_bytes - RECORD_HEADER_BYTES) // bytes_per_block)
        while room and self.extent_bytes(room) > size_bytes:
            room -= 1
        return room

    def first_piece_offset(self, room_blocks: int) -> int:
        """Where piece 0 of layer 0 lies in an extent: its GVA less the extent's base."""
        return self.record_bytes(room_blocks)

    def lane_offsets(self, room_blocks: Int64Array) -> Int64Array:
        """int64 [layers, n]: where each lane starts in each of n extents, from the extents' bases."""
        return self.record_sizes(room_blocks)[None, :] + self.prefix_bytes[:, None] * room_blocks[None, :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How much room the next extent of a scope gets, in blocks."""

    layout: LayoutName
    percent: int
    """A growing scope's next extent has room for this share of the blocks that it already has."""
    room_max: int
    """Rooms stop growing here: larger reads gain nothing."""

    def next_room(self, turn_blocks: int, scope_blocks: int) -> int:
        """Room for a turn of `turn_blocks` more blocks in a scope that has `scope_blocks` already.

        A turn that needs several extents has as few as can be, of one size: a short one behind long ones would let
        tiles begin in the middle of reads from there on.
        """
        if self.layout == "segments":
            return min(turn_blocks, self.room_max)
        extents = max(1, -(-turn_blocks // self.room_max))
        return min(self.room_max, max(-(-turn_blocks // extents), scope_blocks * self.percent // 100))


def room_max(lanes: LaneTable, lane_bytes_max: int, file_bytes: int) -> int:
    """Room at which the largest lane reaches `lane_bytes_max`, at least one block, inside one pool file.

    Raises:
        ConfigError: Not even one block fits in a file.
    """
    room = max(1, lane_bytes_max // lanes.piece_bytes_max)
    if not lanes.room_blocks(file_bytes):
        raise ConfigError(
            f"a file of {file_bytes} bytes cannot hold one block; expected at least {lanes.extent_bytes(1)}: "
            "raise the file's size or use a smaller block_tokens"
        )
    return min(room, lanes.room_blocks(file_bytes))
