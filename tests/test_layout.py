import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake.errors import ConfigError
from flatcake.layout import RECORD_BYTES_PER_PIECE, RECORD_HEADER_BYTES, Growth, LaneTable, room_max
from flatcake.units import DIRECT_BYTES, KiB, MiB
from tests.builders import make_geometry

piece_sizes = st.lists(st.integers(1, 40).map(lambda pages: pages * DIRECT_BYTES), min_size=1, max_size=6)


def lane_table(sizes: list[int]) -> LaneTable:
    return LaneTable.of(make_geometry(*sizes))


@given(piece_sizes, st.lists(st.integers(1, 2000), min_size=1, max_size=5))
def test_lanes_tile_the_extent_after_its_records(sizes: list[int], rooms: list[int]) -> None:
    lanes = lane_table(sizes)
    offsets = lanes.lane_offsets(np.array(rooms, np.int64))
    assert offsets.shape == (len(sizes), len(rooms)) and offsets.dtype == np.int64
    for column, room in enumerate(rooms):
        records = lanes.record_bytes(room)
        assert records % DIRECT_BYTES == 0
        assert records >= RECORD_HEADER_BYTES + room * len(sizes) * RECORD_BYTES_PER_PIECE > records - DIRECT_BYTES
        assert lanes.first_piece_offset(room) == records == offsets[0, column]
        end = records
        for size, offset in zip(sizes, offsets[:, column], strict=True):
            assert offset == end
            end += room * size
        assert lanes.extent_bytes(room) == end


@given(piece_sizes, st.integers(0, 200 * MiB))
def test_room_blocks_is_the_most_that_fits(sizes: list[int], size_bytes: int) -> None:
    lanes = lane_table(sizes)
    room = lanes.room_blocks(size_bytes)
    assert room == 0 or lanes.extent_bytes(room) <= size_bytes
    assert lanes.extent_bytes(room + 1) > size_bytes


@given(piece_sizes, st.integers(1, 500))
def test_room_blocks_inverts_extent_bytes(sizes: list[int], room: int) -> None:
    lanes = lane_table(sizes)
    assert lanes.room_blocks(lanes.extent_bytes(room)) == room
    assert lanes.room_blocks(lanes.extent_bytes(room) - 1) == room - 1


def test_room_blocks_of_nothing_is_zero() -> None:
    lanes = lane_table([4 * KiB])
    assert [lanes.room_blocks(size) for size in (0, 1, 63, 4 * KiB, 8 * KiB - 1, 8 * KiB)] == [0, 0, 0, 0, 0, 1]


def test_segments_get_exactly_the_turn() -> None:
    growth = Growth(layout="segments", percent=25, room_max=100)
    assert [growth.next_room(turn, scope) for turn, scope in ((1, 0), (7, 1000), (90, 5))] == [1, 7, 90]
    assert growth.next_room(250, 0) == 100


def test_lanes_grow_by_a_share_of_the_scope_up_to_the_limit() -> None:
    growth = Growth(layout="lanes", percent=25, room_max=100)
    assert growth.next_room(3, 0) == 3
    assert growth.next_room(1, 8) == 2
    assert growth.next_room(5, 8) == 5
    assert growth.next_room(1, 399) == 99
    assert growth.next_room(1, 4000) == 100
    assert growth.next_room(100, 4000) == 100


@pytest.mark.parametrize("turn_blocks", [1, 24, 25, 33, 128, 855])
def test_a_turn_gets_few_extents_of_one_size(turn_blocks: int) -> None:
    growth = Growth(layout="lanes", percent=0, room_max=24)
    rooms, left = list[int](), turn_blocks
    while left:
        rooms.append(growth.next_room(left, turn_blocks - left))
        left -= rooms[-1]
    assert len(rooms) == -(-turn_blocks // 24) and max(rooms) - min(rooms) <= 1


def test_room_max_is_set_by_the_largest_lane() -> None:
    lanes = lane_table([16 * KiB, 64 * KiB])
    assert room_max(lanes, 8 * MiB, 1024 * MiB) == 128
    assert room_max(lanes, 8 * MiB - 1, 1024 * MiB) == 127
    assert room_max(lanes, 4 * KiB, 1024 * MiB) == 1


def test_room_max_stays_inside_one_file() -> None:
    lanes = lane_table([16 * KiB, 64 * KiB])
    assert room_max(lanes, 8 * MiB, lanes.extent_bytes(9)) == 9
    assert room_max(lanes, 8 * MiB, lanes.extent_bytes(9) - 1) == 8


def test_room_max_refuses_files_too_small_for_one_block() -> None:
    lanes = lane_table([16 * KiB, 64 * KiB])
    with pytest.raises(ConfigError, match=f"a file of {80 * KiB} bytes.*{lanes.extent_bytes(1)}"):
        room_max(lanes, 8 * MiB, 80 * KiB)
