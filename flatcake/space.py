"""Room on the media: slots reserved for a turn, scopes reclaimed when a medium fills.  Paper §3.2.

Pure.  Whole scopes go, oldest last use first, never one that is pinned, and never by moving bytes.  DRAM
drops only scopes that have been idle for a while; new writes then spill to SSD.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatcake.extents import Extent, ExtentTable
from flatcake.gva import Medium, encode_array
from flatcake.index import Index
from flatcake.layout import Growth
from flatcake.scopes import Scope, ScopeTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermarks:
    """When scopes are reclaimed, and how far."""

    high: float
    """Fraction of a medium above which reclaim starts."""
    low: float
    """Fraction down to which it goes."""
    dram_idle_ns_max: int
    """A DRAM scope is dropped only when it was last used longer ago than this."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Consecutive slots of one extent, reserved or published for one scope."""

    scope: Scope
    extent: Extent
    first: int
    count: int


class Space:
    """Extents of all media, the scopes that own them, and the index entries that point at them."""

    def __init__(self, tables: Mapping[Medium, ExtentTable], index: Index, growth: Growth, marks: Watermarks) -> None:
        self.tables = dict(tables)
        self.index = index
        self.scopes = ScopeTable()
        self.draining: list[Scope] = []
        """Withdrawn scopes whose extents are still being read or written."""
        self.reclaimed_scopes = 0
        self.reclaimed_blocks = 0
        self._growth = growth
        self._marks = marks
        self._generation = 0

    def gvas(self, slots: Slots) -> npt.NDArray[np.uint64]:
        """uint64 [count]: the addresses of reserved slots."""
        table = self.tables[slots.extent.medium]
        return encode_array(int(slots.extent.medium), 0, table.piece_offsets(slots.extent, slots.first, slots.count))

    def reserve(self, scope: Scope, blocks: int, now_ns: int) -> list[Slots] | None:
        """Take slots for `blocks` more blocks of a scope: the tail of its last extent, then new extents.

        Returns:
            Slots in token order, or None, with nothing taken, when the medium has no room even after reclaim.
        """
        self._make_room(scope.medium, blocks, now_ns)
        taken: list[Slots] = []
        while blocks:
            slots = self._take(scope, blocks)
            if slots is None:
                if self._reclaim_one(scope.medium, now_ns):
                    continue
                self.give_back(taken)
                return None
            taken.append(slots)
            blocks -= slots.count
        return taken

    def give_back(self, taken: list[Slots]) -> None:
        """Undo `reserve`, last slots first; slots that others follow stay lost until their scope goes."""
        for slots in reversed(taken):
            extent, scope = slots.extent, slots.scope
            if extent.used_blocks == slots.first + slots.count:
                extent.used_blocks = slots.first
            if not extent.used_blocks and not scope.withdrawn:
                scope.extents.remove(extent)
                self.tables[extent.medium].free(extent)

    def pin(self, scope: Scope) -> None:
        scope.pins += 1

    def unpin(self, scope: Scope) -> None:
        """Drop a pin; the last one frees a withdrawn scope's extents, or an empty scope."""
        assert scope.pins > 0
        scope.pins -= 1
        if scope.pins:
            return
        if scope.withdrawn:
            self.draining.remove(scope)
            self._free(scope)
        elif not scope.extents:
            self.scopes.remove(scope)

    def withdraw(self, scope: Scope) -> None:
        """Take a scope's keys out of the index; its extents are freed now, or with the last pin."""
        for keys, gvas in zip(scope.keys, scope.gvas, strict=True):
            self.index.withdraw(keys, gvas)
        self.scopes.remove(scope)
        if scope.pins:
            self.draining.append(scope)
        else:
            self._free(scope)

    def available_blocks(self, medium: Medium, now_ns: int) -> int:
        """About how many blocks fit below the high watermark, idle DRAM scopes counted as room."""
        table = self.tables[medium]
        free_bytes = int(table.ranges.size_bytes * self._marks.high) - table.used_bytes
        for scope in self.scopes.oldest(medium):
            if not self._may_drop(scope, now_ns):
                break
            free_bytes += sum(table.lanes.extent_bytes(extent.room_blocks) for extent in scope.extents)
        return table.lanes.room_blocks(max(0, free_bytes))

    def check(self) -> None:
        """Assert: every extent has one owner, usage equals a recount, no key points into free space."""
        self.scopes.check()
        owned = [e for scope in [*self.scopes, *self.draining] for e in scope.extents]
        for medium, table in self.tables.items():
            table.check()
            assert len(table) == sum(extent.medium is medium for extent in owned)
        for scope in self.scopes:
            assert scope.blocks <= scope.used_blocks
        assert all(scope.withdrawn and scope.pins for scope in self.draining)

    def _take(self, scope: Scope, blocks: int) -> Slots | None:
        last = scope.extents[-1] if scope.extents else None
        if last is None or not last.free_blocks:
            room = self._growth.next_room(min(blocks, self._growth.room_max), scope.used_blocks)
            self._generation += 1
            last = self.tables[scope.medium].allocate(room, scope_id=scope.scope_id, generation=self._generation)
            if last is None:
                return None
            scope.extents.append(last)
        count = min(blocks, last.free_blocks)
        slots = Slots(scope, last, last.used_blocks, count)
        last.used_blocks += count
        return slots

    def _make_room(self, medium: Medium, blocks: int, now_ns: int) -> None:
        table = self.tables[medium]
        need_bytes = blocks * table.lanes.block_bytes
        if table.used_bytes + need_bytes <= table.ranges.size_bytes * self._marks.high:
            return
        while table.used_bytes + need_bytes > table.ranges.size_bytes * self._marks.low:
            if not self._reclaim_one(medium, now_ns):
                return

    def _reclaim_one(self, medium: Medium, now_ns: int) -> bool:
        victim = next(self.scopes.oldest(medium), None)
        if victim is None or not self._may_drop(victim, now_ns):
            return False
        self.reclaimed_scopes += 1
        self.reclaimed_blocks += victim.blocks
        self.withdraw(victim)
        return True

    def _may_drop(self, scope: Scope, now_ns: int) -> bool:
        return scope.medium is not Medium.DRAM or now_ns - scope.last_use_ns > self._marks.dram_idle_ns_max

    def _free(self, scope: Scope) -> None:
        for extent in scope.extents:
            self.tables[extent.medium].free(extent)
        scope.extents.clear()
