"""Bytes on the medium that are not what was saved: flipped, swapped, copied over, zeroed.  A miss or the right ones."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from flatcake.gva import Medium
from flatcake.io.memory import MemoryEngine
from flatcake.io.records import SUM_KIND_NONE, RecordBook
from flatcake.kernels.checksum import SUM_KIND
from flatcake.layout import RECORD_HEADER_BYTES
from flatcake.store import Store
from flatcake.units import DIRECT_BYTES
from tests.stores import (
    MEDIA,
    TURNS,
    Memory,
    Pages,
    check,
    make_config,
    make_store,
    make_tokens,
    memory_engine,
    restore,
    save,
    shuffled,
    simple_layout,
)

BLOCKS = 2
STRIDE = 1 if "FLATCAKE_NIGHTLY" in os.environ else 23
"""Of the bytes of pieces every so manyth is flipped, all in the long form; of the record every one always."""


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout(layers=2, dim=16))


def extent_of(store: Store, tokens: Pages) -> tuple[int, int, int]:
    """Base, size and room of the extent that holds the first block of a sequence."""
    with store.lease(store.match(tokens)) as lease:
        _, base, room, *_ = lease.entry.runs.table[0].tolist()
    return base, store.plane.parts.lanes.extent_bytes(room), room


def view(engine: MemoryEngine, base: int, size_bytes: int) -> np.ndarray:
    """Bytes of the medium; an extent lies in one file."""
    file_bytes = len(engine.files[0])
    return engine.files[base // file_bytes][base % file_bytes :][:size_bytes]


def forget_records(store: Store) -> None:
    """As if all records had been pushed out of memory."""
    parts = store.plane.parts
    kind = SUM_KIND if parts.verify else SUM_KIND_NONE
    parts.book = RecordBook(parts.lanes, parts.layout, sum_kind=kind, bytes_max=1)


def again(store: Store, tokens: Pages) -> None:
    """Put back into the index what a failed restore took out."""
    keys = store.keys(tokens)
    for scope in store.catalog.space.scopes:
        for held, gvas in zip(scope.keys, scope.gvas, strict=True):
            same = (store.catalog.space.index.lookup(held) != gvas) & (held[:, None] == keys[None]).all(2).any(1)
            store.catalog.space.index.publish(held[same], gvas[same])


def quick_restore(store: Store, memory: Memory, tokens: Pages) -> int:
    """`restore` without the comparison of pages that are not named."""
    with store.lease(store.match(tokens)) as lease:
        keys, pages = lease.entry.keys, np.arange(2 * lease.blocks)
        memory.stamp(keys ^ np.uint64(1), pages)
        blocks = store.restore(lease, pages).result().blocks
    assert memory.stamped_blocks(keys[:blocks], pages[: 2 * blocks]) == blocks, "wrong bytes"
    return blocks


@MEDIA
def test_every_byte_of_an_extent_flipped_once(memory: Memory, medium: Medium) -> None:
    with make_store(memory) as store:
        engine, tokens = memory_engine(store, medium), make_tokens("a", BLOCKS)
        save(store, memory, "s", tokens, TURNS[medium])
        base, size_bytes, room = extent_of(store, tokens)
        extent, missed = view(engine, base, size_bytes), np.zeros(size_bytes, bool)
        payload = np.zeros(size_bytes, bool)  # What must be noticed.
        for layer, lane in enumerate(store.plane.parts.lanes.lane_offsets(np.array([room]))[:, 0].tolist()):
            for block in range(room):
                start = lane + block * int(store.plane.parts.lanes.piece_bytes[layer])
                payload[start : start + store.plane.parts.payload_bytes[layer]] = True
        rng, head = np.random.default_rng(1), RECORD_HEADER_BYTES + room * 2 * 8 + 8
        for at in [*range(head), *range(head, size_bytes, STRIDE)]:
            flip = int(rng.integers(1, 256))
            extent[at] ^= flip
            forget_records(store)
            missed[at] = quick_restore(store, memory, tokens) < BLOCKS
            extent[at] ^= flip
            again(store, tokens)
        flipped = np.zeros(size_bytes, bool)
        flipped[[*range(head), *range(head, size_bytes, STRIDE)]] = True
        assert missed[payload & flipped].all() and missed[:48].all()
        sums = np.arange(RECORD_HEADER_BYTES, head - 8).reshape(-1, 8)
        assert missed[sums[:, :4]].all(), "a flipped checksum was not noticed"
        forget_records(store)
        assert quick_restore(store, memory, tokens) == BLOCKS
        check(store)


@MEDIA
def test_foreign_bytes_in_the_place_of_ours(memory: Memory, medium: Medium) -> None:
    """Another session's extents have the same room; anything of theirs that is copied over ours is a miss."""
    with make_store(memory) as store:
        engine, mine, theirs = memory_engine(store, medium), make_tokens("a", 4), make_tokens("b", 4)
        for name, tokens in (("a", mine), ("b", theirs)):
            save(store, memory, name, tokens, TURNS[medium])
        (base, size_bytes, room), (other, _, other_room) = extent_of(store, mine), extent_of(store, theirs)
        assert room == other_room == 4
        ours, foreign = view(engine, base, size_bytes), view(engine, other, size_bytes)
        whole, lanes = ours.copy(), store.plane.parts.lanes
        piece = int(lanes.piece_bytes[0])
        starts = [
            int(lane) + block * piece for lane in lanes.lane_offsets(np.array([room]))[:, 0] for block in range(room)
        ]
        record = slice(0, starts[0])
        cases = [(slice(at, at + piece), foreign[at : at + piece]) for at in starts]
        cases += [(slice(at, at + piece), whole[b : b + piece]) for at in starts for b in starts if a_differs(at, b)]
        cases += [(slice(at, at + piece), np.zeros(piece, np.uint8)) for at in starts]
        cases += [(record, foreign[record]), (slice(0, size_bytes), foreign), (record, np.zeros_like(whole[record]))]
        cases += [(slice(0, size_bytes), np.zeros(size_bytes, np.uint8))]
        cases += [(slice(RECORD_HEADER_BYTES, starts[0]), foreign[RECORD_HEADER_BYTES : starts[0]])]
        for number, (where, what) in enumerate(cases):
            ours[where] = what
            forget_records(store)
            assert quick_restore(store, memory, mine) < 4, f"case {number} was not noticed"
            ours[:] = whole
            again(store, mine)
        for at in starts:  # A zeroed piece beside zeroed sums, under a good header.
            ours[at : at + piece] = 0
            ours[RECORD_HEADER_BYTES : starts[0]] = 0
            forget_records(store)
            assert quick_restore(store, memory, mine) < 4
            ours[:] = whole
            again(store, mine)
        forget_records(store)
        assert quick_restore(store, memory, mine) == quick_restore(store, memory, theirs) == 4
        check(store)


