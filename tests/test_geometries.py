"""Every layout of paged memory that engines use: restored bit for bit, and no other byte is touched.

What a page is comes from torch's own indexing here, not from the description that the store works with.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from flatcake.gva import Medium
from flatcake.io.paged import PagedKV
from flatcake.store import Store
from flatcake.units import DIRECT_BYTES, align_up
from tests.stores import CHAT, ONE_SHOT, WAIT_S, Layout, Memory, check, make_config, make_store, make_tokens, shuffled

LAYERS, HEADS, DIM = 3, 2, 16
BLOCKS = 5
FP8, BF16, FP16, FP32, U8 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.uint8

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def make_layout(name, shapes, dtype, page, block, describe, views) -> Layout:
    """Room for the blocks twice, and a few pages more; `N` in a shape becomes the number of pages."""
    count = 2 * BLOCKS * block // page + 3
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,) * len(shapes)
    return Layout(
        name=name,
        shapes=tuple(tuple(count * size[1] if isinstance(size, tuple) else size for size in shape) for shape in shapes),
        dtypes=dtypes,
        page_tokens=page,
        block_tokens=block,
        page_count=count,
        describe=describe,
        views=views,
    )


N = ("pages", 1)


def pairs(pools: list[Tensor]) -> list[list[Tensor]]:
    return [[k, v] for k, v in zip(pools[::2], pools[1::2], strict=True)]


def apart(name: str, dtype: torch.dtype, page: int, block: int, dim: int = DIM) -> Layout:
    """K and V of each layer in tensors of their own, [pages, page, heads, dim]."""
    shape = (N, page, HEADS, dim)
    return make_layout(
        name, [shape] * 2 * LAYERS, dtype, page, block, lambda t: PagedKV.of_layers(pairs(t), page_tokens=page), pairs
    )


def together(name: str, shape: tuple, axis: int, dtype: torch.dtype, page: int, block: int) -> Layout:
    """K and V of a layer in one tensor whose axis `axis` counts pages."""
    return make_layout(
        name,
        [shape] * LAYERS,
        dtype,
        page,
        block,
        lambda t: PagedKV.of_layers(t, page_tokens=page, page_axis=axis),
        lambda t: [[pool.movedim(axis, 0)] for pool in t],
    )


def slots(name: str, dtype: torch.dtype, page: int, block: int) -> Layout:
    """K and V of each layer as token slots, [slots, heads, dim]."""
    return make_layout(
        name,
        [(("pages", page), HEADS, DIM)] * 2 * LAYERS,
        dtype,
        page,
        block,
        lambda t: PagedKV.of_layers(pairs(t), page_tokens=page, token_slots=True),
        lambda t: [[pool.unflatten(0, (-1, page)) for pool in pair] for pair in pairs(t)],
    )


def stacked(name: str, shape: tuple, layer: int, page_axis: int, split: int | None, page: int = 4) -> Layout:
    """All layers in one tensor."""

    def views(pools: list[Tensor]) -> list[list[Tensor]]:
        axes = [layer, page_axis] if split is None else [layer, split, page_axis]
        front = pools[0].movedim(axes, list(range(len(axes))))
        return [[part] if split is None else list(part) for part in front]

    return make_layout(
        name,
        [shape],
        BF16,
        page,
        2 * page,
        lambda t: PagedKV.of_stacked(t[0], page_tokens=page, page_axis=page_axis, layer_axis=layer, split_axis=split),
        views,
    )


def cut(name: str, shape: tuple, dtype: torch.dtype, page: int, cutter) -> Layout:
    """A view with holes: `cutter` takes it from the whole pool."""
    return make_layout(
        name,
        [shape] * LAYERS,
        dtype,
        page,
        2 * page,
        lambda t: PagedKV.of_layers([cutter(pool) for pool in t], page_tokens=page),
        lambda t: [[cutter(pool)] for pool in t],
    )


def uneven(name: str, per_layer: list[list[tuple[tuple, torch.dtype]]], page: int, block: int) -> Layout:
    """Layers of different components."""
    flat = [part for layer in per_layer for part in layer]
    ends = np.cumsum([len(layer) for layer in per_layer]).tolist()

    def group(pools: list[Tensor]) -> list[list[Tensor]]:
        return [pools[end - len(layer) : end] for end, layer in zip(ends, per_layer, strict=True)]

    return make_layout(
        name,
        [shape for shape, _ in flat],
        tuple(dtype for _, dtype in flat),
        page,
        block,
        lambda t: PagedKV.of_layers(group(t), page_tokens=page),
        group,
    )


P = 4
LATENT = ((N, P, 72), BF16)
INDEX = ((N, P, 132), U8)
KV = ((N, P, HEADS, DIM), BF16)

LAYOUTS = [
    apart("gqa bf16", BF16, 16, 64),
    apart("gqa fp16", FP16, 16, 32),
    apart("gqa fp32", FP32, 16, 16),
    apart("gqa fp8", FP8, 16, 64),
    apart("page 1, block 16", BF16, 1, 16),
    apart("page 1, block 1", BF16, 1, 1),
    apart("page 2, block 6", BF16, 2, 6),
    apart("page 64, block 64", BF16, 64, 64),
    apart("page 256, block 512", FP8, 256, 512),
    apart("padded pieces", BF16, 2, 6, dim=22),
    apart("words of 4 bytes", FP8, 1, 2, dim=6),
    together("vllm [blocks, 2, page, heads, dim]", (N, 2, P, HEADS, DIM), 0, BF16, P, 8),
    together("vllm [2, blocks, page, heads, dim]", (2, N, P, HEADS, DIM), 1, BF16, P, 8),
    together("vllm [2, blocks, ...] fp8, page 1", (2, N, 1, HEADS, DIM), 1, FP8, 1, 4),
    together("HND [blocks, heads, page, dim]", (N, HEADS, P, DIM), 0, FP16, P, 8),
    together("HND [blocks, 2, heads, page, dim]", (N, 2, HEADS, P, DIM), 0, FP32, P, 4),
    together("heads outside [heads, blocks, page, dim]", (HEADS, N, P, DIM), 1, BF16, P, 8),
    slots("sglang, page 1", BF16, 1, 8),
    slots("sglang, page 16", FP16, 16, 32),
    slots("sglang fp8, page 64", FP8, 64, 64),
    uneven("mla bf16", [[((N, P, 72), BF16)]] * LAYERS, P, 8),
    uneven("mla fp8, latent and rope apart", [[((N, P, 64), FP8), ((N, P, 8), BF16)]] * LAYERS, P, 8),
    uneven("kv and an index of 132 bytes", [[((N, P, 656), U8), INDEX]] * LAYERS, P, 8),
    uneven("index of 132 bytes, page 1", [[((N, 1, 64), FP8), ((N, 1, 132), U8)]] * 2, 1, 5),
    uneven("layers of different sizes", [[KV, KV], [LATENT], [KV, KV, INDEX], [LATENT, INDEX]], P, 8),
    stacked("[layers, 2, pages, ...]", (LAYERS, 2, N, P, HEADS, DIM), 0, 2, 1),
    stacked("[layers, 2, pages, ...], K with V", (LAYERS, 2, N, P, HEADS, DIM), 0, 2, None),
    stacked("[pages, layers, 2, ...]", (N, LAYERS, 2, P, HEADS, DIM), 1, 0, 2),
    stacked("[pages, layers, 2, ...], K with V", (N, LAYERS, 2, P, HEADS, DIM), 1, 0, None),
    stacked("[layers, pages, 2, ...]", (LAYERS, N, 2, P, HEADS, DIM), 0, 1, 2),
    stacked("[2, layers, pages, ...]", (2, LAYERS, N, P, HEADS, DIM), 1, 2, 0),
    stacked("[2, layers, pages, ...], K with V", (2, LAYERS, N, P, HEADS, DIM), -5, -4, None),
    stacked("[layers, pages, latent]", (LAYERS, N, P, 72), 0, 1, None),
    cut("rows with a gap", (N, P, HEADS, 2 * DIM), BF16, P, lambda pool: pool[..., :DIM]),
    cut("rows with a gap, from the middle", (N, P, 3 * DIM), FP32, P, lambda pool: pool[..., DIM : 2 * DIM]),
    cut("pages with a gap", (N, P + 1, HEADS, DIM), BF16, P, lambda pool: pool[:, 1:]),
]


def open_over(memory: Memory, directory: Path, **changes) -> Store:
    return make_store(memory, make_config(memory, [directory], blocks=16, file_blocks=8, dram_blocks=16, **changes))


def one_piece_slots(memory: Memory) -> dict[str, int]:
    geometry = memory.kv.geometry(memory.layout.block_tokens)
    largest = max(geometry.piece_bytes(layer) for layer in range(geometry.layer_count))
    return {"slot_bytes": largest, "window_bytes_max": 4 * largest, "slots_min": 2, "save_slots": 2}


def round_trip(memory: Memory, store: Store, *, holes: int) -> None:
    """Save one part to SSD and one to DRAM, restore both to other pages, compare every byte of every pool."""
    layout = memory.layout
    per_block, tokens = layout.pages_per_block, make_tokens("a", BLOCKS, layout.block_tokens, more=1)
    memory.fill(seed=1)
    source = shuffled(memory, BLOCKS, seed=2)
    content = memory.take(source)
    for blocks, turn in ((3, ONE_SHOT), (BLOCKS, CHAT)):
        saved = store.save("s", tokens[: blocks * layout.block_tokens], source, turn).result(WAIT_S)
        assert saved is not None and not saved.reason
    match = store.match(tokens)
    assert match.blocks == BLOCKS
    assert [match.tokens_on(medium) for medium in (Medium.SSD, Medium.DRAM)] == [
        3 * layout.block_tokens,
        2 * layout.block_tokens,
    ]
    memory.fill(seed=3)
    before = memory.snapshot()
    target = shuffled(memory, BLOCKS, seed=4)
    target[np.random.default_rng(5).permutation(BLOCKS * per_block)[:holes]] = -1
    wanted = memory.with_pages(before, target, content)
    assert not memory.is_equal(wanted)
    with store.lease(match) as lease:
        restore = store.restore(lease, target)
        assert all(restore.wait_layer(layer, verified=True) for layer in range(store.geometry.layer_count))
        result = restore.result()
    assert (result.blocks, result.tokens, result.reason) == (BLOCKS, BLOCKS * layout.block_tokens, "")
    assert memory.is_equal(wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_restores_every_byte_and_touches_no_other(layout: Layout, device: str, tmp_path: Path) -> None:
    memory = Memory(layout, device)
    with open_over(memory, tmp_path, io=one_piece_slots(memory)) as store:
        round_trip(memory, store, holes=2)
        check(store)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[12], LAYOUTS[24]], ids=lambda layout: layout.name)
@pytest.mark.parametrize("kind", ["lanes", "segments"])
@pytest.mark.parametrize("verify", ["full", "off"])
def test_restores_with_large_slots_in_either_order_of_bytes(
    layout: Layout, device: str, kind: str, verify: str, tmp_path: Path
) -> None:
    memory = Memory(layout, device)
    with open_over(memory, tmp_path, io={"verify": verify}, layout={"kind": kind}) as store:
        round_trip(memory, store, holes=0)
        check(store)


def test_page_table_may_be_a_list_or_a_tensor_and_longer_than_needed(tmp_path: Path) -> None:
    memory = Memory(apart("plain", BF16, 4, 8))
    with open_over(memory, tmp_path) as store:
        tokens = make_tokens("a", 2)
        pages = list(range(12))
        for table in (pages, torch.tensor(pages), torch.tensor(pages, dtype=torch.int32), np.array(pages, np.uint16)):
            assert store.save("s", tokens, table).published(WAIT_S)
            with store.lease(store.match(tokens)) as lease:
                assert store.restore(lease, table).result().blocks == 2


@pytest.mark.parametrize("change", ["dtype", "page", "order", "layers", "name"])
def test_another_geometry_has_other_keys(change: str) -> None:
    base = PagedKV.of_layers([torch.zeros(8, 4, 2, 16, dtype=BF16)] * 2, page_tokens=4)
    plain = torch.zeros(8, 4, 2, 16, dtype=BF16)
    other = {
        "dtype": PagedKV.of_layers([plain.view(FP16)] * 2, page_tokens=4),
        "page": PagedKV.of_layers([plain.view(16, 2, 2, 16)] * 2, page_tokens=2),
        "order": PagedKV.of_layers([torch.zeros(8, 2, 4, 16, dtype=BF16).transpose(1, 2)] * 2, page_tokens=4),
        "layers": PagedKV.of_layers([plain] * 3, page_tokens=4),
        "name": PagedKV.of_layers([plain] * 2, page_tokens=4, names=["latent"]),
    }[change]
    same = PagedKV.of_layers([torch.ones(30, 4, 2, 16, dtype=BF16)] * 2, page_tokens=4)
    assert base.geometry(8).fingerprint() == same.geometry(8).fingerprint()
    assert base.geometry(8).fingerprint() != other.geometry(8).fingerprint()


def test_pieces_are_padded_to_what_direct_io_takes() -> None:
    for layout in LAYOUTS:
        geometry = Memory(layout).kv.geometry(layout.block_tokens)
        for layer in range(geometry.layer_count):
            assert geometry.piece_bytes(layer) % DIRECT_BYTES == 0
            assert geometry.piece_bytes(layer) >= align_up(geometry.payload_bytes(layer), 4)
