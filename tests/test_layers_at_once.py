"""A store whose extents are short, so that a few layers of each are read at once: the same promises, fewer reads."""

from pathlib import Path

import numpy as np
import pytest

from flatcake.gva import Medium
from flatcake.io.memory import Fault
from flatcake.store import Store
from tests.stores import (
    MEDIA,
    TURNS,
    Memory,
    check,
    eventually,
    flip,
    make_config,
    make_store,
    make_tokens,
    memory_engine,
    piece_at,
    restore,
    save,
    shuffled,
    simple_layout,
)

LAYERS, TURN_BLOCKS, COUNT = 33, 2, 5
BLOCKS = TURN_BLOCKS * COUNT
PIECE = 4096
SLOT_BYTES = 16 * PIECE
"""Two blocks of four layers are half a slot."""


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout(layers=LAYERS, page_count=64))


def opened(memory: Memory, *directories: Path, kind: str = "lanes") -> Store:
    config = make_config(
        memory,
        directories,
        blocks=128,
        dram_blocks=128,
        layout={"kind": kind},
        io={"slot_bytes": SLOT_BYTES, "window_bytes_max": 6 * SLOT_BYTES, "slots_min": 4},
    )
    return make_store(memory, config)


def fill(store: Store, memory: Memory, *media: Medium) -> np.ndarray:
    """Save a session turn by turn among others, so that each turn has an extent of its own."""
    for turn in range(1, COUNT + 1):
        for session in "ab":
            tokens = make_tokens(session, turn * TURN_BLOCKS)
            assert not save(store, memory, session, tokens, TURNS[media[turn % len(media)]]).reason
    return make_tokens("a", BLOCKS)


@MEDIA
@pytest.mark.parametrize("kind", ["lanes", "segments"])
def test_every_byte_comes_back_by_a_quarter_of_the_reads(memory: Memory, medium: Medium, kind: str) -> None:
    with opened(memory, kind=kind) as store:
        tokens = fill(store, memory, medium)
        assert store.stats().media[medium.name.lower()].extents == 2 * COUNT
        found = restore(store, memory, tokens)
        assert found.blocks == BLOCKS and not found.reason
        # The first layer alone, then four at once; a tile may begin in a read.
        assert COUNT * (1 + (LAYERS - 1) // 4) <= found.reads <= COUNT * (1 + (LAYERS - 1) // 4) + found.tiles
        check(store)


def test_files_and_both_media_in_one_request(memory: Memory, tmp_path: Path) -> None:
    with opened(memory, tmp_path) as store:
        tokens = fill(store, memory, Medium.DRAM, Medium.SSD)
        found = restore(store, memory, tokens)
        assert found.blocks == BLOCKS and found.reads < COUNT * LAYERS // 2
        check(store)


@MEDIA
def test_layers_are_ready_in_order_and_each_is_right_when_it_is(memory: Memory, medium: Medium) -> None:
    with opened(memory) as store:
        engine = memory_engine(store, medium)
        tokens = fill(store, memory, medium)
        match = store.match(tokens)
        pages = shuffled(memory, BLOCKS)
        memory.fill(3)
        engine.inject(Fault(kind="delay", verb="read", first=1, batches=None))
        with store.lease(match) as lease:
            reading = store.restore(lease, pages)
            eventually(store, lambda: reading.layer_event[0] is not None)
            assert reading.layer_event[1:] == [None] * (LAYERS - 1), "the first tile is the first layer, and no more"
            ready: list[int] = []
            for layer in range(LAYERS):
                while reading.layer_event[layer] is None:
                    engine.release()
                assert reading.wait_layer(layer, verified=layer % 3 == 0)
                ready.append(sum(event is not None for event in reading.layer_event))
            engine.heal()
            assert reading.result().blocks == BLOCKS
        assert ready == sorted(ready) and 1 <= ready[0] <= 5, "the first layer does not wait for the others"
        assert memory.stamped_blocks(match.keys, pages) == BLOCKS


@MEDIA
@pytest.mark.parametrize(("block", "layer"), [(0, 0), (3, 1), (5, 17), (9, 32)])
def test_a_flipped_bit_fails_its_block_and_its_layer(memory: Memory, medium: Medium, block: int, layer: int) -> None:
    with opened(memory) as store:
        engine = memory_engine(store, medium)
        tokens = fill(store, memory, medium)
        flip(engine, piece_at(store, tokens, block, layer)[1])
        with store.lease(store.match(tokens)) as lease:
            reading = store.restore(lease, shuffled(memory, BLOCKS))
            assert not reading.wait_layer(layer, verified=True)
        assert (reading.result().blocks, reading.result().reason) == (block, "checksum")


@MEDIA
@pytest.mark.parametrize("first", [0, 2, 7])
def test_a_bad_read_delivers_the_blocks_before_it(memory: Memory, medium: Medium, first: int) -> None:
    with opened(memory) as store:
        engine = memory_engine(store, medium)
        tokens = fill(store, memory, medium)
        engine.inject(Fault(kind="short", verb="read", first=first, moved_bytes=PIECE, error=0))
        found = restore(store, memory, tokens)
        assert found.blocks < BLOCKS and "read failed" in found.reason
        engine.heal()
        assert restore(store, memory, tokens).blocks == found.blocks, "what could not be read is forgotten"
