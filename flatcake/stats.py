"""A snapshot of what a store did and holds: plain numbers, true ones.

Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flatcake.extents import ExtentTable


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumStats:
    """One medium."""

    io_path: str
    """Engine that moves its bytes, e.g. ``posix`` or ``kvikio-staged``; empty where the medium is left out."""
    size_bytes: int
    used_bytes: int
    """Bytes in extents."""
    payload_bytes: int
    """Bytes of visible blocks in them, with the padding of their pieces."""
    extents: int
    shrunk_extents: int
    """Extents that got less room than asked for, since the medium was fragmented."""
    free_ranges: int
    written_bytes: int = 0
    """Bytes written since the directory was made, as far as is known, or since open where nothing is kept."""
    foreign_bytes: int = 0
    """Bytes in extents of other identities; they are the first to be reclaimed."""

    @property
    def space_amplification(self) -> float:
        """Bytes in extents of this identity for each byte of visible blocks; 1.0 when empty."""
        return (self.used_bytes - self.foreign_bytes) / self.payload_bytes if self.payload_bytes else 1.0

    @classmethod
    def of(
        cls, table: ExtentTable, blocks: int, io_path: str, *, written_bytes: int = 0, foreign_bytes: int = 0
    ) -> "MediumStats":
        return cls(
            io_path=io_path,
            written_bytes=written_bytes,
            foreign_bytes=foreign_bytes,
            size_bytes=table.ranges.size_bytes,
            used_bytes=table.used_bytes,
            payload_bytes=blocks * table.lanes.block_bytes,
            extents=len(table),
            shrunk_extents=table.shrunk_count,
            free_ranges=table.ranges.range_count,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """A whole store."""

    io_path: str
    """How bytes reach the SSD."""
    io_reason: str
    """Why that engine was chosen."""
    media: Mapping[str, MediumStats]
    blocks: int
    """Visible blocks."""
    index_bytes: int
    window_bytes: int
    """Staging memory of the device, for restores and saves; constant."""
    leases: int
    plans: int
    """Restores and saves that are not settled yet."""
    draining_scopes: int
    ssd_write_budget_bytes: int | None
    """Bytes that saves may write to SSD now; None without a bound."""
    counts: Mapping[str, int]
    """Everything counted since open, by name: blocks delivered and saved per medium, bytes per I/O path, a
    reason for each refusal, drop and failure."""
