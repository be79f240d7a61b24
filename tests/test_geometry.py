import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake.errors import ShapeError
from flatcake.geometry import PART_ALIGN_BYTES, Component, Geometry
from flatcake.units import DIRECT_BYTES

components = st.lists(
    st.builds(Component, st.just("kv"), st.integers(1, 5000).map(lambda words: 4 * words)), min_size=1
)
geometries = st.builds(
    lambda pages, page_tokens, layers: Geometry(
        block_tokens=pages * page_tokens, page_tokens=page_tokens, layers=tuple(map(tuple, layers))
    ),
    st.integers(1, 16),
    st.integers(1, 256),
    st.lists(components, min_size=1, max_size=4),
)


@given(geometries)
def test_piece_holds_its_components_apart_aligned_and_in_order(geometry: Geometry) -> None:
    for layer, parts in enumerate(geometry.layers):
        taken = 0
        for part, offset in zip(parts, geometry.component_offsets(layer), strict=True):
            assert offset % PART_ALIGN_BYTES == 0 and taken <= offset < taken + PART_ALIGN_BYTES
            taken = offset + part.page_bytes * geometry.pages_per_block
        assert geometry.piece_bytes(layer) % DIRECT_BYTES == 0
        assert taken <= geometry.piece_bytes(layer) < taken + DIRECT_BYTES
        assert geometry.payload_bytes(layer) <= taken
    assert geometry.block_bytes == sum(map(geometry.piece_bytes, range(geometry.layer_count)))
    assert geometry.block_payload_bytes == sum(map(geometry.payload_bytes, range(geometry.layer_count)))


def test_geometry_of_known_models() -> None:
    gqa = Geometry(block_tokens=256, page_tokens=16, layers=((Component("kv", 16 * 8 * 128 * 2 * 2),),) * 32)
    assert gqa.piece_bytes(0) == gqa.payload_bytes(0) == 1 << 20 and gqa.pages_per_block == 16
    latent = Geometry(block_tokens=64, page_tokens=64, layers=((Component("mla", 64 * 656),),) * 43)
    assert latent.payload_bytes(0) == 41_984 and latent.piece_bytes(0) == 45_056


def test_fingerprint_depends_on_everything_that_changes_bytes() -> None:
    base = Geometry(block_tokens=32, page_tokens=16, layers=((Component("k", 64), Component("v", 64)),), dtype="bf16")
    others = [
        dataclasses.replace(base, block_tokens=48),
        dataclasses.replace(base, page_tokens=8),
        dataclasses.replace(base, dtype="fp16"),
        dataclasses.replace(base, layers=((Component("k", 64), Component("w", 64)),)),
        dataclasses.replace(base, layers=((Component("k", 64), Component("v", 68)),)),
        dataclasses.replace(base, layers=((Component("v", 64), Component("k", 64)),)),
        dataclasses.replace(base, layers=base.layers * 2),
        dataclasses.replace(base, layers=((Component("k", 64),), (Component("v", 64),))),
    ]
    prints = [geometry.fingerprint() for geometry in [base, *others]]
    assert len(set(prints)) == len(prints)
    assert base.fingerprint() == dataclasses.replace(base).fingerprint()


@pytest.mark.parametrize(("block_tokens", "page_tokens"), [(16, 0), (0, 16), (16, 32), (24, 16), (-16, 16), (16, -16)])
def test_geometry_refuses_blocks_that_are_no_whole_pages(block_tokens: int, page_tokens: int) -> None:
    with pytest.raises(ShapeError, match="whole number of pages"):
        Geometry(block_tokens=block_tokens, page_tokens=page_tokens, layers=((Component("kv", 64),),))


@pytest.mark.parametrize("page_bytes", [0, -4, 2, 6, 1023])
def test_geometry_refuses_odd_page_bytes(page_bytes: int) -> None:
    with pytest.raises(ShapeError, match=f"layer 1 v: {page_bytes} bytes a page; expected a multiple of 4"):
        Geometry(block_tokens=16, page_tokens=16, layers=((Component("k", 64),), (Component("v", page_bytes),)))


def test_geometry_refuses_no_layers_and_layers_without_components() -> None:
    for layers in ((), ((Component("kv", 64),), ())):
        with pytest.raises(ShapeError, match="at least one, each with a component"):
            Geometry(block_tokens=16, page_tokens=16, layers=layers)
