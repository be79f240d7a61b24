"""Checksum records: headers, what stays in memory, and which bytes a turn writes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake.io.records import SUM_KIND_NONE, ExtentRef, Record, RecordBook, aligned_bytes, extents_of
from flatcake.kernels.checksum import SUM_KIND
from flatcake.layout import LaneTable
from flatcake.messages import Runs
from flatcake.units import DIRECT_BYTES
from tests.builders import make_geometry

LANES = LaneTable.of(make_geometry(*[4096] * 5))
REF = ExtentRef(medium=1, base_bytes=8192, room_blocks=40, generation=7)


def make_book(bytes_max: int = 1 << 20, *, layout: int = 99, sum_kind: int = SUM_KIND) -> RecordBook:
    return RecordBook(LANES, layout, sum_kind=sum_kind, bytes_max=bytes_max)


def read_back(book: RecordBook, written: Record, ref: ExtentRef = REF) -> Record | None:
    """As if the record had been read from its medium."""
    record = book.empty(ref)
    record.raw[:] = written.raw
    found = book.accept(record)
    book.check()
    return found


def test_a_record_comes_back_with_its_sums() -> None:
    written = make_book().blank(REF)
    written.sums[3, 4] = 12345
    book = make_book()
    assert book.find(REF) is None
    found = read_back(book, written)
    assert found is not None and found.sums[3, 4] == 12345 and found.sums.sum() == 12345
    assert book.find(REF) is found


@pytest.mark.parametrize("byte", range(48))
def test_each_byte_of_the_header_counts(byte: int) -> None:
    written = make_book().blank(REF)
    assert read_back(make_book(), written) is not None
    written.raw[byte] ^= 1
    book = make_book()
    assert read_back(book, written) is None and book.find(REF) is None and book.size_bytes == 0


@pytest.mark.parametrize(
    ("change", "book"),
    [
        ({"generation": 8}, make_book()),
        ({"generation": 6}, make_book()),
        ({"room_blocks": 39}, make_book()),
        ({}, make_book(layout=98)),
        ({}, make_book(sum_kind=SUM_KIND_NONE)),
    ],
)
def test_a_record_of_another_tenant_or_store_is_refused(change: dict[str, int], book: RecordBook) -> None:
    written = make_book().blank(REF)
    ref = REF._replace(**change)
    record = book.empty(ref)
    record.raw[: len(written.raw)] = written.raw[: len(record.raw)]
    assert book.accept(record) is None


def test_zeros_are_no_record() -> None:
    book = make_book()
    assert book.accept(book.empty(REF)) is None


def test_a_record_that_is_in_memory_is_not_replaced_by_an_older_reading() -> None:
    """A restore reads the record, a save writes newer sums meanwhile, then the restore's reading arrives."""
    book = make_book()
    early = book.empty(REF)
    early.raw[:] = make_book().blank(REF).raw
    current = read_back(book, make_book().blank(REF))
    assert current is not None
    current.sums[0, 0] = 5
    assert book.accept(early) is current and book.find(REF) is current
    book.check()


def test_a_new_tenant_takes_the_place_of_an_old_one() -> None:
    book = make_book()
    old = book.blank(REF)
    later = book.blank(REF._replace(generation=8))
    assert book.find(REF) is None and book.find(REF._replace(generation=8)) is later
    assert book.size_bytes == old.raw.nbytes
    assert book.find(REF._replace(medium=0)) is None
    book.check()


def test_the_least_recently_used_go_first_but_none_that_is_in_use() -> None:
    refs = [REF._replace(base_bytes=number << 20) for number in range(5)]
    size_bytes = LANES.record_bytes(REF.room_blocks)
    book = make_book(3 * size_bytes)
    held = book.hold(book.blank(refs[0]))
    for ref in refs[1:3]:
        book.blank(ref)
    assert book.find(refs[1]) is not None
    book.blank(refs[3])
    assert [book.find(ref) is not None for ref in refs] == [True, True, False, True, False]
    book.let_go(held)
    book.blank(refs[4])
    book.check()
    assert book.size_bytes <= 3 * size_bytes and sum(book.find(ref) is not None for ref in refs) == 3


def test_a_bound_of_nothing_keeps_what_is_in_use() -> None:
    book = make_book(0)
    first = book.hold(book.blank(REF))
    other = REF._replace(base_bytes=0)
    second = book.hold(book.blank(other))
    assert book.find(REF) is first and book.find(other) is second
    for record in (first, second):
        book.let_go(record)
        book.check()
    with pytest.raises(AssertionError):
        book.let_go(first)


def test_generations_tell_plans_that_are_out_of_date() -> None:
    book = make_book()
    assert not book.is_stale(REF)
    book.note_generation(REF)
    assert not book.is_stale(REF) and not book.is_stale(REF._replace(generation=8))
    assert book.is_stale(REF._replace(generation=6))
    assert not book.is_stale(REF._replace(generation=6, medium=0))


@given(room=st.integers(1, 3000), data=st.data())
def test_dirty_range_holds_the_sums_of_its_slots(room: int, data: st.DataObject) -> None:
    ref = REF._replace(room_blocks=room)
    first = data.draw(st.integers(0, room - 1))
    blocks = data.draw(st.integers(1, room - first))
    book = make_book(1 << 30)
    record = book.blank(ref)
    before = record.raw.copy()
    record.sums[first : first + blocks] = np.uint64(2**64 - 1)
    record.raw[: 64 if first == 0 else 0] ^= 255  # The header goes with the first turn.
    changed = np.flatnonzero(record.raw != before)
    offset, size_bytes = book.dirty_range(ref, first, blocks)
    assert offset % DIRECT_BYTES == size_bytes % DIRECT_BYTES == 0
    assert 0 <= offset <= changed.min() and changed.max() < offset + size_bytes <= len(record.raw)
    assert size_bytes - (changed.max() - changed.min() + 1) < 2 * DIRECT_BYTES


def test_extents_of_names_each_extent_once() -> None:
    rows = [(1, 0, 4, 2, 0, 2, 0), (0, 0, 4, 1, 0, 1, 2), (1, 0, 4, 2, 2, 1, 3), (1, 4096, 4, 2, 2, 1, 4)]
    refs = extents_of(Runs(np.array(rows, np.int64)))
    assert refs == [ExtentRef(0, 0, 4, 1), ExtentRef(1, 0, 4, 2), ExtentRef(1, 4096, 4, 2)]
    assert extents_of(Runs.none()) == []


def test_aligned_bytes_are_zeroed_and_aligned() -> None:
    for size_bytes in (4096, 8192, 4096 * 33):
        memory = aligned_bytes(size_bytes)
        assert len(memory) == size_bytes and memory.ctypes.data % DIRECT_BYTES == 0 and not memory.any()
