"""What of a store outlives its process: the manifest, the DRAM medium on disk, and when each is believed.

docs/restart.md says what comes back.

At open the catalog is filled from the manifest, if the pool still is the one that it tells of.  While the
store runs, saves to SSD end on the scribe's thread: committed, then published.  At a clean close DRAM is
written to a file.  Whatever goes wrong here costs hits after a restart, and nothing else.
Write path:  data planes -> [keeper] -> catalog.finish -> manifest -> index
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from flatcake.catalog import Catalog
from flatcake.clock import Clock
from flatcake.gva import Medium
from flatcake.io.dramdump import DUMP, Range, read_dump, write_dump
from flatcake.io.manifestdb import ManifestDB
from flatcake.io.manifestrows import SCOPE_SHIFT
from flatcake.io.parts import Parts
from flatcake.io.pooldir import attempt
from flatcake.io.salvage import Row
from flatcake.io.scribe import Scribe
from flatcake.io.seam import Files
from flatcake.manifest import TurnRow
from flatcake.scopes import Scope
from flatcake.wear import UNKNOWN, Wear

log = logging.getLogger(__name__)


class Keeper:
    """Keeps one store over restarts; only for catalog and data plane in one process."""

    def __init__(self, catalog: Catalog, parts: Parts, manifest: ManifestDB, files: Files, free_bytes_min: int) -> None:
        assert parts.pool is not None
        self.manifest = manifest
        self._counts: Counter[str] = Counter()
        self._catalog, self._parts, self._files = catalog, parts, files
        self._clock: Clock = parts.clock
        self._free_bytes_min = free_bytes_min
        self._home = parts.pool.paths[0].rpartition("/")[0]
        self.written_before: Counter[Medium] = Counter()
        """Bytes that each medium has taken in earlier runs, as far as is known."""
        self._carried: dict[int, list[Row]] = {}
        """Rows of other identities in DRAM, by scope."""
        self._scribe = Scribe(self._on_scribe_end)
        self._is_closed = False
        self.is_abandoned = False
        """Closed while a commit was stuck: whoever gets it unstuck closes the manifest."""
        self._has_scribe_ended = False
        self._ending = threading.Lock()
        """Of the two above: whoever comes second sees what the first has said."""
        self._settling = threading.Lock()

    def reopen(self) -> None:
        """Fill the catalog, once, before anybody else uses it."""
        assert self._parts.pool is not None
        is_same = self._parts.pool.kept
        stored = self.manifest.load(trusted=self._parts.verify)
        if not is_same and len(stored):
            self._counts["reopen: rows of another pool"] += len(stored)
        space = self._catalog.space
        space.manifest = self.manifest  # What expires at once goes with the first transaction.
        self._resume(stored.wear)
        if is_same:
            dropped = self._catalog.reopen(stored, self._clock.now_ns())
            in_dram = stored.numbers[stored.media == Medium.DRAM].tolist()
            gone = set(dropped)
            for number, body in stored.carried:
                if number not in gone:
                    self._carried.setdefault(number >> SCOPE_SHIFT, []).append((number, body))
            self._load_dram()
            self.manifest.start([*dropped, *in_dram], self._used())
        else:
            space.generation = stored.generation
            self.manifest.start((), everything=True)
        self._remove_dump()

    def post(self, task: Callable[[], object]) -> None:
        """Run what may wait on a disk: on the scribe's thread, or here once that has ended.

        After a close that found a commit stuck it is not run: it would be stuck, too.
        """
        if not self._scribe.post(task) and not self.is_abandoned:
            task()

    def tick(self) -> None:
        """Let the manifest forget what was reclaimed, if no commit has done so."""
        if self._settling.acquire(blocking=False):

            def settle() -> None:
                try:
                    self.manifest.settle()
                finally:
                    self._settling.release()

            if not self._scribe.post(settle):
                self._settling.release()

    def flush(self) -> bool:
        """See everything on SSD that is visible now to the disk: the data, then the manifest; whether it is there."""
        return self._sync_pool() and self.manifest.checkpoint()

    def close(self, end_ns: int) -> bool:
        """Write down what is to be found again; call it when no I/O is in flight, before files are let go.

        What is not done at `end_ns` is lost over the restart.  Returns whether all was done; a second call does
        nothing, for the directory may be another's by then.
        """
        if self._is_closed:
            return False
        self._is_closed = True
        is_idle = self._parts.pump.fence(self._left_ns(end_ns))  # All reports are in the scribe's hands then.
        is_idle = self._scribe.close(self._left_ns(end_ns)) and is_idle
        if not is_idle:
            log.warning("%s: closed with commits under way; DRAM is not kept", self._home)
            self.give_up(0)
            return False
        rows, carried = self._dump_dram(end_ns)
        clean, find = self._sync_pool(), self._catalog.space.scopes.find
        with self._catalog.retention.committing:  # A deletion has been by now, or is told that it comes too late.
            rows = [row for row in rows if find(row.scope_id) is not None]
            carried = [row for row in carried if find(row[0] >> SCOPE_SHIFT) is not None]
            return self.manifest.close(rows, self._used(), carried, clean=clean)

    def give_up(self, wait_ns: int) -> None:
        """Keep nothing, and let go of the manifest: now, or as soon as nothing is stuck there."""
        with self._ending:
            self.is_abandoned, has_ended = True, self._has_scribe_ended
        if self._scribe.close(wait_ns) or has_ended:
            self.manifest.close()

    def counts(self) -> Counter[str]:
        """What was dropped at open, and what could not be kept since."""
        return Counter(self._counts) + Counter(self.manifest.counts)

    def check(self) -> None:
        """Assert that the manifest is sound."""
        self.manifest.check()

    def _on_scribe_end(self) -> None:
        with self._ending:
            self._has_scribe_ended = True
        if self.is_abandoned:
            self.manifest.settle()
            self.manifest.close()

    def _used(self) -> list[tuple[int, int]]:
        """All scopes in order of use, oldest first, each with the wall clock of its last use."""
        return self._catalog.space.scopes.by_use(self._clock.now_ns(), self.manifest.wall_s())

    # -- wear -------------------------------------------------------------------------------------------

    def _resume(self, wear: Wear) -> None:
        """Count and spend on where an earlier run has left off."""
        self.written_before = Counter({Medium.DRAM: wear.dram_bytes, Medium.SSD: wear.ssd_bytes})
        idle_s = self.manifest.wall_s() - wear.wall_s
        self._catalog.space.budget.resume(wear.left_bytes, idle_s, self._clock.now_ns())
        self.manifest.wear = self._wear

    def _wear(self) -> Wear:
        total = {medium: self.written_before[medium] + self._parts.written_bytes[medium] for medium in Medium}
        left_bytes = self._catalog.space.budget.left_bytes(self._clock.now_ns())
        return Wear(
            dram_bytes=total[Medium.DRAM],
            ssd_bytes=total[Medium.SSD],
            left_bytes=UNKNOWN if left_bytes is None else left_bytes,
            wall_s=max(0, self.manifest.wall_s()),
        )

    # -- DRAM -------------------------------------------------------------------------------------------

    def _load_dram(self) -> None:
        """Bring the bytes of the DRAM scopes back; those whose bytes are gone are withdrawn."""
        space = self._catalog.space
        scopes = [scope for scope in space.scopes if scope.medium is Medium.DRAM]
        if not scopes:
            return
        assert self._parts.arena is not None
        spans = [span for scope in scopes for span in self._spans(scope)]
        came = iter(read_dump(self._files, f"{self._home}/{DUMP}", self._parts.arena.array, spans))
        for scope in scopes:
            if sum(next(came) for _ in scope.extents) < len(scope.extents):
                self._counts["reopen: DRAM scopes lost"] += 1
                space.withdraw(scope)

    def _dump_dram(self, end_ns: int) -> tuple[list[TurnRow], list[Row]]:
        """Write the DRAM scopes to a file, the one used last first, while there is time and space.

        Returns:
            Rows of what is there, those of other identities apart.
        """
        if self._parts.arena is None:
            return [], []
        scopes = self._catalog.space.scopes
        found = [(row, scopes.find(row.scope_id)) for row in self._catalog.rows_of(Medium.DRAM)]
        rows = [row for row, scope in found if scope is not None]  # Else it was deleted meanwhile, or has expired.
        foreign = [scope for scope in scopes if scope.is_foreign and scope.medium is Medium.DRAM]
        self._remove_dump()
        if not rows and not foreign:
            return [], []
        left_bytes = (attempt(self._files.free_bytes, self._home) or 0) - self._free_bytes_min

        def go_on(size_bytes: int) -> bool:
            nonlocal left_bytes
            left_bytes -= size_bytes
            may = left_bytes >= 0 and self._left_ns(end_ns) > 0
            self._parts.written_bytes[Medium.SSD] += size_bytes if may else 0
            return may

        own = [scope for _, scope in found if scope is not None]
        groups = [self._spans(scope) for scope in (*own, *foreign)]
        path = f"{self._home}/{DUMP}"
        done = attempt(write_dump, self._files, path, self._parts.arena.array, groups, go_on) or 0
        self._counts["DRAM scopes not kept at close"] += len(groups) - done
        if done < len(groups):
            log.warning(
                "%s: %d of %d DRAM scopes are not kept: no time or space", path, len(groups) - done, len(groups)
            )
        kept = foreign[: max(0, done - len(rows))]
        return rows[:done], [each for scope in kept for each in self._carried[scope.scope_id]]

    def _spans(self, scope: Scope) -> Sequence[Range]:
        """Where the extents of a DRAM scope lie."""
        table = self._catalog.space.tables[Medium.DRAM]
        return [(extent.base_bytes, table.size_of(extent)) for extent in scope.extents]

    def _remove_dump(self) -> None:
        try:
            self._files.remove(f"{self._home}/{DUMP}")
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s/%s: %s", self._home, DUMP, error)

    def _sync_pool(self) -> bool:
        assert self._parts.pool is not None
        try:
            for fd in self._parts.pool.fds:
                self._files.sync(fd)
        except OSError as error:
            self._counts["flushes failed"] += 1
            log.warning("%s: %s", self._home, error)
            return False
        return True

    def _left_ns(self, end_ns: int) -> int:
        return max(0, end_ns - self._clock.now_ns())
