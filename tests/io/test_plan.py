"""The planner against a byte-by-byte reading of its own rules."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.errors import PlanError
from flatcake.gva import Medium
from flatcake.io.plan import PlanLimits, TilePlan, Wanted, make_tiles
from flatcake.layout import LaneTable
from flatcake.messages import BLOCKS, FIRST_BLOCK, RUN_COLUMNS, Int64Array, Runs
from flatcake.units import GiB, KiB, MiB
from tests.builders import make_geometry, make_limits

Row = tuple[int, ...]


def lane_table(*sizes: int) -> LaneTable:
    return LaneTable.of(make_geometry(*sizes))


def runs(*rows: Row) -> Runs:
    return Runs(np.array(rows, np.int64).reshape(-1, RUN_COLUMNS))


def piece_places(table: Runs, lanes: LaneTable) -> dict[tuple[int, int], tuple[int, int]]:
    """(layer, block of the request) -> (medium, offset), one piece at a time."""
    places = {}
    for medium, base, room, _, slot, blocks, first in table.table.tolist():
        at = base + lanes.record_bytes(room)
        for layer, size in enumerate(lanes.piece_bytes.tolist()):
            for nth in range(blocks):
                places[layer, first + nth] = medium, at + (slot + nth) * size
            at += room * size
    return places


def assert_layers_come_in_order(layers: Int64Array) -> None:
    """An eighth of all that are moved may come at once, if they are neighbours, but not the first."""
    moved = np.unique(layers).tolist()
    places, at_once = {layer: np.flatnonzero(layers == layer) for layer in moved}, max(1, len(moved) // 8)
    for number, layer in enumerate(moved):
        for later in moved[number + 1 :]:
            apart = set(range(layer, later)) - set(moved) or later - layer >= at_once or not number
            assert not apart or places[layer].max() < places[later].min(), (layer, later)


def assert_plan_is_right(
    plan: TilePlan, table: Runs, lanes: LaneTable, limits: PlanLimits, kept: Wanted | None = None
) -> None:
    every = piece_places(table, lanes)
    places = {piece: place for piece, place in every.items() if kept is None or kept[piece]}
    reads, segments = plan.reads.tolist(), plan.segments.tolist()
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for (offset, layer, first, blocks), number in zip(segments, plan.segment_read.tolist(), strict=True):
        medium, start, size, in_slot = reads[number]
        piece = int(lanes.piece_bytes[layer])
        assert blocks >= 1 and in_slot <= offset and offset + blocks * piece <= in_slot + size
        for nth in range(blocks):
            assert (layer, first + nth) not in found, "a piece is in two segments"
            found[layer, first + nth] = medium, start + offset - in_slot + nth * piece
    assert found == places
    assert_layers_come_in_order(plan.segments[:, 1])
    assert sorted(set(plan.segment_read.tolist())) == list(range(len(reads))), "a read without a segment"

    for medium, start, size, _ in reads:
        assert 0 < size <= min(limits.read_bytes_max, limits.slot_bytes)
        if medium == Medium.SSD:
            assert start // limits.file_bytes == (start + size - 1) // limits.file_bytes
    wanted = {piece: (place, place[1] + int(lanes.piece_bytes[piece[0]])) for piece, place in places.items()}
    for number, (_, start, size, _) in enumerate(reads):
        mine = [s for s, r in zip(segments, plan.segment_read.tolist(), strict=True) if r == number]
        spans = sorted(
            (wanted[layer, first][0][1], wanted[layer, first + blocks - 1][1], layer)
            for _, layer, first, blocks in mine
        )
        assert spans[0][0] == start and spans[-1][1] == start + size, "a read begins and ends with a piece"
        for (_, end, layer), (begin, _, next_layer) in pairwise(spans):
            assert begin == end or 0 < begin - end < limits.gap_bytes_limit
            assert begin == end or layer == next_layer, "no hole between layers is read"

    assert plan.tile_reads[0] == 0 and plan.tile_reads[-1] == len(reads) and plan.tiles == len(plan.tile_first_layer)
    assert plan.tile_segments[0] == 0 and plan.tile_segments[-1] == len(segments)
    for tile in range(plan.tiles):
        first, last = plan.tile_reads[tile : tile + 2]
        assert first < last
        at = 0
        for _, _, size, in_slot in reads[first:last]:
            assert in_slot == at
            at += size
        assert at <= limits.slot_bytes
        part = slice(*plan.tile_segments[tile : tile + 2])
        assert set(plan.segment_read[part].tolist()) == set(range(first, last))
        assert plan.tile_first_layer[tile] == min(plan.segments[part, 1])
        assert plan.tile_last_layer[tile] == max(plan.segments[part, 1])
    assert plan.read_bytes == sum(size for _, _, size, _ in reads)


@st.composite
def requests(draw: st.DrawFn) -> tuple[Runs, LaneTable, PlanLimits]:
    """Runs cut out of extents on both media, in shuffled order, blocks of the request dealt out in any order."""
    sizes = draw(st.lists(st.sampled_from([4 * KiB, 8 * KiB, 20 * KiB, 64 * KiB]), min_size=1, max_size=4))
    lanes = lane_table(*sizes * draw(st.sampled_from([1, 1, 1, 6])))
    file_bytes = draw(st.sampled_from([2 * MiB, 4 * MiB, 8 * MiB]))
    pieces: list[list[int]] = []
    for medium in Medium:
        base = draw(st.integers(0, 3)) * file_bytes
        for _ in range(draw(st.integers(0, 3))):
            room = draw(st.integers(1, min(12, lanes.room_blocks(file_bytes))))
            if base // file_bytes != (base + lanes.extent_bytes(room) - 1) // file_bytes:
                base = (base // file_bytes + 1) * file_bytes
            slot = draw(st.integers(0, room - 1)) if draw(st.booleans()) else 0
            while slot < room:
                blocks = draw(st.integers(1, room - slot))
                pieces.append([int(medium), base, room, 1, slot, blocks, 0])
                slot += blocks + draw(st.integers(0, 5))
            base += lanes.extent_bytes(room) + draw(st.integers(0, 30)) * 4 * KiB
    first = draw(st.integers(0, 5))
    for piece in (dealt := draw(st.permutations(pieces))):
        piece[6] = first
        first += piece[5]
    limits = make_limits(
        gap_bytes_limit=draw(st.sampled_from([0, 4 * KiB, 64 * KiB, 1 * MiB])),
        read_bytes_max=draw(st.sampled_from([64 * KiB, 100 * KiB, 256 * KiB, 8 * MiB])),
        slot_bytes=draw(st.sampled_from([64 * KiB, 128 * KiB, 1 * MiB])),
        file_bytes=file_bytes,
        first_tile_bytes=draw(st.sampled_from([4 * KiB, 64 * KiB, 4 * MiB])),
    )
    return runs(*map(tuple, draw(st.permutations(dealt)))), lanes, limits


@settings(max_examples=150, deadline=None)
@given(requests())
def test_plan_holds_each_piece_once_within_all_limits(request: tuple[Runs, LaneTable, PlanLimits]) -> None:
    table, lanes, limits = request
    before = table.table.copy()
    assert_plan_is_right(make_tiles(table, lanes, limits), table, lanes, limits)
    assert (table.table == before).all(), "the caller's runs were changed"


@settings(max_examples=150, deadline=None)
@given(requests(), st.data())
def test_plan_holds_what_is_wanted_and_reads_through_nothing_else(
    request: tuple[Runs, LaneTable, PlanLimits], data: st.DataObject
) -> None:
    """As with windows: of each layer's pieces some stretch, or an arbitrary choice."""
    table, lanes, limits = request
    blocks = int((table.table[:, FIRST_BLOCK] + table.table[:, BLOCKS]).max(initial=0))
    kept = np.zeros((lanes.layer_count, blocks), np.bool_)
    for layer in kept:
        if data.draw(st.booleans()):
            layer[:] = data.draw(st.booleans())
            continue
        start = data.draw(st.integers(0, blocks))
        layer[start : data.draw(st.integers(start, blocks))] = True
        for _ in range(data.draw(st.integers(0, 2)) if blocks else 0):
            layer[data.draw(st.integers(0, blocks - 1))] ^= True
    plan = make_tiles(table, lanes, limits, kept)
    assert_plan_is_right(plan, table, lanes, limits, kept)
    places = piece_places(table, lanes)
    for number, (medium, start, size, _) in enumerate(plan.reads.tolist()):
        mine = set(plan.segments[plan.segment_read == number, 1].tolist())  # A bridged hole may lie in other layers.
        inside = [p for p, at in places.items() if at[0] == medium and start <= at[1] < start + size and p[0] in mine]
        assert all(kept[piece] for piece in inside), "a piece that nobody wants is read"
    everything = make_tiles(table, lanes, limits, np.ones_like(kept))
    same = make_tiles(table, lanes, limits)
    assert (everything.reads == same.reads).all() and (everything.segments == same.segments).all()


