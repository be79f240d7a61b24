"""Paged KV memory to window: all pieces of a tile, all components, in one launch.  Paper §3.4.

Write path:  pages -> [kernels.gather] -> window -> media -> reported -> published
Padding and pages that are -1 are left as they are in the window, and the same pass sums what the window then holds.
"""

import triton
import triton.language as tl
from torch import Tensor

from flatcake.kernels.copies import CopyRuns, Tables, walk_pages
from flatcake.kernels.kvtable import KVTable
from flatcake.kernels.walk import (
    add_sum,
    find_units,
    memory_of,
    mixed_words,
    no_words,
    read_item,
    tile_units,
    units_inside,
    words_of,
)


@triton.jit
def _gather_item(
    item, window_ptr, pieces_ptr, pages_ptr, rows_ptr, starts_ptr, sums_ptr, seeds_ptr,
    CHUNKS: tl.constexpr, COMPONENTS: tl.constexpr, PAGES: tl.constexpr, PAGE_ROWS: tl.constexpr,
    ROW_UNITS: tl.constexpr, STEPS: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, WEYL: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    # Copies a few tiles of units, and adds their sum to that of the piece.
    piece, chunk, block, row, part_units, start, window_unit = read_item(
        item, pieces_ptr, rows_ptr, starts_ptr, CHUNKS, COMPONENTS, PAGES, PAGE_ROWS, ROW_UNITS, UNIT
    )
    mixed = no_words(TILE, UNIT)
    if sums_ptr is not None:
        seed = tl.load(seeds_ptr + piece)
    first = chunk * (STEPS * TILE)
    end = tl.minimum(first + STEPS * TILE, part_units)
    while first < end:
        unit = tile_units(TILE, UNIT)
        inside = units_inside(first, unit, part_units, WIDE)
        place, there = find_units(first, unit, inside, block, row, pages_ptr, PAGES, WIDE)
        value = tl.load(memory_of(row, UNIT) + words_of(place, UNIT), mask=there)
        target_ptr = window_ptr + words_of(window_unit + (first + unit), UNIT)
        tl.store(target_ptr, value, mask=there)
        if sums_ptr is not None:
            value = tl.where(there, value, tl.load(target_ptr, mask=inside & ~there, other=0))
            mixed += mixed_words(value, inside, first, start, seed, TILE, UNIT, WEYL, SPREAD)
        first += TILE
    if sums_ptr is not None:
        add_sum(sums_ptr, piece, mixed)


# Batches differ in size and in where their slices of a table begin; none may start the compiler again.
@triton.jit(
    do_not_specialize=["items"],
    do_not_specialize_on_alignment=["pieces_ptr", "pages_ptr", "sums_ptr", "seeds_ptr"],
)
def _gather_kernel(
    window_ptr, pieces_ptr, pages_ptr, rows_ptr, starts_ptr, sums_ptr, seeds_ptr, items,
    CHUNKS: tl.constexpr, COMPONENTS: tl.constexpr, PAGES: tl.constexpr, PAGE_ROWS: tl.constexpr,
    ROW_UNITS: tl.constexpr, LOOP: tl.constexpr, STEPS: tl.constexpr,
    TILE: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, WEYL: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    # A program for each item; or fewer, of which each takes every n-th.
    item = tl.program_id(0)
    if LOOP:
        while item < items:
            _gather_item(
                item, window_ptr, pieces_ptr, pages_ptr, rows_ptr, starts_ptr, sums_ptr, seeds_ptr,
                CHUNKS, COMPONENTS, PAGES, PAGE_ROWS, ROW_UNITS, STEPS, TILE, UNIT, WIDE, WEYL, SPREAD,
            )  # fmt: skip
            item += tl.num_programs(0)
    else:
        _gather_item(
            item, window_ptr, pieces_ptr, pages_ptr, rows_ptr, starts_ptr, sums_ptr, seeds_ptr,
            CHUNKS, COMPONENTS, PAGES, PAGE_ROWS, ROW_UNITS, STEPS, TILE, UNIT, WIDE, WEYL, SPREAD,
        )  # fmt: skip


def gather_runs(tables: Tables, kv: KVTable, programs_max: int | None) -> CopyRuns:
    """What `gather_pieces` does, for many ranges of the same tables, as a data plane launches it.

    Raises:
        ShapeError: As `gather_pieces` does.
    """
    return CopyRuns(_gather_kernel, tables, kv, programs_max)


def gather_pieces(
    window: Tensor,
    pieces: Tensor,
    pages: Tensor,
    kv: KVTable,
    *,
    sums: Tensor | None = None,
    seeds: Tensor | None = None,
    programs_max: int | None = None,
) -> None:
    """Copy pieces from the engine's pages to the window, on the current stream, in one launch.

    The tensors' device must be the current one.

    Args:
        window: uint8 [bytes], 16-byte aligned; written in the pieces' parts only, padding keeps what it held.
        pieces: int64 [n, 3]: window offset in bytes (a multiple of 16), block (index into `pages`), layer.
        pages: int64 [blocks * kv.pages_per_block]; the window's bytes of a page below 0 stay, and are summed.
        kv: Where the engine's pages are; read.
        sums: int32 [n], zeroed by the caller; each piece's unfinished checksum is added to it.
        seeds: int32 [n], bits of `checksum.piece_seeds`.  Given together with `sums`, or not.
        programs_max: At most so many programs, to leave multiprocessors to the model; None for one an item.

    Raises:
        ShapeError: A shape, dtype, stride, alignment or device differs from the above.

    Offsets, blocks, layers and pages lie on the device and are not checked: wrong ones read wrong memory.
    """
    runs = gather_runs((pieces, pages, sums, seeds), kv, programs_max)
    kv.check_window(window)
    runs.launch(window, 0, len(pieces))


def gather_pieces_ref(
    window: Tensor,
    pieces: Tensor,
    pages: Tensor,
    kv: KVTable,
    *,
    sums: Tensor | None = None,
    seeds: Tensor | None = None,
) -> None:
    """What `gather_pieces` means: the same arguments, in host memory, a page at a time."""
    for staged, memory in walk_pages(window, (pieces, pages, sums, seeds), kv):
        staged[...] = memory
