"""The manifest in a file: SQLite with a write-ahead log, one transaction per committed turn.  DESIGN §7.

A commit is in the kernel's hands when it returns, so it outlives the process; `checkpoint` sees it to the disk.
Rows prove themselves; `io.manifestfile` opens whatever lies there.  Faults are counted, and never raised
after open.
"""

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from flatcake.errors import OwnershipError
from flatcake.io.manifestfile import open_manifest
from flatcake.io.salvage import is_sound
from flatcake.io.seam import Files
from flatcake.manifest import (
    GENERATION_LIMIT,
    Flags,
    State,
    Stored,
    TurnRow,
    decode_rows,
    decode_state,
    encode_row,
    encode_state,
    trim_row,
)

log = logging.getLogger(__name__)

MANIFEST = "manifest.db"
GENERATION_STEP = 1 << 20
"""Generations are promised to be used in such steps, so that few commits need to say so."""
STATE_NUMBER, ABOUT_NUMBER = 0, 1
"""Rows of the table `state`."""
SCOPE_SHIFT = 24
"""A row's number is its scope's, then this many bits of the commit's: a scope is one stretch of the table."""

_SECONDS_SHIFT = 20
_KEEP_BITS = (1 << SCOPE_SHIFT) - 1
_SCOPE_LIMIT = 1 << (62 - SCOPE_SHIFT)


