"""Checksum records: one lane at the head of every extent, kept with the rank that wrote the bytes.

A record says which generation and geometry an extent holds and, per block and layer, the checksum of the
piece.  It is written after the pieces and before the report, read when a restore first needs it, and kept in
memory up to a bound.  Only arrays and parsing here; `io.restore` and `io.save` move the bytes.  Belongs to
the pump's thread.

    header (64 bytes): magic, format version, kind of sum, generation, layout digest, room, layers
    then uint64 [room, layers]: a block's sums are together, so that a turn appends one range
"""

import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from flatcake.io.engine import Buffer
from flatcake.io.seam import ByteArray
from flatcake.keys import FORMAT_VERSION
from flatcake.layout import RECORD_BYTES_PER_PIECE, RECORD_HEADER_BYTES, LaneTable
from flatcake.messages import BASE, GENERATION, MEDIUM, ROOM, Runs
from flatcake.units import DIRECT_BYTES, align_up

_MAGIC = b"FCEXTENT"
_HEADER = struct.Struct("<8sIIQQQQ")
SUM_KIND_NONE = 0


class ExtentRef(NamedTuple):
    """An extent as a plan names it."""

    medium: int
    base_bytes: int
    room_blocks: int
    generation: int


def extents_of(runs: Runs) -> list[ExtentRef]:
    """Each extent of a plan once."""
    rows = runs.table[:, [MEDIUM, BASE, ROOM, GENERATION]].tolist()
    return [ExtentRef(*row) for row in sorted(set(map(tuple, rows)))]


@dataclass(eq=False, slots=True)
class Record:
    """The record of one extent, as it lies on the medium."""

    ref: ExtentRef
    raw: ByteArray
    """uint8 [record bytes], aligned for direct I/O."""
    sums: npt.NDArray[np.uint64]
    """uint64 [room, layers]: a view of `raw`."""
    users: int = 0
    """Restores and saves that need it in memory."""
    is_stored: bool = False
    """Whether its header is on the medium."""
    buffer: Buffer = field(init=False)
    """`raw`, for engines."""

    def __post_init__(self) -> None:
        self.buffer = Buffer(torch.from_numpy(self.raw), self.raw)


class RecordBook:
    """Records in memory, by extent; the least recently used go first."""

    def __init__(self, lanes: LaneTable, layout: int, *, sum_kind: int, bytes_max: int) -> None:
        self._lanes = lanes
        self._layout = layout
        self._sum_kind = sum_kind
        self._bytes_max = bytes_max
        self._records: OrderedDict[tuple[int, int], Record] = OrderedDict()
        self._generations: dict[tuple[int, int], int] = {}
        self.size_bytes = 0

    def blank(self, ref: ExtentRef) -> Record:
        """A record with a valid header and no sums; what was known of the extent's last tenant is dropped."""
        record = self._new(ref)
        _HEADER.pack_into(record.raw.data, 0, *self._header(ref))
        self._keep(record)
        return record

    def empty(self, ref: ExtentRef) -> Record:
        """A record to read into; it counts only after `accept`."""
        return self._new(ref)

    def accept(self, record: Record) -> Record | None:
        """Check the header of a record that has been read, and keep it; None when it is not that extent's.

        Returns:
            The record to use: one that came into memory meanwhile may hold newer sums, and stays.
        """
        if _HEADER.unpack_from(record.raw.data) != self._header(record.ref):
            return None
        found = self.find(record.ref)
        if found is None:
            record.is_stored = True
            self._keep(record)
        return found or record

    def find(self, ref: ExtentRef) -> Record | None:
        """The record of that generation of an extent, if it is in memory."""
        record = self._records.get((ref.medium, ref.base_bytes))
        if record is None or record.ref != ref:
            return None
        self._records.move_to_end((ref.medium, ref.base_bytes))
        self._trim()
        return record

    def is_stale(self, ref: ExtentRef) -> bool:
        """Whether this rank has seen a later tenant of the extent than the plan names."""
        return self._generations.get((ref.medium, ref.base_bytes), 0) > ref.generation

    def is_known(self, ref: ExtentRef) -> bool:
        """Whether a save to this generation of the extent has begun before."""
        return self._generations.get((ref.medium, ref.base_bytes)) == ref.generation

    def note_generation(self, ref: ExtentRef) -> None:
        """Remember that a save to this generation of the extent has begun."""
        self._generations[ref.medium, ref.base_bytes] = ref.generation

    def hold(self, record: Record) -> Record:
        record.users += 1
        return record

    def let_go(self, record: Record) -> None:
        assert record.users > 0
        record.users -= 1
        self._trim()

    def dirty_range(self, ref: ExtentRef, first_slot: int, blocks: int) -> tuple[int, int]:
        """Offset and size, in the record, of the aligned range that holds the sums of some slots."""
        row_bytes = self._lanes.layer_count * RECORD_BYTES_PER_PIECE
        start = (RECORD_HEADER_BYTES + first_slot * row_bytes) // DIRECT_BYTES * DIRECT_BYTES
        if first_slot == 0:
            start = 0
        end = align_up(RECORD_HEADER_BYTES + (first_slot + blocks) * row_bytes, DIRECT_BYTES)
        return start, end - start

    def check(self) -> None:
        """Assert that sizes add up and stay in their bound, apart from records in use and the newest one."""
        assert self.size_bytes == sum(record.raw.nbytes for record in self._records.values())
        newest = next(reversed(self._records), None)
        for key, record in self._records.items():
            assert record.users >= 0 and key == (record.ref.medium, record.ref.base_bytes)
            assert record.users or key == newest or self.size_bytes <= self._bytes_max

    def _header(self, ref: ExtentRef) -> tuple[object, ...]:
        layers = self._lanes.layer_count
        return (_MAGIC, FORMAT_VERSION, self._sum_kind, ref.generation, self._layout, ref.room_blocks, layers)

    def _new(self, ref: ExtentRef) -> Record:
        size_bytes = self._lanes.record_bytes(ref.room_blocks)
        raw = aligned_bytes(size_bytes)
        layers = self._lanes.layer_count
        table = raw[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + ref.room_blocks * layers * RECORD_BYTES_PER_PIECE]
        return Record(ref, raw, table.view(np.uint64).reshape(ref.room_blocks, layers))

    def _keep(self, record: Record) -> None:
        key = (record.ref.medium, record.ref.base_bytes)
        before = self._records.pop(key, None)
        self.size_bytes += record.raw.nbytes - (before.raw.nbytes if before else 0)
        self._records[key] = record
        self._trim()

    def _trim(self) -> None:
        if self.size_bytes <= self._bytes_max:
            return
        newest = next(reversed(self._records), None)
        for key, record in list(self._records.items()):
            if self.size_bytes <= self._bytes_max:
                return
            if not record.users and key != newest:
                del self._records[key]
                self.size_bytes -= record.raw.nbytes


def aligned_bytes(size_bytes: int) -> ByteArray:
    """Zeroed host bytes at an address that direct I/O accepts."""
    memory = np.zeros(size_bytes + DIRECT_BYTES, np.uint8)
    skip = -int(memory.ctypes.data) % DIRECT_BYTES
    return memory[skip : skip + size_bytes]
