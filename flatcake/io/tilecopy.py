"""Between slots and paged KV: the same small protocol on the host and on a GPU.

A copy object belongs to one plan.  It scatters or gathers tile after tile, and hands out the checksums that
were computed in the same pass.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from flatcake.geometry import Geometry
from flatcake.io.device import Device, Stream
from flatcake.io.engine import Buffer
from flatcake.io.paged import PagedKV
from flatcake.io.pieces import Pieces
from flatcake.io.plan import TilePlan
from flatcake.io.seam import ByteArray
from flatcake.kernels.checksum import Sums
from flatcake.kernels.gather import gather_pieces
from flatcake.kernels.hostcopy import HostPages, gather_segments, scatter_segments, sum_segments
from flatcake.kernels.kvtable import KVTable
from flatcake.kernels.scatter import scatter_pieces
from flatcake.messages import Int64Array


class TileCopy(Protocol):
    """Scatters or gathers the tiles of one plan."""

    def scatter(self, tile: int, slot: Buffer, skip: Sequence[int] = ()) -> None:
        """Queue the copy of a tile to its pages, without the pieces named in `skip`."""

    def gather(self, tile: int, slot: Buffer) -> None:
        """Queue the copy of a tile's pages into the slot."""

    def fetch_sums(self, tiles: Sequence[int]) -> None:
        """Queue the way to the host of the checksums of tiles whose copies are queued."""

    @property
    def sums(self) -> Sums:
        """uint32 [pieces of the plan]: unfinished checksums, valid where they have been fetched."""


class Copier(Protocol):
    """Makes the copy objects of one engine's tensors."""

    def start(self, tiles: TilePlan, pieces: Pieces, pages: Int64Array, stream: Stream, *, sums: bool) -> TileCopy: ...


class HostCopier:
    """Copies in host memory, with numpy, at once."""

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        self.host = HostPages.of(geometry, kv.host_views())

    def start(self, tiles: TilePlan, pieces: Pieces, pages: Int64Array, stream: Stream, *, sums: bool) -> TileCopy:
        return _HostCopy(self.host, tiles, pieces, pages, sums)


class _HostCopy:
    def __init__(self, host: HostPages, tiles: TilePlan, pieces: Pieces, pages: Int64Array, sums: bool) -> None:
        self._host, self._tiles, self._pieces, self._pages = host, tiles, pieces, pages
        self._sums = np.zeros(len(pieces.table), np.uint32) if sums else None

    def scatter(self, tile: int, slot: Buffer, skip: Sequence[int] = ()) -> None:
        segments = self._segments(tile, skip)
        scatter_segments(_host_bytes(slot), segments, self._pages, self._host)
        self._sum(tile, slot)

    def gather(self, tile: int, slot: Buffer) -> None:
        gather_segments(_host_bytes(slot), self._segments(tile, ()), self._pages, self._host)
        self._sum(tile, slot)

    def fetch_sums(self, tiles: Sequence[int]) -> None:
        return None

    @property
    def sums(self) -> Sums:
        assert self._sums is not None
        return self._sums

    def _sum(self, tile: int, slot: Buffer) -> None:
        if self._sums is not None:
            rows = self._rows(tile)
            seeds = self._pieces.seeds[rows]
            self._sums[rows] = sum_segments(_host_bytes(slot), self._segments(tile, ()), seeds, self._host)

    def _rows(self, tile: int) -> slice:
        return slice(int(self._pieces.tile_pieces[tile]), int(self._pieces.tile_pieces[tile + 1]))

    def _segments(self, tile: int, skip: Sequence[int]) -> Int64Array:
        if skip:
            kept = np.setdiff1d(np.arange(self._rows(tile).start, self._rows(tile).stop), skip)
            offset, block, layer = self._pieces.table[kept].T
            return np.stack([offset, layer, block, np.ones_like(block)], axis=1)
        return self._tiles.segments[self._tiles.tile_segments[tile] : self._tiles.tile_segments[tile + 1]]


class GpuCopier:
    """Copies with the Triton kernels, on the stream of the plan."""

    def __init__(self, geometry: Geometry, kv: PagedKV, device: Device, *, programs_max: int) -> None:
        offsets = np.zeros((*kv.rows.shape[:2], 1), np.int64)
        for layer in range(geometry.layer_count):
            starts = geometry.component_offsets(layer)
            offsets[layer, : len(starts), 0] = starts
        rows = np.concatenate([kv.rows, offsets], axis=2)
        self.table = KVTable.from_bytes(rows, geometry.pages_per_block, kv.device)
        self.device = device
        self.programs_max = programs_max

    def start(self, tiles: TilePlan, pieces: Pieces, pages: Int64Array, stream: Stream, *, sums: bool) -> TileCopy:
        return _GpuCopy(self, pieces, pages, stream, sums)


class _GpuCopy:
    def __init__(self, copier: GpuCopier, pieces: Pieces, pages: Int64Array, stream: Stream, sums: bool) -> None:
        device, self._copier, self._stream = copier.device, copier, stream
        self._bounds: list[int] = pieces.tile_pieces.tolist()
        self._table = device.upload(pieces.table, stream)
        self._pages = device.upload(pages.reshape(-1), stream)
        self._seeds = device.upload(pieces.seeds.view(np.int32), stream) if sums else None
        device.use(stream)
        self._sums = torch.zeros_like(self._seeds) if self._seeds is not None else None
        self._host_sums = torch.zeros(len(pieces.table), dtype=torch.int32, pin_memory=True) if sums else None

    def scatter(self, tile: int, slot: Buffer, skip: Sequence[int] = ()) -> None:
        first, last = self._bounds[tile], self._bounds[tile + 1]
        if not skip:
            self._launch(scatter_pieces, slot, first, last)
            return
        dropped = set(skip)
        for start in range(first, last):  # A faulty read is rare: piece by piece is quick enough.
            if start not in dropped:
                self._launch(scatter_pieces, slot, start, start + 1)

    def gather(self, tile: int, slot: Buffer) -> None:
        self._launch(gather_pieces, slot, self._bounds[tile], self._bounds[tile + 1])

    def fetch_sums(self, tiles: Sequence[int]) -> None:
        if self._sums is None or self._host_sums is None:
            return
        first, last = self._bounds[min(tiles)], self._bounds[max(tiles) + 1]  # Others among them: copied again later.
        self._copier.device.use(self._stream)
        self._host_sums[first:last].copy_(self._sums[first:last], non_blocking=True)

    @property
    def sums(self) -> Sums:
        assert self._host_sums is not None
        return self._host_sums.numpy().view(np.uint32)

    def _launch(self, kernel: Callable[..., None], slot: Buffer, first: int, last: int) -> None:
        self._copier.device.use(self._stream)
        kernel(
            slot.tensor,
            self._table[first:last],
            self._pages,
            self._copier.table,
            sums=self._sums[first:last] if self._sums is not None else None,
            seeds=self._seeds[first:last] if self._seeds is not None else None,
            programs_max=self._copier.programs_max,
        )


def _host_bytes(slot: Buffer) -> ByteArray:
    assert slot.host is not None
    return slot.host
