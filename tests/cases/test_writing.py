"""B03, B04, B05, B06, B12, B13: what a save may show while it is written, killed, refused or short of room."""

import errno
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flatcake
from tests.cases import putter
from tests.cases.shim import (
    PIECE_BYTES,
    Shim,
    error,
    make_memory,
    open_case,
    piece_of,
    tokens_of,
)
from tests.stores import CHAT, ONE_SHOT, WAIT_S, check, restore, save

NIGHTLY = bool(os.environ.get("FLATCAKE_NIGHTLY"))
KILLS = 200 if NIGHTLY else 6
RECORD_BYTES = 4096
"""An extent's checksums, padded."""


@pytest.fixture(scope="module")
def forks() -> Any:
    """Starts processes that have imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cases.putter"])
    first = context.Process(target=putter.main, args=(None, "", 0))
    first.start()
    first.join()
    return context


def killed(forks: Any, home: Path, life: int, words: int) -> tuple[set[int], int]:
    """Let a process save until it has said so many words; what it has saved, and up to where it has flushed."""
    ours, theirs = forks.Pipe()
    child = forks.Process(target=putter.main, args=(theirs, str(home), life), daemon=True)
    child.start()
    theirs.close()
    saved, flushed = set[int](), -1
    with ours:
        try:
            for said in range(1000):
                if said == words:
                    child.kill()
                verb, number = ours.recv()
                if verb == "saved":
                    saved.add(number)
                elif verb == "flushed":
                    flushed = max(flushed, number)
                else:
                    child.kill()
        except EOFError:
            child.join()
    assert child.exitcode == -signal.SIGKILL
    child.close()
    return saved, flushed


@pytest.mark.timeout(3600 if NIGHTLY else 120)
def test_b03_killed_in_the_middle_of_a_put(forks: Any, tmp_path: Path) -> None:
    memory, home, dice = make_memory(), tmp_path / "home", random.Random(3)
    used, hits, cut_short = set[int](), 0, 0
    for life in range(KILLS):
        saved, flushed = killed(forks, home, life, dice.randrange(1, 13))
        cut_short += len(saved) < putter.SESSIONS
        with open_case(memory, home) as store:
            for number in range(putter.SESSIONS):
                tokens = tokens_of(f"life {life}, session {number}", putter.BLOCKS)
                found = restore(store, memory, tokens).blocks
                if number in saved or number <= flushed:
                    assert found == putter.BLOCKS, (life, number)
                hits += found
            stats = store.stats()
            assert stats.media["ssd"].payload_bytes == stats.blocks * 4 * PIECE_BYTES
            store.reset()
            used.add(store.stats().media["ssd"].used_bytes)
            check(store)
    assert used == {0}, "space was lost over the kills"
    assert hits and cut_short


def test_b04_reader_during_a_slow_put(tmp_path: Path) -> None:
    memory, files, tokens = make_memory(), Shim(), tokens_of("s", 8)
    with open_case(memory, tmp_path, files=files) as store:
        memory.stamp(store.keys(tokens), np.arange(8))
        gate, seen = files.step(), list[int]()
        handle = store.save("s", tokens, np.arange(8))
        while handle.result(0) is None:
            if not files.arrived.acquire(timeout=0.05):
                continue
            seen.append(store.match(tokens).blocks)
            assert handle.result(0) is None, "it was published while a write was held"
            gate.release()
        assert len(seen) > 4 and set(seen) == {0}, "a block was visible before the last write had ended"
        assert handle.published(WAIT_S) and store.match(tokens).blocks == 8
        assert restore(store, memory, tokens).blocks == 8
        check(store)


def holds(piece: bytes) -> Any:
    """A fault for the write that carries a piece."""
    return lambda verb, views, at: error() if verb == "write" and any(piece in bytes(view) for view in views) else None


def test_b05_one_bad_member_in_a_batch(tmp_path: Path) -> None:
    memory, files, tokens = make_memory(), Shim(), tokens_of("s", 8)
    with open_case(memory, tmp_path, files=files) as store:
        assert not save(store, memory, "s", tokens[: 5 * 16]).reason
        files.fault = holds(piece_of(memory, store.keys(tokens), 5, 1))
        assert save(store, memory, "s", tokens).reason == f"write failed (errno {errno.EIO})" and files.fired == 1
        files.fault = lambda verb, data, at: None
        assert store.match(tokens).blocks == restore(store, memory, tokens).blocks == 5
        check(store)
    with open_case(memory, tmp_path, files=files) as store:
        assert store.match(tokens).blocks == restore(store, memory, tokens).blocks == 5
        assert save(store, memory, "s", tokens).written_blocks == 3
        assert restore(store, memory, tokens).blocks == 8


def test_b05_a_batch_of_which_one_is_there_already(tmp_path: Path) -> None:
    memory, tokens = make_memory(), tokens_of("s", 16)
    with open_case(memory, tmp_path) as store:
        assert save(store, memory, "s", tokens[:16]).written_blocks == 1
        found = save(store, memory, "s", tokens)
        assert (found.blocks, found.written_blocks, found.reason) == (16, 15, "")
        assert store.stats().counts["save_blocks_skipped"] == 1
        assert restore(store, memory, tokens).blocks == 16


class Full:
    """A disk that takes so many bytes more, then one write short, then none."""

    def __init__(self, left_bytes: int) -> None:
        self.left_bytes, self.was_short, self.refused = left_bytes, False, 0

    def __call__(self, verb: str, views: Sequence[memoryview], at: int) -> OSError | int | None:
        size_bytes = len(views[0])
        if verb == "read" or size_bytes <= self.left_bytes:
            self.left_bytes -= size_bytes if verb == "write" else 0
            return None
        if not self.was_short:
            self.was_short = True
            return PIECE_BYTES
        self.refused += 1
        return error(errno.ENOSPC)


def test_b06_device_full_and_a_short_completion(tmp_path: Path) -> None:
    memory, files = make_memory(), Shim()
    old, new = tokens_of("old", 4), tokens_of("new", 16)
    with open_case(memory, tmp_path, files=files) as store:
        assert not save(store, memory, "old", old).reason
        full = files.fault = Full(100 << 10)
        for turn in range(2):
            found = save(store, memory, "new", new)
            assert found.reason == f"write failed (errno {errno.ENOSPC})" and found.written_blocks == 0
            assert store.match(new).blocks == 0, "a block with a short write is visible"
            assert restore(store, memory, old).blocks == 4, turn
        assert full.was_short and full.refused >= 1
        assert store.stats().counts[f"saves failed: write failed (errno {errno.ENOSPC})"] == 2
        files.fault = lambda verb, data, at: None
        assert store.delete_session("old") == 4
        assert save(store, memory, "last", tokens_of("last", 4)).written_blocks == 4
        assert restore(store, memory, tokens_of("last", 4)).blocks == 4
        check(store)


def test_b06_a_full_device_at_allocation_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    memory, files, home = make_memory(), Shim(), tmp_path / "home"
    files.fail("allocate", None, errno.ENOSPC)
    with pytest.raises(flatcake.CapacityError, match="ssd_bytes_max"):
        open_case(memory, home, files=files)
    assert not list(home.glob("pool-*")) and not files.open_fds
    with open_case(memory, home, files=files) as store:
        assert save(store, memory, "s", tokens_of("s", 4)).written_blocks == 4
        assert restore(store, memory, tokens_of("s", 4)).blocks == 4


def test_b12_accounting(tmp_path: Path) -> None:
    memory, files = make_memory(), Shim()
    with open_case(
        memory, tmp_path, files=files, blocks=128, capacity={"high_watermark": 1.0, "low_watermark": 0.9}
    ) as store:

        def recount() -> None:
            stats = store.stats()
            held = sum(medium.payload_bytes for medium in stats.media.values())
            assert held == stats.blocks * 4 * PIECE_BYTES
            assert stats.media["ssd"].used_bytes <= stats.media["ssd"].size_bytes
            check(store)

        one = tokens_of("one", 1)
        files.writes.clear()
        for turn in range(100):
            assert save(store, memory, "one", one).written_blocks == (not turn)
        assert sum(end - start for _, start, end in files.writes) == 4 * PIECE_BYTES + RECORD_BYTES
        assert store.delete_session("one") == 1
        for turn in range(1000 if NIGHTLY else 100):
            name = f"turn {turn % 7}"
            medium = CHAT if turn % 2 else ONE_SHOT
            assert save(store, memory, name, tokens_of(name, 2), medium).written_blocks == 2
            assert store.delete_session(name) == 2
            if turn % 50 == 0:
                recount()
        assert store.stats().media["ssd"].used_bytes == store.stats().media["dram"].used_bytes == 0
        for number in range(3 * 128 // 16):
            assert save(store, memory, f"s{number}", tokens_of(number, 16)).written_blocks == 16
            recount()
        assert store.stats().counts["reclaimed_scopes"] > 8
        for number in range(3 * 128 // 16):
            store.delete_session(f"s{number}")
        assert store.stats().media["ssd"].used_bytes == store.stats().blocks == 0
    memory = make_memory(page_count=128)
    marks = {"high_watermark": 1.0, "low_watermark": 0.9}
    with open_case(memory, tmp_path, blocks=128, dram_blocks=0, capacity=marks) as store:  # An arena limits extents.
        whole = tokens_of("whole", 128)
        assert save(store, memory, "whole", whole).written_blocks == 128
        assert restore(store, memory, whole).blocks == 128


def test_b13_source_pages_are_borrowed_until_the_handle_says_so(tmp_path: Path) -> None:
    memory, files, tokens = make_memory(), Shim(), tokens_of("s", 16)
    with open_case(memory, tmp_path, files=files) as store:
        memory.stamp(store.keys(tokens), np.arange(16))
        gate = files.step()
        handle = store.save("s", tokens, np.arange(16))
        assert files.arrived.acquire(timeout=WAIT_S)
        assert not handle.reusable(0), "tiles that wait for a slot have not been read yet"
        for _ in range(1000):
            gate.release()
        assert handle.reusable(WAIT_S)
        memory.fill(seed=9)
        assert handle.published(WAIT_S)
        assert restore(store, memory, tokens).blocks == 16, "the old bytes, all of them"


def test_b13_an_overwritten_source_is_never_a_mixture_that_verifies(tmp_path: Path) -> None:
    """A caller that does not ask: whatever was read of its pages is one state of each piece, or a miss."""
    memory, files, tokens = make_memory(), Shim(), tokens_of("s", 8)
    with open_case(memory, tmp_path, files=files) as store:
        keys = store.keys(tokens)
        memory.stamp(keys, np.arange(8))
        old = memory.take(np.arange(8))
        gate = files.step()
        handle = store.save("s", tokens, np.arange(8))
        assert files.arrived.acquire(timeout=WAIT_S)
        memory.fill(seed=4)
        new = memory.take(np.arange(8))
        for _ in range(1000):
            gate.release()
        assert handle.result(WAIT_S) is not None
        with store.lease(store.match(tokens)) as lease:
            blocks = store.restore(lease, np.arange(8)).result().blocks
        for layer, views in enumerate(memory.take(np.arange(blocks))):
            for part, got in enumerate(views):
                for block in range(blocks):
                    choices = (old[layer][part][block], new[layer][part][block])
                    assert any(got[block].equal(choice) for choice in choices), (block, layer)


def test_b13_a_block_that_is_not_full_is_never_reported(tmp_path: Path) -> None:
    memory, tokens = make_memory(), tokens_of("s", 1)
    with open_case(memory, tmp_path) as store:
        memory.stamp(store.keys(tokens), np.arange(1))
        assert store.save("s", tokens[:15], np.arange(1)).result(WAIT_S) == flatcake.SaveResult(
            blocks=0, written_blocks=0, reason=""
        )
        assert store.match(tokens).blocks == store.match(tokens[:15]).tokens == 0
        assert save(store, memory, "s", tokens).written_blocks == 1  # The twin: all 16 are there.
        assert store.match(tokens).blocks == 1


def test_the_shim_notices_a_write_under_a_read(tmp_path: Path) -> None:
    """Its proof for B14: it does see one."""
    files, memory = Shim(), np.zeros(2 * 4096, np.uint8)
    (tmp_path / "f").write_bytes(bytes(4096))
    fd = files.open_file(str(tmp_path / "f"), create=False, direct=False)
    gate = files.hold("read")
    reader = threading.Thread(target=lambda: files.read(fd, [memory.data[:4096]], 0))
    reader.start()
    assert files.arrived.acquire(timeout=WAIT_S)
    files.write(fd, [memory.data[4096:]], 0)
    gate.set()
    reader.join(WAIT_S)
    files.close(fd)
    assert len(files.clashes) == 1
