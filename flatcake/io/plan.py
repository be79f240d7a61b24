"""Runs to reads to tiles: what is asked of the media, and what one window slot holds.  Paper §3.4.

Pure: no I/O, no GPU, no clock.  `io.restore` and `io.save` run the plan that this module makes.
Read path:  index -> catalog -> [plan] -> window -> kernels.scatter -> event

Runs are sorted by address once per request.  Extents never overlap, so that order holds in every layer and
the other layers follow by arithmetic.  Per layer, neighbours are merged over holes smaller than
`gap_bytes_limit`; reads then fill tiles greedily, layer by layer, so that layer 0 is ready first.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatcake.errors import PlanError
from flatcake.layout import LaneTable
from flatcake.messages import BASE, BLOCKS, FIRST_BLOCK, FIRST_SLOT, MEDIUM, ROOM, Int64Array, Runs

TILE_GROWTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """The sizes that shape a plan, in bytes."""

    gap_bytes_limit: int
    """A read runs through any hole smaller than this (Δgap); 0 for writes."""
    read_bytes_max: int
    slot_bytes: int
    """A tile's reads lie in one slot, one after another."""
    file_bytes: int
    """Reads never cross a multiple of this: pool files end there."""
    first_tile_bytes: int
    """The first tile is about so large and the next ones double, so that the first layer is ready early."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TilePlan:
    """Reads and segments of all tiles, in the order in which they are to be issued.

    A segment is a stretch of consecutive blocks of one layer that lies in one read: what a scatter copies.
    """

    reads: Int64Array
    """int64 [reads, 4]: medium, offset in the medium, size, offset in the slot; bytes."""
    segments: Int64Array
    """int64 [segments, 4]: offset in the slot in bytes, layer, first block in the request, blocks."""
    segment_read: Int64Array
    """int64 [segments]: the read that brings each segment."""
    tile_reads: Int64Array
    """int64 [tiles + 1]: tile t has the reads tile_reads[t] … tile_reads[t + 1] - 1."""
    tile_segments: Int64Array
    """int64 [tiles + 1]: the same for segments."""
    tile_first_layer: Int64Array
    tile_last_layer: Int64Array

    @property
    def tiles(self) -> int:
        return len(self.tile_reads) - 1

    @property
    def read_bytes(self) -> int:
        """Bytes asked of the media, bridged holes included."""
        return int(self.reads[:, 2].sum())


def make_tiles(runs: Runs, lanes: LaneTable, limits: PlanLimits) -> TilePlan:
    """Turn the runs of a request into reads and tiles.

    Args:
        runs: Disjoint runs, in any order.
        lanes: The lane arithmetic of the geometry.
        limits: Sizes; `min(read_bytes_max, slot_bytes)` must hold one piece of the largest layer.

    Returns:
        A plan in which each block of each layer lies in exactly one read, and each read in one tile.

    Raises:
        PlanError: A single piece is larger than a read or a slot may be.

    Cost: O(layers × runs) array elements after an O(runs log runs) sort.  Source: paper §3.4.
    """
    read_bytes_max = min(limits.read_bytes_max, limits.slot_bytes)
    piece_bytes_max = int(lanes.piece_bytes.max())
    if piece_bytes_max > read_bytes_max:
        raise PlanError(
            f"a piece has {piece_bytes_max} bytes, a read or slot at most {read_bytes_max}; "
            "use a smaller block_tokens or raise read_bytes_max and slot_bytes"
        )
    pieces = _split(_sorted(runs.table), read_bytes_max // piece_bytes_max)
    starts, sizes = _ranges(pieces, lanes)
    opens = _read_breaks(pieces, starts, sizes, limits, read_bytes_max)
    return _tile(pieces, starts, sizes, opens, limits)


def _sorted(table: Int64Array) -> Int64Array:
    return table[np.lexsort((table[:, FIRST_SLOT], table[:, BASE], table[:, MEDIUM]))]


def _split(table: Int64Array, blocks_max: int) -> Int64Array:
    """Cut runs of more than `blocks_max` blocks, so that no range exceeds the largest read."""
    parts = -(-table[:, BLOCKS] // blocks_max)
    if (parts == 1).all():
        return table
    rows = np.repeat(table, parts, axis=0)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)
    skipped = nth * blocks_max
    rows[:, FIRST_SLOT] += skipped
    rows[:, FIRST_BLOCK] += skipped
    rows[:, BLOCKS] = np.minimum(blocks_max, rows[:, BLOCKS] - skipped)
    return rows


def _ranges(table: Int64Array, lanes: LaneTable) -> tuple[Int64Array, Int64Array]:
    """int64 [layers, ranges] twice: start and size of each range in each layer's lane, in bytes."""
    piece = lanes.piece_bytes[:, None]
    starts = table[None, :, BASE] + lanes.lane_offsets(table[:, ROOM]) + table[None, :, FIRST_SLOT] * piece
    return starts, table[None, :, BLOCKS] * piece


