"""Device side of a walk over pieces: what the scatter and the gather kernel share.

A work item is a few tiles, one after another, of one part of one piece.  The part is contiguous in the window, so a
tile is a range of its units; each unit is looked up in the engine's memory.  Sizes and offsets are in units, and a
16-byte unit is two words inside the kernel: this keeps accesses 16 bytes wide whatever the sizes are.  Offsets are
64-bit.
"""

import triton
import triton.language as tl


@triton.jit
def read_item(
    item, pieces_ptr, rows_ptr, starts_ptr, CHUNKS: tl.constexpr, COMPONENTS: tl.constexpr, PAGES: tl.constexpr,
    UNIFORM: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    # -> piece, chunk, block, the component's row (see `KVTable.rows`), units of the part, its first payload word, its
    # window offset in units.  Every number is loaded once, since loads are not merged, and what all rows share is a
    # constant (`KVTable.uniform`): a division by one is a shift, any other costs as much as the copy of a unit, and
    # what need not be loaded is not waited for before the copy begins.
    part = item // CHUNKS
    chunk = item - part * CHUNKS
    piece = part // COMPONENTS
    component = part - piece * COMPONENTS
    piece_ptr = pieces_ptr + piece.to(tl.int64) * 3
    offset_bytes = tl.load(piece_ptr)
    block = tl.load(piece_ptr + 1)
    layer = tl.load(piece_ptr + 2)
    entry = layer * COMPONENTS + component
    row_ptr = rows_ptr + entry * 6
    base = tl.load(row_ptr)
    if UNIFORM is not None:
        row = (base, UNIFORM[0], UNIFORM[1], UNIFORM[2], UNIFORM[3])
        part_units = UNIFORM[1] * UNIFORM[3] * PAGES
        window_unit = offset_bytes // UNIT + component.to(tl.int64) * UNIFORM[4]
        start = component.to(tl.int64) * UNIFORM[5]
    else:
        rows_per_page = tl.load(row_ptr + 2).to(tl.int32)
        row_units = tl.load(row_ptr + 4).to(tl.int32)
        row = (base, tl.load(row_ptr + 1), rows_per_page, tl.load(row_ptr + 3), row_units)
        part_units = rows_per_page * row_units * PAGES
        window_unit = offset_bytes // UNIT + tl.load(row_ptr + 5)
        start = tl.load(starts_ptr + entry)
    return piece, chunk, block, row, part_units, start, window_unit


@triton.jit
def tile_units(TILE: tl.constexpr, UNIT: tl.constexpr):
    # Numbers of a tile's units, in the shape that holds one 64-bit or two 32-bit words of each.
    if UNIT == 4:
        return tl.arange(0, TILE // 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    else:
        return tl.arange(0, TILE)[:, None]


@triton.jit
def units_inside(first, unit, part_units, WIDE: tl.constexpr):
    # Which of a tile's units lie in the part: all of them where tiles divide rows.
    if WIDE:
        return tl.full(unit.shape, 1, tl.int1)
    else:
        return first + unit < part_units


@triton.jit
def words_of(unit, UNIT: tl.constexpr):
    # Word offsets of units: two 8-byte words for 16 bytes, else one word of the unit's size.
    if UNIT == 16:
        return unit * 2 + tl.arange(0, 2)[None, :]
    else:
        return unit


@triton.jit
def memory_of(row, UNIT: tl.constexpr):
    # The component's base address as a pointer to words, known to be a multiple of the unit.
    if UNIT == 4:
        return tl.multiple_of(row[0].to(tl.pointer_type(tl.int32)), UNIT)
    else:
        return tl.multiple_of(row[0].to(tl.pointer_type(tl.int64)), UNIT)


@triton.jit
def find_units(first, unit, inside, block, row, pages_ptr, PAGES: tl.constexpr, WIDE: tl.constexpr):
    # -> where units first + unit of a part lie, in units from the base; which of them have a page
    _, page_stride, rows_per_page, row_stride, row_units = row
    if WIDE:
        number = first // row_units
        column = first - number * row_units + unit
        slot = number // rows_per_page
        page = tl.load(pages_ptr + block * PAGES + slot)
    else:
        number = (first + unit) // row_units
        column = first + unit - number * row_units
        slot = number // rows_per_page
        page = tl.load(pages_ptr + block * PAGES + slot, mask=inside, other=-1)
    there = inside & (page >= 0)
    return page * page_stride + (number - slot * rows_per_page).to(tl.int64) * row_stride + column, there


@triton.jit
def no_words(TILE: tl.constexpr, UNIT: tl.constexpr):
    # Zeros, one for each 64-bit word of a tile.
    if UNIT == 4:
        return tl.zeros([TILE // 2], tl.uint32)
    else:
        return tl.zeros([TILE, UNIT // 8], tl.uint32)


@triton.jit
def mixed_words(
    value, inside, first, start, seed, TILE: tl.constexpr, UNIT: tl.constexpr, WEYL: tl.constexpr, SPREAD: tl.constexpr
):
    # A tile's mixed 64-bit words, whose sum is `checksum.sum_bytes` for units first .. first + TILE of a part.
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
    return tl.where(live != 0, (low * high) ^ tl.umulhi(low, high), 0)


@triton.jit
def add_sum(sums_ptr, item, piece, mixed, LANES: tl.constexpr):
    # Add mixed words to the sum of a piece: once an item, and the items of one piece by turns to each of its lanes,
    # since additions to one place wait for one another.
    total = tl.sum(tl.ravel(mixed), 0).to(tl.int32, bitcast=True)
    tl.atomic_add(sums_ptr + piece.to(tl.int64) * LANES + item % LANES, total, sem="relaxed")


@triton.jit
def copy_item(
    item, window_ptr, pieces_ptr, pages_ptr, rows_ptr, starts_ptr, sums_ptr, seeds_ptr,
    CHUNKS: tl.constexpr, COMPONENTS: tl.constexpr, PAGES: tl.constexpr, UNIFORM: tl.constexpr,
    LANES: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    WEYL: tl.constexpr, SPREAD: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    # Copies a few tiles of units, and adds the sum of what the window then holds to that of the piece.
    piece, chunk, block, row, part_units, start, window_unit = read_item(
        item, pieces_ptr, rows_ptr, starts_ptr, CHUNKS, COMPONENTS, PAGES, UNIFORM, UNIT
    )
    mixed = no_words(TILE, UNIT)
    if sums_ptr is not None:
        seed = tl.load(seeds_ptr + piece)
    first = chunk * (STEPS * TILE)
    end = tl.minimum(first + STEPS * TILE, part_units)
    while first < end:
        unit = tile_units(TILE, UNIT)
        inside = units_inside(first, unit, part_units, WIDE)
        if SCATTER:  # Its load does not wait for the page.
            value = tl.load(window_ptr + words_of(window_unit + (first + unit), UNIT), mask=inside)
        place, there = find_units(first, unit, inside, block, row, pages_ptr, PAGES, WIDE)
        memory_ptr = memory_of(row, UNIT) + words_of(place, UNIT)
        if SCATTER:
            tl.store(memory_ptr, value, mask=there)
        else:
            value = tl.load(memory_ptr, mask=there)
            staged_ptr = window_ptr + words_of(window_unit + (first + unit), UNIT)
            tl.store(staged_ptr, value, mask=there)
            if sums_ptr is not None:  # Where there is no page, what the window held before.
                value = tl.where(there, value, tl.load(staged_ptr, mask=inside & ~there, other=0))
        if sums_ptr is not None:
            mixed += mixed_words(value, inside, first, start, seed, TILE, UNIT, WEYL, SPREAD)
        first += TILE
    if sums_ptr is not None:
        add_sum(sums_ptr, item, piece, mixed, LANES)


@triton.jit
def copy_items(
    window_ptr, pieces_ptr, pages_ptr, rows_ptr, starts_ptr, sums_ptr, seeds_ptr, items,
    CHUNKS: tl.constexpr, COMPONENTS: tl.constexpr, PAGES: tl.constexpr, UNIFORM: tl.constexpr,
    LANES: tl.constexpr, LOOP: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
    WIDE: tl.constexpr, WEYL: tl.constexpr, SPREAD: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    # A program for each item; or fewer, of which each takes every n-th.
    item = tl.program_id(0)
    if LOOP:
        while item < items:
            copy_item(
                item, window_ptr, pieces_ptr, pages_ptr, rows_ptr, starts_ptr, sums_ptr, seeds_ptr,
                CHUNKS, COMPONENTS, PAGES, UNIFORM, LANES, STEPS, TILE, UNIT, WIDE, WEYL, SPREAD, SCATTER,
            )  # fmt: skip
            item += tl.num_programs(0)
    else:
        copy_item(
            item, window_ptr, pieces_ptr, pages_ptr, rows_ptr, starts_ptr, sums_ptr, seeds_ptr,
            CHUNKS, COMPONENTS, PAGES, UNIFORM, LANES, STEPS, TILE, UNIT, WIDE, WEYL, SPREAD, SCATTER,
        )  # fmt: skip