def test_plan_of_nothing_is_empty() -> None:
    plan = make_tiles(runs(), lane_table(4 * KiB, 8 * KiB), make_limits())
    assert plan.tiles == 0 and not len(plan.reads) and not len(plan.segments) and plan.read_bytes == 0


@pytest.mark.parametrize(
    ("hole_bytes", "reads"), [(64 * KiB - 4 * KiB, 1), (64 * KiB, 2), (64 * KiB + 4 * KiB, 2), (4 * KiB, 1), (0, 1)]
)
def test_gap_is_bridged_only_below_the_limit(hole_bytes: int, reads: int) -> None:
    lanes, slot = lane_table(4 * KiB), 2 + hole_bytes // (4 * KiB)
    table = runs((1, 0, 100, 1, 0, 2, 0), (1, 0, 100, 1, slot, 3, 2))
    plan = make_tiles(table, lanes, make_limits())
    assert len(plan.reads) == reads
    assert plan.read_bytes == 5 * 4 * KiB + (hole_bytes if reads == 1 else 0)
    assert len(plan.segments) == 2, "what lies in the hole is copied nowhere"


def test_writes_run_through_no_hole_but_merge_neighbours() -> None:
    lanes, limits = lane_table(4 * KiB), make_limits(gap_bytes_limit=0)
    assert len(make_tiles(runs((1, 0, 9, 1, 0, 2, 0), (1, 0, 9, 1, 3, 2, 2)), lanes, limits).reads) == 2
    assert len(make_tiles(runs((1, 0, 9, 1, 0, 2, 0), (1, 0, 9, 1, 2, 2, 2)), lanes, limits).reads) == 1


