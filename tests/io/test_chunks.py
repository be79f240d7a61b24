"""Chunks: every byte in exactly one of them, none too large, and results that say how far each transfer got."""

import errno

from hypothesis import given
from hypothesis import strategies as st

from flatcake.io.chunks import Batch, Chunk
from flatcake.io.engine import Result, Transfer
from tests.fakes import host_buffer

PAGE = 4096
SIZES = st.lists(st.integers(0, 20), max_size=8)


def make(sizes: list[int], pages_max: int) -> tuple[list[Transfer], list[Chunk], list[list[Result]]]:
    at, transfers = 0, []
    for number, size in enumerate(sizes):
        transfers.append(Transfer(number, 100 * PAGE * number, size * PAGE, at))
        at += (size + number % 2) * PAGE  # Some neighbours touch, some do not.
    answers: list[list[Result]] = []
    return (
        transfers,
        Batch(transfers, host_buffer(PAGE), lambda results, _: answers.append(results)).chunks(pages_max * PAGE),
        answers,
    )


@given(SIZES, st.integers(1, 7))
def test_every_byte_is_in_one_chunk_and_in_one_copy(sizes: list[int], pages_max: int) -> None:
    transfers, chunks, answers = make(sizes, pages_max)
    moved: list[tuple[int, int, int]] = []  # file, page in the file, page in the slot
    for chunk in chunks:
        used = [page for part in chunk.transfers for page in _pages(part.buffer_offset, part.size_bytes)]
        assert used == list(range(len(used))) and len(used) <= pages_max
        slot_of = {
            ring: slot
            for at, start, size in chunk.copies()
            for slot, ring in zip(_pages(at, size), _pages(start, size), strict=True)
        }
        assert sorted(slot_of) == used
        for file, offset, size, start in chunk.transfers:
            pairs = zip(_pages(offset, size), _pages(start, size), strict=True)
            moved += [(file, page, slot_of[ring]) for page, ring in pairs]
    wanted = [
        (file, page, slot)
        for file, offset, size, start in transfers
        for page, slot in zip(_pages(offset, size), _pages(start, size), strict=True)
    ]
    assert sorted(moved) == sorted(wanted)
    assert answers == ([] if chunks else [[Result(0, 0)] * len(sizes)])


@given(SIZES.filter(any), st.integers(1, 7), st.randoms(use_true_random=False))
def test_a_transfer_got_as_far_as_its_first_fault(sizes, pages_max, random) -> None:
    transfers, chunks, answers = make(sizes, pages_max)
    got: dict[int, list[tuple[int, bool]]] = {number: [] for number in range(len(sizes))}
    ends = []
    for chunk in chunks:
        results = []
        for part in chunk.transfers:
            pages = part.size_bytes // PAGE
            good = pages if random.random() < 0.7 else random.randrange(pages)
            got[part.file].append((good, good == pages))
            results.append(Result(good * PAGE, 0 if good == pages else errno.ENOSPC))
        ends.append((chunk, results))
    random.shuffle(ends)
    for number, (chunk, results) in enumerate(ends):
        assert not answers, f"answered after {number} of {len(ends)} chunks"
        chunk.end(results)
    [found] = answers
    for number, (transfer, result) in enumerate(zip(transfers, found, strict=True)):
        pages, whole = 0, True
        for good, is_all in got[number]:
            if whole:
                pages, whole = pages + good, is_all
        assert result == Result(pages * PAGE, 0 if pages * PAGE == transfer.size_bytes else errno.ENOSPC)


def test_copies_of_a_short_read_are_what_came() -> None:
    _, [chunk], _ = make([3, 4], 7)
    assert chunk.copies([Result(PAGE, 5), Result(4 * PAGE, 0)]) == [(0, 0, PAGE), (3 * PAGE, 3 * PAGE, 4 * PAGE)]
    assert chunk.copies([Result(3 * PAGE, 0), Result(PAGE, 5)]) == [(0, 0, 4 * PAGE)]
    assert chunk.copies(chunk.failed()) == []


def _pages(start: int, size: int) -> range:
    return range(start // PAGE, (start + size) // PAGE)
