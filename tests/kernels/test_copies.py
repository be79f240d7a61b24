"""Scatter and gather against their references, over the whole pool and the whole window, bytes not named included."""

import mmap
import sys

import numpy as np
import pytest
import torch

from flatcake.errors import ShapeError
from flatcake.kernels.gather import gather_pieces, gather_pieces_ref
from flatcake.kernels.kvtable import KVTable, Tuning
from flatcake.kernels.scatter import scatter_pieces, scatter_pieces_ref
from tests.kernels.pools import Case, Part, Pool, launch

GPU = pytest.param(
    "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
CPU = pytest.param(
    "cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted, here")
)
DEVICES = pytest.mark.parametrize("device", [CPU, GPU])

SHAPES: dict[str, tuple[list[list[Part]], int, int, int]] = {
    # name: parts of each layer, pages per block, blocks, unit that must come out
    "one_page": ([[Part(64)]], 1, 1, 16),
    "odd_counts": ([[Part(48, rows=3), Part(48, rows=3)]], 3, 3, 16),
    "no_multiple_of_tile": ([[Part(16 * 67), Part(16 * 67)]], 1, 2, 16),
    "wide_pages": ([[Part(4096), Part(4096)]], 1, 2, 16),
    "wide_rows_strided": ([[Part(1024, 2, row_stride=2048), Part(1024, 2, row_stride=2048, skew=1024)]], 2, 2, 16),
    "key_half_of_joint_rows": ([[Part(64, 8, row_stride=128), Part(64, 8, row_stride=128, skew=64)]], 2, 2, 16),
    "unequal_components": ([[Part(512, rows=4), Part(48, rows=4)]], 2, 2, 16),
    "unequal_layers": ([[Part(256), Part(32)], [Part(1152)], [Part(64), Part(656)]], 2, 2, 16),
    "sixteen_pages_a_block": ([[Part(32, rows=2)]], 16, 2, 16),
    "token_pages": ([[Part(576)]], 16, 1, 16),
    "mla_656": ([[Part(656, rows=4)]], 2, 2, 16),
    "unit_8": ([[Part(24, rows=3), Part(40, rows=3)]], 2, 3, 8),
    "unit_8_by_base": ([[Part(64, rows=2, skew=8)]], 1, 3, 8),
    "unit_4_index_rows": ([[Part(128, rows=3), Part(132, rows=3)]], 1, 3, 4),
    "unit_4_odd_parts": ([[Part(12), Part(20), Part(4)]], 1, 3, 4),
}
SMALL = Tuning(tile_units=64, wide_units_min=64)


