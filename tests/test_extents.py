"""Free ranges and extents against a map of every unit of the medium."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.extents import Extent, ExtentTable, FreeRanges
from flatcake.gva import Medium
from flatcake.layout import LaneTable
from flatcake.units import KiB
from tests.builders import make_geometry

FILES, FILE_UNITS = 3, 16
steps = st.lists(st.tuples(st.booleans(), st.integers(0, 2**16)), max_size=60)


def free_runs(units: list[bool]) -> list[tuple[int, int]]:
    """(start, length) of every longest stretch of free units that stays inside one file."""
    found: list[tuple[int, int]] = []
    for at, free in enumerate(units):
        if free and found and sum(found[-1]) == at and at % FILE_UNITS:
            found[-1] = found[-1][0], found[-1][1] + 1
        elif free:
            found.append((at, 1))
    return found


@settings(deadline=None)
@given(steps)
def test_free_ranges_equal_a_map_of_every_unit(steps: list[tuple[bool, int]]) -> None:
    ranges = FreeRanges(size_bytes=FILES * FILE_UNITS, file_bytes=FILE_UNITS)
    units = [True] * FILES * FILE_UNITS
    taken: list[tuple[int, int]] = []
    for give_back, number in steps:
        if give_back and taken:
            start, size = taken.pop(number % len(taken))
            ranges.free(start, size)
            units[start : start + size] = [True] * size
        else:
            size = 1 + number % (FILE_UNITS + 2)
            fits = sorted((length, start) for start, length in free_runs(units) if length >= size)
            found = ranges.allocate(size)
            assert found == (fits[0][1] if fits else None), "best fit, lowest address first"
            if found is not None:
                units[found : found + size] = [False] * size
                taken.append((found, size))
        ranges.check()
        model = free_runs(units)
        assert ranges.range_count == len(model)
        assert ranges.free_bytes == sum(units)
        assert ranges.largest_bytes == max((length for _, length in model), default=0)
    for start, size in taken:
        ranges.free(start, size)
    ranges.check()
    assert ranges.range_count == FILES and ranges.free_bytes == FILES * FILE_UNITS


def test_free_ranges_never_join_across_files() -> None:
    ranges = FreeRanges(size_bytes=32, file_bytes=16)
    assert ranges.range_count == 2 and ranges.allocate(17) is None
    starts = [ranges.allocate(16), ranges.allocate(16)]
    assert starts == [0, 16] and ranges.largest_bytes == 0
    ranges.free(16, 16)
    ranges.free(0, 16)
    assert ranges.range_count == 2 and ranges.largest_bytes == 16


@pytest.mark.parametrize(("start", "size"), [(4, 4), (3, 2), (7, 2), (2, 8), (4, 1)])
def test_free_ranges_notice_what_is_free_already(start: int, size: int) -> None:
    ranges = FreeRanges(size_bytes=16, file_bytes=16)
    assert ranges.allocate(16) == 0
    ranges.free(4, 4)
    with pytest.raises(AssertionError, match="free already"):
        ranges.free(start, size)


def make_table(file_blocks: int = 20) -> ExtentTable:
    lanes = LaneTable.of(make_geometry(4 * KiB, 8 * KiB))
    file_bytes = lanes.extent_bytes(file_blocks)
    return ExtentTable(Medium.SSD, FreeRanges(size_bytes=2 * file_bytes, file_bytes=file_bytes), lanes)


@settings(deadline=None)
@given(steps)
def test_extents_tile_the_medium_and_are_found_by_address(steps: list[tuple[bool, int]]) -> None:
    table = make_table()
    held: list[Extent] = []
    shrunk = 0
    for number, (give_back, value) in enumerate(steps):
        if give_back and held:
            table.free(held.pop(value % len(held)))
        else:
            room, room_left = 1 + value % 24, table.room_left()
            extent = table.allocate(room, scope_id=number, generation=number)
            if room_left:
                assert extent is not None and extent.room_blocks == min(room, room_left)
                assert (extent.scope_id, extent.generation, extent.used_blocks) == (number, number, 0)
                shrunk += extent.room_blocks < room
                held.append(extent)
            else:
                assert extent is None
        table.check()
        assert len(table) == len(held) and table.shrunk_count == shrunk
    for extent in held:
        size_bytes = table.lanes.extent_bytes(extent.room_blocks)
        assert table.at(extent.base_bytes) is extent is table.at(extent.base_bytes + size_bytes - 1)
        after = table.at(extent.base_bytes + size_bytes)
        assert after is None or after.base_bytes == extent.base_bytes + size_bytes
        offsets = [table.piece_offset(extent, slot) for slot in range(extent.room_blocks)]
        assert [table.slot_of(extent, offset) for offset in offsets] == list(range(extent.room_blocks))
        assert all(table.at(offset) is extent for offset in offsets)


def test_fragmentation_gives_smaller_extents_and_counts_them() -> None:
    table = make_table(file_blocks=30)
    parts = [table.allocate(5, scope_id=i, generation=i) for i in range(10)]
    for part in parts[::2]:
        assert part is not None
        table.free(part)
    small = table.allocate(20, scope_id=99, generation=99)
    assert small is not None and 5 <= small.room_blocks < 20
    assert table.shrunk_count == 1
    table.check()


def test_slot_of_refuses_an_address_between_pieces() -> None:
    table = make_table()
    extent = table.allocate(4, scope_id=1, generation=1)
    assert extent is not None
    for offset in (extent.base_bytes, table.piece_offset(extent, 1) + 1, table.piece_offset(extent, 4)):
        with pytest.raises(AssertionError):
            table.slot_of(extent, offset)


def test_an_extent_is_given_back_once() -> None:
    table = make_table()
    extent = table.allocate(4, scope_id=1, generation=1)
    assert extent is not None
    table.free(extent)
    with pytest.raises((AssertionError, KeyError)):
        table.free(extent)
