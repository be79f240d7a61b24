"""The pieces of a plan, one row each, in the order of its tiles: what kernels and checksums work on.

Pure: arrays in, arrays out.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from flatcake.io.plan import TilePlan
from flatcake.kernels.checksum import Sums, piece_seeds
from flatcake.layout import LaneTable
from flatcake.messages import GENERATION, Int64Array, Plan, block_column


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Pieces:
    """All pieces of one plan."""

    table: Int64Array
    """int64 [pieces, 3]: offset in the slot in bytes, block of the request, layer."""
    tile_pieces: Int64Array
    """int64 [tiles + 1]: tile t has the pieces tile_pieces[t] … tile_pieces[t + 1] - 1."""
    seeds: Sums
    """uint32 [pieces]: seeds of the checksums."""


def pieces_of(plan: Plan, tiles: TilePlan, lanes: LaneTable, layout: int) -> Pieces:
    """Expand the segments of a plan to single pieces, with the seed of each.

    Args:
        plan: Keys and generations.
        tiles: Its tiles.
        lanes: Sizes of pieces.
        layout: 64-bit digest of the geometry.

    Cost: O(pieces) array elements.
    """
    counts = tiles.segments[:, 3]
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    table = np.empty((int(ends[-1]), 3), np.int64)
    nth = np.arange(len(table)) - np.repeat(ends[:-1], counts)
    table[:, 2] = np.repeat(tiles.segments[:, 1], counts)
    table[:, 1] = np.repeat(tiles.segments[:, 2], counts) + nth
    table[:, 0] = np.repeat(tiles.segments[:, 0], counts) + nth * lanes.piece_bytes[table[:, 2]]
    generations = block_column(plan, GENERATION)[table[:, 1]].astype(np.uint64)
    seeds = piece_seeds(plan.keys[table[:, 1]], table[:, 2], generations, layout)
    return Pieces(table=table, tile_pieces=ends[tiles.tile_segments], seeds=seeds)


class Work:
    """A plan, expanded for one data plane."""

    def __init__(self, plan: Plan, tiles: TilePlan, lanes: LaneTable, layout: int) -> None:
        self.plan = plan
        self.tiles = tiles
        self._lanes, self._layout = lanes, layout

    @cached_property
    def pieces(self) -> Pieces:
        """Made when they are first asked for: a restore begins to read without them."""
        return pieces_of(self.plan, self.tiles, self._lanes, self._layout)
