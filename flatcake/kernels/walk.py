"""Device side of a walk over pieces: what the scatter and the gather kernel share.

A work item is one tile of one part of one piece.  The part is contiguous in the window, so a tile is a range of its
units; each unit is looked up in the engine's memory.  Sizes and offsets are in units, and a 16-byte unit is two words
inside the kernel: this keeps accesses 16 bytes wide whatever the sizes are.  Offsets are 64-bit.
"""

import triton
import triton.language as tl


@triton.jit
def read_item(item, pieces_ptr, rows_ptr, starts_ptr, components, chunks, UNIT: tl.constexpr):
    # -> piece, chunk, block, address of the component's row, its first payload word, the part's window offset in units
    part = item // chunks
    chunk = item - part * chunks
    piece = part // components
    component = part - piece * components
    offset_bytes = tl.load(pieces_ptr + piece.to(tl.int64) * 3)
    block = tl.load(pieces_ptr + piece.to(tl.int64) * 3 + 1)
    layer = tl.load(pieces_ptr + piece.to(tl.int64) * 3 + 2)
    entry = layer * components + component
    row_ptr = rows_ptr + entry * 6
    window_unit = offset_bytes // UNIT + tl.load(row_ptr + 5)
    return piece, chunk, block, row_ptr, tl.load(starts_ptr + entry), window_unit


@triton.jit
def tile_units(TILE: tl.constexpr, UNIT: tl.constexpr):
    # Numbers of a tile's units, in the shape that holds one 64-bit or two 32-bit words of each.
    if UNIT == 4:
        return tl.arange(0, TILE // 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    else:
        return tl.arange(0, TILE)[:, None]


@triton.jit
def words_of(unit, UNIT: tl.constexpr):
    # Word offsets of units: two 8-byte words for 16 bytes, else one word of the unit's size.
    if UNIT == 16:
        return unit * 2 + tl.arange(0, 2)[None, :]
    else:
        return unit


@triton.jit
def memory_of(row_ptr, UNIT: tl.constexpr):
    # The component's base address as a pointer to words, known to be a multiple of the unit.
    if UNIT == 4:
        return tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(tl.int32)), UNIT)
    else:
        return tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(tl.int64)), UNIT)


@triton.jit
def find_units(first, unit, inside, block, row_ptr, pages_ptr, pages_per_block, TILE: tl.constexpr, WIDE: tl.constexpr):
    # -> where units first + unit of a part lie, in units from the base; which of them have a page
    page_stride = tl.load(row_ptr + 1)
    rows_per_page = tl.load(row_ptr + 2).to(tl.int32)
    row_stride = tl.load(row_ptr + 3)
    row_units = tl.load(row_ptr + 4).to(tl.int32)
    if WIDE:
        row = first // row_units
        column = first - row * row_units + unit
        slot = row // rows_per_page
        page = tl.load(pages_ptr + block * pages_per_block + slot)
        there = inside & (page >= 0)
    else:
        number = first + unit
        row = number // row_units
        column = number - row * row_units
        slot = row // rows_per_page
        page = tl.load(pages_ptr + block * pages_per_block + slot, mask=inside, other=-1)
        there = inside & (page >= 0)
    return page * page_stride + (row - slot * rows_per_page).to(tl.int64) * row_stride + column, there


@triton.jit
def mixed_sum(
    value, inside, first, start, seed, TILE: tl.constexpr, UNIT: tl.constexpr, WEYL: tl.constexpr, SPREAD: tl.constexpr
):
    # Sum of the tile's mixed 64-bit words: `checksum.sum_bytes` for units first .. first + TILE of a part.
    if UNIT == 4:
        low, high = tl.split(value)
        low = low.to(tl.uint32, bitcast=True)
        high = high.to(tl.uint32, bitcast=True)
        live, _ = tl.split(inside.to(tl.int32))
        begin = start + first // 2
        word = tl.arange(0, TILE // 2)
    else:
        low = value.to(tl.uint32)
        high = (value >> 32).to(tl.uint32)
        live = inside.to(tl.int32)
        begin = start + first * (UNIT // 8)
        word = words_of(tl.arange(0, TILE)[:, None], UNIT)
        live = live + tl.zeros(word.shape, tl.int32)
    # The tile's first key is made once, in scalars; its words' steps from there are the same in every tile.
    key = (seed.to(tl.uint32, bitcast=True).to(tl.uint64) + 1) * SPREAD
    key = (key ^ (key >> 32)) + begin.to(tl.uint64) * WEYL + word.to(tl.uint64) * WEYL
    low = low ^ key.to(tl.uint32)
    high = high ^ (key >> 32).to(tl.uint32)
    mixed = (low * high) ^ tl.umulhi(low, high)
    mixed = tl.where(live != 0, mixed, 0)
    return tl.sum(tl.ravel(mixed), 0).to(tl.int32, bitcast=True)
