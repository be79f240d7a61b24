"""The manifest in a file: SQLite with a write-ahead log, one transaction per committed turn.  docs/restart.md.

A commit is in the kernel's hands when it returns, so it outlives the process; `checkpoint` sees it to the disk.
Rows prove themselves; `io.manifestfile` opens whatever lies there.  Faults are counted, and never raised
after open.
"""

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from flatcake.errors import OwnershipError
from flatcake.io import manifestrows
from flatcake.io.manifestfile import open_manifest
from flatcake.io.manifestrows import SCOPE_LIMIT, SCOPE_SHIFT, Step
from flatcake.io.pooldir import attempt
from flatcake.io.salvage import Row, is_sound
from flatcake.io.seam import Files
from flatcake.manifest import (
    GENERATION_LIMIT,
    State,
    Stored,
    TurnRow,
    decode_rows,
    encode_row,
)
from flatcake.messages import Flags
from flatcake.tenancy import Tenancy, Used, completed, read_tenancy
from flatcake.wear import Wear

log = logging.getLogger(__name__)

MANIFEST = "manifest.db"
GENERATION_STEP = 1 << 20
"""Generations are promised to be used in such steps, so that few commits need to say so."""
USED_MAX = 1 << 21
"""Of so many scopes the order of use is remembered."""

_SECONDS_SHIFT = 20


