"""`flatcake verify`: reads every stored block of closed stores, on every rank, and says or drops what is damaged.

Holds the locks of all directories meanwhile; without `--drop` nothing there is changed, apart from the line in
`lock` that says who holds it.  Interrupting it loses nothing but its report.
Exit codes: 0; 1 when something failed, dropped or not; 2 for a caller's mistake, a store that is open included.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from flatcake import __version__
from flatcake.about import About
from flatcake.audit.checking import SLOT_BYTES, Advance, Checker, runs_of_rows
from flatcake.audit.facts import Found, HomeFacts, RankFacts, RowFacts
from flatcake.audit.progress import Progress
from flatcake.audit.roots import look_root
from flatcake.audit.sources import Sources
from flatcake.audit.stores import group, read_store
from flatcake.audit.survey import find_problems, pool_files, rebuilt
from flatcake.audit.tally import RankTally, ScopeTally, Verified, as_mapping, as_text
from flatcake.audit.verdicts import Verdicts
from flatcake.clock import Clock, MonotonicClock
from flatcake.errors import ConfigError, OwnershipError
from flatcake.gva import Medium
from flatcake.io.manifestdb import MANIFEST, ManifestDB
from flatcake.io.pooldir import Header, claim, let_go
from flatcake.io.posix import PosixEngine
from flatcake.io.seam import Files
from flatcake.keys import FORMAT_VERSION
from flatcake.layout import LaneTable
from flatcake.manifest import Stored
from flatcake.messages import BLOCKS, Int64Array
from flatcake.units import SECOND

THREADS_MAX = 8
CLOSE_NS = 30 * SECOND
"""How long an interrupted run waits for reads that are in the kernel."""

MakeProgress = Callable[[int], Progress]


class _Task(NamedTuple):
    """What is read on each rank."""

    files: Files
    about: About
    stored: Stored
    runs: Int64Array
    pool_files: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("directory", nargs="+", metavar="DIRECTORY", help="first directory of a store, or all in order")
    parser.add_argument("--drop", action="store_true", help="forget the blocks that fail; the rest stays")
    parser.add_argument("--all", action="store_true", help="all scopes, not only those with failed blocks")
    parser.add_argument("--json", action="store_true", help="one JSON object, on one line, with all scopes")


def run(args: argparse.Namespace) -> int:
    """Verify, report, and return the exit code."""
    files, clock = Files(), MonotonicClock()
    done: list[Verified] = []
    with claimed(files, args.directory) as stores:
        for store in stores:
            done.append(
                verify(files, clock, store, drop=args.drop, progress=lambda total: Progress(sys.stderr, clock, total))
            )
            if not args.json:
                sys.stdout.write(("\n" if len(done) > 1 else "") + as_text(done[-1], everything=args.all))
                sys.stdout.flush()
    if args.json:
        body = {"version": __version__, "stores": [as_mapping(store) for store in done]}
        sys.stdout.write(json.dumps(body) + "\n")
    return 0 if all(store.is_good for store in done) else 1


@contextmanager
def claimed(files: Files, directories: list[str]) -> Iterator[list[Found]]:
    """Lock the directories of stores, of all ranks, those included that only the manifests name; read the manifests.

    Raises:
        OwnershipError: One is open, here or elsewhere, or may not be read or written.
        ConfigError, FormatError: As for `group`; or a further directory of a store is named without its first.
    """
    with ExitStack() as undo:
        stores = []
        for roots in group(files, directories):
            header = roots[0].header
            if header is not None and header.directory:
                where = f"directory {header.directory + 1} of {header.directories}"
                raise ConfigError(f"{roots[0].path}: {where} of its store; name the first one, which has the manifest")
            mine = {home.path: home for root in roots for home in root.homes.values()}
            _lock(files, mine.values(), undo)
            found = read_store(files, [look_root(files, root.path, is_engine=root.is_engine) for root in roots])
            _lock(files, [home for home in found.homes if home.path not in mine], undo)
            if found.is_engine and found.catalog.owner is not None:  # Its ranks are gone, or have not begun.
                where = f"{found.catalog.path}/{MANIFEST}"
                raise OwnershipError(f"{where}: in use by {found.catalog.owner}; end that engine first")
            stores.append(found)
        yield stores


def verify(files: Files, clock: Clock, store: Found, *, drop: bool, progress: MakeProgress) -> Verified:
    """Read every block of a store whose directories are locked, on every rank.

    Args:
        files: The seam to the system.
        clock: Monotonic time, for rates.
        store: Its directories and what its manifest says.
        drop: Whether to forget what fails.
        progress: Makes what is told of bytes that have been checked, from their number.

    Raises:
        OwnershipError, CapacityError: Files may not be read, or not all at once.
    """
    store = _without_owners(store)
    problems, notes = find_problems(store)
    directories = tuple(home.path for home in store.homes)
    result = Verified(path=store.path, catalog=store.catalog.path, directories=directories)
    if store.rows is not None and store.about is not None:
        result, verdicts = _read(files, clock, store, result, progress)
        notes += result.notes
        if drop and verdicts.failed().any():
            result, is_done = _drop(files, store.catalog, store.rows, verdicts, result)
            problems += [] if is_done else ["what failed could not be dropped: look at the disk; nothing was changed"]
    return replace(result, problems=tuple(problems), notes=tuple(notes))


def _lock(files: Files, homes: Iterable[HomeFacts], undo: ExitStack) -> None:
    stand_in = Header(
        version=FORMAT_VERSION, geometry="", rank=0, pool_file_bytes=0, files=0, directory=0, directories=0
    )
    for home in homes:
        if home.has_pool:  # Else there is nothing to guard, and what is not ours stays as it is.
            lock, _ = claim(files, home.path, home.header or stand_in)
            undo.callback(let_go, files, lock)


def _without_owners(store: Found) -> Found:
    """The owner is this process."""
    ranks = [replace(rank, homes=tuple(replace(home, owner=None) for home in rank.homes)) for rank in store.ranks]
    return replace(store, catalog=replace(store.catalog, owner=None), ranks=tuple(ranks))


def _read(
    files: Files, clock: Clock, store: Found, result: Verified, progress: MakeProgress
) -> tuple[Verified, Verdicts]:
    rows, about = store.rows, store.about
    assert rows is not None and about is not None
    count = pool_files(store.ranks)
    left_out, dropped = rebuilt(about, count, rows.stored)[1:]  # The catalog itself is let go.
    runs = runs_of_rows(rows.stored, ~np.isin(rows.stored.numbers, dropped))
    size_bytes = int(runs[:, BLOCKS].sum()) * LaneTable.of(about.geometry).block_bytes
    task = _Task(files, about, rows.stored, runs, count)
    verdicts, start_ns = Verdicts(rows.stored), clock.now_ns()
    bar = progress(size_bytes * len(store.ranks))
    try:
        for rank in store.ranks:
            mine = Verdicts(rows.stored)
            checker, is_direct = _read_rank(task, rank, mine, bar.advance)
            verdicts.add(mine, rank.rank if len(store.ranks) > 1 else None)
            directories = tuple(home.path for home in rank.homes)
            tally = RankTally(rank=rank.rank, directories=directories, counts=mine.count())
            result = replace(
                result,
                ranks=(*result.ranks, tally),
                read_bytes=result.read_bytes + checker.read_bytes,
                buffer_bytes=max(result.buffer_bytes, checker.buffer_bytes),
                is_direct=is_direct and result.is_direct is not False,
            )
    finally:
        bar.close()
    return replace(
        result,
        scopes=_tallies(rows, verdicts),
        wall_ns=clock.now_ns() - start_ns,
        counts=verdicts.count(),
        notes=tuple(f"{number} {reason}: the next open leaves them out" for reason, number in left_out.items()),
    ), verdicts


def _read_rank(task: _Task, rank: RankFacts, verdicts: Verdicts, advance: Advance) -> tuple[Checker, bool]:
    """Read everything on one rank; the checker that did it, and whether that was past the page cache."""
    with ExitStack() as undo:
        sources = Sources(task.files, task.about, rank.homes, task.pool_files)
        threads = min(THREADS_MAX, max(2, task.files.processors()))
        engine = PosixEngine(task.files, sources.fds, threads=threads, task_bytes=SLOT_BYTES)

        def close() -> None:
            if engine.close(CLOSE_NS):  # Else a read is stuck in the kernel, and its file must stay open.
                sources.close()

        undo.callback(close)
        checker = Checker(task.about, sources, engine, verdicts, advance)
        checker.check(task.runs, task.stored)
        return checker, sources.is_direct


def _tallies(rows: RowFacts, verdicts: Verdicts) -> tuple[ScopeTally, ...]:
    stored = rows.stored
    last = dict(zip(stored.scopes.tolist(), range(len(stored)), strict=True))
    tallies = []
    for scope_id, blocks in verdicts.blocks_of_scopes().items():
        row = last[scope_id]
        session = stored.sessions[row].tobytes().hex() if stored.has_session[row] else None
        medium = Medium(int(stored.media[row]))
        tallies.append(ScopeTally(scope_id=scope_id, session=session, medium=medium, counts=verdicts.count(blocks)))
    return tuple(tallies)


def _drop(files: Files, home: HomeFacts, rows: RowFacts, verdicts: Verdicts, result: Verified) -> tuple[Verified, bool]:
    """Forget what failed; whether that is on the disk."""
    bad, origin = verdicts.failed_rows(), rows.origin
    assert origin is not None
    manifest = ManifestDB(files, f"{home.path}/{MANIFEST}", origin)
    try:
        is_done = manifest.trim(bad, rows.bodies)
    finally:
        manifest.close()
    if not is_done:
        return result, False
    gone = sum(bool(flags.all()) for flags in bad.values())
    return replace(result, dropped_blocks=int(verdicts.failed().sum()), dropped_turns=gone), True