def test_gap_in_bytes_differs_between_layers_of_different_sizes() -> None:
    lanes = lane_table(4 * KiB, 32 * KiB)  # two blocks missing: a hole of 8 KiB, and one of 64 KiB
    plan = make_tiles(runs((1, 0, 9, 1, 0, 1, 0), (1, 0, 9, 1, 3, 1, 1)), lanes, make_limits())
    assert plan.segment_read.tolist() == [0, 0, 1, 2]


def test_reads_never_join_two_files() -> None:
    lanes = lane_table(4 * KiB)
    room = 8
    table = runs((1, GiB - lanes.extent_bytes(room), room, 1, 7, 1, 0), (1, GiB, room, 2, 0, 1, 1))
    assert len(make_tiles(table, lanes, make_limits(file_bytes=GiB)).reads) == 2
    assert len(make_tiles(table, lanes, make_limits(file_bytes=2 * GiB)).reads) == 1


def test_reads_never_join_two_media() -> None:
    lanes = lane_table(4 * KiB)
    table = runs((0, 0, 8, 1, 7, 1, 0), (1, lanes.extent_bytes(8), 8, 2, 0, 1, 1))
    assert make_tiles(table, lanes, make_limits()).reads[:, 0].tolist() == [0, 1]


def test_long_runs_are_split_at_the_largest_read_or_slot() -> None:
    lanes = lane_table(4 * KiB, 8 * KiB)
    table = runs((1, 0, 100, 1, 0, 100, 0))
    for read_bytes_max, slot_bytes in ((64 * KiB, 1 * MiB), (1 * MiB, 64 * KiB)):
        limits = make_limits(read_bytes_max=read_bytes_max, slot_bytes=slot_bytes)
        plan = make_tiles(table, lanes, limits)
        assert_plan_is_right(plan, table, lanes, limits)
        assert int(plan.reads[:, 2].max()) == 64 * KiB
        assert len(plan.reads) == -(-400 // 64) + -(-800 // 64)


def test_neighbours_merge_up_to_the_largest_read_and_no_further() -> None:
    lanes = lane_table(4 * KiB)
    rows = [(1, 0, 100, 1, slot, 1, slot) for slot in range(33)]
    plan = make_tiles(runs(*rows), lanes, make_limits(read_bytes_max=64 * KiB))
    assert plan.reads[:, 2].tolist() == [64 * KiB, 64 * KiB, 4 * KiB]
    assert plan.segment_read.tolist() == [0] * 16 + [1] * 16 + [2]


def test_first_tile_is_small_and_later_ones_double() -> None:
    lanes = lane_table(*[64 * KiB] * 128)
    limits = make_limits(first_tile_bytes=64 * KiB, slot_bytes=256 * KiB)
    plan = make_tiles(runs((1, 0, 10, 1, 0, 1, 0)), lanes, limits)
    assert np.diff(plan.tile_reads).tolist() == [1, 2, *[4] * 31, 1]
    assert plan.tile_first_layer[:3].tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("pieces", "first", "largest"),
    [(3, 64, 128), (30, 64, 128), (60, 64, 192), (79, 64, 192), (80, 64, 256), (30, 256, 256)],
)
def test_tiles_of_a_short_plan_are_smaller(pieces: int, first: int, largest: int) -> None:
    limits = make_limits(first_tile_bytes=first * KiB, slot_bytes=256 * KiB)
    plan = make_tiles(runs((1, 0, 10, 1, 0, 1, 0)), lane_table(*[64 * KiB] * pieces), limits)
    sizes = np.add.reduceat(plan.reads[:, 2], plan.tile_reads[:-1])
    assert sizes.max() == largest * KiB


