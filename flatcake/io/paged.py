"""An engine's paged KV tensors, described once: where page p of component c of layer l lies in memory.

Bytes are opaque: a page is some rows of contiguous bytes at a fixed stride, whatever its dtype and inner
shape.  Those go into the geometry's `dtype` text, and so into the identity: another layout hits nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from flatcake.errors import PageTableError, ShapeError
from flatcake.geometry import Component, Geometry
from flatcake.io.seam import view_memory
from flatcake.messages import Int64Array

BASE, PAGE_STRIDE, ROWS, ROW_STRIDE, ROW_BYTES = range(5)
WORD_BYTES = 4
"""The least that a copy moves at once."""


@dataclass(frozen=True, eq=False, slots=True)
class PageTable:
    """A page table that has been checked, so that it need not be again."""

    rows: Int64Array
    """int64 [groups * blocks, pages of a block]: one group's blocks after another's."""


@dataclass(frozen=True, eq=False, slots=True)
class PagedTensor:
    """One component of one layer: a tensor, and what its page axis counts."""

    tensor: torch.Tensor
    page_axis: int
    slot_tokens: int
    """Entries of the page axis that make one page: 1, or `page_tokens` where the axis counts token slots."""

    def strides(self) -> tuple[int, int, int, int, int, int]:
        """Base address, page stride, rows a page, row stride, row bytes, pages; all in bytes.

        Raises:
            ShapeError: A page is not made of equal rows at one stride, or pages overlap.
        """
        tensor, width = self.tensor, self.tensor.element_size()
        count, step = tensor.shape[self.page_axis], tensor.stride(self.page_axis) * width
        inner = [(tensor.shape[a], tensor.stride(a) * width) for a in range(tensor.ndim) if a != self.page_axis]
        if self.slot_tokens > 1:
            inner.append((self.slot_tokens, step))
        row_bytes, rows, row_stride = width, 1, 0
        for size, stride in sorted((axis for axis in inner if axis[0] != 1), key=lambda axis: axis[1]):
            if rows == 1 and stride == row_bytes:
                row_bytes *= size
            elif rows == 1 and stride > row_bytes:
                rows, row_stride = size, stride
            elif rows > 1 and stride == rows * row_stride:
                rows *= size
            else:
                raise ShapeError(
                    f"tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}: expected pages made of "
                    "equal rows at one stride; pass a contiguous tensor or one view per component"
                )
        page_stride, span = step * self.slot_tokens, (rows - 1) * row_stride + row_bytes
        interleaved = rows > 1 and page_stride * (count // self.slot_tokens) <= row_stride
        if count > self.slot_tokens and page_stride < span and not interleaved:
            raise ShapeError(f"tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}: its pages overlap")
        if any(value % WORD_BYTES for value in (tensor.data_ptr(), page_stride, row_stride, row_bytes)):
            raise ShapeError(
                f"tensor of shape {tuple(tensor.shape)}, strides {tensor.stride()} and {width} bytes an element: "
                f"expected rows of contiguous bytes that start and end at multiples of {WORD_BYTES} bytes"
            )
        return tensor.data_ptr(), page_stride, rows, row_stride, row_bytes, count // self.slot_tokens

    def describe(self) -> str:
        """Dtype, inner shape and order of axes: what the bytes of a page mean."""
        tensor = self.tensor
        inner = [a for a in range(tensor.ndim) if a != self.page_axis]
        steps = {a: tensor.stride(a) for a in inner}
        order = sorted(inner, key=lambda a: -steps[a])
        return f"{tensor.dtype}{[tensor.shape[a] for a in inner]}{[inner.index(a) for a in order]}"


class PagedKV:
    """All paged tensors of one engine on one device.

    Args:
        layers: Per layer its components, in the order in which they are stored.
        page_tokens: Tokens in one page.
        names: A name for each component of a layer; counted where absent.
        groups: Per layer the number of its group, for engines that keep a page table for each of several groups of
            layers; all are in group 0 where absent.

    Raises:
        ShapeError: Tensors on several devices, with different numbers of pages, or of a layout that is not rows; or
            groups that are not one for each layer, from 0 on without a gap.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[PagedTensor]],
        *,
        page_tokens: int,
        names: Sequence[str] = (),
        groups: Sequence[int] = (),
    ) -> None:
        if not layers or not all(layers):
            raise ShapeError(f"{len(layers)} layers: expected at least one, each with a tensor")
        self.page_tokens = page_tokens
        self.tensors = tuple(tuple(layer) for layer in layers)
        every = [paged for layer in self.tensors for paged in layer]
        devices = {paged.tensor.device for paged in every}
        if len(devices) > 1:
            raise ShapeError(f"tensors on {sorted(map(str, devices))}: expected one device")
        self.device: torch.device = devices.pop()
        width = max(len(layer) for layer in self.tensors)
        self.rows = np.zeros((len(layers), width, 5), np.int64)
        """int64 [layers, components, 5]: base address, page stride, rows a page, row stride, row bytes."""
        pages = set()
        for layer, parts in enumerate(self.tensors):
            for at, paged in enumerate(parts):
                *row, count = paged.strides()
                self.rows[layer, at] = row
                pages.add(count)
        if len(pages) > 1:
            raise ShapeError(f"tensors of {sorted(pages)} pages: expected the same number in every layer and component")
        self.page_count = pages.pop()
        self.layer_groups: Int64Array = np.array(groups or [0] * len(layers), np.int64)
        """int64 [layers]: the group whose page table says where a layer's pages are."""
        self.groups = int(self.layer_groups.max()) + 1
        if len(self.layer_groups) != len(layers) or set(self.layer_groups.tolist()) != set(range(self.groups)):
            raise ShapeError(f"groups {list(groups)}: expected one for each of {len(layers)} layers, from 0 on")
        each = (self.rows[self.layer_groups == group, :, BASE] for group in range(self.groups))
        bases = [set(rows.ravel().tolist()) - {0} for rows in each]
        share_memory = sum(map(len, bases)) > len(set().union(*bases))
        # Where groups share their memory a page has one owner among all of them.
        self._owners: Int64Array = np.arange(self.groups)[:, None] * (0 if share_memory else self.page_count)
        """int64 [groups, 1]: added to a page, it makes those of groups that share no memory different ones."""
        self._names = tuple(names)

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        *,
        page_tokens: int,
        page_axis: int = 0,
        token_slots: bool = False,
        names: Sequence[str] = (),
        groups: Sequence[int] = (),
    ) -> "PagedKV":
        """Describe per-layer tensors.

        Args:
            layers: Per layer one tensor, or several (K and V, latent, index …).
            page_tokens: Tokens in one page.
            page_axis: Axis that counts pages, e.g. 0 in ``[pages, 2, page, heads, dim]``.
            token_slots: The axis counts token slots instead, as in ``[slots, heads, dim]``; a page is
                `page_tokens` consecutive slots, and page tables name pages, not slots.
            names: A name for each component.
            groups: Per layer the number of its group, where each group has a page table of its own.
        """
        slots = page_tokens if token_slots else 1
        parts = [[layer] if isinstance(layer, torch.Tensor) else list(layer) for layer in layers]
        return cls(
            [[PagedTensor(tensor, _axis(tensor, page_axis), slots) for tensor in layer] for layer in parts],
            page_tokens=page_tokens,
            names=names,
            groups=groups,
        )

    @classmethod
    def of_stacked(
        cls,
        tensor: torch.Tensor,
        *,
        page_tokens: int,
        page_axis: int,
        layer_axis: int = 0,
        split_axis: int | None = None,
    ) -> "PagedKV":
        """Describe one tensor with a layer dimension, e.g. ``[layers, 2, pages, page, heads, dim]``.

        Args:
            tensor: All layers.
            page_tokens: Tokens in one page.
            page_axis: Axis that counts pages.
            layer_axis: Axis that counts layers.
            split_axis: Axis that counts components (K and V) that are not part of a page, else None.
                All axes are those of `tensor`.
        """
        layer_at, page_at = _axis(tensor, layer_axis), _axis(tensor, page_axis)
        split_at = None if split_axis is None else _axis(tensor, split_axis)
        if len({layer_at, page_at, split_at}) < 3:
            raise ShapeError(f"axes {layer_axis}, {split_axis}, {page_axis}: expected different ones")
        layers: list[list[torch.Tensor]] = [[layer] for layer in tensor.unbind(layer_at)]
        if split_at is not None:
            layers = [list(layer.unbind(split_at - (layer_at < split_at))) for (layer,) in layers]
        before = (layer_at < page_at) + (split_at is not None and split_at < page_at)
        return cls.of_layers(layers, page_tokens=page_tokens, page_axis=page_at - before)

    def geometry(self, block_tokens: int) -> Geometry:
        """The sizes of a block of `block_tokens` tokens, with the meaning of its bytes as text.

        Raises:
            ShapeError: `block_tokens` is not a multiple of the page size.
        """
        sizes = self.rows[:, :, ROWS] * self.rows[:, :, ROW_BYTES]
        layers = tuple(
            tuple(Component(self._name(at), int(sizes[layer, at])) for at in range(len(parts)))
            for layer, parts in enumerate(self.tensors)
        )
        text = "|".join(dict.fromkeys(",".join(p.describe() for p in layer) for layer in self.tensors))
        return Geometry(block_tokens=block_tokens, page_tokens=self.page_tokens, layers=layers, dtype=text)

    def host_views(self) -> list[list[npt.NDArray[np.generic]]]:
        """Per layer and component a numpy view [pages, rows, words] of host memory, in words of 8 or 4 bytes."""
        assert self.device.type == "cpu", self.device
        return [
            [self._host_view(self.rows[layer, at]) for at in range(len(parts))]
            for layer, parts in enumerate(self.tensors)
        ]

    def page_table(self, pages: object, blocks: int, pages_per_block: int, *, whole_from: int) -> Int64Array:
        """Check a page table and shape it as int64 [groups * blocks, pages_per_block]; longer tables are cut.

        Args:
            pages: 1-D integers, one per page of the sequence from its first token on: list, numpy or torch; with
                several groups 2-D, a row for each.  A CUDA tensor is copied to the host, which waits for it.
            blocks: Blocks of the sequence.
            pages_per_block: Pages in one block.
            whole_from: Pages of the blocks before this one may be -1: there are none, or they are to be left alone.

        Raises:
            PageTableError: Too short, not integers, of another number of groups, out of range, or a page named twice.
        """
        given = np.asarray(pages.cpu() if isinstance(pages, torch.Tensor) else pages)
        table = given[None] if self.groups == 1 else given
        if table.ndim != 2 or len(table) != self.groups or (table.size and table.dtype.kind not in "iu"):
            shape = "1-D integers" if self.groups == 1 else f"integers, a row for each of {self.groups} groups"
            raise PageTableError(f"page table of shape {given.shape} and type {given.dtype}: expected {shape}")
        need = blocks * pages_per_block
        if table.shape[1] < need:
            raise PageTableError(
                f"page table of {table.shape[1]} pages: expected {need}, {pages_per_block} for each of {blocks} blocks"
            )
        table = np.array(table[:, :need], np.int64)  # A copy: the caller may change its own at once.
        owned = table + self._owners if self.groups > 1 else table
        used = table.ravel()
        if whole_from:
            is_used = table != -1
            is_used[:, whole_from * pages_per_block :] = True
            used, owned = table[is_used], owned[is_used]
        if used.size and used.view(np.uint64).max() >= self.page_count:  # A negative one becomes a huge one.
            raise PageTableError(f"pages {used.min()} … {used.max()}: expected 0 … {self.page_count - 1}")
        is_named = np.zeros(self.groups * self.page_count, np.bool_)
        is_named[owned] = True
        if np.count_nonzero(is_named) < used.size:
            twice = int(np.argmax(np.bincount(owned.ravel()))) % self.page_count
            raise PageTableError(f"page {twice} is named more than once; every page of a table must be distinct")
        return table.reshape(self.groups * blocks, pages_per_block)

    def wanted(self, rows: Int64Array) -> npt.NDArray[np.bool_] | None:
        """bool [layers, blocks]: whether any page of a block is named, in rows of `page_table`.  None: every page."""
        is_named: npt.NDArray[np.bool_] = rows >= 0
        if is_named.all():
            return None
        return is_named.any(axis=1).reshape(self.groups, -1)[self.layer_groups]

    def row_of(self, layers: Int64Array, blocks: Int64Array, rows: int) -> Int64Array:
        """int64 [n]: which of so many rows of a page table is that of each block in each layer."""
        return self.layer_groups[layers] * (rows // self.groups) + blocks

    def _name(self, at: int) -> str:
        return self._names[at] if at < len(self._names) else f"part{at}"

    def _host_view(self, row: Int64Array) -> npt.NDArray[np.generic]:
        base, page_stride, rows, row_stride, row_bytes = (int(value) for value in row)
        row_stride = row_stride or row_bytes
        wide = not any(value % 8 for value in (base, page_stride, row_stride, row_bytes))
        word = np.dtype(np.uint64 if wide else np.uint32)
        span = (self.page_count - 1) * page_stride + (rows - 1) * row_stride + row_bytes
        flat = view_memory(base, span).view(np.uint8)
        shape = (self.page_count, rows, row_bytes // word.itemsize)
        return np.ndarray(shape, word, flat.data, 0, (page_stride, row_stride, word.itemsize))


def _axis(tensor: torch.Tensor, axis: int) -> int:
    if not -tensor.ndim <= axis < tensor.ndim:
        raise ShapeError(f"axis {axis} of a tensor of shape {tuple(tensor.shape)}: expected one of its {tensor.ndim}")
    return axis % tensor.ndim
