"""Window to paged KV memory: all pieces of a tile, all components, in one launch.  Paper §3.4.

Read path:  index -> catalog -> plan -> window -> [kernels.scatter] -> event
Padding is never copied, pages that are -1 are never written, and the same pass sums what the window holds.
"""

import triton
import triton.language as tl
from torch import Tensor

from flatcake.kernels.copies import CopyRuns, Tables, walk_pages
from flatcake.kernels.kvtable import KVTable
from flatcake.kernels.walk import copy_items


# Batches differ in size and in where their slices of a table begin; none may start the compiler again.
@triton.jit(
    do_not_specialize=["items"],
    do_not_specialize_on_alignment=["pieces_ptr", "pages_ptr", "sums_ptr", "seeds_ptr"],
)
def _scatter_kernel(
    window_ptr, pieces_ptr, pages_ptr, rows_ptr, starts_ptr, sums_ptr, seeds_ptr, items,
    CHUNKS: tl.constexpr, COMPONENTS: tl.constexpr, PAGES: tl.constexpr, UNIFORM: tl.constexpr,
    LANES: tl.constexpr, LOOP: tl.constexpr, STEPS: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, WEYL: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    copy_items(
        window_ptr, pieces_ptr, pages_ptr, rows_ptr, starts_ptr, sums_ptr, seeds_ptr, items,
        CHUNKS, COMPONENTS, PAGES, UNIFORM, LANES, LOOP, STEPS, TILE, UNIT, WIDE, WEYL, SPREAD, SCATTER=True,
    )  # fmt: skip


def scatter_runs(tables: Tables, kv: KVTable, programs_max: int | None) -> CopyRuns:
    """What `scatter_pieces` does, for many ranges of the same tables, as a data plane launches it.

    Raises:
        ShapeError: As `scatter_pieces` does.
    """
    return CopyRuns(_scatter_kernel, tables, kv, programs_max)


def scatter_pieces(
    window: Tensor,
    pieces: Tensor,
    pages: Tensor,
    kv: KVTable,
    *,
    sums: Tensor | None = None,
    seeds: Tensor | None = None,
    programs_max: int | None = None,
) -> None:
    """Copy pieces from the window to the engine's pages, on the current stream, in one launch.

    The tensors' device must be the current one.

    Args:
        window: uint8 [bytes], 16-byte aligned; read.
        pieces: int64 [n, 3]: window offset in bytes (a multiple of 16), block (index into `pages`), layer.
        pages: int64 [blocks * kv.pages_per_block]; a page below 0 is skipped but still summed.  Others are distinct.
        kv: Where the engine's pages are; they are written, nothing else is.
        sums: int32 [n, lanes], zeroed by the caller; to each row the unfinished checksum of a piece is added, in parts
            to any of its lanes, modulo 2**32.  `kv.sum_lanes` of them are quickest, one will do.
        seeds: int32 [n], bits of `checksum.piece_seeds`.  Given together with `sums`, or not.
        programs_max: At most so many programs, to leave multiprocessors to the model; None for one an item.

    Raises:
        ShapeError: A shape, dtype, stride, alignment or device differs from the above.

    Offsets, blocks, layers and pages lie on the device and are not checked: wrong ones write wrong memory.
    """
    runs = scatter_runs((pieces, pages, sums, seeds), kv, programs_max)
    kv.check_window(window)
    runs.launch(window, 0, len(pieces))


def scatter_pieces_ref(
    window: Tensor,
    pieces: Tensor,
    pages: Tensor,
    kv: KVTable,
    *,
    sums: Tensor | None = None,
    seeds: Tensor | None = None,
) -> None:
    """What `scatter_pieces` means: the same arguments, in host memory, a page at a time."""
    for staged, memory in walk_pages(window, (pieces, pages, sums, seeds), kv):
        memory[...] = staged
