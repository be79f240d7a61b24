"""In which order ranges are read: layer by layer, or a few layers of each extent at once.

Pure.  The lanes of an extent lie one behind the other, so where lanes are short and everything in an extent is wanted,
a few of its layers are one long read.
"""

import numpy as np

from flatcake.layout import LaneTable
from flatcake.messages import BASE, BLOCKS, MEDIUM, ROOM, Flags, Int64Array
from flatcake.units import MiB

READ_BYTES = 8 * MiB
"""Media gain nothing from longer reads."""
_GROUPS_MIN = 8
"""In so many parts, at least, the layers of a restore are ready one after another."""


def read_order(
    table: Int64Array, lanes: LaneTable, read_bytes: int, kept: Flags | None, opens: Flags
) -> Int64Array | None:
    """Which of all ranges, [layers, ranges] in one row, are read and in which order; None for all, layer by layer.

    The first layer comes alone, that it is ready early.  Of neighbouring ones so many come at once as make a read of an
    extent's lanes long enough, if most blocks lie in extents of which everything is read.

    Args:
        table: Runs, by address.
        lanes: The lane arithmetic of the geometry.
        read_bytes: What is long enough.
        kept: bool [layers, ranges]: what is wanted; None for everything.
        opens: bool [layers, ranges]: ranges that begin a read; changed in place where layers come at once.

    Cost: O(layers x ranges log) array elements where layers come at once.
    """
    layers, count = opens.shape
    used = np.ones(layers, np.bool_) if kept is None else kept.any(axis=1)
    at_once = min(int(used.sum()) // _GROUPS_MIN, _lanes_a_read(table, lanes, read_bytes))
    if at_once < 2:
        return None if kept is None else kept.ravel().nonzero()[0]
    extents = np.ones(count, np.bool_)
    extents[1:] = (table[1:, BASE] != table[:-1, BASE]) | (table[1:, MEDIUM] != table[:-1, MEDIUM])
    opens[:, extents] = True
    numbers = np.arange(layers)
    firsts = np.maximum.accumulate(np.where(used, 0, numbers + 1))  # Of the neighbours that are used.
    groups = firsts + (numbers - firsts - (firsts == used.argmax())) // at_once
    places = groups[:, None] * count + extents.cumsum()
    order: Int64Array = places.ravel().argsort(kind="stable")  # So layers and ranges of one place stay in order.
    return order if kept is None else order[kept.ravel()[order]]


def _lanes_a_read(table: Int64Array, lanes: LaneTable, read_bytes: int) -> int:
    """How many lanes of one extent make a long read; 0 where most blocks lie in extents with other things in them."""
    whole = table[table[:, BLOCKS] == table[:, ROOM], BLOCKS]  # Others have a hole behind each lane.
    if 2 * whole.sum() <= table[:, BLOCKS].sum():
        return 0
    return int(read_bytes / (whole.mean() * lanes.piece_bytes_max))
