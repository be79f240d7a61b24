"""Room on the media: slots reserved for a turn, scopes reclaimed when a medium fills.  Paper §3.2.

Pure.  Whole scopes go, oldest last use first, never one that is pinned, and never by moving bytes.  DRAM
drops only scopes that have been idle for a while; new writes then spill to SSD.  Softly pinned scopes go last.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatcake.extents import Extent, ExtentTable
from flatcake.gva import Medium, decode_array, encode
from flatcake.index import Index
from flatcake.layout import Growth
from flatcake.scopes import Scope, ScopeTable
from flatcake.turnlog import Manifest, NoManifest
from flatcake.wear import WriteBudget

GvaArray = npt.NDArray[np.uint64]


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
        self.reclaimed_pinned_scopes = 0
        """Those that a caller had softly pinned: nothing else was left."""
        self.generation = 0
        """Of the newest extent."""
        self.manifest: Manifest = NoManifest()
        self.budget = WriteBudget()
        """What saves may still write to SSD."""
        self._growth = growth
        self._marks = marks

    def gvas(self, slots: Slots) -> GvaArray:
        """uint64 [count]: the addresses of reserved slots."""
        medium, table = slots.extent.medium, self.tables[slots.extent.medium]
        first, piece_bytes = table.piece_offset(slots.extent, slots.first), int(table.lanes.piece_bytes[0])
        span_bytes = (slots.count - 1) * piece_bytes
        last = encode(medium, 0, first + span_bytes)
        return np.arange(last - span_bytes, last + 1, piece_bytes, dtype=np.uint64)

    def reserve(self, scope: Scope, blocks: int, now_ns: int) -> list[Slots] | None:
        """Take slots for `blocks` more blocks of a scope: the tail of its last extent, then new extents.

        Returns:
            Slots in token order, or None, with nothing taken, when the medium has no room even after reclaim.
        """
        if not self._make_room(scope, blocks, now_ns):
            return None
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
        """Undo `reserve`, last slots first; slots that others follow are lost until those are given back too.

        Or until their scope goes: when it is reclaimed, or with its last pin if none of its blocks was ever published.
        """
        for slots in reversed(taken):
            extent, scope = slots.extent, slots.scope
            extent.holes[slots.first + slots.count] = slots.first
            while extent.used_blocks in extent.holes:
                extent.used_blocks = extent.holes.pop(extent.used_blocks)
            if not extent.used_blocks and not scope.withdrawn:
                scope.extents.remove(extent)
                self.tables[extent.medium].free(extent)

    def pin(self, scope: Scope) -> None:
        scope.pins += 1

    def unpin(self, scope: Scope) -> None:
        """Drop a pin; the last one frees a withdrawn scope's extents, or a scope with nothing published."""
        assert scope.pins > 0
        scope.pins -= 1
        if scope.pins:
            return
        if scope.withdrawn:
            self.draining.remove(scope)
            self._free(scope)
        elif not scope.keys:
            self.withdraw(scope)

    def withdraw(self, scope: Scope) -> int:
        """Take a scope's keys out of the index; its extents are freed now, or with the last pin.

        The manifest forgets it before anything else is committed, so before its bytes are another's.

        Returns:
            Blocks that are no longer visible.
        """
        if scope.medium is Medium.SSD:
            self.manifest.drop_scope(scope.scope_id)
        blocks = sum(self.index.withdraw(keys, gvas) for keys, gvas in zip(scope.keys, scope.gvas, strict=True))
        self.scopes.remove(scope)
        if scope.pins:
            self.draining.append(scope)
        else:
            self._free(scope)
        return blocks

    def lose(self, medium: Medium) -> None:
        """The bytes of a medium are gone: its scopes are withdrawn, and no restore may begin that reads them."""
        for scope in [scope for scope in [*self.scopes, *self.draining] if scope.medium is medium]:
            scope.is_lost = True
            if not scope.withdrawn:
                self.withdraw(scope)

    def scope_bytes(self, scope: Scope) -> int:
        """Bytes of a scope's extents."""
        table = self.tables[scope.medium]
        return sum(table.size_of(extent) for extent in scope.extents)

    def available_blocks(self, medium: Medium, now_ns: int, blocks_max: int) -> int:
        """About how many blocks fit below the high watermark, idle DRAM scopes counted as room.

        Counting stops once `blocks_max` fit, so that the cost does not grow with the number of idle scopes.
        """
        table = self.tables[medium]
        enough_bytes = table.lanes.extent_bytes(blocks_max)
        free_bytes = int(table.ranges.size_bytes * self._marks.high) - table.used_bytes
        if free_bytes >= enough_bytes:
            return blocks_max
        for scope in self.scopes.victims(medium, now_ns):
            if free_bytes >= enough_bytes or not self._may_drop(scope, now_ns):
                break
            free_bytes += self.scope_bytes(scope)
        return min(blocks_max, table.lanes.room_blocks(max(0, free_bytes)))

    def check(self) -> None:
        """Assert: every extent has one owner, usage equals a recount, no key points into free space."""
        self.scopes.check()
        owned = [(scope, extent) for scope in [*self.scopes, *self.draining] for extent in scope.extents]
        assert len({extent.generation for _, extent in owned}) == len(owned)
        for scope, extent in owned:
            assert extent.scope_id == scope.scope_id and extent.medium is scope.medium
            assert extent.used_blocks or scope.withdrawn, "an extent that nothing uses"
            assert self.tables[extent.medium].at(extent.base_bytes) is extent
        assert sum(map(len, self.tables.values())) == len(owned), "an extent without a scope, or with two"
        for table in self.tables.values():
            table.check()
        live = 0
        for scope in self.scopes:
            assert scope.blocks <= scope.used_blocks and (scope.pins or scope.keys or scope.is_foreign)
            for keys, gvas in zip(scope.keys, scope.gvas, strict=True):
                live += int((self.index.lookup(keys) == gvas).sum())
                assert (decode_array(gvas)[0] == int(scope.medium)).all()
                for offset in decode_array(gvas)[2].tolist():
                    table = self.tables[scope.medium]
                    found = table.at(offset)
                    assert found in scope.extents and table.slot_of(found, offset) < found.used_blocks
        assert live == len(self.index), "a key is in the index and in no scope"
        assert all(scope.withdrawn and scope.pins for scope in self.draining)

    def _take(self, scope: Scope, blocks: int) -> Slots | None:
        last = scope.extents[-1] if scope.extents else None
        if last is None or not last.free_blocks:
            room = self._growth.next_room(blocks, scope.used_blocks)
            self.generation += 1
            last = self.tables[scope.medium].allocate(room, scope_id=scope.scope_id, generation=self.generation)
            if last is None:
                return None
            scope.extents.append(last)
        count = min(blocks, last.free_blocks)
        slots = Slots(scope, last, last.used_blocks, count)
        last.used_blocks += count
        return slots

    def _make_room(self, scope: Scope, blocks: int, now_ns: int) -> bool:
        """Reclaim down to the low watermark if `blocks` more would pass the high one, or overfill the index.

        Returns:
            False, with nothing reclaimed, when they would not fit even then.
        """
        table, marks = self.tables[scope.medium], self._marks
        size_bytes = table.ranges.size_bytes
        new = max(0, blocks - (scope.extents[-1].free_blocks if scope.extents else 0))
        used_bytes = table.used_bytes + new * table.lanes.block_bytes
        surplus = len(self.index) + blocks - self.index.entries_max
        if used_bytes <= size_bytes * marks.high and surplus <= 0:
            return True
        victims: list[Scope] = []
        for victim in self.scopes.victims(scope.medium, now_ns):
            if (used_bytes <= size_bytes * marks.low and surplus <= 0) or not self._may_drop(victim, now_ns):
                break
            victims.append(victim)
            used_bytes -= self.scope_bytes(victim)
            surplus -= victim.blocks
        if used_bytes > size_bytes or surplus > 0:
            return False
        for victim in victims:
            self._reclaim(victim, now_ns)
        return True

    def _reclaim_one(self, medium: Medium, now_ns: int) -> bool:
        victim = next(self.scopes.victims(medium, now_ns), None)
        if victim is None or not self._may_drop(victim, now_ns):
            return False
        self._reclaim(victim, now_ns)
        return True

    def _reclaim(self, victim: Scope, now_ns: int) -> None:
        self.reclaimed_scopes += 1
        self.reclaimed_pinned_scopes += victim.kept_until_ns > now_ns
        self.reclaimed_blocks += victim.blocks
        self.withdraw(victim)

    def _may_drop(self, scope: Scope, now_ns: int) -> bool:
        """DRAM keeps what is in use, since new writes can spill to SSD; without SSD it drops like any medium."""
        can_spill = scope.medium is Medium.DRAM and self.tables[Medium.SSD].ranges.size_bytes > 0
        is_idle = now_ns - scope.last_use_ns > self._marks.dram_idle_ns_max and scope.kept_until_ns <= now_ns
        return not can_spill or is_idle or scope.is_foreign

    def _free(self, scope: Scope) -> None:
        for extent in scope.extents:
            self.tables[extent.medium].free(extent)
        scope.extents.clear()
