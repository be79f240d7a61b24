"""Runs to reads to tiles: what is asked of the media, and what one window slot holds.  Paper §3.4.

Pure: no I/O, no GPU, no clock.  `io.restore` and `io.save` run the plan that this module makes.
Read path:  index -> catalog -> [plan] -> window -> kernels.scatter -> event

Runs are sorted by address once per request.  Extents never overlap, so that order holds in every layer and
the other layers follow by arithmetic.  Per layer, neighbours are merged over holes smaller than
`gap_bytes_limit`.  Where an extent's lanes are short, a few layers of it are read at once, lane after lane.  All
layers, one after another or a few at once, are then cut in tiles, each as full as whole pieces make it.
"""

from dataclasses import dataclass

import numpy as np

from flatcake.errors import PlanError
from flatcake.io.cuts import cut_segments, cut_tiles
from flatcake.io.order import READ_BYTES, read_order
from flatcake.layout import LaneTable
from flatcake.messages import BASE, BLOCKS, FIRST_BLOCK, FIRST_SLOT, MEDIUM, ROOM, Flags, Int64Array, Runs

Wanted = Flags


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
    """int64 [tiles]: the lowest layer of each."""
    tile_last_layer: Int64Array
    """int64 [tiles]: the highest; it need not have something of all between."""

    @property
    def tiles(self) -> int:
        return len(self.tile_reads) - 1

    @property
    def read_bytes(self) -> int:
        """Bytes asked of the media, bridged holes included."""
        return int(self.reads[:, 2].sum())


def make_tiles(runs: Runs, lanes: LaneTable, limits: PlanLimits, wanted: Wanted | None = None) -> TilePlan:
    """Turn the runs of a request into reads and tiles.

    Args:
        runs: Disjoint runs, in any order.
        lanes: The lane arithmetic of the geometry.
        limits: Sizes; `min(read_bytes_max, slot_bytes)` must hold one piece of the largest layer.
        wanted: bool [layers, blocks of the request]: which pieces are to be moved; None for all of the runs.

    Returns:
        A plan in which each wanted piece of the runs lies in exactly one read, and each read in one tile.

    Raises:
        PlanError: A single piece is larger than a read or a slot may be.

    Cost: O(layers × runs) array elements after an O(runs log runs) sort.  Source: paper §3.4.
    """
    read_bytes_max = min(limits.read_bytes_max, limits.slot_bytes)
    piece_bytes_max = lanes.piece_bytes_max
    if piece_bytes_max > read_bytes_max:
        raise PlanError(
            f"a piece has {piece_bytes_max} bytes, a read or slot at most {read_bytes_max}; "
            "use a smaller block_tokens or raise read_bytes_max and slot_bytes"
        )
    wanted = None if wanted is None or wanted.all() else wanted
    table = _sorted(runs.table if wanted is None else _cut(runs.table, wanted))
    if limits.read_bytes_max < limits.slot_bytes:  # Else a tile limits its reads.
        table = _split(table, read_bytes_max // piece_bytes_max)
    starts, ends = _ranges(table, lanes)
    opens = _read_breaks(table, starts, ends, limits)
    kept = None
    if wanted is not None:
        kept = wanted[:, table[:, FIRST_BLOCK]]
        opens[:, 1:] |= ~kept[:, :-1]  # No read goes on behind what is not wanted, so none begins with it.
    joins = limits.slot_bytes <= limits.read_bytes_max  # Else no read runs on into the next lane.
    rows = read_order(table, lanes, min(READ_BYTES, limits.slot_bytes) if joins else 0, kept, opens)
    ranges = _segments(table, starts), np.tile(table[:, MEDIUM], len(starts)), ends.ravel(), opens.ravel()
    if rows is not None:
        ranges = ranges[0][rows], ranges[1][rows], ranges[2][rows], ranges[3][rows]
    return _tile(*ranges, lanes, limits)


def _sorted(table: Int64Array) -> Int64Array:
    if len(table) < 2:
        return table
    return table[np.lexsort((table[:, FIRST_SLOT], table[:, BASE], table[:, MEDIUM]))]


def _cut(table: Int64Array, wanted: Wanted) -> Int64Array:
    """Cut runs wherever a layer's pieces begin or cease to be wanted, so that all pieces of a range are, or none."""
    cuts = np.flatnonzero((wanted[:, 1:] != wanted[:, :-1]).any(axis=0)) + 1
    firsts, ends = table[:, FIRST_BLOCK], table[:, FIRST_BLOCK] + table[:, BLOCKS]
    inside = np.searchsorted(cuts, firsts, "right"), np.searchsorted(cuts, ends, "left")
    parts = np.maximum(0, inside[1] - inside[0]) + 1
    if (parts == 1).all():
        return table
    rows = np.repeat(table, parts, axis=0)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)
    at = np.append(cuts, 0)[np.repeat(inside[0], parts) + nth - 1]
    starts = np.where(nth == 0, rows[:, FIRST_BLOCK], at)
    stops = np.append(starts[1:], 0)
    lasts = np.cumsum(parts) - 1
    stops[lasts] = ends
    rows[:, FIRST_SLOT] += starts - rows[:, FIRST_BLOCK]
    rows[:, FIRST_BLOCK], rows[:, BLOCKS] = starts, stops - starts
    return rows