class ManifestDB:
    """One directory's manifest.  Any number of threads may call; its lock on the directory is the pool's."""

    def __init__(
        self, files: Files, path: str, origin: bytes, about: bytes = b"", piece_bytes: Sequence[int] = ()
    ) -> None:
        """Open or make the file.

        Args:
            files: The seam to the system.
            path: The file.
            origin: Of this store.
            about: What the store is, for whoever looks at the file later (`flatcake.about`).
            piece_bytes: Bytes of a piece of each layer: what another identity must know to leave the bytes alone.

        Raises:
            OwnershipError: It is locked, or may not be read or written.
            FormatError: It is of a newer format.
            CapacityError: There is no room for it.
        """
        self.counts: Counter[str] = Counter()
        self._files, self._path, self._origin, self._about = files, path, origin, about
        self._lock = threading.Lock()
        self._dropped_turns: list[int] = []
        self._dropped_scopes: list[int] = []
        self._scope_limit = 0
        self._sequence = 0
        self._generation = 0
        self._noted = State(origin=origin, piece_bytes=tuple(piece_bytes))
        self._tenancy = Tenancy(last=None, own=None)
        self._wall_s = 0
        self.wear: Callable[[], Wear] | None = None
        """Asked at each transaction what the media have taken."""
        self._database: sqlite3.Connection | None
        self._database, damages = open_manifest(files, path)
        if damages:
            self.counts["reopen: damaged manifests"] += damages

    def load(self, *, trusted: bool) -> Stored:
        """Read everything, once, after open; raises `OwnershipError` where the disk does not give it.

        Args:
            trusted: Whether the pool is the one that the manifest tells of, and bytes that are not there would
                be noticed; if not, rows count only after a clean close, or not at all.
        """
        assert self._database is not None
        wall_s = self._wall_s = self._files.wall_s()
        with self._lock:
            try:
                tenancy = read_tenancy(self._database.execute("SELECT number, body FROM state"), self._origin)
                rows = self._database.execute("SELECT number, body FROM turns")
                stored, bad = decode_rows(rows, self._origin, tenancy.origins)
            except sqlite3.Error as error:
                raise self._refusal(str(error)) from error
            if bad:
                self.counts["reopen: damaged rows"] += len(bad)
            self._dropped_turns += bad
            if not trusted and not tenancy.is_settled:
                self.counts["reopen: rows that nothing could verify"] += len(stored)
                self._dropped_turns += stored.numbers.tolist()
                stored, _ = decode_rows([], self._origin)
            if foreign := int((stored.tenants > 0).sum()):
                self.counts["reopen: rows of another identity or pool"] += foreign
            last, stored = tenancy.last, completed(stored, tenancy, wall_s)
            self._tenancy, self._sequence = tenancy.with_rows_only(stored), stored.sequence
            known = last.generation if last is not None else stored.generation + GENERATION_STEP
            # The clock as well: a manifest that was restored from a copy, or lost, knows too little.
            self._generation = max(known, stored.generation, wall_s << _SECONDS_SHIFT)
        return replace(stored, generation=min(self._generation, GENERATION_LIMIT >> 1))

    def start(self, dropped: Iterable[int], used: Used = (), *, everything: bool = False) -> None:
        """Note that the store is open from now on, forget some rows or all, and promise a step of generations.

        Args:
            dropped: Numbers of rows.
            used: Scopes in order of use, oldest first, each with the wall clock of its last use.
            everything: Forget all rows, those of other identities too.

        Raises:
            OwnershipError: It cannot be written; nothing may be stored then.
        """
        self.drop_turns(dropped)
        with self._lock:
            self._generation += GENERATION_STEP
            self._note(used)
            self._tenancy = replace(self._tenancy, others=()) if everything else self._tenancy
            steps: list[Step] = [("DELETE FROM turns", ())] if everything else []
            steps += manifestrows.put_tenants(self._tenancy.rows())
            steps += [manifestrows.put_about(self._about), self._state(was_closed=False)]
            if not self._transact(steps):
                raise self._refusal("it cannot be written")

    def wall_s(self) -> int:
        """Seconds since 1970; those of the last time that the system said so, if it does not."""
        self._wall_s = attempt(self._files.wall_s) or self._wall_s
        return self._wall_s

    # -- Manifest ---------------------------------------------------------------------------------------

    def commit_turn(self, row: TurnRow, generation: int) -> int:
        """See `Manifest.commit_turn`."""
        with self._lock:
            if self._database is None or row.scope_id < self._scope_limit or row.scope_id >= SCOPE_LIMIT:
                return 0
            number, insert = self._insertion(row)
            steps = [insert]
            if generation + GENERATION_STEP // 2 > self._generation:
                self._generation = generation + GENERATION_STEP
                steps.append(self._state(was_closed=False))
            return number if self._transact(steps) else 0

    def drop_turns(self, numbers: Iterable[int]) -> None:
        """See `Manifest.drop_turns`."""
        self._dropped_turns.extend(numbers)

    def drop_scope(self, scope_id: int) -> None:
        """See `Manifest.drop_scope`."""
        self._dropped_scopes.append(scope_id)

    def reset(self, scope_limit: int) -> bool:
        """See `Manifest.reset`."""
        with self._lock:
            if self._database is None:
                return False
            self._scope_limit = scope_limit
            return self._transact([manifestrows.dropping_below(scope_limit)]) and self._checkpoint()

    def trim(self, bad: Mapping[int, Flags], states: Mapping[int, bytes]) -> bool:
        """Forget single blocks of turns, for good; all of it or nothing; whether it is on the disk.

        Args:
            bad: For turns by number: which of their blocks are to go, bool [blocks].
            states: Rows of the table `state` that must be there afterwards, by number.
        """
        with self._lock:
            assert self._database is not None
            steps = manifestrows.trimming(self._database, bad, self._origin)
            return (
                self._transact([*((manifestrows.PUT_STATE, each) for each in states.items()), *steps])
                and self._checkpoint()
            )

    # -- the end ----------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Forget what was dropped, if nothing else was committed meanwhile."""
        with self._lock:
            return not (self._dropped_turns or self._dropped_scopes) or self._transact([])

    def checkpoint(self) -> bool:
        """See `Manifest.checkpoint`."""
        with self._lock:
            return self._database is not None and self._transact([]) and self._checkpoint()

    def close(
        self, rows: Sequence[TurnRow] = (), used: Used = (), carried: Iterable[Row] = (), *, clean: bool = False
    ) -> bool:
        """Commit last rows and that the store was closed, if it was, and close the file.  Twice is safe.

        `used` is as for `start`; `carried` are rows of other identities as they were.
        """
        with self._lock:
            if self._database is None:
                return False
            if clean:
                steps = [self._insertion(row)[1] for row in rows]
                steps += [(manifestrows.PUT_TURN, each) for each in carried]
                self._note(used)
                clean = self._transact([*steps, self._state(was_closed=True)]) and self._checkpoint()
            database, self._database = self._database, None
            try:
                self._files.close_database(database)
            except (sqlite3.Error, OSError) as error:
                log.warning("%s: %s", self._path, error)
                return False
            return clean

    def check(self) -> None:
        """Assert that the file is sound and holds only rows of this store that may be there."""
        with self._lock:
            if self._database is None:
                return
            assert is_sound(self._database)
            gone = set(self._dropped_turns)
            live = [n for (n,) in self._database.execute("SELECT number FROM turns") if n not in gone]
            assert all(number >> SCOPE_SHIFT >= self._scope_limit for number in live)
            rows = self._database.execute("SELECT number, body FROM turns")
            found, bad = decode_rows(rows, self._origin, self._tenancy.origins)
            assert gone.issuperset(bad), "a row that is no row"
            assert found.sequence <= self._sequence and found.generation <= self._generation

    # -- private, under the lock ------------------------------------------------------------------------

    def _insertion(self, row: TurnRow) -> tuple[int, Step]:
        """A row's number, and the statement that puts it there."""
        self._sequence += 1
        number = manifestrows.row_number(row.scope_id, self._sequence)
        body = encode_row(row, self._sequence, self._origin, self.wall_s())
        return number, (manifestrows.PUT_TURN, (number, body))

    def _note(self, used: Used) -> None:
        """Remember the order of use, all commits so far included, for the next state that is written."""
        ids, seconds = zip(*used[-USED_MAX:], strict=True) if used else ((), ())
        self._noted = replace(self._noted, used=tuple(ids), used_s=tuple(seconds), noted=self._sequence)

    def _state(self, *, was_closed: bool) -> Step:
        state = replace(self._noted, generation=self._generation, was_closed=was_closed)
        return manifestrows.put_state(state)

    def _transact(self, steps: Sequence[Step]) -> bool:
        """Do what was dropped, then the steps, all or nothing."""
        turns, scopes = len(self._dropped_turns), len(self._dropped_scopes)  # More may come meanwhile.
        if self._database is None:
            return False
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for statement, values in (
                *manifestrows.dropping(self._dropped_turns[:turns], self._dropped_scopes[:scopes]),
                *steps,
            ):
                self._database.execute(statement, values)
            if self.wear is not None:
                self._database.execute(*manifestrows.put_wear(self.wear()))
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            self.counts["manifest transactions failed"] += 1
            log.warning("%s: %s; what was to be kept over a restart is not", self._path, error)
            self._roll_back()
            return False
        del self._dropped_turns[:turns]
        del self._dropped_scopes[:scopes]
        return True

    def _roll_back(self) -> None:
        try:
            if self._database is not None and self._database.in_transaction:
                self._database.execute("ROLLBACK")
        except sqlite3.Error as error:
            log.warning("%s: %s", self._path, error)

    def _checkpoint(self) -> bool:
        assert self._database is not None
        try:
            busy = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        except sqlite3.Error as error:
            self.counts["manifest checkpoints failed"] += 1
            log.warning("%s: %s", self._path, error)
            return False
        return not busy

    def _refusal(self, reason: str) -> OwnershipError:
        return OwnershipError(f"{self._path}: {reason}; look at the disk, or use another directory")
