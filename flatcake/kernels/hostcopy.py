"""Scatter and gather between a window slot and paged host memory, with numpy: what the kernels do on a GPU.

One assignment a segment and component: numpy copies whole rows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatcake.geometry import Geometry
from flatcake.kernels.checksum import Sums, sum_parts

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False, slots=True)
class HostPages:
    """Paged host memory of every layer, and where its components lie in a piece."""

    views: list[list[npt.NDArray[np.generic]]]
    """Per layer and component: [pages, rows, words]."""
    offsets: list[tuple[int, ...]]
    """Per layer: where each component starts in a piece, in bytes."""
    piece_bytes: list[int]
    pages_per_block: int

    @classmethod
    def of(cls, geometry: Geometry, views: list[list[npt.NDArray[np.generic]]]) -> "HostPages":
        layers = range(geometry.layer_count)
        return cls(
            views,
            [geometry.component_offsets(layer) for layer in layers],
            [geometry.piece_bytes(layer) for layer in layers],
            geometry.pages_per_block,
        )

    def parts(self, layer: int) -> list[tuple[int, int]]:
        """Offset and size in a piece of each component's share, in bytes."""
        sizes = (view.shape[1] * view.shape[2] * view.itemsize * self.pages_per_block for view in self.views[layer])
        return list(zip(self.offsets[layer], sizes, strict=True))


def scatter_segments(slot: ByteArray, segments: Int64Array, pages: Int64Array, host: HostPages) -> None:
    """Copy every piece of the segments from the slot to its pages.

    Args:
        slot: uint8 [slot bytes].
        segments: int64 [segments, 4]: offset in the slot, layer, first block, blocks.
        pages: int64 [blocks, pages a block]; pages of -1 are left alone.
        host: Where the pages are.
    """
    for offset, layer, first, blocks in segments.tolist():
        table = pages[first : first + blocks]
        kept = table >= 0
        for part, view in _parts(slot, offset, layer, blocks, host):
            if kept.all():
                view[table] = part
            else:
                view[table[kept]] = part[kept]


def gather_segments(slot: ByteArray, segments: Int64Array, pages: Int64Array, host: HostPages) -> None:
    """Copy the pages of every piece of the segments into the slot; arguments as for `scatter_segments`.

    Every page must be named: -1 is not allowed here.
    """
    for offset, layer, first, blocks in segments.tolist():
        table = pages[first : first + blocks]
        for part, view in _parts(slot, offset, layer, blocks, host):
            for block in range(blocks):
                np.take(view, table[block], axis=0, out=part[block], mode="clip")


def sum_segments(slot: ByteArray, segments: Int64Array, seeds: npt.NDArray[np.uint32], host: HostPages) -> Sums:
    """Unfinished checksums, uint32 [pieces], of every piece of the segments; `seeds` has one for each."""
    sums = np.empty(len(seeds), np.uint32)
    at = 0
    for offset, layer, _, blocks in segments.tolist():
        pieces = _pieces(slot, offset, layer, blocks, host)
        sums[at : at + blocks] = sum_parts(pieces, host.parts(layer), seeds[at : at + blocks])
        at += blocks
    return sums


def _pieces(slot: ByteArray, offset: int, layer: int, blocks: int, host: HostPages) -> ByteArray:
    piece_bytes = host.piece_bytes[layer]
    return slot[offset : offset + blocks * piece_bytes].reshape(blocks, piece_bytes)


def _parts(
    slot: ByteArray, offset: int, layer: int, blocks: int, host: HostPages
) -> list[tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]]:
    """Per component: its share of the pieces as [blocks, pages a block, rows, words], and its paged memory."""
    pieces, found = _pieces(slot, offset, layer, blocks, host), []
    for (at, size_bytes), view in zip(host.parts(layer), host.views[layer], strict=True):
        part = pieces[:, at : at + size_bytes].view(view.dtype)
        found.append((part.reshape(blocks, host.pages_per_block, *view.shape[1:]), view))
    return found