def a_differs(a: int, b: int) -> bool:
    return a != b


@MEDIA
def test_a_session_whose_record_is_damaged_can_still_save(memory: Memory, medium: Medium) -> None:
    """What the record covered is lost; what is saved later is not, though it goes to the same extent."""
    config = make_config(memory, layout={"growth_percent": 200})
    with make_store(memory, config) as store:
        engine, tokens = memory_engine(store, medium), make_tokens("a", 12)
        for blocks in (2, 3, 4):  # The second extent has room to spare.
            save(store, memory, "s", tokens[: 8 * blocks], TURNS[medium])
        with store.lease(store.match(tokens)) as lease:
            extents = {row[1]: row[2] for row in lease.entry.runs.table.tolist()}
        for base in extents:
            view(engine, base, DIRECT_BYTES)[:8] = 0
        forget_records(store)
        assert quick_restore(store, memory, tokens) == 0
        reasons = [save(store, memory, "s", tokens, TURNS[medium]).reason for _ in range(2)]
        assert reasons[-1] == "", reasons
        for _ in range(12):  # Each restore drops the first bad block, each save brings it back.
            quick_restore(store, memory, tokens)
            save(store, memory, "s", tokens, TURNS[medium])
        assert restore(store, memory, tokens).blocks == 12
        check(store)


def test_a_later_turn_does_not_wait_for_an_earlier_one_that_never_starts(memory: Memory) -> None:
    """The earlier one has the head of the extent, and has not begun its record."""
    config = make_config(memory, layout={"growth_percent": 200})
    with make_store(memory, config) as store:
        tokens, more = make_tokens("a", 4), make_tokens("b", 2)
        save(store, memory, "s", tokens)
        memory.stamp(store.keys(make_tokens("c", 2)), np.arange(40, 44))
        first = store.save("s", make_tokens("c", 2), np.arange(40, 44), deferred=True)
        assert save(store, memory, "s", more).reason == ""
        first.start()
        assert first.result(10).reason == ""
        forget_records(store)
        for tokens_of, blocks in ((tokens, 4), (more, 2), (make_tokens("c", 2), 2)):
            assert restore(store, memory, tokens_of).blocks == blocks
        check(store)


def test_an_older_copy_of_the_whole_pool_is_a_miss(memory: Memory, tmp_path: Path) -> None:
    """Every file is put back to what it was some turns ago, under the running store."""
    with make_store(memory, make_config(memory, [tmp_path / "pool"], blocks=16, file_blocks=16)) as store:
        save(store, memory, "s", make_tokens("old", 10))
        shutil.copytree(tmp_path / "pool", tmp_path / "copy")
        for turn in range(3):  # The old one's extent is used again.
            save(store, memory, f"t{turn}", make_tokens(turn, 10))
        assert restore(store, memory, make_tokens(2, 10)).blocks == 10
        for path in (tmp_path / "copy").glob("pool-*"):
            (tmp_path / "pool" / path.name).write_bytes(path.read_bytes())
        for records in (True, False):
            if not records:
                forget_records(store)
            assert restore(store, memory, make_tokens(2, 10)).blocks == 0
        check(store)
        assert shuffled(memory, 1).size == 2
