"""What scatter and gather share around their kernels: the launch, and the walk of the reference.

Same arguments either way; which side is read and which is written is the kernel's, or the reference's, own.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from flatcake.kernels import checksum
from flatcake.kernels.kvtable import KVTable

Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Window, pieces, pages, sums, seeds, as the launchers describe them."""


def launch_copy(kernel: Any, given: Given, kv: KVTable, programs_max: int | None) -> None:
    """Check the arguments and launch `kernel` once for all pieces, on the current stream.

    Raises:
        ShapeError: A shape, dtype, stride, alignment or device differs from what the kernels expect.
    """
    window, pieces, pages, sums, seeds = given
    kv.check_launch(window, pieces, pages, sums, seeds)
    if len(pieces) == 0:
        return
    walk = kv.walk(len(pieces), programs_max)
    args = (
        kv.words(window), pieces, pages, kv.rows, kv.starts, sums, seeds,
        walk.items, walk.chunks, kv.components, kv.pages_per_block,
        walk.tile_units, kv.unit_bytes, walk.wide, checksum.WEYL, checksum.SPREAD,
    )  # fmt: skip
    kv.launches.launch(kernel, walk.programs, args, key=sums is None, warps=kv.tuning.warps)


def walk_pages(given: Given, kv: KVTable) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Every page of every piece in host memory, as (bytes in the window, bytes in the engine's memory); then the sums.

    Both are views: the caller copies one to the other before it takes the next.
    """
    window, pieces, pages, sums, seeds = given
    kv.check_launch(window, pieces, pages, sums, seeds)
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
            sums[number] += int(total.view(np.int32)[0])
