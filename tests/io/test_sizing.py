"""How the window is cut: it holds what it must, and never more than it may."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake.config import IOConfig
from flatcake.errors import ConfigError
from flatcake.io.sizing import RING_BYTES, size_ring, size_window
from flatcake.layout import LaneTable
from flatcake.units import DIRECT_BYTES, KiB, MiB
from tests.builders import make_geometry


def lanes(piece_bytes: int) -> LaneTable:
    return LaneTable.of(make_geometry(piece_bytes, 4 * KiB))


@given(
    pages=st.integers(1, 5000),
    window=st.integers(1 * MiB, 512 * MiB),
    slots_min=st.integers(2, 16),
    save_slots=st.integers(1, 4),
    is_host=st.booleans(),
)
def test_size_window_fits_or_refuses(pages: int, window: int, slots_min: int, save_slots: int, is_host: bool) -> None:
    settings = IOConfig(window_bytes_max=window, slots_min=slots_min, save_slots=save_slots, read_bytes_max=32 * MiB)
    piece_bytes = pages * DIRECT_BYTES
    try:
        size = size_window(settings, lanes(piece_bytes), is_host=is_host)
    except ConfigError:
        assert piece_bytes * (slots_min + save_slots) > window
        return
    assert size.slot_bytes >= piece_bytes and size.slot_bytes % DIRECT_BYTES == 0
    assert size.slots >= slots_min and size.save_slots == save_slots
    assert (size.slots + size.save_slots) * size.slot_bytes <= window


def test_size_window_keeps_a_given_slot_size() -> None:
    settings = IOConfig(slot_bytes=64 * KiB, window_bytes_max=64 * MiB)
    assert size_window(settings, lanes(8 * KiB), is_host=False).slot_bytes == 64 * KiB


def test_size_window_refuses_reads_smaller_than_a_piece() -> None:
    with pytest.raises(ConfigError, match="a piece has 8192 bytes, read_bytes_max=4096: expected room for one piece"):
        size_window(IOConfig(read_bytes_max=4 * KiB), lanes(8 * KiB), is_host=True)


def test_size_window_refuses_slots_smaller_than_a_piece() -> None:
    settings = IOConfig(slot_bytes=4 * KiB)
    with pytest.raises(ConfigError, match="a piece has 8192 bytes.*raise window_bytes_max or slot_bytes"):
        size_window(settings, lanes(8 * KiB), is_host=True)


@pytest.mark.parametrize(
    ("slot_kib", "reads", "writes"),
    [(24 << 10, 4, 2), (12 << 10, 8, 4), (32 << 10, 3, 2), (100 << 10, 2, 1), (4, 32, 16)],
)
def test_the_ring_has_buffers_as_large_as_slots_and_stays_small(slot_kib: int, reads: int, writes: int) -> None:
    size = size_ring(slot_kib << 10)
    assert (size.buffer_bytes, size.reads, size.writes) == (slot_kib << 10, reads, writes)
    assert reads * size.buffer_bytes <= RING_BYTES or reads == 2
