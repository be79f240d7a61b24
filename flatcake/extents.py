"""Who owns which range of a medium: free ranges, extents, generations.  Paper §3.2.

Pure: offsets and numbers, no files.  A medium is an address space of equal files (the DRAM arena is one
file); an extent lies inside one file and belongs to one scope.

Differs from §3.2: the paper gives a session whole files.  Real traces are full of requests of a few MiB, so
an extent is a range of a file with room for exactly n blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sortedcontainers import SortedDict, SortedList

from flatcake.gva import Medium
from flatcake.layout import LaneTable


class FreeRanges:
    """Free byte ranges of one medium: best fit, coalescing, never across a file's end."""

    def __init__(self, *, size_bytes: int, file_bytes: int) -> None:
        assert file_bytes > 0 and size_bytes % file_bytes == 0, (size_bytes, file_bytes)
        self.size_bytes = size_bytes
        self.file_bytes = file_bytes
        self.free_bytes = 0
        self._by_start: SortedDict = SortedDict()
        self._by_size: SortedList = SortedList()
        for start in range(0, size_bytes, file_bytes):
            self._insert(start, file_bytes)

    @property
    def largest_bytes(self) -> int:
        """The longest range that `allocate` can still give, in bytes."""
        return int(self._by_size[-1][0]) if self._by_size else 0

    @property
    def range_count(self) -> int:
        return len(self._by_start)

    def allocate(self, size_bytes: int) -> int | None:
        """Take the smallest range that fits; returns its offset, or None.  Cost: O(log n)."""
        assert size_bytes > 0, size_bytes
        at = self._by_size.bisect_left((size_bytes, -1))
        if at == len(self._by_size):
            return None
        found_bytes, start = self._by_size[at]
        self._remove(start, found_bytes)
        if found_bytes > size_bytes:
            self._insert(start + size_bytes, found_bytes - size_bytes)
        return int(start)

    def take(self, taken: Sequence[tuple[int, int]]) -> None:
        """Take many ranges at once while nothing is taken yet: (start, size) in order, disjoint, inside files."""
        assert self.free_bytes == self.size_bytes
        gaps, at = [], 0
        for start, size_bytes in (*taken, (self.size_bytes, 0)):
            assert at <= start, f"range {start}+{size_bytes} is taken twice"
            while at < start:
                end = min(start, (at // self.file_bytes + 1) * self.file_bytes)
                gaps.append((at, end - at))
                at = end
            at = start + size_bytes
        self._by_start = SortedDict(gaps)
        self._by_size = SortedList((size, start) for start, size in gaps)
        self.free_bytes = sum(size for _, size in gaps)

    def free(self, start: int, size_bytes: int) -> None:
        """Give a range back and join it with its free neighbours in the same file.  Cost: O(log n)."""
        end = start + size_bytes
        at = self._by_start.bisect_left(start)
        if at < len(self._by_start):
            next_start, next_bytes = self._by_start.peekitem(at)
            assert end <= next_start, f"range {start}+{size_bytes} is free already"
            if next_start == end and end % self.file_bytes:
                self._remove(next_start, next_bytes)
                end += next_bytes
        if at:
            before_start, before_bytes = self._by_start.peekitem(at - 1)
            assert before_start + before_bytes <= start, f"range {start}+{size_bytes} is free already"
            if before_start + before_bytes == start and start % self.file_bytes:
                self._remove(before_start, before_bytes)
                start = before_start
        self._insert(start, end - start)

    def check(self) -> None:
        """Assert: sorted, disjoint, coalesced, inside files, and counted right."""
        end_before = -1
        for start, size in self._by_start.items():
            assert size > 0 and start // self.file_bytes == (start + size - 1) // self.file_bytes
            assert start > end_before or (start == end_before and start % self.file_bytes == 0)
            end_before = start + size
        assert list(self._by_size) == sorted((size, start) for start, size in self._by_start.items())
        assert self.free_bytes == sum(self._by_start.values())

    def _insert(self, start: int, size_bytes: int) -> None:
        self._by_start[start] = size_bytes
        self._by_size.add((size_bytes, start))
        self.free_bytes += size_bytes

    def _remove(self, start: int, size_bytes: int) -> None:
        del self._by_start[start]
        self._by_size.remove((size_bytes, start))
        self.free_bytes -= size_bytes


@dataclass(slots=True, eq=False)
class Extent:
    """A range of a medium with room for `room_blocks`, of which `used_blocks` are taken."""

    medium: Medium
    base_bytes: int
    room_blocks: int
    generation: int
    scope_id: int
    used_blocks: int = field(default=0)
    holes: dict[int, int] = field(default_factory=dict)
    """Slots that were given back while others followed them: end to first."""
    size_bytes: int = field(default=0)
    """Of an extent of another geometry; 0: the table's."""

    @property
    def free_blocks(self) -> int:
        return self.room_blocks - self.used_blocks


class ExtentTable:
    """All extents of one medium, by address."""

    def __init__(self, medium: Medium, ranges: FreeRanges, lanes: LaneTable) -> None:
        self.medium = medium
        self.ranges = ranges
        self.lanes = lanes
        self.used_bytes = 0
        self.shrunk_count = 0
        """Extents that got less room than asked for, because the medium was fragmented."""
        self._by_base: SortedDict = SortedDict()

    def __len__(self) -> int:
        return len(self._by_base)

    def room_left(self) -> int:
        """Blocks that a single new extent could hold now."""
        return self.lanes.room_blocks(self.ranges.largest_bytes)

    def allocate(self, room_blocks: int, *, scope_id: int, generation: int) -> Extent | None:
        """Make an extent with room for `room_blocks`, or for fewer if no free range is that long.

        Returns:
            The extent, or None when not even one block fits.  Cost: O(log n).
        """
        room, size_bytes = room_blocks, self.lanes.extent_bytes(room_blocks)
        if room < 1 or size_bytes > self.ranges.largest_bytes:
            room = min(room, self.room_left())
            if room < 1:
                return None
            self.shrunk_count += 1
            size_bytes = self.lanes.extent_bytes(room)
        base = self.ranges.allocate(size_bytes)
        assert base is not None
        extent = Extent(self.medium, base, room, generation, scope_id)
        self._by_base[base] = extent
        self.used_bytes += size_bytes
        return extent

    def restore(self, extents: Sequence[Extent]) -> None:
        """Put extents of an earlier run in their places, while there are none; disjoint, inside files."""
        assert not self._by_base
        self._by_base.update((extent.base_bytes, extent) for extent in extents)
        spans = [(base, self.size_of(extent)) for base, extent in self._by_base.items()]
        self.ranges.take(spans)
        self.used_bytes = sum(size_bytes for _, size_bytes in spans)

    def free(self, extent: Extent) -> None:
        """Give an extent's range back; its generation is never used again."""
        assert self._by_base.pop(extent.base_bytes) is extent
        size_bytes = self.size_of(extent)
        self.ranges.free(extent.base_bytes, size_bytes)
        self.used_bytes -= size_bytes

    def size_of(self, extent: Extent) -> int:
        """Bytes that an extent takes."""
        return extent.size_bytes or self.lanes.extent_bytes(extent.room_blocks)

    def at(self, offset_bytes: int) -> Extent | None:
        """The extent that holds the byte at `offset_bytes`, or None.  Cost: O(log n)."""
        at = self._by_base.bisect_right(offset_bytes) - 1
        if at < 0:
            return None
        extent: Extent = self._by_base.peekitem(at)[1]
        end = extent.base_bytes + self.size_of(extent)
        return extent if offset_bytes < end else None

    def piece_offset(self, extent: Extent, slot: int) -> int:
        """Offset of the layer-0 piece of block `slot` of an extent: the GVA's offset field."""
        first = extent.base_bytes + self.lanes.first_piece_offset(extent.room_blocks)
        return first + slot * int(self.lanes.piece_bytes[0])

    def slot_of(self, extent: Extent, offset_bytes: int) -> int:
        """Inverse of `piece_offset`."""
        first = self.piece_offset(extent, 0)
        slot, rest = divmod(offset_bytes - first, int(self.lanes.piece_bytes[0]))
        assert rest == 0 and 0 <= slot < extent.room_blocks, (offset_bytes, extent)
        return slot

    def check(self) -> None:
        """Assert: extents and free ranges tile the medium, and usage equals a recount."""
        self.ranges.check()
        spans = [(base, self.size_of(extent)) for base, extent in self._by_base.items()]
        assert self.used_bytes == sum(size for _, size in spans)
        assert self.used_bytes + self.ranges.free_bytes == self.ranges.size_bytes
        for (base, size), (next_base, _) in pairwise(spans):
            assert base + size <= next_base
        for extent in self._by_base.values():
            assert 0 <= extent.used_blocks <= extent.room_blocks
