"""vLLM's KV tensors as the store's paged tensors: the order of layers, and where a block lies in each.

A layer's tensor is `[blocks, heads, tokens, content]` by shape; how the bytes lie is in its strides, and what they
mean depends on the attention backend.  Bytes are stored opaque; all of this goes into the identity instead.
"""

import re
from collections.abc import Mapping, Sequence
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
    """Number of the store's layer, by vLLM's name; layers of one group that share a tensor have the same.

    Where there are several groups, a layer that uses another's KV is in none and has no number.
    """
    pages_per_block: int
    """Pages of the tensors in one of vLLM's blocks: more than 1 where a kernel wants smaller ones."""

    def pages(self, blocks: Int64Array) -> Int64Array:
        """Page table of [groups, n] of vLLM's blocks, as the store takes it; -1 stays -1."""
        pages = blocks[:, :, None] * self.pages_per_block + np.arange(self.pages_per_block)
        table = np.where(blocks[:, :, None] < 0, -1, pages).reshape(len(blocks), -1)
        return table[0] if len(table) == 1 else table


def view_caches(
    caches: Mapping[str, object], *, block_tokens: int, block_count: int, groups: Sequence[Sequence[str]]
) -> KVViews:
    """Describe what vLLM has registered.

    Args:
        caches: By name of layer.
        block_tokens: vLLM's block size.
        block_count: Blocks that its scheduler hands out.
        groups: Names of the layers in each of its groups.

    Raises:
        ShapeError: A layer is no single tensor, its first axis does not count blocks, or it is in no group and has
            a tensor of its own.
    """
    tensors: list[torch.Tensor] = []
    layer_of: dict[str, int] = {}
    seen: dict[tuple[int, int, tuple[int, ...]], int] = {}
    number_of = {name: number for number, names in enumerate(groups) for name in names}
    grouped = {
        tensor.data_ptr() for name, tensor in caches.items() if name in number_of and isinstance(tensor, torch.Tensor)
    }
    ratios, group_of = set(), []
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
        group = number_of.get(name, 0 if len(groups) == 1 else None)  # A layer that shares another's KV has no group.
        if group is None and tensor.data_ptr() in grouped:
            continue
        if group is None:
            raise ShapeError(f"layer {name}: is in none of {len(groups)} groups of KV cache")
        key = (group, tensor.data_ptr(), tuple(tensor.shape))
        if key not in seen:
            seen[key] = len(tensors)
            tensors.append(tensor)
            group_of.append(group)
        layer_of[name] = seen[key]
    if len(ratios) != 1:
        raise ShapeError(f"layers with {sorted(ratios)} pages a block: expected the same in all of them")
    ratio = ratios.pop()
    return KVViews(PagedKV.of_layers(tensors, page_tokens=block_tokens // ratio, groups=group_of), layer_of, ratio)


def _layer_key(name: str) -> tuple[int, str]:
    """Layers by the first number in their name, as they are computed."""
    number = re.search(r"\d+", name)
    return int(number.group()) if number else -1, name
