"""What scatter and gather share around their kernels: the launch, and the walk of the reference.

Same arguments either way; which side is read and which is written is the kernel's, or the reference's, own.
"""

from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from flatcake.kernels import checksum
from flatcake.kernels.kvtable import KVTable, Walk
from flatcake.kernels.launch import Direct

Tables = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Pieces, pages, sums, seeds, as the launchers describe them."""

Bytes = npt.NDArray[np.uint8]

_PIECE_BYTES, _WORD_BYTES = 24, 4


class CopyRuns:
    """Launches a kernel for ranges of one table of pieces, which is checked once.  Not safe for several threads.

    The tensors must live until the last launch has ended.
    """

    def __init__(self, kernel: Any, tables: Tables, kv: KVTable, programs_max: int | None) -> None:
        """Check the tables.

        Raises:
            ShapeError: A shape, dtype, stride, alignment or device differs from what the kernels expect.
        """
        kv.check_tables(*tables)
        self._kernel, self._tables, self._kv, self._programs_max = kernel, tables, kv, programs_max
        pieces, pages, sums, seeds = tables
        self._pieces = pieces.data_ptr()
        self._shared = pages.data_ptr(), kv.rows.data_ptr(), kv.starts.data_ptr()
        self._sums = None if sums is None or seeds is None else (sums.data_ptr(), seeds.data_ptr())
        self._lanes = 1 if sums is None else sums.shape[1]
        self._walks: dict[int, Walk] = {}
        self._direct: dict[Hashable, Direct] = {}

    def launch(self, window: Tensor, first: int, last: int, stream: int | None = None) -> None:
        """Launch once for the pieces `first` … `last` - 1.

        Args:
            window: uint8 [bytes], 16-byte aligned, on the tables' device: what the pieces' offsets are into.
            first, last: Rows of the table of pieces.
            stream: Pointer of the stream, one of the data plane's, in a thread of its own; None for the current one,
                which the very first launch takes always.

        Cost: once the kernel is compiled, one call of the driver on a stream that is given; on the current one Triton's
            launcher, several times as much.
        """
        if first == last:
            return
        kv, walk = self._kv, self._walks.get(last - first)
        if walk is None:
            walk = self._walks[last - first] = kv.walk(last - first, self._programs_max)
        loop = walk.programs < walk.items
        tables: tuple[int, ...] = (window.data_ptr(), self._pieces + first * _PIECE_BYTES, *self._shared)
        if self._sums is not None:
            sums, seeds = self._sums
            tables += (sums + first * self._lanes * _WORD_BYTES, seeds + first * _WORD_BYTES)
        key = self._sums is None, self._lanes, loop
        if stream is not None and self._launch_direct(walk.programs, stream, (*tables, walk.items), key):
            return
        counts = (
            walk.items, walk.chunks, kv.components, kv.pages_per_block, kv.uniform, self._lanes, loop,
            walk.steps, walk.tile_units, kv.unit_bytes, walk.wide, checksum.WEYL, checksum.SPREAD,
        )  # fmt: skip
        absent = (None, None) if self._sums is None else ()
        if not kv.launches.again(self._kernel, walk.programs, (*tables, *absent, *counts), key=key, stream=stream):
            given = (kv.words(window), *self._slices(first, last))
            kv.launches.first(self._kernel, walk.programs, given + counts, key=key, warps=kv.tuning.warps)

    def _launch_direct(self, programs: int, stream: int, arguments: tuple[int, ...], key: Hashable) -> bool:
        direct = self._direct.get(key)
        if direct is None:
            direct = self._kv.launches.direct(self._kernel, key=key, arguments=len(arguments))
            if direct is None:
                return False
            self._direct[key] = direct
        direct.launch(programs, stream, arguments)
        return True

    def _slices(self, first: int, last: int) -> tuple[Tensor | None, ...]:
        pieces, pages, sums, seeds = self._tables
        kv = self._kv
        of_each = (None if table is None else table[first:last] for table in (sums, seeds))
        return (pieces[first:last], pages, kv.rows, kv.starts, *of_each)


def walk_pages(
    window: Tensor, tables: Tables, kv: KVTable
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Every page of every piece in host memory, as (bytes in the window, bytes in the engine's memory); then the sums.

    Both are views: the caller copies one to the other before it takes the next.
    """
    pieces, pages, sums, seeds = tables
    kv.check_window(window)
    kv.check_tables(*tables)
    staged = window.numpy()
    for number, (offset, block, layer) in enumerate(pieces.tolist()):
        parts = kv.parts(layer)
        table = pages[block * kv.pages_per_block :][: kv.pages_per_block].tolist()
        for component, (part_bytes, size_bytes) in enumerate(parts):
            part = staged[offset + part_bytes :][:size_bytes].reshape(kv.pages_per_block, -1)
            for slot, page in enumerate(table):
                if page >= 0 and size_bytes:
                    memory = kv.host_page(layer, component, page)
                    yield part[slot].reshape(memory.shape), memory
        if sums is not None and seeds is not None:
            total = checksum.sum_parts(staged[None, offset:], parts, seeds.numpy()[number : number + 1])
            sums[number, 0] += int(total.view(np.int32)[0])
