"""Puts a save's checksums into the records of its extents, and the records on their media.

After the pieces are on the medium, before the report.  Writes to one extent's record follow one another, so
that two turns which append to it at the same time cannot overwrite each other's sums.  Pump's thread only.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from flatcake.gva import Medium
from flatcake.io.engine import Buffer, Result
from flatcake.io.parts import Parts
from flatcake.io.records import ExtentRef, Record, extents_of
from flatcake.messages import BASE, BLOCKS, FIRST_BLOCK, FIRST_SLOT, GENERATION, MEDIUM, ROOM, Int64Array, Plan


class Recording:
    """Writes the records of one save."""

    def __init__(self, parts: Parts, plan: Plan, then: Callable[[str], None]) -> None:
        self._parts, self._plan, self._then = parts, plan, then
        self._sums: npt.NDArray[np.uint64]
        self._held: list[Record] = []
        self._waiting = 0
        self._error = ""

    def prepare(self) -> None:
        """Note the extents, and begin the records of new ones, for later turns may be written before this one.

        One that a later turn has begun already is left alone, also when it is no longer in memory.
        """
        book = self._parts.book
        for ref in extents_of(self._plan.runs):
            is_new = not book.is_known(ref) and self._rows(ref)[:, FIRST_SLOT].min() == 0
            book.note_generation(ref)
            if is_new:
                self._held.append(book.hold(book.find(ref) or book.blank(ref)))

    def start(self, sums: npt.NDArray[np.uint64]) -> None:
        """Write `sums`, uint64 [blocks of the request, layers]; `then` is called once with a reason, empty if all went
        well."""
        self._sums = sums
        refs = extents_of(self._plan.runs)
        self._waiting = len(refs)
        for ref in refs:
            self._parts.record_turns.enter(ref, lambda ref=ref: self._fetch(ref))  # type: ignore[misc]

    def close(self) -> None:
        """Let go of the records that `prepare` began."""
        held, self._held = self._held, []
        for record in held:
            self._parts.book.let_go(record)

    def _fetch(self, ref: ExtentRef) -> None:
        book = self._parts.book
        record = book.find(ref)
        if record is not None:
            self._write(ref, record)
        else:
            self._parts.load_record(ref, lambda found: self._write(ref, found), anew=True)

    def _write(self, ref: ExtentRef, record: Record | None) -> None:
        if record is None:
            self._done(ref, "checksum record of the extent cannot be read")
            return
        rows = self._rows(ref)
        for row in rows.tolist():
            blocks = slice(row[FIRST_BLOCK], row[FIRST_BLOCK] + row[BLOCKS])
            record.sums[row[FIRST_SLOT] : row[FIRST_SLOT] + row[BLOCKS]] = self._sums[blocks]
        first = int(rows[:, FIRST_SLOT].min()) if record.is_stored else 0
        end = int((rows[:, FIRST_SLOT] + rows[:, BLOCKS]).max())
        offset, size_bytes = self._parts.book.dirty_range(ref, first, end - first)
        self._parts.book.hold(record)
        self._parts.counts["record_write_bytes"] += size_bytes
        self._parts.written_bytes[Medium(ref.medium)] += size_bytes

        def finish(results: list[Result]) -> None:
            self._parts.book.let_go(record)
            whole = not results[0].error and results[0].moved_bytes == size_bytes
            record.is_stored |= whole
            self._done(ref, "" if whole else f"record write failed (errno {results[0].error})")

        self._parts.media[Medium(ref.medium)].host_engine.write(
            [self._parts.transfer(ref.medium, ref.base_bytes + offset, size_bytes, offset)],
            Buffer.of(torch.from_numpy(record.raw)),
            lambda results, _: self._parts.pump.post(lambda: finish(results)),
        )

    def _done(self, ref: ExtentRef, error: str) -> None:
        self._error = self._error or error
        self._parts.record_turns.leave(ref)
        self._waiting -= 1
        if not self._waiting:
            self._then(self._error)

    def _rows(self, ref: ExtentRef) -> Int64Array:
        table = self._plan.runs.table
        rows: Int64Array = table[(table[:, [MEDIUM, BASE, ROOM, GENERATION]] == np.array(ref)).all(axis=1)]
        return rows
