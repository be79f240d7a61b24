"""vLLM's KV tensors, as the store sees them."""

import numpy as np
import pytest
import torch

from flatcake.engines.vllm.views import view_caches
from flatcake.errors import ShapeError

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 8, 16
ONE: list[list[str]] = [[]]
"""One group, which all layers are in."""


def test_layers_go_by_number_and_not_by_name() -> None:
    caches = {f"model.layers.{layer}.attn": torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT) for layer in (10, 2, 0)}
    views = view_caches(caches, block_tokens=TOKENS, block_count=BLOCKS, groups=ONE)
    assert [views.layer_of[f"model.layers.{layer}.attn"] for layer in (0, 2, 10)] == [0, 1, 2]
    assert views.kv.page_tokens == TOKENS and views.pages_per_block == 1
    assert views.pages(np.array([[3, -1]])).tolist() == [3, -1]


def test_layers_that_share_a_tensor_are_stored_once() -> None:
    one, two = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT), torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)
    views = view_caches({"l.0": one, "l.1": two, "l.2": one}, block_tokens=TOKENS, block_count=BLOCKS, groups=ONE)
    assert views.layer_of == {"l.0": 0, "l.1": 1, "l.2": 0} and len(views.kv.tensors) == 2


def test_groups_share_their_memory_and_not_their_blocks() -> None:
    one, two = torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT), torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT)
    caches = {"l.0": one, "l.1": one, "l.2": two, "l.3": two}
    groups = [["l.0", "l.2"], ["l.1", "l.3"]]
    views = view_caches(caches, block_tokens=TOKENS, block_count=BLOCKS, groups=groups)
    assert views.layer_of == {"l.0": 0, "l.1": 1, "l.2": 2, "l.3": 3}
    assert views.kv.layer_groups.tolist() == [0, 1, 0, 1]
    assert views.pages(np.array([[3, 4], [-1, 5]])).tolist() == [[3, 4], [-1, 5]]
    user = view_caches(caches | {"l.4": one}, block_tokens=TOKENS, block_count=BLOCKS, groups=groups)
    assert user.layer_of == views.layer_of, "a layer that uses another's KV is stored as that one's"
    with pytest.raises(ShapeError, match=r"layer l.4: is in none of 2 groups"):
        view_caches(caches | {"l.4": one.clone()}, block_tokens=TOKENS, block_count=BLOCKS, groups=groups)


def test_a_kernel_with_smaller_pages() -> None:
    caches = {"l.0": torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)}
    views = view_caches(caches, block_tokens=TOKENS, block_count=BLOCKS, groups=ONE)
    assert views.kv.page_tokens == TOKENS // 2
    assert views.pages(np.array([[3, -1, 0]])).tolist() == [6, 7, -1, -1, 0, 1]


@pytest.mark.parametrize(
    "order", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (0, 2, 1, 3, 4), (1, 0, 2, 3, 4), (1, 0, 3, 2, 4), (1, 2, 0, 3, 4)]
)
def test_every_layout_of_vllm_is_described_and_told_apart(order: tuple[int, ...]) -> None:
    """`[L, B, H, N, C]` by shape; LBHNC, LBNHC, LHBNC, BLHNC, BLNHC and BHLNC in memory."""
    shape = (3, BLOCKS, HEADS, TOKENS, CONTENT)
    memory = torch.arange(int(np.prod(shape)), dtype=torch.int32).reshape([shape[axis] for axis in order])
    logical = memory.permute([order.index(axis) for axis in range(5)])
    caches = {f"l.{layer}": logical[layer] for layer in range(3)}
    views = view_caches(caches, block_tokens=TOKENS, block_count=BLOCKS, groups=ONE)
    for host, cache in zip(views.kv.host_views(), caches.values(), strict=True):
        for block in range(BLOCKS):
            found = np.sort(host[0][block].reshape(-1).view(np.int32))
            assert np.array_equal(found, np.sort(cache[block].reshape(-1).numpy()))
    plain = view_caches(
        {f"l.{n}": torch.zeros(shape[1:], dtype=torch.int32) for n in range(3)},
        block_tokens=TOKENS,
        block_count=BLOCKS,
        groups=ONE,
    )
    same = views.kv.geometry(TOKENS).fingerprint() == plain.kv.geometry(TOKENS).fingerprint()
    assert same == (order.index(3) > order.index(2)), "heads and tokens in another order are other bytes"


@pytest.mark.parametrize(
    ("cache", "text"),
    [
        ([torch.zeros(BLOCKS, 4)], "expected one tensor"),
        (torch.zeros(2, BLOCKS, TOKENS, HEADS), "expected an axis of 6 blocks in front"),
        (torch.zeros(BLOCKS + 1, HEADS, TOKENS, CONTENT), "expected an axis of 6 blocks in front"),
        (torch.zeros(3 * BLOCKS, HEADS, TOKENS, CONTENT), "expected an axis of 6 blocks in front"),
    ],
)
def test_anything_else_is_refused(cache: object, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        view_caches({"l.0": cache}, block_tokens=TOKENS, block_count=BLOCKS, groups=ONE)
