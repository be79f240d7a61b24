"""A store that has taken ten times what it has room for still takes everything, and counts right."""

import gc
from pathlib import Path

import numpy as np
import pytest

from flatcake.gva import Medium
from flatcake.io.judging import Judging
from flatcake.io.pieces import Work
from flatcake.io.reading import Reading
from flatcake.io.recording import Recording
from flatcake.io.writing import Writing
from tests.stores import (
    TURNS,
    Memory,
    check,
    eventually,
    make_config,
    make_store,
    make_tokens,
    restore,
    save,
    simple_layout,
)

TIMES = 10


@pytest.mark.parametrize("medium", list(Medium), ids=lambda medium: medium.name.lower())
def test_ten_times_the_capacity_goes_in_without_a_refusal(medium: Medium, tmp_path: Path) -> None:
    memory, rng = Memory(simple_layout(page_count=64)), np.random.default_rng(4)
    config = make_config(memory, [tmp_path], blocks=64, dram_blocks=48)
    with make_store(memory, config) as store:
        room = store.stats().media[medium.name.lower()].size_bytes
        lengths: dict[int, int] = {}
        written_bytes, number, restored = 0, 0, 0
        while written_bytes < TIMES * room:
            session = number if rng.random() < 0.5 or not lengths else int(rng.choice([*lengths]))
            number += 1
            lengths[session] = min(12, lengths.get(session, 0) + int(rng.integers(1, 4)))
            tokens = make_tokens(session, lengths[session])
            found = save(store, memory, f"s{session}", tokens, TURNS[medium])
            assert not found.reason, (number, found)
            assert store.match(tokens).blocks == lengths[session], "what was just saved is not there"
            written_bytes += found.written_blocks * store.geometry.block_bytes
            if number % 8 == 0:
                restored += restore(store, memory, tokens).blocks
            lengths = {key: blocks for key, blocks in lengths.items() if key > session - 8}
        stats = store.stats()
        assert restored > 0 and stats.counts["reclaimed_scopes"] > 10
        assert stats.media[medium.name.lower()].used_bytes <= room
        check(store)


def test_what_is_over_leaves_nothing_for_the_garbage_collector(tmp_path: Path) -> None:
    """Its arrays grow with the prefix, and a collection of all objects stops a serving process for long."""
    memory = Memory(simple_layout(page_count=64))
    kinds = Reading, Writing, Judging, Recording, Work
    gc.collect()
    before = [each for each in gc.get_objects() if type(each) in kinds]  # Of tests that leave a read hanging.
    with make_store(memory, make_config(memory, [tmp_path], blocks=64, dram_blocks=48)) as store:
        gc.disable()
        try:
            for turn, medium in enumerate((Medium.DRAM, Medium.SSD), 1):  # The second restore reads both.
                assert not save(store, memory, "s", make_tokens("s", 4 * turn), TURNS[medium]).reason
                assert restore(store, memory, make_tokens("s", 4 * turn)).blocks == 4 * turn
            eventually(store, lambda: sum(type(each) in kinds for each in gc.get_objects()) <= len(before))
        finally:
            gc.enable()
