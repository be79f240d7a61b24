"""The pieces of a plan, one row each, in the order of its tiles: what kernels and checksums work on.

Pure: arrays in, arrays out.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise, repeat

import numpy as np

from flatcake.io.plan import TilePlan
from flatcake.kernels.checksum import Sums, block_states, seeds_of
from flatcake.layout import LaneTable
from flatcake.messages import GENERATION, Int64Array, Plan, block_column

SHARE = 4096
"""Pieces that are made at once, more or less: a quarter of a millisecond, and arrays that stay in the cache."""


class Pieces:
    """All pieces of one plan; rows are made a share at a time, by one thread."""

    table: Int64Array
    """int64 [pieces, 3]: offset in the slot in bytes, block of the request, layer."""
    tile_pieces: Int64Array
    """int64 [tiles + 1]: tile t has the pieces tile_pieces[t] … tile_pieces[t + 1] - 1."""
    seeds: Sums
    """uint32 [pieces]: seeds of the checksums."""
    made: int
    """So many rows of `table` and `seeds` are there; the rest is not yet."""

    def __init__(self, plan: Plan, tiles: TilePlan, lanes: LaneTable, layout: int) -> None:
        """Count the pieces.

        Args:
            plan: Keys and generations.
            tiles: Its tiles.
            lanes: Sizes of pieces.
            layout: 64-bit digest of the geometry.
        """
        self._segments, self._piece_bytes = tiles.segments, lanes.piece_bytes
        self._ends = np.concatenate([[0], tiles.segments[:, 3].cumsum()])
        count = int(self._ends[-1])
        self.table, self.seeds = np.empty((count, 3), np.int64), np.empty(count, np.uint32)
        self.tile_pieces, self.made = self._ends[tiles.tile_segments], 0
        self._states = block_states(plan.keys, layout)
        self._generations = block_column(plan, GENERATION).view(np.uint64)

    def __len__(self) -> int:
        return len(self.table)

    @property
    def tiles_made(self) -> int:
        """Tiles all of whose pieces are there: the first ones."""
        return int(self.tile_pieces.searchsorted(self.made, "right")) - 1

    def shares(self) -> Iterator[slice]:
        """Make what is missing; yields the rows of each share.

        Cost: O(pieces) array elements; fresh memory would cost more than all arithmetic.
        """
        cuts = self._ends.searchsorted(np.arange(self.made, len(self), SHARE)).tolist()
        for first, last in pairwise([*cuts, len(self._segments)]):
            if first < last:
                yield self._make(first, last)

    def complete(self) -> "Pieces":
        """Make what is missing, here and now."""
        for _ in self.shares():
            pass
        return self

    def _make(self, first: int, last: int) -> slice:
        """Expand segments `first` … `last` - 1."""
        ends = self._ends[first:last]
        rows = slice(int(ends[0]), int(self._ends[last]))
        starts, layers, blocks, counts = self._segments[first:last].T
        sizes = self._piece_bytes[layers]
        number = np.arange(rows.start, rows.stop)
        block = number + np.repeat(blocks - ends, counts)
        layer = np.repeat(layers, counts)
        self.table[rows, 0] = number * np.repeat(sizes, counts) + np.repeat(starts - sizes * ends, counts)
        self.table[rows, 1], self.table[rows, 2] = block, layer
        self.seeds[rows] = seeds_of(self._states[block], layer.view(np.uint64), self._generations[block])
        self.made = rows.stop
        return rows


class Work:
    """A plan, expanded for one data plane.

    What is cached is made when it is first asked for: a restore begins to read without it.
    """

    def __init__(self, plan: Plan, tiles: TilePlan, lanes: LaneTable, layout: int) -> None:
        self.plan = plan
        self.tiles = tiles
        self._lanes, self._layout = lanes, layout

    @cached_property
    def pieces(self) -> Pieces:
        """Counted only: whoever needs their rows has them made."""
        return Pieces(self.plan, self.tiles, self._lanes, self._layout)

    @cached_property
    def tile_layers(self) -> list[range]:
        """Per tile: the layers from the first to the last that it has something of."""
        ends: list[int] = (self.tiles.tile_last_layer + 1).tolist()
        return list(map(range, self.tiles.tile_first_layer.tolist(), ends))

    @cached_property
    def whole(self) -> list[list[tuple[int, int]]]:
        """Per tile: the results of its reads or writes, if all is well."""
        results = list(zip(self.tiles.reads[:, 2].tolist(), repeat(0)))
        return [results[first:last] for first, last in pairwise(self.tiles.tile_reads.tolist())]

    @cached_property
    def layer_tiles(self) -> tuple[int, ...]:
        """Per layer: in how many tiles it lies."""
        layers, tiles = self._lanes.layer_count, self.tiles
        begun = np.bincount(tiles.tile_first_layer, minlength=layers).cumsum()
        over = np.bincount(tiles.tile_last_layer + 1, minlength=layers + 1).cumsum()
        return tuple((begun - over[:-1]).tolist())
