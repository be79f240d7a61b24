"""The description of paged memory: addresses against torch's own indexing, and page tables.

What whole stores do with each layout is `tests/test_geometries.py`; refusals are `tests/test_bad_input.py`.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatcake.errors import PageTableError, ShapeError
from flatcake.io.paged import BASE, PAGE_STRIDE, ROW_BYTES, ROW_STRIDE, ROWS, PagedKV
from flatcake.io.seam import view_memory


def page_by_address(kv: PagedKV, layer: int, part: int, page: int) -> bytes:
    """A page as the description has it: its rows, one after another."""
    row = kv.rows[layer, part].tolist()
    start = row[BASE] + page * row[PAGE_STRIDE]
    return b"".join(view_memory(start + nth * row[ROW_STRIDE], row[ROW_BYTES]).tobytes() for nth in range(row[ROWS]))


def by_memory(page: torch.Tensor) -> bytes:
    """The bytes of a page, in the order in which they lie in memory."""
    axes = sorted(range(page.ndim), key=lambda axis: -page.stride(axis))
    return page.permute(axes).flatten().clone().numpy().tobytes()


@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    order=st.randoms(),
    holes=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    axis=st.integers(0, 3),
    width=st.sampled_from([torch.int32, torch.int16, torch.uint8]),
)
def test_every_page_lies_where_torch_has_it_or_the_tensor_is_refused(shape, order, holes, axis, width) -> None:
    axis %= len(shape)
    axes = list(range(len(shape)))
    order.shuffle(axes)
    padded = [size + hole for size, hole in zip(shape, holes, strict=False)]
    memory = torch.randint(0, 100, [padded[a] for a in axes], dtype=torch.int32).to(width)
    tensor = memory.permute(np.argsort(axes).tolist())[tuple(slice(0, size) for size in shape)]
    try:
        kv = PagedKV.of_layers([tensor], page_tokens=1, page_axis=axis)
    except ShapeError:
        whole = tensor.is_contiguous() and axis == 0 and len(tensor) > 1
        assert not (whole and tensor[0].numel() * width.itemsize % 4 == 0)
        return
    assert kv.page_count == shape[axis]
    for page in range(shape[axis]):
        assert page_by_address(kv, 0, 0, page) == by_memory(tensor.select(axis, page))


def test_token_slots_make_pages_of_consecutive_slots() -> None:
    slots = torch.arange(24 * 2 * 4, dtype=torch.int32).view(24, 2, 4)
    kv = PagedKV.of_layers([slots], page_tokens=5, token_slots=True)
    assert kv.page_count == 4  # The last four slots make no page.
    for page in range(4):
        assert page_by_address(kv, 0, 0, page) == by_memory(slots[5 * page : 5 * page + 5])


@pytest.mark.parametrize("axes", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("split", [True, False])
def test_stacked_layers_are_those_of_the_tensor(axes: tuple[int, ...], split: bool) -> None:
    """Axis 0 counts 2 layers, axis 1 counts 3 components, axis 2 counts 5 pages, wherever they are."""
    whole = torch.arange(2 * 3 * 5 * 8, dtype=torch.int32).view(2, 3, 5, 8)
    tensor = whole.permute(*axes, 3).contiguous()
    layer, part, page = (axes.index(number) for number in range(3))
    try:
        kv = PagedKV.of_stacked(
            tensor, page_tokens=1, page_axis=page, layer_axis=layer, split_axis=part if split else None
        )
    except ShapeError:
        assert not split
        return
    assert kv.rows.shape[:2] == (2, 3 if split else 1) and kv.page_count == 5
    for number, nth in itertools.product(range(2), range(5)):
        if split:
            parts = [page_by_address(kv, number, component, nth) for component in range(3)]
            assert b"".join(parts) == whole[number, :, nth].contiguous().numpy().tobytes()
        else:
            assert page_by_address(kv, number, 0, nth) == whole[number, :, nth].contiguous().numpy().tobytes()


def test_geometry_tells_sizes_and_meaning() -> None:
    layers = [[torch.zeros(6, 4, 16, dtype=torch.bfloat16), torch.zeros(6, 4, 132, dtype=torch.uint8)]] * 2
    geometry = PagedKV.of_layers(layers, page_tokens=4, names=["latent", "index"]).geometry(12)
    assert (geometry.block_tokens, geometry.page_tokens, geometry.pages_per_block, geometry.layer_count) == (
        12,
        4,
        3,
        2,
    )
    assert [(part.name, part.page_bytes) for part in geometry.layers[1]] == [("latent", 128), ("index", 528)]
    assert geometry.payload_bytes(0) == 3 * (128 + 528)
    assert "bfloat16" in geometry.dtype and "uint8" in geometry.dtype


def test_host_views_are_the_tensors_memory() -> None:
    tensor = torch.arange(6 * 4 * 8, dtype=torch.int32).view(6, 4, 8)[:, :, :3]
    ((view,),) = PagedKV.of_layers([tensor], page_tokens=4).host_views()
    assert view.shape == (6, 4, 3) and view.dtype == np.uint32
    assert (view.view(np.int32) == tensor.numpy()).all()
    before = tensor.clone()
    view[2, 1] = 7
    assert (tensor[2, 1] == 7).all()
    tensor[2, 1] = before[2, 1]
    assert torch.equal(tensor, before)
    ((wide,),) = PagedKV.of_layers([torch.zeros(6, 4, 8, dtype=torch.int32)], page_tokens=4).host_views()
    assert wide.shape == (6, 1, 16) and wide.dtype == np.uint64


# -- page tables ----------------------------------------------------------------------------------------

KV = PagedKV.of_layers([torch.zeros(10, 4, dtype=torch.int32)], page_tokens=1)


@given(pages=st.lists(st.integers(-3, 12), max_size=8), blocks=st.integers(0, 5), holes=st.booleans())
def test_page_table_accepts_what_is_distinct_and_in_range(pages: list[int], blocks: int, holes: bool) -> None:
    need = pages[: 2 * blocks]
    named = [page for page in need if not (holes and page == -1)]
    good = len(need) == 2 * blocks and len(set(named)) == len(named) and all(0 <= page < 10 for page in named)
    try:
        table = KV.page_table(pages, blocks, 2, whole_from=blocks if holes else 0)
    except PageTableError:
        assert not good
        return
    assert good and table.dtype == np.int64 and table.shape == (blocks, 2) and table.ravel().tolist() == need


def test_page_table_copies_what_it_is_given() -> None:
    pages = np.arange(6)
    table = KV.page_table(pages, 3, 2, whole_from=0)
    pages[:] = 0
    assert table.ravel().tolist() == list(range(6))


def grouped(*layers: tuple[torch.Tensor, int]) -> PagedKV:
    return PagedKV.of_layers([tensor for tensor, _ in layers], page_tokens=1, groups=[group for _, group in layers])


ONE, OTHER = (torch.zeros(10, 4, dtype=torch.int32) for _ in range(2))


@given(
    tables=st.lists(st.lists(st.integers(-2, 10), min_size=6, max_size=7), min_size=2, max_size=2),
    blocks=st.integers(0, 3),
    whole_from=st.integers(0, 3),
    shared=st.booleans(),
)
def test_page_tables_of_groups(tables: list[list[int]], blocks: int, whole_from: int, shared: bool) -> None:
    length = min(map(len, tables))
    tables = [table[:length] for table in tables]
    kv = grouped((ONE, 0), (ONE if shared else OTHER, 1), (OTHER, 1 if not shared else 0))
    named = [
        (0 if shared else group, page)
        for group, table in enumerate(tables)
        for at, page in enumerate(table[: 2 * blocks])
        if not (page == -1 and at < 2 * whole_from)
    ]
    good = len(set(named)) == len(named) and all(0 <= page < 10 for _, page in named)
    try:
        rows = kv.page_table(tables, blocks, 2, whole_from=whole_from)
    except PageTableError:
        assert not good
        return
    assert good and rows.reshape(2, -1).tolist() == [table[: 2 * blocks] for table in tables]
    wanted = kv.wanted(rows)
    assert (wanted is None) == bool((rows >= 0).all())
    for layer, group in enumerate(kv.layer_groups.tolist()):
        for block in range(blocks):
            row = int(kv.row_of(np.array([layer]), np.array([block]), len(rows))[0])
            assert rows[row].tolist() == tables[group][2 * block : 2 * block + 2]
            assert (wanted is None or wanted[layer, block]) == any(page >= 0 for page in rows[row])


@pytest.mark.parametrize("pages", [[1, 2], [[1, 2]], [[1, 2], [3, 4], [5, 6]], [[1, 2], [3]], [[1.0, 2.0], [3.0, 4.0]]])
def test_a_page_table_of_other_groups_is_refused(pages: object) -> None:
    with pytest.raises((PageTableError, ValueError), match="row for each of 2 groups|inhomogeneous"):
        grouped((ONE, 0), (OTHER, 1)).page_table(pages, 1, 2, whole_from=0)


@pytest.mark.parametrize("groups", [[0], [0, 2], [1, 1], [0, -1], [0, 0, 0]])
def test_groups_are_counted_from_0_one_for_each_layer(groups: list[int]) -> None:
    with pytest.raises(ShapeError, match="expected one for each of 2 layers, from 0 on"):
        PagedKV.of_layers([ONE, OTHER], page_tokens=1, groups=groups)
