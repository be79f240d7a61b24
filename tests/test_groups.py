"""Engines with several groups of layers, each with its page table: windows that need only the end of a prefix."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from flatcake.errors import PageTableError, ShapeError
from flatcake.gva import Medium
from flatcake.io.paged import PagedKV
from flatcake.loop.loop import Loop
from flatcake.placement import Turn
from flatcake.store import Store
from tests.stores import (
    CHAT,
    ONE_SHOT,
    TURNS,
    WAIT_S,
    Layout,
    Memory,
    Pages,
    check,
    make_config,
    make_store,
    make_tokens,
)

N, P, BLOCKS = 64, 4, 6
GROUPS = (0, 1, 1, 0, 2)
"""Of the layers; layers 0 and 1 share a tensor, as vLLM's groups do."""
POOL_OF = (0, 0, 1, 2, 3)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]


def describe(pools: list[torch.Tensor]) -> PagedKV:
    return PagedKV.of_layers([pools[number] for number in POOL_OF], page_tokens=P, groups=GROUPS)


LAYOUT = Layout(
    name="groups",
    shapes=((N, P, 2, 24),) * 4,
    dtypes=(torch.bfloat16,) * 4,
    page_tokens=P,
    block_tokens=2 * P,
    page_count=N,
    describe=describe,
    views=lambda pools: [[pool] for pool in pools],
)


def tables(seed: int) -> Pages:
    """Page tables of all groups; no page is in two of them."""
    order = np.random.default_rng(seed).permutation(N)[: 3 * 2 * BLOCKS]
    return order.reshape(3, 2 * BLOCKS).astype(np.int64)


def pages_of(memory: Memory, table: Pages) -> list[torch.Tensor]:
    """Per layer the bytes of its pages, on the host; those of -1 are page 0's."""
    pools = [pool.cpu() for (pool,) in memory.views]
    return [pools[POOL_OF[layer]][torch.from_numpy(table[group].clip(0))] for layer, group in enumerate(GROUPS)]


def open_groups(memory: Memory, directory: Path) -> Store:
    return make_store(memory, make_config(memory, [directory], blocks=16, file_blocks=8, dram_blocks=16))


def save_random(memory: Memory, store: Store, medium: Medium) -> tuple[Pages, list[torch.Tensor]]:
    """Save random bytes; returns the tokens, and what each layer had in its pages."""
    tokens, source = make_tokens("a", BLOCKS), tables(2)
    memory.fill(seed=1)
    content = pages_of(memory, source)
    assert store.save("s", tokens, source, TURNS[medium]).published(WAIT_S)
    return tokens, content


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("medium", list(Medium))
def test_each_layer_goes_to_the_pages_of_its_group(device: str, medium: Medium, tmp_path: Path) -> None:
    memory = Memory(LAYOUT, device)
    with open_groups(memory, tmp_path) as store:
        tokens, content = save_random(memory, store, medium)
        match = store.match(tokens)
        assert match.tokens_on(medium) == BLOCKS * 2 * P
        memory.fill(seed=3)
        before, target = [pool.clone() for (pool,) in memory.views], tables(4)
        with store.lease(match) as lease:
            result = store.restore(lease, target).result()
        assert (result.blocks, result.reason) == (BLOCKS, "")
        assert all(map(torch.equal, pages_of(memory, target), content))
        for number, ((pool,), old) in enumerate(zip(memory.views, before, strict=True)):
            named = {GROUPS[layer] for layer in range(len(GROUPS)) if POOL_OF[layer] == number}
            others = torch.from_numpy(np.setdiff1d(np.arange(N), target[sorted(named)])).to(pool.device)
            assert torch.equal(pool[others], old[others])
        check(store)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("medium", list(Medium))
