"""Puts a save's checksums into the records of its extents, and the records on their media.

After the pieces are on the medium, before the report.  Writes to one extent's record follow one another, so
that two turns which append to it at the same time cannot overwrite each other's sums.  Pump's thread only.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from flatcake.gva import Medium
from flatcake.io.engine import Result, Transfer
from flatcake.io.parts import Parts
from flatcake.io.records import ExtentRef, Record
from flatcake.messages import FIRST_SLOT, Plan


class Recording:
    """Writes the records of one save."""

    def __init__(self, parts: Parts, plan: Plan) -> None:
        self._parts = parts
        self.runs: dict[ExtentRef, list[list[int]]] = {}
        """The plan's runs of each extent, as rows of `Runs`."""
        for row in plan.runs.table.tolist():
            self.runs.setdefault(ExtentRef(*row[:FIRST_SLOT]), []).append(row)
        self._sums: npt.NDArray[np.uint64]
        self._then: Callable[[str], None]
        self._new: list[ExtentRef] = []
        self._held: list[Record] = []
        self._waiting = 0
        self._error = ""

    def note(self) -> None:
        """Note the extents before anything is written to them."""
        book = self._parts.book
        for ref, rows in self.runs.items():
            if not book.is_known(ref) and any(not row[FIRST_SLOT] for row in rows):
                self._new.append(ref)
            book.note_generation(ref)

    def prepare(self) -> None:
        """Begin the records of new extents, for later turns may be written before this one.

        One that a later turn has begun already is left alone, also when it is no longer in memory.  Post this in the
        turn of `note`: then it comes before what is posted of later turns.
        """
        book, new = self._parts.book, self._new
        self._new = []
        self._held += [book.hold(book.find(ref) or book.blank(ref)) for ref in new]

    def start(self, sums: npt.NDArray[np.uint64], then: Callable[[str], None]) -> None:
        """Write `sums`, uint64 [blocks of the request, layers]; `then` is called once with a reason, empty if all went
        well."""
        self._sums, self._then = sums, then
        self._waiting = len(self.runs)
        for ref in self.runs:
            self._parts.record_turns.enter(ref, lambda ref=ref: self._fetch(ref))  # type: ignore[misc]

    def close(self) -> None:
        """Let go of the records that `prepare` began, or begin none."""
        held, self._held, self._new = self._held, [], []
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
        parts, medium = self._parts, Medium(ref.medium)
        first, end = ref.room_blocks, 0
        for *_, slot, blocks, block in self.runs[ref]:
            record.sums[slot : slot + blocks] = self._sums[block : block + blocks]
            first, end = min(first, slot), max(end, slot + blocks)
        first = first if record.is_stored else 0
        offset, size_bytes = parts.book.dirty_range(ref, first, end - first)
        parts.book.hold(record)
        parts.counts["record_write_bytes"] += size_bytes
        parts.written_bytes[medium] += size_bytes

        def finish(results: list[Result]) -> None:
            parts.book.let_go(record)
            whole = not results[0].error and results[0].moved_bytes == size_bytes
            record.is_stored |= whole
            self._done(ref, "" if whole else f"record write failed (errno {results[0].error})")

        io = parts.media[medium]
        file, at = io.locate(ref.base_bytes + offset)
        batch = [Transfer(file, at, size_bytes, offset)]
        io.host_engine.write(batch, record.buffer, lambda results, _: parts.pump.post(lambda: finish(results)))

    def _done(self, ref: ExtentRef, error: str) -> None:
        self._error = self._error or error
        self._parts.record_turns.leave(ref)
        self._waiting -= 1
        if not self._waiting:
            then = self._then
            del self._then  # Which has this.
            then(self._error)
