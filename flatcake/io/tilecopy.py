"""Between slots and paged KV: the same small protocol on the host and on a GPU.

A copy object belongs to one plan.  It scatters or gathers tile after tile, and hands out the checksums that
were computed in the same pass.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch

from flatcake.geometry import Geometry
from flatcake.io.device import NOW, Device, Event, Stream
from flatcake.io.engine import Buffer
from flatcake.io.paged import PagedKV
from flatcake.io.pieces import Pieces
from flatcake.io.plan import TilePlan
from flatcake.io.seam import ByteArray
from flatcake.kernels.checksum import Sums
from flatcake.kernels.copies import Tables
from flatcake.kernels.gather import gather_runs
from flatcake.kernels.hostcopy import HostPages, gather_segments, scatter_segments, sum_segments
from flatcake.kernels.kvtable import KVTable
from flatcake.kernels.scatter import scatter_runs
from flatcake.messages import Int64Array
from flatcake.units import DIRECT_BYTES, align_up


class TileCopy(Protocol):
    """Scatters or gathers the tiles of one plan."""

    def push(self, rows: slice) -> None:
        """Take rows of the pieces that have been made since the last call; tiles come after all of theirs."""

    def scatter(self, tile: int, slot: Buffer, skip: Sequence[int] = ()) -> None:
        """Queue the copy of a tile to its pages, without the pieces named in `skip`."""

    def gather(self, tile: int, slot: Buffer) -> None:
        """Queue the copy of a tile's pages into the slot."""

    def fetch_sums(self, tiles: Sequence[int]) -> None:
        """Queue the way to the host of the checksums of tiles whose copies are queued."""

    def sums_of(self, rows: "slice | Int64Array") -> Sums:
        """uint32 [rows]: unfinished checksums of rows of the pieces, valid where they have been fetched."""


class Copier(Protocol):
    """Makes the copy objects of one engine's tensors."""

    def start(self, tiles: TilePlan, pieces: Pieces, pages: Int64Array, stream: Stream, *, sums: bool) -> TileCopy:
        """Make the one of a plan, whose pieces may still be made; `pages` is what `PagedKV.page_table` has made."""


class HostCopier:
    """Copies in host memory, with numpy, at once."""

    def __init__(self, geometry: Geometry, kv: PagedKV) -> None:
        self.host = HostPages.of(geometry, kv.host_views())
        self._kv = kv

    def start(self, tiles: TilePlan, pieces: Pieces, pages: Int64Array, stream: Stream, *, sums: bool) -> TileCopy:
        return _HostCopy(self.host, self._kv, tiles, pieces, pages, sums)


class _HostCopy:
    def __init__(
        self, host: HostPages, kv: PagedKV, tiles: TilePlan, pieces: Pieces, pages: Int64Array, sums: bool
    ) -> None:
        self._host, self._kv, self._tiles, self._pieces, self._pages = host, kv, tiles, pieces, pages
        self._sums = np.zeros(len(pieces), np.uint32) if sums else None

    def push(self, rows: slice) -> None:
        return None

    def scatter(self, tile: int, slot: Buffer, skip: Sequence[int] = ()) -> None:
        segments = self._segments(tile, skip)
        scatter_segments(_host_bytes(slot), segments, self._pages, self._host)
        self._sum(tile, slot)

    def gather(self, tile: int, slot: Buffer) -> None:
        gather_segments(_host_bytes(slot), self._segments(tile, ()), self._pages, self._host)
        self._sum(tile, slot)

    def fetch_sums(self, tiles: Sequence[int]) -> None:
        return None

    def sums_of(self, rows: "slice | Int64Array") -> Sums:
        assert self._sums is not None
        return self._sums[rows]

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
            segments = np.stack([offset, layer, block, np.ones_like(block)], axis=1)
        else:
            segments = self._tiles.segments[self._tiles.tile_segments[tile] : self._tiles.tile_segments[tile + 1]]
        return _on_rows(segments, 2, segments[:, 1], self._kv, len(self._pages))