class ManifestDB:
    """One directory's manifest.  Any number of threads may call; its lock on the directory is the pool's."""

    def __init__(self, files: Files, path: str, origin: bytes, about: bytes = b"") -> None:
        """Open or make the file.

        Args:
            files: The seam to the system.
            path: The file.
            origin: Of this store; rows of any other are no rows.
            about: What the store is, for whoever looks at the file later (`flatcake.about`).

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
        self._used: tuple[int, ...] = ()
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
        with self._lock:
            try:
                state = decode_state(self._one(f"SELECT body FROM state WHERE number = {STATE_NUMBER}"))
                stored, bad = decode_rows(self._database.execute("SELECT number, body FROM turns"), self._origin)
            except sqlite3.Error as error:
                raise self._refusal(str(error)) from error
            if state is not None and state.origin != self._origin:
                self.counts["reopen: rows of another identity or pool"] += len(bad)
            elif bad:
                self.counts["reopen: damaged rows"] += len(bad)
            self._used = state.used if state is not None and state.was_closed else ()
            self._dropped_turns += bad
            if not trusted and not (state is not None and state.was_closed):
                self.counts["reopen: rows that nothing could verify"] += len(stored)
                self._dropped_turns += stored.numbers.tolist()
                stored, _ = decode_rows([], self._origin)
            self._sequence = stored.sequence
            known = state.generation if state is not None else stored.generation + GENERATION_STEP
            # The clock as well: a manifest that was restored from a copy, or lost, knows too little.
            self._generation = max(known, stored.generation, self._files.wall_s() << _SECONDS_SHIFT)
        return replace(stored, generation=min(self._generation, GENERATION_LIMIT >> 1), used=self._used)

    def start(self, dropped: Iterable[int], *, everything: bool = False) -> None:
        """Note that the store is open from now on, forget some rows or all, and promise a step of generations.

        Raises:
            OwnershipError: It cannot be written; nothing may be stored then.
        """
        self.drop_turns(dropped)
        with self._lock:
            self._generation += GENERATION_STEP
            steps = [("DELETE FROM turns", ())] if everything else []
            about = ("INSERT OR REPLACE INTO state VALUES (?, ?)", (ABOUT_NUMBER, self._about))
            if not self._transact([*steps, self._state(was_closed=False), about]):
                raise self._refusal("it cannot be written")

    # -- Manifest ---------------------------------------------------------------------------------------

    def commit_turn(self, row: TurnRow, generation: int) -> int:
        """See `Manifest.commit_turn`."""
        with self._lock:
            if self._database is None or row.scope_id < self._scope_limit or row.scope_id >= _SCOPE_LIMIT:
                return 0
            self._sequence += 1
            number = row.scope_id << SCOPE_SHIFT | self._sequence & _KEEP_BITS
            body = encode_row(row, self._sequence, self._origin)
            steps: list[tuple[str, tuple[object, ...]]] = [("INSERT INTO turns VALUES (?, ?)", (number, body))]
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
            steps = [("DELETE FROM turns WHERE number < ?", (min(scope_limit, _SCOPE_LIMIT) << SCOPE_SHIFT,))]
            return self._transact(steps) and self._checkpoint()

    def trim(self, bad: Mapping[int, Flags], states: Mapping[int, bytes]) -> bool:
        """Forget single blocks of turns, for good; all of it or nothing; whether it is on the disk.

        Args:
            bad: For turns by number: which of their blocks are to go, bool [blocks].
            states: Rows of the table `state` that must be there afterwards, by number.
        """
        steps: list[tuple[str, tuple[object, ...]]] = [
            ("INSERT OR REPLACE INTO state VALUES (?, ?)", each) for each in states.items()
        ]
        with self._lock:
            for number, flags in bad.items():
                body = self._one(f"SELECT body FROM turns WHERE number = {number:d}")
                left = trim_row(body, ~flags, self._origin) if isinstance(body, bytes) else b""
                if left:
                    steps.append(("UPDATE turns SET body = ? WHERE number = ?", (left, number)))
                else:
                    steps.append(("DELETE FROM turns WHERE number = ?", (number,)))
            return self._transact(steps) and self._checkpoint()

    # -- the end ----------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Forget what was dropped, if nothing else was committed meanwhile."""
        with self._lock:
            return not (self._dropped_turns or self._dropped_scopes) or self._transact([])

    def checkpoint(self) -> bool:
        """See all commits to the disk; whether they are there."""
        with self._lock:
            return self._database is not None and self._transact([]) and self._checkpoint()

    def close(self, rows: Sequence[TurnRow] = (), used: Iterable[int] = (), *, clean: bool = False) -> bool:
        """Commit last rows and that the store was closed, if it was, and close the file.  Twice is safe."""
        with self._lock:
            if self._database is None:
                return False
            if clean:
                steps = []
                for row in rows:
                    self._sequence += 1
                    number = row.scope_id << SCOPE_SHIFT | self._sequence & _KEEP_BITS
                    body = encode_row(row, self._sequence, self._origin)
                    steps.append(("INSERT INTO turns VALUES (?, ?)", (number, body)))
                self._used = tuple(used)
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
            found, bad = decode_rows(self._database.execute("SELECT number, body FROM turns"), self._origin)
            assert gone.issuperset(bad), "a row that is no row"
            assert found.sequence <= self._sequence and found.generation <= self._generation

    # -- private, under the lock ------------------------------------------------------------------------

    def _state(self, *, was_closed: bool) -> tuple[str, tuple[object, ...]]:
        used = self._used if was_closed else ()
        state = State(origin=self._origin, generation=self._generation, was_closed=was_closed, used=used)
        return "INSERT OR REPLACE INTO state VALUES (?, ?)", (STATE_NUMBER, encode_state(state))

    def _transact(self, steps: Sequence[tuple[str, tuple[object, ...]]]) -> bool:
        """Do what was dropped, then the steps, all or nothing."""
        turns, scopes = len(self._dropped_turns), len(self._dropped_scopes)  # More may come meanwhile.
        if self._database is None:
            return False
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for number in self._dropped_turns[:turns]:
                self._database.execute("DELETE FROM turns WHERE number = ?", (number,))
            for scope in self._dropped_scopes[:scopes]:
                first = scope << SCOPE_SHIFT
                span = (first, first | _KEEP_BITS)
                self._database.execute("DELETE FROM turns WHERE number BETWEEN ? AND ?", span)
            for statement, values in steps:
                self._database.execute(statement, values)
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

    def _one(self, query: str) -> object:
        assert self._database is not None
        row = self._database.execute(query).fetchone()
        return row[0] if row else None
