"""Paged pools, windows and page tables for the kernel tests, and one call that runs a kernel on any device."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatcake.kernels.kvtable import KVTable, Tuning

PIECE_ALIGN = 4096


@dataclass(frozen=True)
class Part:
    """One component of one layer inside an allocation of its own."""

    row_bytes: int
    rows: int = 1
    row_stride: int = 0
    page_stride: int = 0
    skew: int = 0
    """Bytes from the allocation's start to the component's base."""

    def strides(self) -> tuple[int, int]:
        row_stride = self.row_stride or self.row_bytes
        return self.page_stride or row_stride * self.rows, row_stride


@dataclass
class Pool:
    """Engine memory: one uint8 allocation for each (layer, component), filled with random bytes."""

    layers: list[list[Part]]
    pages: int
    memory: list[list[Tensor]]
    pages_per_block: int

    @classmethod
    def random(cls, layers: list[list[Part]], pages: int, pages_per_block: int, seed: int = 0) -> "Pool":
        rng = np.random.default_rng(seed)
        memory = []
        for parts in layers:
            sizes = [part.skew + part.strides()[0] * (pages - 1) + part.strides()[1] * part.rows + 64 for part in parts]
            memory.append([torch.from_numpy(rng.integers(0, 256, size, dtype=np.uint8)) for size in sizes])
        return cls(layers, pages, memory, pages_per_block)

    def to(self, device: str) -> "Pool":
        moved = [[tensor.to(device, copy=True) for tensor in layer] for layer in self.memory]
        return Pool(self.layers, self.pages, moved, self.pages_per_block)

    def table(self, device: str, tuning: Tuning | None = None, align: int = 16) -> KVTable:
        """Parts begin at multiples of `align` in a piece, so some pieces have gaps between parts."""
        components = max(len(parts) for parts in self.layers)
        rows = np.zeros((len(self.layers), components, 6), np.int64)
        for layer, parts in enumerate(self.layers):
            offset = 0
            for component, part in enumerate(parts):
                base = self.memory[layer][component].data_ptr() + part.skew
                page_stride, row_stride = part.strides()
                rows[layer, component] = (base, page_stride, part.rows, row_stride, part.row_bytes, offset)
                offset += -(-part.rows * part.row_bytes * self.pages_per_block // align) * align
        return KVTable.from_bytes(rows, self.pages_per_block, device, tuning)


@dataclass
class Case:
    """Arguments of one launch, on the CPU."""

    window: Tensor
    pieces: Tensor
    pages: Tensor
    seeds: Tensor

    @classmethod
    def random(cls, pool: Pool, kv: KVTable, blocks: int, seed: int = 1) -> "Case":
        """Every block of every layer once, in random order and places, with room between some pieces."""
        rng = np.random.default_rng(seed)
        pages = rng.permutation(pool.pages)[: blocks * kv.pages_per_block].astype(np.int64)
        assert len(pages) == blocks * kv.pages_per_block, "the pool has too few pages"
        wanted = [(block, layer) for layer in range(kv.layers) for block in range(blocks)]
        pieces, offset = [], 0
        for at in rng.permutation(len(wanted)):
            block, layer = wanted[at]
            pieces.append((offset, block, layer))
            end = max(begin + size for begin, size in kv.parts(layer))
            offset += -(-end // PIECE_ALIGN) * PIECE_ALIGN + PIECE_ALIGN * int(rng.integers(0, 2))
        window = rng.integers(0, 256, offset + PIECE_ALIGN, dtype=np.uint8)
        seeds = rng.integers(0, 1 << 32, len(pieces), dtype=np.uint32).view(np.int32)
        return cls(*map(torch.from_numpy, (window, np.array(pieces, np.int64), pages, seeds)))


def launch(
    kernel: Callable[..., None], case: Case, kv: KVTable, *, summed: bool, programs_max: int | None = 3
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32] | None]:
    """Run on the table's device with a copy of the window; return window and sums, on the CPU."""
    device = kv.rows.device
    window, pieces, pages, seeds = (
        tensor.to(device, copy=True) for tensor in (case.window, case.pieces, case.pages, case.seeds)
    )
    sums = torch.zeros(len(pieces), 3, dtype=torch.int32, device=device) if summed else None
    given = {"sums": sums, "seeds": seeds if summed else None}
    if programs_max is not None:
        given["programs_max"] = programs_max  # type: ignore[assignment]
    kernel(window, pieces, pages, kv, **given)
    return window.cpu().numpy(), None if sums is None else sums.cpu().numpy().sum(axis=1, dtype=np.int32)
