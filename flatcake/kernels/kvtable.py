"""Where an engine's paged KV memory lies, as one small table that a kernel can read, and how a launch walks it.

A piece holds the parts of its components one after another; a part holds a block's pages in order, a page its rows.
Row `r` of page `p` lies at `base + p * page_stride + r * row_stride` of the component's memory.  A part is contiguous,
so a kernel cuts it in tiles of units and looks up only where each unit goes in the engine's memory.

Never launches anything and never touches the memory that it describes.
"""

import ctypes
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatcake.errors import ShapeError
from flatcake.kernels.launch import Launches

BASE, PAGE_STRIDE, ROWS_PER_PAGE, ROW_STRIDE, ROW_SIZE, PIECE_OFFSET = range(6)
"""Columns of `KVTable.rows`, and of the rows in bytes that `from_bytes` reads."""

UNITS_BYTES = (16, 8, 4)

_ITEMS_A_LANE, _LANES_MAX = 8, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """How a copy is spread over the device.

    Measured on an H200, see `profiles/NOTES.md`: small programs, many of them, and few instructions for each.
    """

    tile_units: int = 256
    """Units that one program moves at a time; a power of two."""
    steps: int = 2
    """Tiles that it moves one after another, and sums up as one."""
    wide_units_min: int = 256
    """Rows that are multiples of a power of two at least this large need no look-up per unit."""
    warps: int = 4
    """Warps of a program; a power of two."""

    def __post_init__(self) -> None:
        for name, low in (("tile_units", 32), ("wide_units_min", 32), ("warps", 1)):
            value = getattr(self, name)
            if value < low or value & (value - 1):
                raise ShapeError(f"Tuning.{name}={value}: expected a power of two, {low} or more")
        if self.steps < 1:
            raise ShapeError(f"Tuning.steps={self.steps}: expected 1 or more")


@dataclass(frozen=True, slots=True)
class Walk:
    """Shape of one launch: `items` pieces of work, `chunks` of them for each part."""

    items: int
    chunks: int
    programs: int
    """As many as items, unless the caller allows fewer: then each takes several in a loop."""
    tile_units: int
    steps: int
    """Tiles of an item."""
    wide: bool
    """A tile lies within one row, so that its page is looked up once."""


