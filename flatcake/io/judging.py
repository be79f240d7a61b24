"""The verdicts of a restore: checksums of its pieces against the records of their extents.

The copy computes the sums of a tile in the same pass.  They are fetched from the device for several tiles at
once, whenever a layer is complete, and compared on the host when the records are there too: neither delays a
layer.  Pump's thread only.
"""

from collections.abc import Callable

import numpy as np

from flatcake.io.device import Stream
from flatcake.io.parts import Parts
from flatcake.io.pieces import Work
from flatcake.io.records import ExtentRef, Record, extents_of
from flatcake.io.restore import Restore
from flatcake.io.tilecopy import TileCopy
from flatcake.io.verdict import WantedSums
from flatcake.messages import BASE, MEDIUM, Int64Array, block_column

Group = tuple[list[int], list[int]]
"""Tiles whose sums are fetched together, and the layers that are complete with the last of them."""


def _nothing() -> None:
    return None


class Judging:
    """Verifies one restore, or only waves it through where checksums are off."""

    def __init__(self, parts: Parts, restore: Restore, work: Work, idle: Callable[[], None]) -> None:
        self._parts, self._restore, self._work = parts, restore, work
        self._idle = idle
        """Called whenever the last open verdict is in."""
        self._waits_for_records = 0
        self._records: dict[ExtentRef, Record] = {}
        self._wanted: WantedSums | None = None
        self._unfetched: list[int] = []
        self._groups = 0
        self._unjudged: list[Group] = []
        self._bad_rows: dict[int, list[int]] = {}
        self._stream: Stream = None
        self._copy: TileCopy | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no record and no verdict is waited for; once dropped, no further sums are fetched."""
        unfetched = self._unfetched and not self._restore.dropped
        return not (self._waits_for_records or self._groups or unfetched)

    def start(self, stream: Stream) -> None:
        """Refuse extents that have a later tenant, and look for the records of the others."""
        self._stream = stream
        for ref in extents_of(self._work.plan.runs):
            if self._parts.book.is_stale(ref):
                self._fail_extent(ref, "stale plan")
            elif self._parts.verify:
                self._want_record(ref)

    def use(self, copy: TileCopy) -> None:
        """Judge the sums of `copy`: say so before a tile is scattered."""
        self._copy = copy

    def note_scattered(self, tile: int, bad: list[int], complete: list[int]) -> None:
        """A tile's copy is queued, as the last of the layers `complete`: with any, sums are fetched up to here."""
        if not self._parts.verify:
            return
        self._unfetched.append(tile)
        if bad:
            self._bad_rows[tile] = bad
        if complete:
            assert self._copy is not None
            tiles, self._unfetched = self._unfetched, []
            self._copy.fetch_sums(tiles)
            fetched = self._parts.device.record(self._stream)
            self._groups += 1
            self._parts.pump.when(fetched, lambda: self._on_fetched((tiles, complete)), self)

    def end(self) -> None:
        """Let the records go, and who has asked: a cycle would keep all arrays of the plan for a while."""
        for record in self._records.values():
            self._parts.book.let_go(record)
        self._records, self._idle = {}, _nothing

    def _on_fetched(self, group: Group) -> None:
        self._unjudged.append(group)
        self._judge_waiting()

    def _judge_waiting(self) -> None:
        if self._waits_for_records or not self._parts.verify:
            return
        groups, self._unjudged = self._unjudged, []
        self._groups -= len(groups)  # Where one fails, the restore is dropped, and nobody judges the others.
        for tiles, complete in groups:  # In the order in which layers were complete, so all tiles of those are known.
            if not self._restore.dropped:
                self._judge(tiles)
                self._restore.note_verified(complete)
        if self.is_idle:
            self._idle()

    def _judge(self, tiles: list[int]) -> None:
        if self._wanted is None:
            self._wanted = WantedSums(self._work.plan, self._work.pieces, self._records, self._parts.payload_bytes)
        assert self._copy is not None
        pieces, bounds = self._work.pieces, self._work.pieces.tile_pieces
        rows = slice(int(bounds[min(tiles)]), int(bounds[max(tiles) + 1]))  # Those of other tiles do not count.
        found, wanted = self._copy.sums_of(rows), self._wanted.of(rows)
        if found.tobytes() == wanted.tobytes():  # Quicker than to look where they differ.
            return
        differs = found != wanted
        for tile in tiles:
            own = np.arange(bounds[tile], bounds[tile + 1])
            failed = np.setdiff1d(own[differs[own - rows.start]], self._bad_rows.get(tile, ()))
            if len(failed):
                self._fail_blocks(np.unique(pieces.table[failed, 1]))

    def _fail_blocks(self, blocks: Int64Array) -> None:
        self._parts.counts["blocks_failed_checksum"] += len(blocks)
        self._restore.damaged.update(blocks.tolist())
        self._restore.note_bad(int(blocks[0]), "checksum")

    def _want_record(self, ref: ExtentRef) -> None:
        record = self._parts.book.find(ref)
        if record is not None:
            self._records[ref] = self._parts.book.hold(record)
            return
        self._waits_for_records += 1
        self._parts.load_record(ref, lambda found: self._on_record(ref, found))

    def _on_record(self, ref: ExtentRef, record: Record | None) -> None:
        self._waits_for_records -= 1
        if record is None:
            self._restore.damaged.update(self._fail_extent(ref, "no valid checksum record"))
        else:
            self._records[ref] = self._parts.book.hold(record)
        self._judge_waiting()

    def _fail_extent(self, ref: ExtentRef, reason: str) -> list[int]:
        """Note that none of an extent's blocks can be delivered; returns them."""
        plan = self._work.plan
        places = block_column(plan, MEDIUM), block_column(plan, BASE)
        blocks = np.flatnonzero((places[0] == ref.medium) & (places[1] == ref.base_bytes))
        if len(blocks):
            self._restore.note_bad(int(blocks[0]), reason)
        found: list[int] = blocks.tolist()
        return found
