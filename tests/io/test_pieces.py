"""Pieces of a plan: against a walk over its segments, piece by piece."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatcake.io.pieces import SHARE, Work
from flatcake.io.plan import make_tiles
from flatcake.kernels.checksum import piece_seeds
from flatcake.layout import LaneTable
from flatcake.messages import Plan, PlanKind, Runs
from tests.builders import make_geometry, make_keys, make_limits

LANES = LaneTable.of(make_geometry(4096, 8192, 4096))
LAYOUT = 77


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Disjoint runs in extents of room 8, in some order of the request; some blocks are in no run."""
    rows, first = [], draw(st.integers(0, 2))
    for number in range(draw(st.integers(1, 5))):
        slot = draw(st.integers(0, 7))
        count = draw(st.integers(1, 8 - slot))
        rows.append((number % 2, number << 20, 8, 10 + number, slot, count, first))
        first += count
    keys = make_keys("a", first + draw(st.integers(0, 2)))
    order = draw(st.permutations(rows))
    return Plan(kind=PlanKind.RESTORE, plan_id=1, runs=Runs(np.array(order, np.int64)), keys=keys)


@given(plan=plans(), slot_pages=st.integers(2, 40))
def test_pieces_are_those_of_the_segments(plan: Plan, slot_pages: int) -> None:
    limits = make_limits(slot_bytes=slot_pages * 4096, first_tile_bytes=8192)
    tiles = make_tiles(plan.runs, LANES, limits)
    pieces = Work(plan, tiles, LANES, LAYOUT).pieces.complete()
    generation_of = {}
    for *_, generation, _, count, first in plan.runs.table.tolist():
        generation_of |= {first + nth: generation for nth in range(count)}
    rows, bounds = [], [0]
    for tile in range(tiles.tiles):
        for offset, layer, first, count in tiles.segments[tiles.tile_segments[tile] : tiles.tile_segments[tile + 1]]:
            size = int(LANES.piece_bytes[layer])
            rows += [(int(offset) + nth * size, int(first) + nth, int(layer)) for nth in range(count)]
        bounds.append(len(rows))
    assert pieces.table.tolist() == [list(row) for row in rows] and pieces.tile_pieces.tolist() == bounds
    assert sorted((block, layer) for _, block, layer in rows) == [
        (block, layer) for block in sorted(generation_of) for layer in range(3)
    ]
    for row, (_, block, layer) in enumerate(rows):
        generation = np.array([generation_of[block]], np.uint64)
        assert pieces.seeds[row] == piece_seeds(plan.keys[block : block + 1], layer, generation, LAYOUT)[0]


def test_an_empty_plan_has_no_pieces() -> None:
    plan = Plan(kind=PlanKind.RESTORE, plan_id=1, runs=Runs.none(), keys=make_keys("a", 0))
    pieces = Work(plan, make_tiles(plan.runs, LANES, make_limits()), LANES, LAYOUT).pieces.complete()
    assert len(pieces.table) == len(pieces.seeds) == 0 and pieces.tile_pieces.tolist() == [0]


def test_a_long_plan_is_expanded_in_shares() -> None:
    lanes = LaneTable.of(make_geometry(4096, 8192))
    blocks = 3 * SHARE // 4
    rows = [(1, 0, blocks, 3, 0, blocks - 5, 0), (0, 0, 8, 4, 2, 5, blocks - 5)]
    plan = Plan(kind=PlanKind.RESTORE, plan_id=1, runs=Runs(np.array(rows)), keys=make_keys("a", blocks))
    tiles = make_tiles(plan.runs, lanes, make_limits(slot_bytes=1 << 20, read_bytes_max=1 << 20, file_bytes=1 << 40))
    pieces, made = Work(plan, tiles, lanes, LAYOUT).pieces, []
    assert (pieces.made, pieces.tiles_made) == (0, 0)
    for rows in pieces.shares():
        made.append(rows)
        assert pieces.made == rows.stop and pieces.tiles_made == sum(pieces.tile_pieces[1:] <= rows.stop)
    assert len(made) > 1 and [0, *(rows.stop for rows in made)] == [*(rows.start for rows in made), 2 * blocks]
    assert pieces.tiles_made == tiles.tiles and not list(pieces.shares())
    assert len(pieces) == len(pieces.table) == 2 * blocks > SHARE
    tile_of = np.repeat(np.arange(tiles.tiles), np.diff(pieces.tile_pieces))
    at = 0
    for tile, (offset, layer, first, count) in zip(
        np.repeat(np.arange(tiles.tiles), np.diff(tiles.tile_segments)), tiles.segments.tolist(), strict=True
    ):
        own = slice(at, at + count)
        assert (tile_of[own] == tile).all() and (pieces.table[own, 2] == layer).all()
        assert (pieces.table[own, 1] == first + np.arange(count)).all()
        assert (pieces.table[own, 0] == offset + np.arange(count) * lanes.piece_bytes[layer]).all()
        at += count
    generations = np.where(pieces.table[:, 1] < blocks - 5, 3, 4).astype(np.uint64)
    assert (pieces.seeds == piece_seeds(plan.keys[pieces.table[:, 1]], pieces.table[:, 2], generations, LAYOUT)).all()