def test_what_has_no_page_is_not_read(device: str, medium: Medium, tmp_path: Path) -> None:
    """Group 1 sees the last two blocks only, group 2 nothing."""
    memory = Memory(LAYOUT, device)
    with open_groups(memory, tmp_path) as store:
        tokens, content = save_random(memory, store, medium)
        target = tables(4)
        target[1, : 2 * (BLOCKS - 2)] = target[2] = -1
        memory.fill(seed=3)
        with store.lease(store.match(tokens)) as lease:
            restore = store.restore(lease, target)
            assert all(restore.wait_layer(layer, verified=True) for layer in range(len(GROUPS)))
            result = restore.result()
        assert (result.blocks, result.reason) == (BLOCKS, "")
        sizes = [store.geometry.piece_bytes(layer) for layer in range(len(GROUPS))]
        assert result.read_bytes == sum(sizes[layer] * {0: BLOCKS, 1: 2, 2: 0}[GROUPS[layer]] for layer in range(5))
        found = pages_of(memory, target)
        for layer, group in enumerate(GROUPS):
            there = torch.from_numpy(target[group] >= 0)
            assert torch.equal(found[layer][there], content[layer][there])
        check(store)


def test_a_turn_is_saved_behind_what_has_left_the_window(tmp_path: Path) -> None:
    memory = Memory(LAYOUT)
    with open_groups(memory, tmp_path) as store:
        tokens, source = make_tokens("a", BLOCKS), tables(2)
        memory.fill(seed=1)
        content = pages_of(memory, source)
        assert store.save("s", tokens[: 4 * 2 * P], source, ONE_SHOT).published(WAIT_S)
        later = source.copy()
        later[1:, : 2 * 4] = -1
        with pytest.raises(PageTableError, match="-1"):
            store.save("s", tokens, later, CHAT)
        with pytest.raises(PageTableError, match="-1"):
            store.save("s", tokens, later, Turn(first_block=3))
        assert store.save("s", tokens, later, Turn(first_block=4)).published(WAIT_S)
        assert store.match(tokens).blocks == BLOCKS
        memory.fill(seed=3)
        target = tables(4)
        with store.lease(store.match(tokens)) as lease:
            assert store.restore(lease, target).result().blocks == BLOCKS
        assert all(map(torch.equal, pages_of(memory, target), content))
        check(store)


def test_blocks_before_the_first_one_stay_missing(tmp_path: Path) -> None:
    memory = Memory(LAYOUT)
    with open_groups(memory, tmp_path) as store:
        tokens, source = make_tokens("a", BLOCKS), tables(2)
        assert store.save("s", tokens, source, Turn(first_block=2)).published(WAIT_S)
        assert store.match(tokens).blocks == 0
        assert store.save("s", tokens[: 2 * 2 * P], source).published(WAIT_S)
        assert store.match(tokens).blocks == BLOCKS
        check(store)


class NoPages:
    def take(self, count: int) -> None:
        return None

    def give_back(self, pages: Pages) -> None:
        raise AssertionError("nothing was taken")


def test_the_loop_hands_out_one_page_table_and_says_so(tmp_path: Path) -> None:
    with open_groups(Memory(LAYOUT), tmp_path) as store, pytest.raises(ShapeError, match="3 groups of layers"):
        Loop(store, pages=NoPages())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("medium", list(Medium))
def test_a_restore_into_no_page_at_all_is_over_and_holds_nothing(device: str, medium: Medium, tmp_path: Path) -> None:
    memory = Memory(LAYOUT, device)
    with open_groups(memory, tmp_path) as store:
        tokens, ended = make_tokens("a", BLOCKS), threading.Event()
        assert store.save("s", tokens, tables(2), TURNS[medium]).published(WAIT_S)
        with store.lease(store.match(tokens)) as lease:
            restore = store.restore(lease, np.full((3, 2 * BLOCKS), -1))
            restore.on_end(ended.set)
            assert all(restore.wait_layer(layer, verified=True) for layer in range(len(GROUPS)))
            assert restore.result().read_bytes == 0 and ended.wait(WAIT_S)
        assert store.catalog.open_counts() == {"leases": 0, "plans": 0, "draining": 0}
        check(store)