def test_reads_per_layer_are_extents_not_turns() -> None:
    lanes = lane_table(*[64 * KiB] * 4)
    turns = [(1, 0, 60, 1, 2 * turn, 2, 2 * turn) for turn in range(30)]
    assert len(make_tiles(runs(*turns), lanes, make_limits()).reads) == 4


def test_a_piece_larger_than_a_read_is_refused() -> None:
    for limits in (make_limits(read_bytes_max=60 * KiB), make_limits(slot_bytes=60 * KiB)):
        with pytest.raises(PlanError, match="65536 bytes, a read or slot at most 61440; use a smaller block_tokens"):
            make_tiles(runs((1, 0, 1, 1, 0, 1, 0)), lane_table(4 * KiB, 64 * KiB), limits)


def test_plan_of_a_long_restore_reads_its_payload_once() -> None:
    lanes = lane_table(*[44 * KiB] * 43)
    rows = [(1, i * GiB, 190, 1, 0, min(190, 3421 - 190 * i), 190 * i) for i in range(19)]
    plan = make_tiles(runs(*rows), lanes, make_limits())
    assert plan.read_bytes == 3421 * 43 * 44 * KiB
    assert len(plan.reads) <= 43 * 19 * 2 + plan.tiles, "more than one read a tile is cut"


def test_tiles_are_full_whatever_the_length_of_a_lane() -> None:
    lanes = lane_table(*[48 * KiB] * 43)
    limits = make_limits(read_bytes_max=24 * MiB, slot_bytes=24 * MiB, first_tile_bytes=2 * MiB, file_bytes=4 * GiB)
    plan = make_tiles(runs((1, 0, 860, 1, 0, 855, 0)), lanes, limits)
    sizes = np.add.reduceat(plan.reads[:, 2], plan.tile_reads[:-1])
    first = int((plan.tile_last_layer == 0).sum())
    assert plan.tile_first_layer[first] == 1, "the first layer waits for the second"
    assert sizes[0] <= 2 * MiB and (sizes[first:-1] > 20 * MiB).all() and plan.tiles <= first + 71
    assert len(plan.reads) <= 43 + plan.tiles
    assert_plan_is_right(plan, runs((1, 0, 860, 1, 0, 855, 0)), lanes, limits)