def _read_breaks(
    table: Int64Array, starts: Int64Array, sizes: Int64Array, limits: PlanLimits, read_bytes_max: int
) -> npt.NDArray[np.bool_]:
    """bool [layers, ranges]: True where a range opens a new read instead of joining the one before it."""
    opens = np.ones(starts.shape, np.bool_)
    ends = starts + sizes
    hole = starts[:, 1:] - ends[:, :-1]
    same_file = starts[:, 1:] // limits.file_bytes == starts[:, :-1] // limits.file_bytes
    same_medium = table[None, 1:, MEDIUM] == table[None, :-1, MEDIUM]
    adjacent = (hole == 0) | ((hole > 0) & (hole < limits.gap_bytes_limit))
    opens[:, 1:] = ~(adjacent & same_file & same_medium)
    for layer in np.flatnonzero(~opens.all(axis=1)):
        _cap_reads(opens[layer], starts[layer], ends[layer], read_bytes_max)
    return opens


def _cap_reads(opens: npt.NDArray[np.bool_], starts: Int64Array, ends: Int64Array, read_bytes_max: int) -> None:
    """Open further reads, in place, wherever a merged one would exceed the largest."""
    firsts = np.flatnonzero(opens)
    lasts = np.append(firsts[1:], len(opens)) - 1
    for group in np.flatnonzero(ends[lasts] - starts[firsts] > read_bytes_max):
        read_start = int(starts[firsts[group]])
        for at in range(int(firsts[group]) + 1, int(lasts[group]) + 1):
            if int(ends[at]) - read_start > read_bytes_max:
                opens[at], read_start = True, int(starts[at])


def _tile(
    table: Int64Array, starts: Int64Array, sizes: Int64Array, opens: npt.NDArray[np.bool_], limits: PlanLimits
) -> TilePlan:
    layers, ranges = starts.shape
    flat_starts, flat_ends = starts.ravel(), (starts + sizes).ravel()
    firsts = np.flatnonzero(opens.ravel())
    lasts = np.append(firsts[1:], layers * ranges) - 1
    read_bytes = flat_ends[lasts] - flat_starts[firsts]
    read_layer = firsts // ranges
    tile_reads = _fill(read_bytes, read_layer, limits)
    before = np.cumsum(read_bytes) - read_bytes
    slot_offset = before - np.repeat(before[tile_reads[:-1]], np.diff(tile_reads))
    segment_read = np.cumsum(opens.ravel()) - 1
    medium = np.tile(table[:, MEDIUM], layers)[firsts]
    segments = np.stack(
        [
            slot_offset[segment_read] + flat_starts - flat_starts[firsts][segment_read],
            np.repeat(np.arange(layers), ranges),
            np.tile(table[:, FIRST_BLOCK], layers),
            np.tile(table[:, BLOCKS], layers),
        ],
        axis=1,
    )
    return TilePlan(
        reads=np.stack([medium, flat_starts[firsts], read_bytes, slot_offset], axis=1),
        segments=segments,
        segment_read=segment_read,
        tile_reads=tile_reads,
        tile_segments=np.append(firsts, layers * ranges)[tile_reads],
        tile_first_layer=read_layer[tile_reads[:-1]],
        tile_last_layer=read_layer[tile_reads[1:] - 1],
    )


def _fill(read_bytes: Int64Array, read_layer: Int64Array, limits: PlanLimits) -> Int64Array:
    """int64 [tiles + 1]: pack reads into tiles, greedily and in order; the first tiles are small."""
    ends = np.cumsum(read_bytes)
    limit_bytes, at, cuts = limits.first_tile_bytes, 0, [0]
    while at < len(read_bytes):
        start_bytes = int(ends[at] - read_bytes[at])
        room_bytes = min(limit_bytes, limits.slot_bytes)
        stop = int(np.searchsorted(ends, start_bytes + room_bytes, side="right"))
        at = max(stop, at + 1)
        cuts.append(at)
        limit_bytes *= TILE_GROWTH
    return np.array(cuts, np.int64)
