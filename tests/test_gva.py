"""Addresses: both forms of the codec agree, round-trip, and refuse every field that is out of range."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake.errors import AddressError
from flatcake.gva import (
    GVA_LIMIT,
    NODE_LIMIT,
    OFFSET_BYTES_LIMIT,
    Address,
    Medium,
    decode,
    decode_array,
    encode,
    encode_array,
)

ADDRESSES = st.tuples(
    st.sampled_from(Medium), st.integers(0, NODE_LIMIT - 1), st.integers(0, OFFSET_BYTES_LIMIT - 1)
).map(lambda fields: Address(*fields))

BAD_FIELDS = [
    ("medium", (2, 0, 0)),
    ("medium", (15, 0, 0)),
    ("medium", (16, 0, 0)),
    ("medium", (-1, 0, 0)),
    ("medium", (0.0, 0, 0)),
    ("node", (0, 4096, 0)),
    ("node", (0, -1, 0)),
    ("node", (0, 1.0, 0)),
    ("node", (0, True, 0)),
    ("node", (0, "1", 0)),
    ("offset_bytes", (0, 0, 2**48)),
    ("offset_bytes", (0, 0, 2**80)),
    ("offset_bytes", (0, 0, -1)),
    ("offset_bytes", (0, 0, 4096.0)),
    ("offset_bytes", (0, 0, None)),
]


def test_encode_puts_fields_where_the_design_says():
    assert encode(Medium.DRAM, 0, 0) == 0
    assert encode(Medium.SSD, 0, 0) == 1 << 60
    assert encode(Medium.SSD, 0xABC, 0x123456789000) == 0x1ABC_1234_5678_9000
    assert encode(np.uint8(1), np.int32(3), np.uint64(4096)) == (1 << 60) | (3 << 48) | 4096


@given(ADDRESSES)
def test_decode_inverts_encode(address):
    gva = encode(*address)
    assert decode(gva) == address
    assert isinstance(decode(gva).medium, Medium)
    assert (gva < 2**60) == (address.medium is Medium.DRAM)
    assert gva < GVA_LIMIT


@given(st.integers(0, 2**64 - 1))
def test_decode_accepts_exactly_what_encode_makes(gva):
    if gva < GVA_LIMIT:
        assert encode(*decode(gva)) == gva
    else:
        with pytest.raises(AddressError, match="gva"):
            decode(gva)
        with pytest.raises(AddressError, match="gva"):
            decode_array(np.array([0, gva], np.uint64))


@given(st.lists(ADDRESSES, max_size=30))
def test_arrays_agree_with_scalars(addresses):
    columns = [[int(address[field]) for address in addresses] for field in range(3)]
    gvas = encode_array(*columns)
    assert gvas.dtype == np.uint64
    assert gvas.tolist() == [encode(*address) for address in addresses]
    media, nodes, offsets = decode_array(gvas)
    assert (media.dtype, nodes.dtype, offsets.dtype) == (np.uint8, np.uint16, np.int64)
    assert list(zip(media.tolist(), nodes.tolist(), offsets.tolist(), strict=True)) == addresses


def test_encode_array_spreads_one_medium_and_node_over_all_offsets():
    gvas = encode_array(Medium.SSD, 7, np.arange(3, dtype=np.int32) * 4096)
    assert gvas.tolist() == [encode(Medium.SSD, 7, offset) for offset in (0, 4096, 8192)]
    assert encode_array(Medium.SSD, 7, []).shape == (0,)
    assert encode_array(Medium.SSD, 7, 4096).shape == ()


def test_encode_array_leaves_its_arguments_alone():
    offsets = np.arange(4, dtype=np.uint64)
    gvas = encode_array(0, 0, offsets)
    gvas += np.uint64(1)
    assert offsets.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("name", "fields"), BAD_FIELDS)
def test_encode_refuses_and_names_the_field(name, fields):
    with pytest.raises(AddressError, match=f"{name}="):
        encode(*fields)


@pytest.mark.parametrize(("name", "fields"), BAD_FIELDS)
@pytest.mark.parametrize("beside_good_ones", [False, True])
def test_encode_array_refuses_and_names_the_field(name, fields, beside_good_ones):
    columns = [[field] for field in fields]
    if beside_good_ones and not isinstance(fields[1], bool):
        columns = [[0, 1, *column, 0] for column in columns]
    with pytest.raises(AddressError, match=name):
        encode_array(*columns)


@pytest.mark.parametrize("gva", [-1, 2**64, 1.5, None, False, "0", 2**64 - 1, 2**64 - 2, 2 << 60])
def test_decode_refuses_what_is_no_address(gva):
    with pytest.raises(AddressError, match="gva"):
        decode(gva)
    with pytest.raises(AddressError, match="gva"):
        decode_array([gva])


@pytest.mark.parametrize("ragged", [[[0], [0, 1]], {"a": 1}, object()])
def test_arrays_refuse_what_is_no_array(ragged):
    with pytest.raises(AddressError, match="offset_bytes"):
        encode_array(0, 0, ragged)


def test_encode_array_refuses_shapes_that_do_not_go_together():
    with pytest.raises(AddressError, match="broadcast"):
        encode_array([0, 1], 0, [0, 1, 2])
