"""The pieces of a plan, one row each, in the order of its tiles: what kernels and checksums work on.

Pure: arrays in, arrays out.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from flatcake.io.plan import TilePlan
from flatcake.kernels.checksum import Sums, block_states, seeds_of
from flatcake.layout import LaneTable
from flatcake.messages import GENERATION, Int64Array, Plan, block_column

SHARE = 8192
"""Pieces that are expanded at once, so that the arrays stay in the processor's cache."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Pieces:
    """All pieces of one plan."""

    table: Int64Array
    """int64 [pieces, 3]: offset in the slot in bytes, block of the request, layer."""
    tile_pieces: Int64Array
    """int64 [tiles + 1]: tile t has the pieces tile_pieces[t] … tile_pieces[t + 1] - 1."""
    seeds: Sums
    """uint32 [pieces]: seeds of the checksums."""


def expand(plan: Plan, tiles: TilePlan, lanes: LaneTable, layout: int) -> Generator[None, None, Pieces]:
    """Expand the segments of a plan to single pieces, with the seed of each; yields between two shares.

    Args:
        plan: Keys and generations.
        tiles: Its tiles.
        lanes: Sizes of pieces.
        layout: 64-bit digest of the geometry.

    Cost: O(pieces) array elements; fresh memory would cost more than all arithmetic.
    """
    ends = np.concatenate([[0], tiles.segments[:, 3].cumsum()])
    count = int(ends[-1])
    table, seeds = np.empty((count, 3), np.int64), np.empty(count, np.uint32)
    states, generations = block_states(plan.keys, layout), block_column(plan, GENERATION).view(np.uint64)
    cuts = ends.searchsorted(np.arange(0, count, SHARE)).tolist()
    for nth, (first, last) in enumerate(pairwise([*cuts, len(tiles.segments)])):
        if nth:
            yield
        rows = slice(int(ends[first]), int(ends[last]))
        starts, layers, blocks, counts = tiles.segments[first:last].T
        sizes = lanes.piece_bytes[layers]
        number = np.arange(rows.start, rows.stop)
        block = number + np.repeat(blocks - ends[first:last], counts)
        layer = np.repeat(layers, counts)
        table[rows, 0] = number * np.repeat(sizes, counts) + np.repeat(starts - sizes * ends[first:last], counts)
        table[rows, 1], table[rows, 2] = block, layer
        seeds[rows] = seeds_of(states[block], layer.view(np.uint64), generations[block])
    return Pieces(table=table, tile_pieces=ends[tiles.tile_segments], seeds=seeds)


class Work:
    """A plan, expanded for one data plane.

    What is cached is made when it is first asked for: a restore begins to read without it.
    """

    def __init__(self, plan: Plan, tiles: TilePlan, lanes: LaneTable, layout: int) -> None:
        self.plan = plan
        self.tiles = tiles
        self._lanes, self._layout = lanes, layout
        self._pieces: Pieces | None = None

    @property
    def pieces(self) -> Pieces:
        """Made here and now unless they are there."""
        if self._pieces is None:
            for _ in self.make_pieces():
                pass
        assert self._pieces is not None
        return self._pieces

    def make_pieces(self) -> Iterator[None]:
        """Make `pieces` a share at a time, for a thread that has other things to do in between."""
        self._pieces = yield from expand(self.plan, self.tiles, self._lanes, self._layout)

    @cached_property
    def tile_layers(self) -> list[range]:
        """Per tile: the layers that it has something of."""
        ends: list[int] = (self.tiles.tile_last_layer + 1).tolist()
        return list(map(range, self.tiles.tile_first_layer.tolist(), ends))

    @cached_property
    def layer_tiles(self) -> tuple[int, ...]:
        """Per layer: in how many tiles it lies."""
        layers, tiles = self._lanes.layer_count, self.tiles
        begun = np.bincount(tiles.tile_first_layer, minlength=layers).cumsum()
        over = np.bincount(tiles.tile_last_layer + 1, minlength=layers + 1).cumsum()
        return tuple((begun - over[:-1]).tolist())
