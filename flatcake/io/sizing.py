"""How the window is cut, by a rule.

Pure.  A slot holds at least one piece.  On a GPU slots are 24 MiB: at PCIe's rate that is half a millisecond,
more than Python needs for a tile.  On the host they are 8 MiB, and 12 of them: reads end in bursts, and while
some slots are scattered the others keep the disk busy.  In front of a GPU, host memory is a ring of such slots.
"""

from dataclasses import dataclass

from flatcake.config import IOConfig
from flatcake.errors import ConfigError
from flatcake.layout import LaneTable
from flatcake.units import DIRECT_BYTES, MiB, align_up

GPU_SLOT_BYTES = 24 * MiB
HOST_SLOT_BYTES = 8 * MiB
HOST_SLOTS = 12


@dataclass(frozen=True, slots=True)
class WindowSize:
    """Slots for restores and for saves, all of one size."""

    slots: int
    save_slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class RingSize:
    """How much host memory a staged engine may hold: a ring for each direction, of `buffer_bytes` each entry."""

    buffer_bytes: int
    """Largest batch; a multiple of 4 KiB."""
    reads: int
    """Batches that are read at once; more wait."""
    writes: int
    """Batches that are written at once; more wait."""

    @property
    def size_bytes(self) -> int:
        return (self.reads + self.writes) * self.buffer_bytes


RING_BYTES = 96 * MiB
"""Of reads: what stays in the last-level cache of a server's processor."""
RING_READS_MAX = 32


def size_ring(slot_bytes: int) -> RingSize:
    """Cut the ring: four buffers for reads and two for writes, where slots are 24 MiB."""
    reads = min(RING_READS_MAX, max(2, RING_BYTES // slot_bytes))
    return RingSize(slot_bytes, reads=reads, writes=-(-reads // 2))


def size_window(settings: IOConfig, lanes: LaneTable, *, is_host: bool) -> WindowSize:
    """Cut the window.

    Raises:
        ConfigError: One piece does not fit in a slot, or the slots do not fit in the window.
    """
    piece_bytes = lanes.piece_bytes_max
    fewest = settings.slots_min + settings.save_slots
    preferred = HOST_SLOT_BYTES if is_host else GPU_SLOT_BYTES
    share = settings.window_bytes_max // fewest // DIRECT_BYTES * DIRECT_BYTES
    slot_bytes = settings.slot_bytes or max(align_up(piece_bytes, DIRECT_BYTES), min(preferred, share))
    if settings.read_bytes_max < piece_bytes:
        raise ConfigError(
            f"a piece has {piece_bytes} bytes, read_bytes_max={settings.read_bytes_max}: expected room for one piece; "
            "raise read_bytes_max, or use a smaller block_tokens"
        )
    if slot_bytes < piece_bytes or fewest * slot_bytes > settings.window_bytes_max:
        raise ConfigError(
            f"a piece has {piece_bytes} bytes, the window at most {settings.window_bytes_max} in {fewest} slots: "
            "expected room for one piece in each; raise window_bytes_max or slot_bytes, or use a smaller block_tokens"
        )
    slots = settings.window_bytes_max // slot_bytes - settings.save_slots
    if is_host:
        slots = min(slots, max(HOST_SLOTS, settings.slots_min))
    return WindowSize(slots, settings.save_slots, slot_bytes)
