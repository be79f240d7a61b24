"""Where tiles begin: the pieces of all layers, one after another, cut so that each part fits in a window slot.

Pure.  A tile costs the same however full it is, so none ends with a lane or a run, and a read is cut where one is
full.
Read path:  index -> catalog -> plan: [cuts] -> window -> kernels.scatter -> event
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np

from flatcake.messages import Flags, Int64Array

_GROWTH = 2
_TILES_MIN = 20
"""What a tile is read, copied and scattered in passes without the others at either end of a plan, so a short plan has
smaller tiles: so many, unless they would be less than half a slot."""
_PART = 6
"""A read is cut where a tile is full, unless less than this part of a tile would be left of it: then it goes whole into
the next one."""
_LIST_MAX = 4096


def cut_tiles(
    segments: Int64Array, ends: Int64Array, opens: Flags, pieces: Int64Array, first_tile_bytes: int, slot_bytes: int
) -> Int64Array:
    """Find where tiles begin: each is as full as whole pieces make it, and has one at least.

    The first ones are small and the first layer has tiles of its own, so that it is ready early; those of a short plan
    are all smaller.

    Args:
        segments: As in `TilePlan`, in the order in which they are read; their offsets are in the medium.
        ends: int64 [segments]: the end of each in the medium.
        opens: Segments that a read begins with; any other belongs to the read of the one before it.
        pieces: int64 [segments]: bytes of a piece.
        first_tile_bytes: The first tile holds so much, each further one twice as much as the one before.
        slot_bytes: No tile holds more, and where the first one may hold so much, a short plan's are no smaller.

    Returns:
        int64 [tiles - 1, 2]: the segment in which each tile but the first begins, and how many of its blocks come
        before.

    Cost: O(segments) array elements, and a microsecond a tile.
    """
    count, sizes = len(segments), segments[:, 3] * pieces
    if not count:
        return np.empty((0, 2), np.int64)
    holes = np.zeros(count, np.int64)  # Those that a read runs through.
    holes[1:] = np.where(opens[1:], 0, segments[1:, 0] - ends[:-1])
    stops = (sizes + holes).cumsum()
    heads = np.maximum.accumulate(np.where(opens, np.arange(count), 0))
    # Looking at an element of a list is quick, making one is not: worth it while there are few segments a tile.
    arrays = stops, stops - sizes, pieces, heads
    columns: Any = [array.tolist() for array in arrays] if count < _LIST_MAX else arrays
    others = segments[:, 1] != segments[0, 1]
    second_layer = int(others.argmax()) if others[-1] else count
    tile_bytes = min(slot_bytes, max(first_tile_bytes, slot_bytes // 2, int(stops[-1]) // _TILES_MIN))
    cuts = _walk(columns, second_layer, first_tile_bytes, tile_bytes)
    return np.array(cuts, np.int64).reshape(-1, 2)


def _walk(
    columns: Sequence[Sequence[int]], second_layer: int, limit_bytes: int, slot_bytes: int
) -> list[tuple[int, int]]:
    """The cuts, of segments of which is known: end and start if all lie one after another, piece, first of the read."""
    stops, starts, pieces, heads = columns
    cuts, begin, limit_bytes = list[tuple[int, int]](), 0, min(limit_bytes, slot_bytes)
    wall = starts[second_layer] if second_layer < len(stops) else 0
    while begin + limit_bytes < stops[-1] or 0 < begin < wall:
        number, blocks = bisect_right(stops, begin + limit_bytes), 0
        if 0 < begin < wall <= begin + limit_bytes:
            number, start = second_layer, wall
        else:
            start, piece, head = starts[number], pieces[number], heads[number]
            if begin + limit_bytes > start:
                blocks = (begin + limit_bytes - start) // piece
            if begin < starts[head] and start + blocks * piece - starts[head] < limit_bytes // _PART:
                number, start, blocks = head, starts[head], 0
            elif start + blocks * piece <= begin:
                blocks = 1 + (begin - start) // piece  # One piece at least.
                if start + blocks * piece == stops[number]:
                    number, blocks = number + 1, 0
                    if number == len(stops):
                        break
                    start = starts[number]
            start += blocks * piece
        cuts.append((number, blocks))
        begin = start
        if limit_bytes < slot_bytes:
            limit_bytes = min(limit_bytes * _GROWTH, slot_bytes)
    return cuts


def cut_segments(
    segments: Int64Array, pieces: Int64Array, cuts: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut segments where a tile begins inside: the new ones, the one that each comes from, `TilePlan.tile_segments`."""
    inside = cuts[:, 1] > 0
    parts = 1 + np.bincount(cuts[inside, 0], minlength=len(segments))
    sources = np.repeat(np.arange(len(segments)), parts)
    firsts = parts.cumsum() - parts
    skipped = np.zeros(len(sources), np.int64)
    is_rest = np.ones(len(sources), np.bool_)
    is_rest[firsts] = False
    skipped[is_rest] = cuts[inside, 1]
    stops = segments[sources, 3]
    stops[:-1][is_rest[1:]] = cuts[inside, 1]
    segments = segments[sources]
    segments[:, 0] += skipped * pieces[sources]
    segments[:, 2] += skipped
    segments[:, 3] = stops - skipped
    begins = firsts[cuts[:, 0]]
    begins[inside] = np.flatnonzero(is_rest)
    return segments, sources, np.concatenate([np.zeros(min(1, len(segments)), np.int64), begins, [len(segments)]])