@dataclass(frozen=True, slots=True)
class KVTable:
    """The engine's paged tensors, one row per (layer, component); build it with `from_bytes`."""

    rows: Tensor
    """int64 [layers, components, 6] on the device: base in bytes, rows per page as a count, the rest in units."""
    starts: Tensor
    """int64 [layers, components] on the device: 64-bit payload words of the piece before this part."""
    host_rows: npt.NDArray[np.int64]
    """The same rows in bytes, on the host; an absent component has rows of 0 bytes."""
    unit_bytes: int
    """16, 8 or 4: what divides every base, size, stride and offset."""
    pages_per_block: int
    part_units_max: int
    """Units of the largest part."""
    row_units_gcd: int
    """Divides the row size of every component, in units."""
    uniform: tuple[int, ...] | None
    """What all components of all layers agree on, so that kernels need not look: units from page to page, rows a page,
    units from row to row, units a row, and from part to part units of the window and payload words.  Else None."""
    tuning: Tuning
    launches: Launches = field(default_factory=Launches, compare=False, repr=False)
    """Kernels compiled for this table: its units, tiles and counts never change."""

    @classmethod
    def from_bytes(
        cls,
        host_rows: npt.NDArray[np.int64],
        pages_per_block: int,
        device: torch.device | str,
        tuning: Tuning | None = None,
    ) -> "KVTable":
        """Check rows given in bytes and put them on the device, in the largest unit that fits.

        Args:
            host_rows: int64 [layers, components, 6] in bytes: base address, page stride, rows per page, row stride,
                row size, offset of the part in the piece.  A row size of 0 marks an absent component.
            pages_per_block: Pages of a block, 1 or more.
            device: Where the kernels will run.
            tuning: How launches are spread over the device.

        Raises:
            ShapeError: Wrong shape, rows or pages that overlap, parts out of order, or not even 4-byte units fit.
        """
        host = _checked(host_rows, pages_per_block)
        unit_bytes = _unit_bytes(host)
        rows = host.copy()
        rows[..., [PAGE_STRIDE, ROW_STRIDE, ROW_SIZE, PIECE_OFFSET]] //= unit_bytes
        part_units = rows[..., ROWS_PER_PAGE] * rows[..., ROW_SIZE] * pages_per_block
        if part_units.max() >= 1 << 30:
            raise ShapeError(f"a part of {part_units.max()} units of {unit_bytes} bytes: expected fewer than 2**30")
        words = -(-part_units * unit_bytes // 8)
        return cls(
            rows=torch.from_numpy(rows).to(device),
            starts=torch.from_numpy(np.cumsum(words, axis=1) - words).to(device),
            host_rows=host,
            unit_bytes=unit_bytes,
            pages_per_block=pages_per_block,
            part_units_max=int(part_units.max()),
            row_units_gcd=math.gcd(*rows[..., ROW_SIZE].ravel().tolist()),
            uniform=_uniform(rows, int(words.max())),
            tuning=tuning or Tuning(),
        )

    @property
    def layers(self) -> int:
        return int(self.host_rows.shape[0])

    @property
    def components(self) -> int:
        return int(self.host_rows.shape[1])

    def parts(self, layer: int) -> list[tuple[int, int]]:
        """`(offset_bytes, size_bytes)` of each component's part in a piece of `layer`; size 0 when absent."""
        rows = self.host_rows[layer]
        sizes = rows[:, ROWS_PER_PAGE] * rows[:, ROW_SIZE] * self.pages_per_block
        return [(int(offset), int(size)) for offset, size in zip(rows[:, PIECE_OFFSET], sizes, strict=True)]

    def payload_bytes(self, layer: int) -> int:
        """Bytes of a piece of `layer` without padding: what `checksum.finish` mixes in."""
        return sum(size for _, size in self.parts(layer))

    def host_page(self, layer: int, component: int, page: int) -> npt.NDArray[np.uint8]:
        """One page in host memory, as a view uint8 [rows, row_bytes]; what the references read and write.

        Raises:
            ShapeError: The table is on another device, so its addresses are not the host's.
        """
        if self.rows.device.type != "cpu":
            raise ShapeError(f"table on {self.rows.device}: expected one on the CPU, the reference reads host memory")
        base, page_stride, rows, row_stride, row_bytes, _ = self.host_rows[layer, component].tolist()
        memory = (ctypes.c_uint8 * ((rows - 1) * row_stride + row_bytes)).from_address(base + page * page_stride)
        return np.ndarray((rows, row_bytes), np.uint8, memory, strides=(row_stride, 1))

    @property
    def sum_lanes(self) -> int:
        """Columns of `sums` that keep the copies from waiting for one another: about one for eight items of a piece."""
        items = self.walk(1, None).items
        return min(_LANES_MAX, 1 << max(0, (items // _ITEMS_A_LANE).bit_length() - 1))

    def words(self, window: Tensor) -> Tensor:
        """The window as the words that kernels load: two int64 for 16 bytes, else one word of a unit's size."""
        return window.view(torch.int32 if self.unit_bytes == 4 else torch.int64)

    def walk(self, pieces: int, programs_max: int | None) -> Walk:
        """Cut `pieces` pieces in work items for one launch of at most `programs_max` programs; None for no limit.

        Raises:
            ShapeError: `programs_max` below 1, or too many items for one launch.
        """
        tuning = self.tuning
        tile = min(tuning.tile_units, max(32, 1 << (self.part_units_max - 1).bit_length()))
        row_power = self.row_units_gcd & -self.row_units_gcd
        wide = min(tile, row_power) >= min(tuning.wide_units_min, tile)
        tile = min(tile, row_power) if wide else tile
        steps = max(1, min(tuning.steps, -(-self.part_units_max // tile)))
        chunks = max(1, -(-self.part_units_max // (tile * steps)))
        items = pieces * self.components * chunks
        programs_max = items if programs_max is None else programs_max
        if programs_max < 1 or items >= 1 << 31:
            raise ShapeError(f"{items} work items, programs_max={programs_max}: expected below 2**31, and 1 or more")
        return Walk(items, chunks, min(items, programs_max), tile, steps, wide)

    def check_window(self, window: Tensor) -> None:
        """Check the window of a launch.

        Raises:
            ShapeError: Its shape, dtype, stride, alignment or device differs from what the kernels expect.
        """
        _expect("window", window, torch.uint8, 1, self.rows.device)
        if window.data_ptr() % 16 or window.shape[0] % 16:
            raise ShapeError(f"window at {window.data_ptr():#x}, {window.shape[0]} bytes: expected multiples of 16")

    def check_tables(self, pieces: Tensor, pages: Tensor, sums: Tensor | None, seeds: Tensor | None) -> None:
        """Check the tables of a launch, without reading from the device.

        Raises:
            ShapeError: A shape, dtype, stride or device differs from what the kernels expect.
        """
        _expect("pieces", pieces, torch.int64, 2, self.rows.device)
        _expect("pages", pages, torch.int64, 1, self.rows.device)
        if pieces.shape[1] != 3:
            raise ShapeError(f"pieces {list(pieces.shape)}: expected [n, 3]: window offset, block, layer")
        if pages.shape[0] % self.pages_per_block:
            raise ShapeError(f"pages [{pages.shape[0]}]: expected a multiple of {self.pages_per_block} pages per block")
        if (sums is None) != (seeds is None):
            raise ShapeError("sums and seeds: expected both or neither")
        for name, given in (("sums", sums), ("seeds", seeds)):
            if given is not None:
                _expect(name, given, torch.int32, 2 if given is sums else 1, self.rows.device)
                if given.shape[0] != pieces.shape[0] or 0 in given.shape[1:]:
                    raise ShapeError(f"{name} {list(given.shape)}: expected one for each of {pieces.shape[0]} pieces")


def _expect(name: str, given: Tensor, dtype: torch.dtype, dims: int, device: torch.device) -> None:
    if given.dtype != dtype or given.dim() != dims or not given.is_contiguous() or given.device != device:
        raise ShapeError(
            f"{name}: {given.dtype} {list(given.shape)} strides {given.stride()} on {given.device}: "
            f"expected contiguous {dtype} with {dims} dimensions on {device}"
        )


def _checked(host_rows: npt.NDArray[np.int64], pages_per_block: int) -> npt.NDArray[np.int64]:
    if host_rows.dtype != np.int64 or host_rows.ndim != 3 or host_rows.shape[2] != 6 or not host_rows.size:
        raise ShapeError(f"rows: {host_rows.dtype} {list(host_rows.shape)}: expected int64 [layers, components, 6]")
    if pages_per_block < 1 or host_rows.min() < 0:
        raise ShapeError(f"{pages_per_block} pages per block, smallest entry {host_rows.min()}: expected 1, 0 or more")
    host = np.ascontiguousarray(host_rows).copy()
    host[host[..., ROW_SIZE] == 0] = (0, 0, 1, 0, 0, 0)
    present = host[host[..., ROW_SIZE] > 0]
    if not len(present):
        raise ShapeError("rows: every component is absent; expected at least one row size above 0")
    if present[:, BASE].min() == 0 or present[:, ROWS_PER_PAGE].min() == 0:
        raise ShapeError("rows: a base address or a count of rows is 0; mark an absent component by row size 0")
    many = present[present[:, ROWS_PER_PAGE] > 1]
    if (present[:, PAGE_STRIDE] < present[:, ROW_SIZE]).any() or (many[:, ROW_STRIDE] < many[:, ROW_SIZE]).any():
        raise ShapeError("rows: a page or row stride is smaller than a row, so rows overlap")
    for layer in host:
        end = 0
        for row in layer[layer[:, ROW_SIZE] > 0]:
            if row[PIECE_OFFSET] < end:
                raise ShapeError(f"part at {row[PIECE_OFFSET]}: begins before the previous part ends at {end}")
            end = int(row[PIECE_OFFSET] + row[ROWS_PER_PAGE] * row[ROW_SIZE] * pages_per_block)
    return host


def _unit_bytes(host: npt.NDArray[np.int64]) -> int:
    sizes = host[..., [BASE, PAGE_STRIDE, ROW_STRIDE, ROW_SIZE, PIECE_OFFSET]]
    divisor = math.gcd(*sizes.ravel().tolist())
    for unit_bytes in UNITS_BYTES:
        if divisor % unit_bytes == 0:
            return unit_bytes
    raise ShapeError(f"bases, sizes, strides and offsets share only {divisor} bytes: expected multiples of 4")


def _uniform(rows: npt.NDArray[np.int64], part_words: int) -> tuple[int, ...] | None:
    components = rows.shape[1]
    part_step = int(rows[0, -1, PIECE_OFFSET]) // max(1, components - 1)
    kinds = np.unique(rows[..., PAGE_STRIDE : ROW_SIZE + 1].reshape(-1, 4), axis=0).tolist()
    if len(kinds) > 1 or (rows[..., PIECE_OFFSET] != part_step * np.arange(components)).any():
        return None
    return (*kinds[0], part_step, part_words)
