"""A data plane: media, window and pipelines of one rank.  It acts on plans and reports; it decides nothing.

One process may hold a catalog and a data plane (`store`), or a rank's worker holds the data plane alone and a
catalog elsewhere sends it plans.
"""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from flatcake.errors import ClosedError
from flatcake.geometry import Geometry
from flatcake.gva import Medium
from flatcake.io.device import Event
from flatcake.io.paged import PagedKV, PageTable
from flatcake.io.parts import Parts
from flatcake.io.pieces import Work
from flatcake.io.plan import PlanLimits, TilePlan, Wanted, make_tiles
from flatcake.io.pump import Timer
from flatcake.io.reading import Reading
from flatcake.io.restore import Restore
from flatcake.io.save import Save
from flatcake.io.writing import Writing
from flatcake.messages import FIRST_BLOCK, Completion, Plan, RankStart, Runs

Report = Callable[[Completion], object]
CloseParts = Callable[[int, Callable[[int], object]], bool]


class DataPlane:
    """Runs restores and saves.  Any number of threads may call.

    Args:
        parts: What it is made of; `assemble` puts them together.
        kv: The engine's paged tensors.
        geometry: Of `kv`, for the store's block size.
        restores_max: Restores under way at once; more wait for their turn.
        close_parts: Closes engines, files and memory within so many nanoseconds; True when all are closed.  Calls
            what it is given when nothing is in flight any more, with the time at which it should be done.
        io_reason: Why the SSD's engine was chosen.
    """

    def __init__(
        self,
        parts: Parts,
        kv: PagedKV,
        *,
        geometry: Geometry,
        restores_max: int,
        close_parts: CloseParts,
        io_reason: str,
    ) -> None:
        self.parts = parts
        self.kv = kv
        self.io_reason = io_reason
        self.before_release: Callable[[int], object] = lambda end_ns: None
        """Called at close when no I/O is in flight, and files and memory are still there."""
        self._geometry = geometry
        self._write_limits = replace(parts.limits, gap_bytes_limit=0, first_tile_bytes=parts.limits.slot_bytes)
        self._restores_max = restores_max
        self._close_parts = close_parts
        self._lock = threading.Lock()
        self._is_closed = False
        self._process = os.getpid()
        self._restores: dict[Reading, Restore] = {}
        """Under the lock, as the next one: all that have not been reported, those that wait for their turn too."""
        self._saves: set[Writing] = set()
        self._deadlines: dict[Reading | Writing, Timer] = {}
        # Of the pump's thread:
        self._active: set[Reading] = set()
        self._queued: dict[Reading, Callable[[], None]] = {}
        parts.pump.on_failure = self._on_failure

    def restore(
        self,
        plan: Plan,
        pages: object,
        *,
        stream: object = None,
        deadline_ns: int,
        report: Report,
        slots_max: int | None = None,
    ) -> Restore:
        """Start a restore; returns at once.

        Args:
            plan: From a catalog.
            pages: As for `PagedKV.page_table`; pages of -1 are left alone, a piece without any page is not read.
            stream: Its queued work may still touch the pages, and is waited for before the first scatter.
            deadline_ns: Time of the clock after which the restore is dropped.
            report: Called once, on the pump's thread, when nothing of the plan is in flight any more.
            slots_max: Window slots that it may hold at once, so that others find some; None: as many as are free.

        Raises:
            PageTableError: The page table is too short, out of range, or names a page twice.  Nothing was begun.
            ClosedError: The data plane is closed.
        """
        self._require_open()
        blocks = len(plan.keys)
        table = self.kv.page_table(pages, blocks, self._geometry.pages_per_block, whole_from=blocks)
        work = self._expand(plan, self.parts.limits, self.kv.wanted(table))
        after = self.parts.device.record(self.parts.device.stream_of(stream))
        restore = self._handle(work.tiles, blocks)
        limit = self.parts.window.slots if slots_max is None else max(1, slots_max)
        reading = Reading(self.parts, restore, work, partial(self._end_restore, report), limit)
        with self._lock:
            self._require_open()
            restore.on_drop = lambda: self.parts.pump.post(reading.on_dropped)
            self._restores[reading] = restore
            self._deadlines[reading] = self.parts.pump.at(deadline_ns, partial(reading.drop, "deadline"))
        self.parts.pump.post(lambda: self._queue(reading, lambda: reading.start(table, after)))
        return restore

    def save(
        self,
        plan: Plan,
        pages: object,
        *,
        stream: object = None,
        deadline_ns: int,
        report: Report,
        deferred: bool = True,
    ) -> Save:
        """Prepare a save that `Save.start` begins; returns at once.

        Args:
            plan: From a catalog.
            pages: As for `restore`, but -1 only before the first block to write; or what `check_pages` made of it.
            stream: The producer: what is queued there at the start is waited for before the pages are read.
            deadline_ns: Time of the clock after which no further write is begun; the start included.
            report: As for `restore`.
            deferred: It may be started later, or never.  One that is started at once has its deadline set meanwhile.

        Raises:
            PageTableError: The page table is too short, out of range, or names a page twice.  Nothing was begun.
            ClosedError: The data plane is closed.
        """
        self._require_open()
        if not isinstance(pages, PageTable):
            pages = self.check_pages(pages, len(plan.keys), plan.runs.column(FIRST_BLOCK).min(initial=len(plan.keys)))
        table, work = pages.rows, self._expand(plan, self._write_limits)
        producer = self.parts.device.stream_of(stream)

        def begin() -> None:
            try:
                self.parts.pump.post(partial(start, self.parts.device.record(producer)))
            except BaseException:
                self.parts.pump.post(partial(writing.give_up, "not begun"))  # No deadline may be set that would end it.
                raise

        def start(after: Event) -> None:
            writing.start(table, after, deadline_ns)
            self._set_deadline(writing, deadline_ns)

        save = Save(len(plan.keys), begin)
        writing = Writing(self.parts, save, work, partial(self._end_save, report))
        with self._lock:
            self._require_open()
            self._saves.add(writing)
        if deferred:
            self._set_deadline(writing, deadline_ns)
        return save

    def check_pages(self, pages: object, blocks: int, first_block: int = 0) -> PageTable:
        """Check the page table of a save of the blocks from `first_block` on before anything is begun.

        Raises:
            PageTableError: Too short, out of range, or a page named twice.
        """
        return PageTable(self.kv.page_table(pages, blocks, self._geometry.pages_per_block, whole_from=first_block))

    def require_threads(self) -> None:
        """A child of fork has the store's memory and none of its threads: nothing would ever end there.

        Raises:
            ClosedError: This process is one.
        """
        if os.getpid() != self._process:
            raise ClosedError(f"the store is of process {self._process}, before a fork; open another one after it")

    def start_report(self) -> RankStart:
        """What a catalog in another process must know of this rank."""
        parts = self.parts
        ssd = parts.media.get(Medium.SSD)
        return RankStart(
            rank=parts.rank,
            epoch=parts.epoch,
            geometry=self._geometry,
            pool_kept=parts.pool is not None and parts.pool.kept,
            pool_file_bytes=parts.pool.file_bytes if parts.pool is not None else 0,
            directories=parts.pool.homes if parts.pool is not None else (),
            verifies=parts.verify,
            window_slots=parts.window.slots,
            slot_bytes=parts.window.slot_bytes,
            io_path=ssd.engine.name if ssd is not None else "",
        )

    def nothing(self, reason: str, blocks: int = 0) -> Restore:
        """A restore that is over before it began: a miss with a reason, or `blocks` that are in the pages already."""
        restore = self._handle(make_tiles(Runs.none(), self.parts.lanes, self.parts.limits), blocks)
        if reason:
            restore.cancel(reason)
        restore.end()
        return restore

    def cancel_all(self, reason: str) -> None:
        """Give all pages back; restores under way have ended as misses with `reason` when this returns."""
        with self._lock:
            restores = list(self._restores.values())
        for restore in restores:
            restore.cancel(reason)

    def close(self, wait_ns: int) -> bool:
        """Refuse new work, drop restores, wait for what is in flight; True when nothing was left.

        Every handle is over when this returns.  I/O that is stuck in the kernel is left behind when the time is
        up, with the files that it uses; another call waits again.  In a child of fork nothing is touched.
        """
        if os.getpid() != self._process:
            return False
        with self._lock:
            self._is_closed = True
        end_ns = self.parts.clock.now_ns() + wait_ns
        self.cancel_all("closed")
        is_clean = self._close_parts(wait_ns, self.before_release)
        is_clean = self.parts.pump.close(max(0, end_ns - self.parts.clock.now_ns())) and is_clean
        with self._lock:
            restores, saves = [*self._restores.values()], [*self._saves]
            self._restores, self._saves = {}, set()
        for restore in restores:
            restore.cancel("closed")
        for writing in saves:
            writing.abandon("closed")
        return is_clean

    # -- the pump's -------------------------------------------------------------------------------------

    def _queue(self, reading: Reading, start: Callable[[], None]) -> None:
        if not reading.is_over:
            self._queued[reading] = start
            self._start_queued()

    def _start_queued(self) -> None:
        while self._queued and len(self._active) < self._restores_max:
            reading = next(iter(self._queued))
            start = self._queued.pop(reading)
            self._active.add(reading)
            start()

    def _end_restore(self, report: Report, reading: Reading, done: Completion) -> None:
        self._active.discard(reading)
        self._queued.pop(reading, None)
        with self._lock:
            self._restores.pop(reading, None)
            self.parts.pump.forget(self._deadlines.pop(reading))
        self.parts.pump.post(self._start_queued)
        report(done)

    def _set_deadline(self, writing: Writing, deadline_ns: int) -> None:
        with self._lock:
            if writing in self._saves and writing not in self._deadlines:
                self._deadlines[writing] = self.parts.pump.at(deadline_ns, partial(writing.give_up, "deadline"))

    def _end_save(self, report: Report, writing: Writing, done: Completion) -> None:
        with self._lock:
            self._saves.discard(writing)
            self.parts.pump.forget(self._deadlines.pop(writing, None))
        report(done)

    def _on_failure(self) -> None:
        """A handler has raised, nobody knows for whom: all end as misses and refusals, none waits for ever."""
        self.cancel_all("internal error")
        with self._lock:
            saves = list(self._saves)
        for writing in saves:
            self.parts.pump.post(partial(writing.give_up, "internal error"))

    # -- private ----------------------------------------------------------------------------------------

    def _expand(self, plan: Plan, limits: PlanLimits, wanted: Wanted | None = None) -> Work:
        tiles = make_tiles(plan.runs, self.parts.lanes, limits, wanted)
        return Work(plan, tiles, self.parts.lanes, self.parts.layout)

    def _handle(self, tiles: TilePlan, blocks: int) -> Restore:
        parts, tokens, layers = self.parts, self._geometry.block_tokens, self.parts.lanes.layer_count
        return Restore(parts.device, parts.clock, tiles, blocks=blocks, block_tokens=tokens, layers=layers)

    def _require_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the data plane is closed; open the store again")
        self.require_threads()


def layout_number(fingerprint: str) -> int:
    """The 64-bit digest of a geometry that seeds checksums and marks records."""
    return int(np.uint64(int(fingerprint[:16], 16)))
