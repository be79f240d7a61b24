"""What the next open of a store would find: scopes, extents, free space, from the rows of its manifest.

Pure.  The catalog is rebuilt by the same code as at open, so what is shown is what a store would see.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from flatcake.about import About
from flatcake.audit.facts import Found, MediumFacts, RankFacts, RowFacts, ScopeFacts, Survey
from flatcake.extents import ExtentTable, FreeRanges
from flatcake.geometry import Geometry
from flatcake.gva import Medium
from flatcake.index import Index
from flatcake.layout import Growth, LaneTable
from flatcake.manifest import Stored
from flatcake.prefix import prefix_of
from flatcake.reopen import rebuild
from flatcake.scopes import Scope
from flatcake.space import Space, Watermarks
from flatcake.units import format_bytes

_PREFIX = "reopen: "
"""Of the counters that say what an open leaves out."""


def rebuilt(about: About, pool_files: int, stored: Stored) -> tuple[Space, Counter[str], list[int]]:
    """The catalog that an open would begin with; why rows are left out, and their numbers.

    Args:
        about: What the store is.
        pool_files: How many files its pool has.
        stored: Rows of its manifest.

    Cost: about 2 µs a block, and 50 bytes.
    """
    lanes = LaneTable.of(about.geometry)
    sizes = {
        Medium.DRAM: (about.dram_bytes, about.dram_bytes),
        Medium.SSD: (pool_files * about.pool_file_bytes, about.pool_file_bytes),
    }
    tables = {
        medium: ExtentTable(medium, FreeRanges(size_bytes=size_bytes, file_bytes=max(1, file_bytes)), lanes)
        for medium, (size_bytes, file_bytes) in sizes.items()
    }
    growth = Growth(layout="lanes", percent=0, room_max=1)  # Nothing is written here.
    marks = Watermarks(high=1.0, low=1.0, dram_idle_ns_max=0)
    space = Space(tables, Index(max(1, int(stored.block_counts.sum()))), growth, marks)
    counts: Counter[str] = Counter()
    dropped = rebuild(space, stored, 0, counts)
    left_out = {name.removeprefix(_PREFIX): count for name, count in counts.items() if name.startswith(_PREFIX)}
    return space, Counter(left_out), dropped


def survey(about: About, pool_files: int, stored: Stored, *, hides_dram: bool) -> Survey:
    """Describe every scope and medium.

    Args:
        about: What the store is.
        pool_files: How many files its pool has.
        stored: Rows of its manifest.
        hides_dram: Whether what is in DRAM is known to other processes alone.
    """
    space, left_out, dropped = rebuilt(about, pool_files, stored)
    turns = Counter(stored.scopes[~np.isin(stored.numbers, dropped)].tolist())
    order = sorted(space.scopes, key=lambda scope: -scope.order)
    use = {scope.scope_id: place for place, scope in enumerate(order, 1)} if stored.used else {}
    scopes = [_scope(scope, space, turns[scope.scope_id], use.get(scope.scope_id)) for scope in space.scopes]
    scopes.sort(key=lambda scope: (-scope.extent_bytes, scope.scope_id))
    shown = [table for medium, table in space.tables.items() if table.ranges.size_bytes]
    if hides_dram:
        shown = [table for table in shown if table.medium is Medium.SSD]
    media = tuple(_medium(table, about.geometry, scopes) for table in shown)
    return Survey(media=media, scopes=tuple(scopes), left_out=left_out)


def pool_files(ranks: Iterable[RankFacts]) -> int:
    """How many files a rank's pool has over all directories: as a header says, else as many as there are."""
    facts = tuple(ranks)
    header = next((rank.header for rank in facts if rank.header is not None), None)
    if header is not None:
        return header.files
    return max([1, *(sum(home.pool_files for home in rank.homes) for rank in facts)])