def _split(table: Int64Array, blocks_max: int) -> Int64Array:
    """Cut runs of more than `blocks_max` blocks, so that no range exceeds the largest read."""
    if (table[:, BLOCKS] <= blocks_max).all():
        return table
    parts = -(-table[:, BLOCKS] // blocks_max)
    rows = np.repeat(table, parts, axis=0)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)
    skipped = nth * blocks_max
    rows[:, FIRST_SLOT] += skipped
    rows[:, FIRST_BLOCK] += skipped
    rows[:, BLOCKS] = np.minimum(blocks_max, rows[:, BLOCKS] - skipped)
    return rows


def _ranges(table: Int64Array, lanes: LaneTable) -> tuple[Int64Array, Int64Array]:
    """int64 [layers, ranges] twice: start and end of each range in each layer's lane, in bytes."""
    piece = lanes.piece_bytes[:, None]
    starts = lanes.lane_offsets(table[:, ROOM])
    starts += table[:, FIRST_SLOT] * piece
    starts += table[:, BASE]
    return starts, starts + table[:, BLOCKS] * piece


def _read_breaks(table: Int64Array, starts: Int64Array, ends: Int64Array, limits: PlanLimits) -> Flags:
    """bool [layers, ranges]: True where a range opens a new read instead of joining the one before it."""
    opens = np.ones(starts.shape, np.bool_)
    if len(table) < 2:
        return opens
    holes = (starts[:, 1:] - ends[:, :-1]).view(np.uint64)  # A negative hole becomes a huge one.
    np.greater_equal(holes, max(1, limits.gap_bytes_limit), out=opens[:, 1:])
    if opens.all():
        return opens
    # An extent lies in one file, so neighbours are in one file in every layer or in none.
    media, files = table[:, MEDIUM], table[:, BASE] // limits.file_bytes
    opens[:, 1:] |= (media[1:] != media[:-1]) | (files[1:] != files[:-1])
    if limits.read_bytes_max < limits.slot_bytes:
        for layer in np.flatnonzero(~opens.all(axis=1)):
            _cap_reads(opens[layer], starts[layer], ends[layer], limits.read_bytes_max)
    return opens


def _cap_reads(opens: Flags, starts: Int64Array, ends: Int64Array, read_bytes_max: int) -> None:
    """Open further reads, in place, wherever a merged one would exceed the largest."""
    firsts = np.flatnonzero(opens)
    lasts = np.append(firsts[1:], len(opens)) - 1
    for group in np.flatnonzero(ends[lasts] - starts[firsts] > read_bytes_max):
        read_start = int(starts[firsts[group]])
        for at in range(int(firsts[group]) + 1, int(lasts[group]) + 1):
            if int(ends[at]) - read_start > read_bytes_max:
                opens[at], read_start = True, int(starts[at])


