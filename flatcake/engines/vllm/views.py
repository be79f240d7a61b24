"""vLLM's KV tensors as the store's paged tensors: the order of layers, and where a block lies in each.

A layer's tensor is `[blocks, heads, tokens, content]` by shape; how the bytes lie is in its strides, and what they
mean depends on the attention backend.  Bytes are stored opaque; all of this goes into the identity instead.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from flatcake.errors import ShapeError
from flatcake.io.paged import PagedKV
from flatcake.messages import Int64Array


@dataclass(frozen=True, eq=False, slots=True)
class KVViews:
    """All KV tensors of one worker."""

    kv: PagedKV
    layer_of: Mapping[str, int]
    """Number of the store's layer, by vLLM's name; layers that share a tensor have the same."""
    pages_per_block: int
    """Pages of the tensors in one of vLLM's blocks: more than 1 where a kernel wants smaller ones."""

    def pages(self, blocks: Int64Array) -> Int64Array:
        """Page table of a list of vLLM's blocks; -1 stays -1."""
        if self.pages_per_block == 1:
            return blocks
        pages = blocks[:, None] * self.pages_per_block + np.arange(self.pages_per_block)
        return np.where(blocks[:, None] < 0, -1, pages).reshape(-1)


def view_caches(caches: Mapping[str, object], *, block_tokens: int, block_count: int) -> KVViews:
    """Describe what vLLM has registered.

    Args:
        caches: By name of layer.
        block_tokens: vLLM's block size.
        block_count: Blocks that its scheduler hands out.

    Raises:
        ShapeError: A layer is no single tensor, or its first axis does not count blocks.
    """
    tensors: list[torch.Tensor] = []
    layer_of: dict[str, int] = {}
    seen: dict[tuple[int, tuple[int, ...]], int] = {}
    ratios = set()
    for name in sorted(caches, key=_layer_key):
        tensor = caches[name]
        if not isinstance(tensor, torch.Tensor):
            raise ShapeError(f"layer {name}: {type(tensor).__name__}; expected one tensor, as attention layers have")
        ratio, rest = divmod(tensor.shape[0], block_count)
        if not ratio or rest or block_tokens % ratio:
            raise ShapeError(
                f"layer {name} of shape {tuple(tensor.shape)}: expected an axis of {block_count} blocks in front"
            )
        ratios.add(ratio)
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in seen:
            seen[key] = len(tensors)
            tensors.append(tensor)
        layer_of[name] = seen[key]
    if len(ratios) != 1:
        raise ShapeError(f"layers with {sorted(ratios)} pages a block: expected the same in all of them")
    ratio = ratios.pop()
    return KVViews(PagedKV.of_layers(tensors, page_tokens=block_tokens // ratio), layer_of, ratio)


def _layer_key(name: str) -> tuple[int, str]:
    """Layers by the first number in their name, as they are computed."""
    number = re.search(r"\d+", name)
    return int(number.group()) if number else -1, name