def find_problems(found: Found) -> tuple[list[str], list[str]]:
    """What is wrong with a store, and what there is to know of it besides."""
    places = {home.path: home for home in (*found.homes, found.catalog)}.values()
    problems = [f"{home.path}: {fault}: the next open finds nothing" for home in places for fault in home.faults]
    notes = [f"{home.path}: {name}: set aside by an earlier open" for home in places for name in home.aside]
    for home in found.unused:
        notes.append(f"{home.path}: the last run had no such rank; {format_bytes(home.pool_bytes)} in pool files")
    header = found.header
    if header is not None and header.directory > 0:
        notes.append(f"directory {header.directory + 1} of {header.directories}: the first has the manifest")
    elif found.rows is None:
        what = "the manifest is no regular file" if found.catalog.has_manifest else "there is no manifest"
        problems.append(f"{what}: the next open finds nothing")
    else:
        _judge_rows(found, found.rows, problems, notes)
    return problems, notes


def _judge_rows(found: Found, rows: RowFacts, problems: list[str], notes: list[str]) -> None:
    if rows.damages:
        problems.append(f"the manifest is damaged; {len(rows.stored)} of its turns can be read")
    if rows.origin is None and rows.bad_rows:
        problems.append(f"nothing says whose {rows.bad_rows} turns of the manifest are")
    elif rows.bad_rows:
        problems.append(f"{rows.bad_rows} turns of the manifest are damaged, or another store's")
    if not rows.is_steady:
        notes.append("the manifest was being written all the time: figures are of different moments")
    about, has_rows = rows.about, bool(len(rows.stored))
    if about is None:
        if rows.state is not None or rows.bad_rows or has_rows:
            problems.append("the manifest does not say what its blocks look like; open the store once")
        return
    problems += [f"{path}: header and manifest tell of different stores" for path in _strangers(found, about)]
    closed = rows.state is not None and rows.state.was_closed
    if has_rows and not about.verify and found.owner is None:
        if found.is_engine:
            problems.append("without checksums (io.verify) an engine's next open finds nothing")
        elif not closed:
            problems.append("not closed, and without checksums (io.verify): the next open finds nothing")


def _strangers(found: Found, about: About) -> Iterator[str]:
    """Directories with the header of another pool than the manifest tells of."""
    if found.is_engine != bool(about.ranks):
        yield found.catalog.path
    count = pool_files(found.ranks)
    for rank in found.ranks:
        for place, home in enumerate(rank.homes):
            header = home.header
            wanted = {
                "geometry": about.geometry.fingerprint(),
                "rank": rank.rank,
                "pool_file_bytes": about.pool_file_bytes,
                "files": count,
                "directory": place,
                "directories": len(about.directories),
            }
            if header is not None and any(getattr(header, name) != value for name, value in wanted.items()):
                yield home.path


def _scope(scope: Scope, space: Space, turns: int, use: int | None) -> ScopeFacts:
    keys, gvas = np.concatenate(scope.keys), np.concatenate(scope.gvas)
    live = np.flatnonzero(space.index.lookup(keys) == gvas)
    lanes = space.tables[scope.medium].lanes
    generations = [extent.generation for extent in scope.extents]
    return ScopeFacts(
        scope_id=scope.scope_id,
        session=scope.session.hex() if isinstance(scope.session, bytes) else None,
        medium=scope.medium,
        turns=turns,
        blocks=len(live),
        superseded_blocks=len(keys) - len(live),
        shared_blocks=scope.shared_blocks,
        size_bytes=len(live) * lanes.block_bytes,
        extents=len(scope.extents),
        extent_bytes=sum(lanes.extent_bytes(extent.room_blocks) for extent in scope.extents),
        room_blocks=sum(extent.room_blocks for extent in scope.extents),
        runs=len(prefix_of(gvas[live], np.arange(len(live)), space).runs),
        generation_min=min(generations),
        generation_max=max(generations),
        use=use,
    )


def _medium(table: ExtentTable, geometry: Geometry, scopes: list[ScopeFacts]) -> MediumFacts:
    mine = [scope for scope in scopes if scope.medium is table.medium]
    blocks = sum(scope.blocks for scope in mine)
    return MediumFacts(
        medium=table.medium,
        size_bytes=table.ranges.size_bytes,
        extents=len(table),
        extent_bytes=table.used_bytes,
        scopes=len(mine),
        blocks=blocks,
        block_bytes=blocks * geometry.block_bytes,
        payload_bytes=blocks * geometry.block_payload_bytes,
        runs=sum(scope.runs for scope in mine),
        free_bytes=table.ranges.free_bytes,
        free_ranges=table.ranges.range_count,
        largest_free_bytes=table.ranges.largest_bytes,
    )