def setup(shape: str, skip: bool) -> tuple[Pool, Case, int]:
    layers, pages_per_block, blocks, unit_bytes = SHAPES[shape]
    pool = Pool.random(layers, blocks * pages_per_block + 3, pages_per_block)
    case = Case.random(pool, pool.table("cpu", align=unit_bytes), blocks)
    if skip:
        case.pages[:: max(2, len(case.pages) // 3)] = -1
    return pool, case, unit_bytes


def reserved(size_bytes: int, device: str) -> torch.Tensor:
    """Memory that takes no room before it is touched, where that can be had."""
    if device == "cuda":
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)  # MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype=torch.uint8)


def assert_pools_equal(left: Pool, right: Pool) -> None:
    for layer, (mine, theirs) in enumerate(zip(left.memory, right.memory, strict=True)):
        for component, pair in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(pair[0].cpu(), pair[1].cpu()), f"layer {layer} component {component} differs"


@DEVICES
@pytest.mark.parametrize("skip", [False, True], ids=["all", "some_pages_skipped"])
@pytest.mark.parametrize("shape", SHAPES)
def test_scatter_equals_reference(shape: str, skip: bool, device: str) -> None:
    pool, case, unit_bytes = setup(shape, skip)
    expected, got = pool.to("cpu"), pool.to(device)
    kv = got.table(device, SMALL, align=unit_bytes)
    assert kv.unit_bytes == unit_bytes
    want_window, want_sums = launch(
        scatter_pieces_ref, case, expected.table("cpu", align=unit_bytes), summed=True, programs_max=None
    )
    window, sums = launch(scatter_pieces, case, kv, summed=True)
    assert_pools_equal(got, expected)
    assert (window == case.window.numpy()).all() and (want_window == window).all()
    assert sums is not None and want_sums is not None and np.array_equal(sums, want_sums) and want_sums.any()


@DEVICES
@pytest.mark.parametrize("skip", [False, True], ids=["all", "some_pages_skipped"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gather_equals_reference(shape: str, skip: bool, device: str) -> None:
    pool, case, unit_bytes = setup(shape, skip)
    got = pool.to(device)
    want_window, want_sums = launch(
        gather_pieces_ref, case, pool.table("cpu", align=unit_bytes), summed=True, programs_max=None
    )
    window, sums = launch(gather_pieces, case, got.table(device, SMALL, align=unit_bytes), summed=True)
    assert np.array_equal(window, want_window)
    assert_pools_equal(got, pool)
    assert sums is not None and want_sums is not None and np.array_equal(sums, want_sums)
    assert np.array_equal(window, case.window.numpy()) == bool((case.pages < 0).all())


@DEVICES
@pytest.mark.parametrize("shape", ["odd_counts", "wide_pages", "unit_4_odd_parts"])
def test_gather_of_what_was_scattered_is_the_same(shape: str, device: str) -> None:
    pool, case, unit_bytes = setup(shape, skip=False)
    got = pool.to(device)
    kv = got.table(device, SMALL, align=unit_bytes)
    _, in_sums = launch(scatter_pieces, case, kv, summed=True)
    blank = Case(torch.zeros_like(case.window), case.pieces, case.pages, case.seeds)
    window, out_sums = launch(gather_pieces, blank, kv, summed=True)
    assert in_sums is not None and out_sums is not None and np.array_equal(in_sums, out_sums)
    named = np.zeros(len(window), bool)
    for offset, _, layer in case.pieces.tolist():
        for begin, size in kv.parts(layer):
            named[offset + begin : offset + begin + size] = True
    assert np.array_equal(window[named], case.window.numpy()[named])
    assert not window[~named].any(), "padding was written"


@DEVICES
@pytest.mark.parametrize("shape", ["no_multiple_of_tile", "unit_8"])
def test_copies_without_sums_move_the_same_bytes(shape: str, device: str) -> None:
    pool, case, unit_bytes = setup(shape, skip=True)
    first, second = pool.to(device), pool.to(device)
    launch(scatter_pieces, case, first.table(device, SMALL, align=unit_bytes), summed=True)
    launch(scatter_pieces, case, second.table(device, align=unit_bytes), summed=False, programs_max=None)
    assert_pools_equal(first, second)
    assert not all(torch.equal(a.cpu(), b) for a, b in zip(first.memory[0], pool.memory[0], strict=True))


@DEVICES
@pytest.mark.parametrize("extra_bytes", [0, 4], ids=["unit_16", "unit_4"])
def test_offsets_beyond_32_bits_reach_the_right_page(extra_bytes: int, device: str) -> None:
    # Memory that is reserved but hardly touched.  Page 3 is beyond 2**33 bytes, and beyond 2**31 units of 4 bytes.
    stride = (3 << 30) + extra_bytes
    memory = reserved(3 * stride + 4096, device)
    pages = [2, 0, 3]
    for page in range(4):
        memory[page * stride : page * stride + 64] = page
    rows = np.array([[[memory.data_ptr(), stride, 1, 64, 64, 0]]], np.int64)
    kv = KVTable.from_bytes(rows, 1, device)
    window = torch.arange(3 * 4096, device=device).to(torch.uint8)
    pieces = torch.tensor([[4096 * n, n, 0] for n in range(3)], device=device)
    gathered = torch.zeros_like(window)
    table = torch.tensor(pages, device=device)
    gather_pieces(gathered, pieces, table, kv)
    assert [int(gathered[4096 * n]) for n in range(3)] == pages
    window[::4096] = torch.tensor([101, 102, 103], dtype=torch.uint8, device=device)
    scatter_pieces(window, pieces, table, kv)
    assert [int(memory[page * stride]) for page in pages] == [101, 102, 103]
    assert int(memory[stride]) == 1, "a page that was not named changed"


@pytest.mark.parametrize("kernel", [scatter_pieces, gather_pieces, scatter_pieces_ref, gather_pieces_ref])
def test_copies_refuse_what_does_not_fit(kernel: object) -> None:
    pool, case, _ = setup("one_page", skip=False)
    kv = pool.table("cpu")
    window, pieces, pages, seeds = case.window, case.pieces, case.pages, case.seeds
    bad = [
        ((window.to(torch.int8), pieces, pages), {}, "window: torch.int8"),
        ((window[8:], pieces, pages), {}, "multiples of 16"),
        ((window, pieces.to(torch.int32), pages), {}, "pieces: torch.int32"),
        ((window, pieces[:, :2].contiguous(), pages), {}, "expected \\[n, 3\\]"),
        ((window, pieces, pages.expand(4)), {}, "strides"),
        ((window, pieces, pages), {"sums": seeds[:, None]}, "both or neither"),
        ((window, pieces, pages), {"sums": seeds[:, None], "seeds": seeds.to(torch.int64)}, "seeds: torch.int64"),
        ((window, pieces, pages), {"sums": seeds.repeat(2)[:, None], "seeds": seeds}, "one for each"),
        ((window, pieces, pages), {"sums": seeds[:, None][:, :0], "seeds": seeds}, "one for each"),
        ((window, pieces, pages), {"sums": seeds, "seeds": seeds}, "with 2 dimensions"),
    ]
    for arguments, keywords, match in bad:
        with pytest.raises(ShapeError, match=match):
            kernel(*arguments, kv, **keywords)  # type: ignore[operator]


def test_nothing_to_copy_launches_nothing() -> None:
    pool, case, _ = setup("one_page", skip=False)
    for kernel in (scatter_pieces, gather_pieces, scatter_pieces_ref, gather_pieces_ref):
        kernel(case.window, case.pieces[:0], case.pages, pool.table("cpu"))
