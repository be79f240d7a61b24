"""Which rows of a manifest fit together, into today's pool and into the index.

Pure.  Of two that contradict each other the later one stays; of two extents that overlap, the newer one.
Write path:  manifest -> [rowcheck] -> reopen -> index
"""

import itertools

import numpy as np

from flatcake.gva import OFFSET_BYTES_LIMIT, Medium
from flatcake.layout import LaneTable
from flatcake.manifest import (
    BASE_BYTES,
    COUNT,
    EXTENT_GENERATION,
    GENERATION_LIMIT,
    ROOM_BLOCKS,
    SLOT,
    Stored,
)
from flatcake.messages import Flags, Int64Array
from flatcake.space import Space
from flatcake.units import DIRECT_BYTES


class Rows:
    """The rows, and which of them are still good."""

    def __init__(self, space: Space, stored: Stored) -> None:
        self.space, self.stored = space, stored
        self.good: Flags = np.ones(len(stored), np.bool_)
        self.row = np.repeat(np.arange(len(stored)), stored.part_counts)
        """Of each part."""
        self.medium = stored.media[self.row]
        self.part = stored.parts
        self.is_own: Flags = stored.tenants == 0
        self.tenant = stored.tenants[self.row]
        """Of each part; its lanes are `lanes[tenant]`."""
        self.lanes = [space.tables[Medium.SSD].lanes, *map(_lanes_of, stored.piece_bytes)]

    def unkeepable(self) -> Flags:
        """Rows of other identities of no known geometry."""
        unknown = [tenant for tenant, lanes in enumerate(self.lanes) if lanes is None]
        return np.asarray(np.isin(self.stored.tenants, unknown))

    def outside(self) -> Flags:
        """Rows with a part outside of its medium, across a file's end, or of a shape that cannot be."""
        stored, part = self.stored, self.part
        inside = np.zeros(len(part), np.bool_)
        for table, (tenant, lanes) in itertools.product(self.space.tables.values(), enumerate(self.lanes)):
            if lanes is None:
                continue
            mine = np.flatnonzero((self.medium == table.medium) & (self.tenant == tenant))
            base, room, generation, slot, count = part[mine].T
            size_bytes, file_bytes = table.ranges.size_bytes, table.ranges.file_bytes
            fits = (base >= 0) & (base < size_bytes) & (base % DIRECT_BYTES == 0)
            fits &= (room > 0) & (room <= lanes.room_blocks(file_bytes)) & (generation > 0)
            fits &= (generation < GENERATION_LIMIT) & (slot >= 0) & (slot < room) & (count > 0) & (count <= room - slot)
            end = base[fits] + lanes.extent_sizes(room[fits])
            fits[fits] = (end <= size_bytes) & (base[fits] // file_bytes == (end - 1) // file_bytes)
            inside[mine] = fits
        blocks = np.bincount(self.row[inside], part[inside, COUNT], len(stored))
        bad = (blocks != stored.block_counts) | (stored.block_counts < 1) | (stored.scopes < 1) | (stored.shared < 0)
        return np.asarray(self._rows_of(~inside) | bad)

    def contradicting(self) -> Flags:
        """Rows that say of an extent or a scope something else than a later row does."""
        stored = self.stored
        bad = np.zeros(len(stored), np.bool_)
        live = np.flatnonzero(self.good[self.row])
        facts = np.column_stack([self.medium, self.part[:, BASE_BYTES], self.part[:, ROOM_BLOCKS]])
        facts = np.column_stack([facts, stored.scopes[self.row]])[live]
        bad[self.row[live[_differs_from_last(self.part[live, EXTENT_GENERATION], facts)]]] = True
        rows = np.flatnonzero(self.good)
        owners = np.column_stack([stored.media, stored.tenants, stored.has_session, stored.sessions.view(np.int64)])[
            rows
        ]
        bad[rows[_differs_from_last(stored.scopes[rows], owners)]] = True
        latest: dict[tuple[int, ...], int] = {}
        _, last = np.unique(stored.scopes[rows][::-1], return_index=True)
        for row in sorted((rows[len(rows) - 1 - last]).tolist()):
            if stored.has_session[row]:  # A session has one scope on a medium.
                before = latest.setdefault(tuple(owners[np.searchsorted(rows, row)].tolist()), row)
                if before != row:
                    bad |= stored.scopes == stored.scopes[before]
                    latest[tuple(owners[np.searchsorted(rows, row)].tolist())] = row
        return bad

    def overlapping_extents(self) -> Flags:
        """Rows in extents of which an extent of a higher generation has taken bytes."""
        live = np.flatnonzero(self.good[self.row])
        generations, first = np.unique(self.part[live, EXTENT_GENERATION], return_index=True)
        medium, base = self.medium[live[first]], self.part[live[first], BASE_BYTES]
        end = base + self.sizes(live[first])
        lost: list[int] = []
        order = np.lexsort((base, medium))
        while len(order) > 1:
            left, right = order[:-1], order[1:]
            clash = (medium[left] == medium[right]) & (end[left] > base[right])
            if not clash.any():
                break
            older = np.minimum(left[clash], right[clash])  # They are in the order of their generations.
            lost += generations[older].tolist()
            order = order[~np.isin(order, older)]
        return self._rows_of(np.isin(self.part[:, EXTENT_GENERATION], lost))

    def overlapping_slots(self) -> Flags:
        """Rows of which a later row has taken slots."""
        bad = np.zeros(len(self.stored), np.bool_)
        while True:
            live = np.flatnonzero((self.good & ~bad)[self.row])
            part = self.part[live]
            order = np.lexsort((part[:, SLOT], part[:, EXTENT_GENERATION]))
            left, right = order[:-1], order[1:]
            clash = (part[left, EXTENT_GENERATION] == part[right, EXTENT_GENERATION]) & (
                part[left, SLOT] + part[left, COUNT] > part[right, SLOT]
            )
            if not clash.any():
                return bad
            bad[np.minimum(self.row[live[left[clash]]], self.row[live[right[clash]]])] = True

    def surplus(self) -> Flags:
        """The oldest rows, if there are more blocks than the index has room for."""
        counts = np.where(self.good & self.is_own, self.stored.block_counts, 0)
        after = np.cumsum(counts[::-1])[::-1]
        return np.asarray((after > self.space.index.entries_max) & self.is_own)

    def _rows_of(self, parts: Flags) -> Flags:
        flags = np.zeros(len(self.stored), np.bool_)
        flags[self.row[parts]] = True
        return flags

    def sizes(self, parts: Int64Array) -> Int64Array:
        """Bytes of the extents of good parts."""
        found = np.zeros(len(parts), np.int64)
        for tenant, lanes in enumerate(self.lanes):
            mine = self.tenant[parts] == tenant
            if lanes is not None:
                found[mine] = lanes.extent_sizes(self.part[parts[mine], ROOM_BLOCKS])
        return found


def _lanes_of(piece_bytes: tuple[int, ...]) -> LaneTable | None:
    """The lanes of another identity; None where its manifest says nothing of use."""
    is_sane = all(0 < size <= OFFSET_BYTES_LIMIT >> 16 and size % DIRECT_BYTES == 0 for size in piece_bytes)
    return LaneTable.of_pieces(piece_bytes) if piece_bytes and is_sane else None


def _differs_from_last(of: Int64Array, facts: Int64Array) -> Flags:
    """Which items say something else than the last item with the same number does."""
    _, last, inverse = np.unique(of[::-1], return_index=True, return_inverse=True)
    said = facts[::-1][last][inverse][::-1]
    return np.asarray((facts != said).any(axis=1))