def test_a_read_is_not_cut_for_little_of_a_tile() -> None:
    lanes = lane_table(*[12 * KiB] * 4)
    limits = make_limits(read_bytes_max=1 * MiB, slot_bytes=1000 * KiB, first_tile_bytes=1000 * KiB)
    kept = make_tiles(runs((1, 0, 80, 1, 0, 75, 0)), lanes, limits)
    assert kept.reads[:, 2].tolist() == [900 * KiB] * 4 and kept.tiles == 4
    cut = make_tiles(runs((1, 0, 80, 1, 0, 66, 0)), lanes, limits)
    assert (cut.reads[:, 2] // KiB).tolist() == [792, 204, 588, 408, 384, 612, 180]
    assert cut.tile_reads.tolist() == [0, 2, 4, 6, 7], "what is left of a tile is a sixth of it or more"


def test_full_lanes_of_one_extent_are_one_read_a_tile() -> None:
    lanes = LaneTable.of(make_geometry(*[4 * KiB] * 8))
    limits = make_limits(read_bytes_max=64 * KiB, slot_bytes=64 * KiB, first_tile_bytes=64 * KiB)
    full = make_tiles(runs((1, 0, 4, 1, 0, 4, 0)), lanes, limits)
    assert full.reads[:, 2].tolist() == [64 * KiB, 64 * KiB] and full.tiles == 2
    assert full.segments[:, 0].tolist() == [16 * KiB * (layer % 4) for layer in range(8)]
    assert full.segment_read.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    partly = make_tiles(runs((1, 0, 5, 1, 0, 4, 0)), lanes, limits)
    assert len(partly.reads) == 8, "a hole in each lane"
    small = make_limits(read_bytes_max=16 * KiB, slot_bytes=64 * KiB, first_tile_bytes=64 * KiB)
    assert int(make_tiles(runs((1, 0, 4, 1, 0, 4, 0)), lanes, small).reads[:, 2].max()) == 16 * KiB


EXTENTS = [(1, extent * 16 * MiB, 2, extent + 1, 0, 2, 2 * extent) for extent in range(4)]


@pytest.mark.parametrize(
    ("layers", "slot_kib", "reads"),
    [
        (33, 512, 4 + 4 * 8),  # Four layers at once: an eighth of all.
        (33, 256, 4 + 4 * 16),  # Two fill a slot.
        (33, 128, 4 * 33),
        (15, 512, 4 * 15),  # An eighth is one.
    ],
)
def test_a_few_layers_of_an_extent_are_read_at_once_where_lanes_are_short(
    layers: int, slot_kib: int, reads: int
) -> None:
    lanes, slot_bytes = lane_table(*[64 * KiB] * layers), slot_kib * KiB
    limits = make_limits(read_bytes_max=slot_bytes, slot_bytes=slot_bytes, first_tile_bytes=slot_bytes)
    plan = make_tiles(runs(*EXTENTS), lanes, limits)
    assert_plan_is_right(plan, runs(*EXTENTS), lanes, limits)
    assert len(plan.reads) == reads
    assert plan.segments[:4, 1].tolist() == [0] * 4, "the first layer comes alone"


def test_lanes_with_room_left_are_read_layer_by_layer() -> None:
    """There is a hole behind each, and a read runs through none between layers."""
    lanes = lane_table(*[64 * KiB] * 33)
    limits = make_limits(read_bytes_max=512 * KiB, slot_bytes=512 * KiB, first_tile_bytes=512 * KiB)
    table = runs(*[(1, extent * 16 * MiB, 3, extent + 1, 0, 2, 2 * extent) for extent in range(4)])
    plan = make_tiles(table, lanes, limits)
    assert_plan_is_right(plan, table, lanes, limits)
    assert len(plan.reads) == 4 * 33 and (np.diff(plan.segments[:, 1]) >= 0).all()
    half = make_tiles(runs(*EXTENTS[:2], *table.table[2:].tolist()), lanes, limits)
    assert len(half.reads) == 4 * 33
    most = make_tiles(runs(*EXTENTS[:3], *table.table[3:].tolist()), lanes, limits)
    assert len(most.reads) == 3 * (1 + 8) + 33


def test_the_first_layer_that_is_wanted_comes_alone() -> None:
    lanes = lane_table(*[64 * KiB] * 35)
    limits = make_limits(read_bytes_max=512 * KiB, slot_bytes=512 * KiB, first_tile_bytes=512 * KiB)
    kept = np.ones((35, 8), np.bool_)
    kept[:3] = False
    plan = make_tiles(runs(*EXTENTS), lanes, limits, kept)
    assert_plan_is_right(plan, runs(*EXTENTS), lanes, limits, kept)
    assert plan.segments[:8, 1].tolist() == [3, 3, 3, 3, 4, 5, 6, 7] and plan.tile_last_layer[0] == 3


def test_small_neighbours_are_no_one_read_where_a_few_layers_come_at_once() -> None:
    lanes = lane_table(*[4 * KiB] * 16)
    limits = make_limits(gap_bytes_limit=1 * MiB, read_bytes_max=1 * MiB, slot_bytes=1 * MiB, first_tile_bytes=1 * MiB)
    table = runs((1, 0, 1, 1, 0, 1, 0), (1, lanes.extent_bytes(1), 1, 2, 0, 1, 1))
    plan = make_tiles(table, lanes, limits)
    assert_plan_is_right(plan, table, lanes, limits)
    assert plan.read_bytes == 2 * 16 * 4 * KiB


@pytest.mark.parametrize(("step", "last", "reads"), [(2, 33, 4 * 17), (1, 11, 4 * 11), (1, 17, 4 + 4 * 8)])
def test_layers_come_at_once_only_with_neighbours_and_in_eight_parts(step: int, last: int, reads: int) -> None:
    lanes = lane_table(*[64 * KiB] * 33)
    limits = make_limits(read_bytes_max=512 * KiB, slot_bytes=512 * KiB, first_tile_bytes=512 * KiB)
    kept = np.zeros((33, 8), np.bool_)
    kept[:last:step] = True
    plan = make_tiles(runs(*EXTENTS), lanes, limits, kept)
    assert_plan_is_right(plan, runs(*EXTENTS), lanes, limits, kept)
    assert len(plan.reads) == reads