class GpuCopier:
    """Copies with the Triton kernels, on the stream of the plan."""

    def __init__(self, geometry: Geometry, kv: PagedKV, device: Device, *, programs_max: int | None) -> None:
        offsets = np.zeros((*kv.rows.shape[:2], 1), np.int64)
        for layer in range(geometry.layer_count):
            starts = geometry.component_offsets(layer)
            offsets[layer, : len(starts), 0] = starts
        rows = np.concatenate([kv.rows, offsets], axis=2)
        self.table = KVTable.from_bytes(rows, geometry.pages_per_block, kv.device)
        self.device = device
        self.programs_max = programs_max
        self._kv = kv
        self._tables: dict[int, PieceTables] = {}
        """By stream, which belongs to one plan at a time; not by its pointer, since torch deals out 32 in turn."""
        self._leaving: list[PieceTables] = []
        """Tables that others have taken the place of while something of theirs was on its way up."""

    def warm(self, *, sums: bool) -> None:
        """Have the kernels compiled, by copies that touch no page, so that the first restore need not wait for it."""
        device, stream, before = self.device, self.device.new_stream(), self.device.stream_of(None)
        device.use(stream)
        tables = PieceTables(self, 2, self.table.pages_per_block, stream, sums=sums)
        tables.set_pages(np.full(self.table.pages_per_block, -1))
        tables.push(0, np.zeros((2, 3), np.int64), np.zeros(2, np.uint32))
        scratch = device.window(align_up(self.table.payload_bytes(0), DIRECT_BYTES))
        # Where programs are limited, large tiles take several items a program, which is another kernel.
        for limit in (None,) if self.programs_max is None else (None, 1):
            for runs in (scatter_runs, gather_runs):
                runs(tables.kernel_tables, self.table, limit).launch(scratch, 0, 2)
        device.record(stream).wait()
        device.use(before)

    def start(self, tiles: TilePlan, pieces: Pieces, pages: Int64Array, stream: Stream, *, sums: bool) -> TileCopy:
        self.device.use(stream)
        tables = self._tables.get(id(stream))
        if tables is None or not tables.has_room(len(pieces), pages.size, sums=sums):
            self._leaving = [old for old in (*self._leaving, tables) if old is not None and not old.is_up]
            blocks = -(-pages.size // self.table.pages_per_block)
            room = 1 << len(pieces).bit_length(), self.table.pages_per_block << blocks.bit_length()
            tables = self._tables[id(stream)] = PieceTables(self, *room, stream, sums=sums)
        tables.set_pages(pages)
        return _GpuCopy(self, tables, pieces, pages, self.device.pointer(stream))

    def rows_of(self, table: Int64Array, pages: Int64Array) -> Int64Array:
        """Rows of a table of pieces as the kernels take them."""
        return _on_rows(table, 1, table[:, 2], self._kv, len(pages))


class PieceTables:
    """Tables of one plan after another, on both sides: pages, seeds and pieces go up, sums come back.

    Making them costs a third of a millisecond, so a stream's are used again.  Whoever fetches waits for what it fetched
    before it lets go of the stream.
    """

    def __init__(self, copier: "GpuCopier", pieces: int, pages: int, stream: Stream, *, sums: bool) -> None:
        assert pieces % 2 == 0, pieces  # Else the pieces, of 8 bytes each number, would begin in the middle of one.
        device, self._room = copier.device, (pieces, pages, sums)
        self._device, self._stream = device, stream  # Kept, so that no other stream gets its identity.
        self._pushed: Event = NOW
        self._lanes = lanes = copier.table.sum_lanes
        sizes = [8 * pages, 4 * pieces * lanes * sums, 4 * pieces * sums, 24 * pieces]
        ends = list(accumulate(sizes))
        self._starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        mirror = self._mirror = device.mirror(ends[-1], stream)
        sides: tuple[Any, Any] = mirror.host, mirror.tensor
        host, there = ([side[start:end] for start, end in zip(self._starts, ends, strict=True)] for side in sides)
        self._pages, self._seeds, self._pieces = host[0].view(np.int64), host[2].view(np.uint32), host[3].view(np.int64)
        self.sums: Sums = host[1].view(np.uint32).reshape(-1, lanes)
        """uint32 [pieces, lanes]: what has been fetched; a piece's sum is that of its lanes."""
        both = (there[1].view(torch.int32).view(-1, lanes), there[2].view(torch.int32)) if sums else (None, None)
        tables: Tables = (there[3].view(torch.int64).view(-1, 3), there[0].view(torch.int64), *both)
        self.kernel_tables = tables
        self.scatter, self.gather = (
            runs(tables, copier.table, copier.programs_max) for runs in (scatter_runs, gather_runs)
        )

    @property
    def is_up(self) -> bool:
        """Whether nothing that was set is on its way to the device any more."""
        return self._pushed.done()

    def has_room(self, pieces: int, pages: int, *, sums: bool) -> bool:
        """Whether a plan fits, and nothing is on its way up that was set before."""
        fits = pieces <= self._room[0] and pages <= self._room[1] and sums == self._room[2]
        return fits and self.is_up

    def set_pages(self, pages: Int64Array) -> None:
        """Set the page table and zero the sums; the first rows of pieces take them along."""
        self._pages[: pages.size] = pages.reshape(-1)
        self.sums[:] = 0

    def push(self, first: int, pieces: Int64Array, seeds: Sums) -> None:
        """Set rows of pieces, `first` and those after it; queues their way to the device."""
        last = first + len(pieces)
        self._pieces[3 * first : 3 * last] = pieces.reshape(-1)
        _, sums_start, seeds_start, pieces_start = self._starts
        if len(self.sums):
            self._seeds[first:last] = seeds
        if not first:
            self._mirror.push(0, seeds_start + 4 * last if len(self.sums) else sums_start)
        elif len(self.sums):
            self._mirror.push(seeds_start + 4 * first, seeds_start + 4 * last)
        self._mirror.push(pieces_start + 24 * first, pieces_start + 24 * last)
        self._pushed = self._device.record(self._stream)

    def fetch(self, first: int, last: int) -> None:
        """Queue the way of the sums of pieces `first` … `last` - 1 to the host."""
        if len(self.sums):
            row_bytes = 4 * self._lanes
            self._mirror.pull(self._starts[1] + row_bytes * first, self._starts[1] + row_bytes * last)


class _GpuCopy:
    def __init__(
        self, copier: GpuCopier, tables: PieceTables, pieces: Pieces, pages: Int64Array, stream: int | None
    ) -> None:
        self._copier, self._tables, self._pieces, self._pages, self._stream = copier, tables, pieces, pages, stream
        self._bounds: list[int] = pieces.tile_pieces.tolist()

    def push(self, rows: slice) -> None:
        table = self._copier.rows_of(self._pieces.table[rows], self._pages)
        self._tables.push(rows.start, table, self._pieces.seeds[rows])

    def scatter(self, tile: int, slot: Buffer, skip: Sequence[int] = ()) -> None:
        first, last = self._bounds[tile], self._bounds[tile + 1]
        runs = self._tables.scatter
        if not skip:
            runs.launch(slot.tensor, first, last, self._stream)
            return
        dropped = set(skip)
        for start in range(first, last):  # A faulty read is rare: piece by piece is quick enough.
            if start not in dropped:
                runs.launch(slot.tensor, start, start + 1, self._stream)

    def gather(self, tile: int, slot: Buffer) -> None:
        self._tables.gather.launch(slot.tensor, self._bounds[tile], self._bounds[tile + 1], self._stream)

    def fetch_sums(self, tiles: Sequence[int]) -> None:
        self._tables.fetch(self._bounds[min(tiles)], self._bounds[max(tiles) + 1])  # Others among them: again later.

    def sums_of(self, rows: "slice | Int64Array") -> Sums:
        sums: Sums = self._tables.sums[rows].sum(axis=1, dtype=np.uint32)
        return sums


def _on_rows(table: Int64Array, column: int, layers: Int64Array, kv: PagedKV, rows: int) -> Int64Array:
    """The table with rows of a page table in a column that named blocks of the request; with one group both are one."""
    if kv.groups == 1:
        return table
    table = table.copy()
    table[:, column] = kv.row_of(layers, table[:, column], rows)
    return table


def _host_bytes(slot: Buffer) -> ByteArray:
    assert slot.host is not None
    return slot.host
