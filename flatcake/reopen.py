"""A store as it was: index, scopes and extents rebuilt from the rows of a manifest, and rows made of scopes.

Pure.  Rows are whole turns and prove themselves, but they need not fit together or into today's pool: what
lies outside a file, overlaps something newer, or does not fit the index is left out and counted.  Nothing
here looks at a byte of KV: what is gone behind a row is a miss, by its checksum.
Write path:  manifest -> [reopen] -> index
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flatcake.extents import Extent
from flatcake.gva import Medium, encode_array
from flatcake.manifest import (
    BASE_BYTES,
    COUNT,
    EXTENT_GENERATION,
    GENERATION_LIMIT,
    ROOM_BLOCKS,
    SLOT,
    Stored,
    TurnRow,
    session_digest,
)
from flatcake.messages import BASE, BLOCKS, FIRST_SLOT, GENERATION, MEDIUM, ROOM, Int64Array
from flatcake.prefix import prefix_of
from flatcake.scopes import Scope
from flatcake.space import Space
from flatcake.units import DIRECT_BYTES

_Flags = npt.NDArray[np.bool_]


def rebuild(space: Space, stored: Stored, now_ns: int, counts: Counter[str]) -> list[int]:
    """Fill an empty space with what is stored, as far as it fits.

    Args:
        space: Empty.
        stored: Rows in the order of their commits: of two that tell of the same key or scope, the later counts.
        now_ns: Becomes the last use of every scope.
        counts: Increased by what happens.

    Returns:
        Numbers of the rows that were left out.

    Cost: about 2 µs a block.
    """
    assert not len(space.scopes) and not len(space.index)
    space.generation = max(space.generation, stored.generation)
    rows = _Rows(space, stored)
    for reason, find in (
        ("rows that lie outside of the pool", rows.outside),
        ("rows that contradict others", rows.contradicting),
        ("rows whose extents overlap newer ones", rows.overlapping_extents),
        ("rows whose slots overlap newer ones", rows.overlapping_slots),
        ("rows that do not fit the index", rows.surplus),
    ):
        bad = find() & rows.good
        rows.good &= ~bad
        if bad.any():
            counts[f"reopen: {reason}"] += int(bad.sum())
    _fill(space, rows, now_ns)
    for medium in Medium:
        counts[f"reopened_blocks_{medium.name.lower()}"] += int(
            stored.block_counts[rows.good & (stored.media == medium)].sum()
        )
    dropped: list[int] = stored.numbers[~rows.good].tolist()
    return dropped


def rows_of(space: Space, medium: Medium) -> list[TurnRow]:
    """The visible blocks of every scope of a medium, a row each, the one used last first."""
    scopes = sorted((s for s in space.scopes if s.medium is medium), key=lambda scope: -scope.order)
    return [row for row in (_row_of(scope, space) for scope in scopes) if row is not None]


def turn_row(scope: Scope, parts: list[tuple[int, ...]], keys: npt.NDArray[np.uint64]) -> TurnRow:
    """The row of blocks that lie in some slots of a scope; `parts` as in `TurnRow`."""
    session = session_digest(scope.session) if isinstance(scope.session, str) else scope.session
    return TurnRow(
        scope_id=scope.scope_id,
        session=session,
        medium=scope.medium,
        shared_blocks=scope.shared_blocks,
        parts=np.array(parts, np.int64).reshape(-1, 5),
        keys=keys,
    )


def _row_of(scope: Scope, space: Space) -> TurnRow | None:
    if not scope.keys:
        return None
    keys, gvas = np.concatenate(scope.keys), np.concatenate(scope.gvas)
    live = np.flatnonzero(space.index.lookup(keys) == gvas)
    if not len(live):
        return None
    runs = prefix_of(gvas[live], np.arange(len(live)), space).runs.table
    parts = runs[:, [BASE, ROOM, GENERATION, FIRST_SLOT, BLOCKS]]
    assert (runs[:, MEDIUM] == int(scope.medium)).all()
    return replace(turn_row(scope, [], keys[live]), parts=parts)


class _Rows:
    """The rows, and which of them are still good."""

    def __init__(self, space: Space, stored: Stored) -> None:
        self.space, self.stored = space, stored
        self.good: _Flags = np.ones(len(stored), np.bool_)
        self.row = np.repeat(np.arange(len(stored)), stored.part_counts)
        """Of each part."""
        self.medium = stored.media[self.row]
        self.part = stored.parts

    def outside(self) -> _Flags:
        """Rows with a part outside of its medium, across a file's end, or of a shape that cannot be."""
        stored, part = self.stored, self.part
        inside = np.zeros(len(part), np.bool_)
        for medium, table in self.space.tables.items():
            mine = np.flatnonzero(self.medium == medium)
            base, room, generation, slot, count = part[mine].T
            size_bytes, file_bytes = table.ranges.size_bytes, table.ranges.file_bytes
            fits = (base >= 0) & (base < size_bytes) & (base % DIRECT_BYTES == 0)
            fits &= (room > 0) & (room <= table.lanes.room_blocks(file_bytes)) & (generation > 0)
            fits &= (generation < GENERATION_LIMIT) & (slot >= 0) & (slot < room) & (count > 0) & (count <= room - slot)
            end = base[fits] + table.lanes.extent_sizes(room[fits])
            fits[fits] = (end <= size_bytes) & (base[fits] // file_bytes == (end - 1) // file_bytes)
            inside[mine] = fits
        blocks = np.bincount(self.row[inside], part[inside, COUNT], len(stored))
        bad = (blocks != stored.block_counts) | (stored.block_counts < 1) | (stored.scopes < 1) | (stored.shared < 0)
        return np.asarray(self._rows_of(~inside) | bad)

    def contradicting(self) -> _Flags:
        """Rows that say of an extent or a scope something else than a later row does."""
        stored = self.stored
        bad = np.zeros(len(stored), np.bool_)
        live = np.flatnonzero(self.good[self.row])
        facts = np.column_stack([self.medium, self.part[:, BASE_BYTES], self.part[:, ROOM_BLOCKS]])
        facts = np.column_stack([facts, stored.scopes[self.row]])[live]
        bad[self.row[live[_differs_from_last(self.part[live, EXTENT_GENERATION], facts)]]] = True
        rows = np.flatnonzero(self.good)
        owners = np.column_stack([stored.media, stored.has_session, stored.sessions.view(np.int64)])[rows]
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

    def overlapping_extents(self) -> _Flags:
        """Rows in extents of which an extent of a higher generation has taken bytes."""
        live = np.flatnonzero(self.good[self.row])
        generations, first = np.unique(self.part[live, EXTENT_GENERATION], return_index=True)
        medium, base, room = self.medium[live[first]], *self.part[live[first], :2].T
        end = base + self._sizes(medium, room)
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

    def overlapping_slots(self) -> _Flags:
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

    def surplus(self) -> _Flags:
        """The oldest rows, if there are more blocks than the index has room for."""
        counts = np.where(self.good, self.stored.block_counts, 0)
        after = np.cumsum(counts[::-1])[::-1]
        return np.asarray(after > self.space.index.entries_max)

    def _rows_of(self, parts: _Flags) -> _Flags:
        flags = np.zeros(len(self.stored), np.bool_)
        flags[self.row[parts]] = True
        return flags

    def _sizes(self, medium: Int64Array, room: Int64Array) -> Int64Array:
        sizes = np.zeros(len(room), np.int64)
        for name, table in self.space.tables.items():
            sizes[medium == name] = table.lanes.extent_sizes(room[medium == name])
        return sizes


def _differs_from_last(of: Int64Array, facts: Int64Array) -> _Flags:
    """Which items say something else than the last item with the same number does."""
    _, last, inverse = np.unique(of[::-1], return_index=True, return_inverse=True)
    said = facts[::-1][last][inverse][::-1]
    return np.asarray((facts != said).any(axis=1))


def _fill(space: Space, rows: _Rows, now_ns: int) -> None:
    stored = rows.stored
    good = np.flatnonzero(rows.good)
    owner = dict(zip(stored.scopes[good].tolist(), good.tolist(), strict=True))  # The last row of each scope.
    place = {scope: number for number, scope in enumerate(stored.used)}
    # What was committed after the order was noted is younger than all that is in it.
    for scope_id in sorted(owner, key=lambda scope: (place.get(scope, len(place)), owner[scope])):
        row = owner[scope_id]
        session = stored.sessions[row].tobytes() if stored.has_session[row] else None
        space.scopes.restore(scope_id, session, Medium(int(stored.media[row])), now_ns)
    for row in good[stored.shared[good] > 0].tolist():
        scope = space.scopes.get(int(stored.scopes[row]))
        scope.shared_blocks = max(scope.shared_blocks, int(stored.shared[row]))
    parts = np.flatnonzero(rows.good[rows.row])
    _fill_extents(space, rows, parts)
    _fill_index(space, rows, good, parts)


def _fill_extents(space: Space, rows: _Rows, parts: Int64Array) -> None:
    part = rows.part[parts]
    generations, first, which = np.unique(part[:, EXTENT_GENERATION], return_index=True, return_inverse=True)
    used = np.zeros(len(generations), np.int64)
    np.maximum.at(used, which, part[:, SLOT] + part[:, COUNT])
    made: dict[Medium, list[Extent]] = {medium: [] for medium in space.tables}
    facts = np.column_stack([rows.medium[parts][first], part[first][:, :3], rows.stored.scopes[rows.row[parts][first]]])
    for (medium, base, room, generation, scope_id), used_blocks in zip(facts.tolist(), used.tolist(), strict=True):
        extent = Extent(Medium(medium), base, room, generation, scope_id, used_blocks)
        made[extent.medium].append(extent)
        space.scopes.get(scope_id).extents.append(extent)  # Oldest first, as their generations say.
    for medium, extents in made.items():
        space.tables[medium].restore(extents)


def _fill_index(space: Space, rows: _Rows, good: Int64Array, parts: Int64Array) -> None:
    stored = rows.stored
    blocks = np.flatnonzero(np.repeat(rows.good, stored.block_counts))
    keys = stored.keys[blocks]
    count = rows.part[parts, COUNT]
    nth = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    offsets = np.zeros(len(blocks), np.int64)
    medium = np.repeat(rows.medium[parts], count)
    for name, table in space.tables.items():
        first = rows.part[parts, BASE_BYTES] + table.lanes.record_sizes(rows.part[parts, ROOM_BLOCKS])
        piece_bytes = int(table.lanes.piece_bytes[0])
        found = np.repeat(first + rows.part[parts, SLOT] * piece_bytes, count) + nth * piece_bytes
        offsets[medium == name] = found[medium == name]
    gvas = encode_array(medium, 0, offsets)
    space.index.publish(keys, gvas)
    scope_of = np.repeat(stored.scopes[good], stored.block_counts[good])
    order = np.argsort(scope_of, kind="stable")
    cuts = np.flatnonzero(np.diff(scope_of[order])) + 1
    for mine in np.split(order, cuts) if len(order) else ():
        space.scopes.get(int(scope_of[mine[0]])).record(keys[mine], gvas[mine])
