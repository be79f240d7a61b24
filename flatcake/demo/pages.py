"""Paged KV memory of the demo's engine, and the cache that lets a transformer work on it.

Pages are plain torch tensors that the demo owns.  Between turns every page is filled with NaN: what a restore
fails to bring back cannot be mistaken for the real thing.
Read path:  store -> [pages] -> attention
"""

from collections.abc import Callable

import numpy as np
import torch

from flatcake.io.paged import PagedKV
from flatcake.messages import Int64Array
from flatcake.units import align_up

WaitLayer = Callable[[int], object]


class PagedMemory:
    """K and V of all layers in pages, and the choice of pages for a turn.

    Args:
        shape: Layers, heads and head dimension of the KV cache.
        page_count: Pages of each layer.
        page_tokens: Tokens of one page.
        dtype: Of the elements.
        device: Where the tensors live.
        seed: Of the shuffled page tables.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        page_count: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
    ) -> None:
        layers, heads, width = shape
        self.page_count, self.page_tokens = page_count, page_tokens
        size = (2, page_count, page_tokens, heads, width)
        self.tensors = [torch.empty(size, dtype=dtype, device=device) for _ in range(layers)]
        """Per layer ``[2, pages, page, heads, dim]``: K and V."""
        self._rng = np.random.default_rng(seed)
        self.poison()

    def describe(self) -> PagedKV:
        """The tensors, as the store wants to hear of them."""
        return PagedKV.of_layers([list(tensor) for tensor in self.tensors], page_tokens=self.page_tokens)

    def take(self, tokens: int) -> Int64Array:
        """Pages for a sequence of so many tokens, in random order: never those of the turn before."""
        need = align_up(tokens, self.page_tokens) // self.page_tokens
        assert need <= self.page_count, (need, self.page_count)
        return self._rng.permutation(self.page_count)[:need].astype(np.int64)

    def poison(self) -> None:
        """Overwrite every page with NaN."""
        for tensor in self.tensors:
            tensor.fill_(torch.nan)

    def slots(self, table: Int64Array) -> torch.Tensor:
        """int64 [tokens]: where each token of a page table lies among all token slots of a layer."""
        within = np.arange(self.page_tokens)
        slots = (table[:, None] * self.page_tokens + within[None, :]).reshape(-1)
        return torch.from_numpy(slots).to(self.tensors[0].device)


class PagedLayer:
    """One layer's KV of one sequence, as `transformers` asks for it.

    New keys and values go into the pages, and all are gathered from the pages: the model sees what is there.

    Args:
        tensor: ``[2, pages, page, heads, dim]``.
        slots: From `PagedMemory.slots`.
        tokens: Leading tokens that are in the pages, or will be once `wait` has returned.
        wait: Called once, before the pages are touched.
    """

    def __init__(self, tensor: torch.Tensor, slots: torch.Tensor, tokens: int, wait: Callable[[], object]) -> None:
        super().__init__()
        self._flat = tensor.flatten(1, 2)
        self._slots = slots
        self._tokens = tokens
        self._wait: Callable[[], object] | None = wait

    def get_seq_length(self, *_: object) -> int:
        return self._tokens

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[1, heads, new, dim]`` of each; returns all of them, ``[1, heads, tokens, dim]``."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()
        first, self._tokens = self._tokens, self._tokens + keys.shape[-2]
        new = self._slots[first : self._tokens]
        self._flat[0, new] = keys[0].transpose(0, 1)
        self._flat[1, new] = values[0].transpose(0, 1)
        whole = self._flat[:, self._slots[: self._tokens]].transpose(1, 2)
        return whole[:1], whole[1:]
