"""A store as it was: index, scopes and extents rebuilt from the rows of a manifest, and rows made of scopes.

Pure.  Rows are whole turns and prove themselves, but they need not fit together or into today's pool: what
lies outside a file, overlaps something newer, or does not fit the index is left out and counted.  Rows of other
identities only hold their places.  Nothing here looks at a byte of KV: what is gone behind a row is a
miss, by its checksum.
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
    ROOM_BLOCKS,
    SLOT,
    Stored,
    TurnRow,
    session_digest,
)
from flatcake.messages import BASE, BLOCKS, FIRST_SLOT, GENERATION, MEDIUM, ROOM, Flags, Int64Array
from flatcake.prefix import prefix_of
from flatcake.rowcheck import Rows
from flatcake.scopes import NEVER_NS, Scope
from flatcake.space import Space
from flatcake.units import SECOND


def rebuild(space: Space, stored: Stored, now_ns: int, counts: Counter[str]) -> list[int]:
    """Fill an empty space with what is stored, as far as it fits.

    Args:
        space: Empty.
        stored: Rows in the order of their commits: of two that tell of the same key or scope, the later counts.
        now_ns: Last uses are counted back from here; it is that of every scope of which nothing is known.
        counts: Increased by what happens.

    Returns:
        Numbers of the rows that were left out.

    Cost: about 2 µs a block.
    """
    assert not len(space.scopes) and not len(space.index)
    space.generation = max(space.generation, stored.generation)
    rows = Rows(space, stored)
    for reason, find in (
        ("rows of another identity that cannot be kept", rows.unkeepable),
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
        found = rows.good & rows.is_own & (stored.media == medium)
        counts[f"reopened_blocks_{medium.name.lower()}"] += int(stored.block_counts[found].sum())
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


def _fill(space: Space, rows: Rows, now_ns: int) -> None:
    stored = rows.stored
    good = np.flatnonzero(rows.good)
    owner = dict(zip(stored.scopes[good].tolist(), good.tolist(), strict=True))  # The last row of each scope.
    place = {scope: number for number, scope in enumerate(stored.used)}
    idle_s, is_own = stored.idle_s, rows.is_own
    last_use_ns = NEVER_NS

    def turn(scope_id: int) -> tuple[int, ...]:
        """Others before ours.  What was committed after the order was noted is younger than all that is in it."""
        row = owner[scope_id]
        among = place.get(scope_id, len(place)), row
        return (1, *among) if is_own[row] else (0, -idle_s.get(scope_id, 0), *among)

    for scope_id in sorted(owner, key=turn):
        row = owner[scope_id]
        session = stored.sessions[row].tobytes() if stored.has_session[row] else None
        used_ns = now_ns - idle_s.get(scope_id, 0) * SECOND
        if is_own[row]:  # In their order, whatever the wall clock did.
            last_use_ns = used_ns = max(last_use_ns, used_ns)
        medium = Medium(int(stored.media[row]))
        space.scopes.restore(scope_id, session, medium, used_ns, is_foreign=not is_own[row])
    for row in good[stored.shared[good] > 0].tolist():
        scope = space.scopes.get(int(stored.scopes[row]))
        scope.shared_blocks = max(scope.shared_blocks, int(stored.shared[row]))
    _fill_extents(space, rows, np.flatnonzero(rows.good[rows.row]))
    _fill_index(space, rows, rows.good & is_own)


def _fill_extents(space: Space, rows: Rows, parts: Int64Array) -> None:
    part = rows.part[parts]
    generations, first, which = np.unique(part[:, EXTENT_GENERATION], return_index=True, return_inverse=True)
    used = np.zeros(len(generations), np.int64)
    np.maximum.at(used, which, part[:, SLOT] + part[:, COUNT])
    made: dict[Medium, list[Extent]] = {medium: [] for medium in space.tables}
    facts = [rows.medium[parts][first], part[first][:, :3], rows.stored.scopes[rows.row[parts][first]]]
    sizes = np.where(rows.tenant[parts[first]] > 0, rows.sizes(parts[first]), 0)
    table = np.column_stack([*facts, used, sizes])
    for medium, base, room, generation, scope_id, used_blocks, size_bytes in table.tolist():
        extent = Extent(Medium(medium), base, room, generation, scope_id, used_blocks, size_bytes=size_bytes)
        made[extent.medium].append(extent)
        space.scopes.get(scope_id).extents.append(extent)  # Oldest first, as their generations say.
    for medium, extents in made.items():
        space.tables[medium].restore(extents)


def _fill_index(space: Space, rows: Rows, visible: Flags) -> None:
    stored, good, parts = rows.stored, np.flatnonzero(visible), np.flatnonzero(visible[rows.row])
    blocks = np.flatnonzero(np.repeat(visible, stored.block_counts))
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