def _tile(
    segments: Int64Array, media: Int64Array, ends: Int64Array, opens: Flags, lanes: LaneTable, limits: PlanLimits
) -> TilePlan:
    """Put the segments in tiles, layer by layer, and find the reads of each tile.

    Segments are as in the plan, but for their offsets: those are in the medium, where each has its end.
    """
    pieces = lanes.piece_bytes[segments[:, 1]]
    cuts = cut_tiles(segments, ends, opens, pieces, limits.first_tile_bytes, limits.slot_bytes)
    segments, sources, tile_segments = cut_segments(segments, pieces, cuts)
    opens, pieces = opens[sources], pieces[sources]
    opens[1:] |= sources[1:] == sources[:-1]
    opens[tile_segments[:-1]] = True
    firsts = opens.nonzero()[0]
    reads, tile_reads = _reads(segments, firsts, pieces, media[sources[firsts]]), firsts.searchsorted(tile_segments)
    heads = _heads(reads, tile_reads, limits)
    if heads is not None:
        opens = np.zeros(len(opens), np.bool_)
        opens[firsts[heads]] = True
        read_bytes = np.add.reduceat(reads[:, 2], heads)
        reads, tile_reads = reads[heads], heads.searchsorted(tile_reads)
        reads[:, 2] = read_bytes
    slot_offset = reads[:, 2].cumsum() - reads[:, 2]
    slot_offset -= np.repeat(slot_offset[tile_reads[:-1]], tile_reads[1:] - tile_reads[:-1])
    reads[:, 3] = slot_offset
    segment_read = opens.cumsum(dtype=np.int64)
    segment_read -= 1
    segments[:, 0] += (slot_offset - reads[:, 1])[segment_read]
    return TilePlan(
        reads=reads,
        segments=segments,
        segment_read=segment_read,
        tile_reads=tile_reads,
        tile_segments=tile_segments,
        tile_first_layer=np.minimum.reduceat(segments[:, 1], tile_segments[:-1]),
        tile_last_layer=np.maximum.reduceat(segments[:, 1], tile_segments[:-1]),
    )


def _reads(segments: Int64Array, firsts: Int64Array, pieces: Int64Array, media: Int64Array) -> Int64Array:
    """The reads that begin with the segments `firsts`, but for their place in the slot."""
    lasts = np.append(firsts, len(segments))[1:] - 1
    reads = np.empty((len(firsts), 4), np.int64)
    reads[:, 0] = media
    reads[:, 1] = segments[firsts, 0]
    reads[:, 2] = segments[lasts, 0] + segments[lasts, 3] * pieces[lasts] - reads[:, 1]
    return reads


def _segments(table: Int64Array, starts: Int64Array) -> Int64Array:
    """All ranges of all layers as `TilePlan.segments`, but for their offsets: those are in the medium."""
    # Filled in place, column by column: fresh memory costs more here than arithmetic.
    segments: Int64Array = np.empty((*starts.shape, 4), np.int64)
    segments[..., 0] = starts
    segments[..., 1] = np.arange(len(starts))[:, None]
    segments[..., 2] = table[:, FIRST_BLOCK]
    segments[..., 3] = table[:, BLOCKS]
    return segments.reshape(-1, 4)


def _heads(reads: Int64Array, tile_reads: Int64Array, limits: PlanLimits) -> Int64Array | None:
    """Which reads stay, if those in a tile that touch across layers are made one; None for all.

    Where a request has every block that an extent has room for, one lane ends where the next begins.
    """
    media, starts, sizes, _ = reads.T
    touches = starts[1:] == starts[:-1] + sizes[:-1]
    if limits.slot_bytes > limits.read_bytes_max or not touches.any():
        return None
    files = starts // limits.file_bytes
    stays = np.empty(len(starts), np.bool_)
    stays[1:] = ~touches | (media[1:] != media[:-1]) | (files[1:] != files[:-1])
    stays[tile_reads[:-1]] = True
    return stays.nonzero()[0]
