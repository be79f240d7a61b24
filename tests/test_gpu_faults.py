"""Faults that only a GPU can show: a process killed while it restores, and pinned memory that is let go."""

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from flatcake.io.staged import StagedEngine
from tests.stores import ONE_SHOT, WAIT_S, Memory, check, make_config, make_store, make_tokens, restore, save, shuffled
from tests.stores import simple_layout as layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCKS, KILLS = 12, 3


def restore_for_ever(pipe: Connection, directory: str, number: int) -> None:
    """Save a session, then restore it until killed; says so after each restore."""
    memory = Memory(layout(page_count=128), "cuda")
    store = make_store(memory, make_config(memory, [directory]))
    tokens = make_tokens(number, BLOCKS)
    assert not save(store, memory, f"s{number}", tokens, ONE_SHOT).reason
    match = store.match(tokens)
    while True:
        with store.lease(match) as lease:
            restores = [store.restore(lease, shuffled(memory, BLOCKS, seed=seed)) for seed in range(2)]
        pipe.send(restores[0].result().blocks)


@pytest.mark.leaves("files")  # The pipe of multiprocessing's own tracker, which lives as long as this process.
def test_a_kill_during_restores_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    for number in range(KILLS):
        ours, theirs = context.Pipe()
        child = context.Process(target=restore_for_ever, args=(theirs, str(tmp_path), number), daemon=True)
        child.start()
        theirs.close()
        for _ in range(1 + 7 * number):
            assert ours.poll(WAIT_S) and ours.recv() == BLOCKS
        child.kill()
        child.join(WAIT_S)
        assert child.exitcode == -9, "it was not killed"
        ours.close()
    memory = Memory(layout(page_count=128), "cuda")
    with make_store(memory, make_config(memory, [tmp_path])) as store:
        for number in range(KILLS):
            assert restore(store, memory, make_tokens(number, BLOCKS)).blocks == BLOCKS
        check(store)


def test_pinned_memory_is_let_go_at_close(tmp_path: Path) -> None:
    memory = Memory(layout(page_count=128), "cuda")
    store = make_store(memory, make_config(memory, [tmp_path], io={"engine": "posix"}))
    assert save(store, memory, "s", make_tokens("a", BLOCKS)).written_blocks == BLOCKS
    parts = store.plane.parts
    arena, [ring] = parts.arena, [io.engine for io in parts.media.values() if isinstance(io.engine, StagedEngine)]
    assert arena is not None and arena.pinned and ring.pinned
    held = [arena._memory, ring._memory]
    for each in held:  # What is pinned cannot be pinned again.
        with pytest.raises(RuntimeError):
            parts.device.pin(each)
    assert store.close() and not arena.pinned and not ring.pinned
    for each in held:
        parts.device.pin(each)
        parts.device.unpin(each)
