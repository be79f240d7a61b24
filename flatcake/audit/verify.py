"""`flatcake verify`: reads every stored block of closed stores, and says or drops what is damaged.

Holds the lock of every directory meanwhile; without `--drop` nothing there is changed, apart from the line in
`lock` that says who holds it.  Interrupting it loses nothing but its report.
Exit codes: 0; 1 when something failed, dropped or not; 2 for a caller's mistake, a store that is open included.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from flatcake import __version__
from flatcake.audit.checking import SLOT_BYTES, Checker, runs_of_rows
from flatcake.audit.facts import HomeFacts, RowFacts
from flatcake.audit.home import look
from flatcake.audit.progress import Progress
from flatcake.audit.sources import Sources
from flatcake.audit.stores import group, read_store
from flatcake.audit.survey import find_problems, pool_files, rebuilt
from flatcake.audit.tally import ScopeTally, Verified, as_mapping, as_text
from flatcake.audit.verdicts import Verdicts
from flatcake.clock import Clock, MonotonicClock
from flatcake.errors import ConfigError
from flatcake.gva import Medium
from flatcake.io.manifestdb import MANIFEST, ManifestDB
from flatcake.io.pooldir import Header, claim, let_go
from flatcake.io.posix import PosixEngine
from flatcake.io.seam import Files
from flatcake.keys import FORMAT_VERSION
from flatcake.layout import LaneTable
from flatcake.messages import BLOCKS
from flatcake.units import SECOND

THREADS_MAX = 8
CLOSE_NS = 30 * SECOND
"""How long an interrupted run waits for reads that are in the kernel."""

MakeProgress = Callable[[int], Progress]


class Claimed(NamedTuple):
    """A store whose directories are locked."""

    homes: tuple[HomeFacts, ...]
    rows: RowFacts | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "directory", nargs="+", metavar="DIRECTORY", help="first directory of a store, of one rank; or all, in order"
    )
    parser.add_argument("--drop", action="store_true", help="forget the blocks that fail; the rest stays")
    parser.add_argument("--all", action="store_true", help="all scopes, not only those with failed blocks")
    parser.add_argument("--json", action="store_true", help="one JSON object, on one line, with all scopes")


def run(args: argparse.Namespace) -> int:
    """Verify, report, and return the exit code."""
    files, clock = Files(), MonotonicClock()
    done: list[Verified] = []
    with claimed(files, args.directory) as stores:
        for homes in stores:
            done.append(
                verify(files, clock, homes, drop=args.drop, progress=lambda total: Progress(sys.stderr, clock, total))
            )
            if not args.json:
                sys.stdout.write(("\n" if len(done) > 1 else "") + as_text(done[-1], everything=args.all))
                sys.stdout.flush()
    if args.json:
        body = {"version": __version__, "stores": [as_mapping(store) for store in done]}
        sys.stdout.write(json.dumps(body) + "\n")
    return 0 if all(store.is_good for store in done) else 1


@contextmanager
def claimed(files: Files, directories: list[str]) -> Iterator[list[Claimed]]:
    """Lock the directories of stores, those included that only the manifests name, and read the manifests.

    Raises:
        OwnershipError: One is open, here or elsewhere, or may not be read or written.
        ConfigError, FormatError: As for `group`; or a further directory of a store is named without its first.
    """
    with ExitStack() as undo:
        stores = []
        for homes in group(files, directories):
            header = homes[0].header
            if header is not None and header.directory:
                where = f"directory {header.directory + 1} of {header.directories}"
                raise ConfigError(f"{homes[0].path}: {where} of its store; name the first one, which has the manifest")
            _lock(files, homes, undo)
            found, rows = read_store(files, [look(files, home.path) for home in homes])
            _lock(files, found[len(homes) :], undo)
            stores.append(Claimed(tuple(replace(home, owner=None) for home in found), rows))
        yield stores


def verify(files: Files, clock: Clock, store: Claimed, *, drop: bool, progress: MakeProgress) -> Verified:
    """Read every block of a store whose directories are locked.

    Args:
        files: The seam to the system.
        clock: Monotonic time, for rates.
        store: Its directories and what its manifest says.
        drop: Whether to forget what fails.
        progress: Makes what is told of bytes that have been checked, from their number.

    Raises:
        OwnershipError, CapacityError: Files may not be read, or not all at once.
    """
    homes, rows = store
    problems, notes = find_problems(homes, rows)
    result = Verified(path=homes[0].path, directories=tuple(home.path for home in homes))
    if rows is not None and rows.about is not None:
        result, verdicts = _read(files, clock, homes, rows, progress)
        notes += result.notes
        if drop and verdicts.failed().any():
            result, is_done = _drop(files, homes[0], rows, verdicts, result)
            problems += [] if is_done else ["what failed could not be dropped: look at the disk; nothing was changed"]
    return replace(result, problems=tuple(problems), notes=tuple(notes))


def _lock(files: Files, homes: Sequence[HomeFacts], undo: ExitStack) -> None:
    for home in homes:
        stand_in = Header(
            version=FORMAT_VERSION, geometry="", rank=0, pool_file_bytes=0, files=0, directory=0, directories=0
        )
        lock, _ = claim(files, home.path, home.header or stand_in)
        undo.callback(let_go, files, lock)


def _read(
    files: Files, clock: Clock, homes: tuple[HomeFacts, ...], rows: RowFacts, progress: MakeProgress
) -> tuple[Verified, Verdicts]:
    about, stored = rows.about, rows.stored
    assert about is not None
    count = pool_files(homes)
    left_out, dropped = rebuilt(about, count, stored)[1:]  # The catalog itself is let go.
    runs = runs_of_rows(stored, ~np.isin(stored.numbers, dropped))
    verdicts = Verdicts(stored)
    bar = progress(int(runs[:, BLOCKS].sum()) * LaneTable.of(about.geometry).block_bytes)
    start_ns = clock.now_ns()
    with ExitStack() as undo:
        undo.callback(bar.close)
        sources = Sources(files, about, homes, count)
        threads = min(THREADS_MAX, max(2, files.processors()))
        engine = PosixEngine(files, sources.fds, threads=threads, task_bytes=SLOT_BYTES)

        def close() -> None:
            if engine.close(CLOSE_NS):  # Else a read is stuck in the kernel, and its file must stay open.
                sources.close()

        undo.callback(close)
        checker = Checker(about, sources, engine, verdicts, bar.advance)
        checker.check(runs, stored)
    return Verified(
        path=homes[0].path,
        directories=tuple(home.path for home in homes),
        scopes=_tallies(rows, verdicts),
        read_bytes=checker.read_bytes,
        wall_ns=clock.now_ns() - start_ns,
        buffer_bytes=checker.buffer_bytes,
        is_direct=sources.is_direct,
        counts=verdicts.count(),
        notes=tuple(f"{number} {reason}: the next open leaves them out" for reason, number in left_out.items()),
    ), verdicts


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
