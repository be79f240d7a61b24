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
from flatcake.io.verdict import expected_sums, failed_blocks
from flatcake.kernels.checksum import Sums
from flatcake.messages import BASE, MEDIUM, block_column


class Judging:
    """Verifies one restore, or only waves it through where checksums are off."""

    def __init__(self, parts: Parts, restore: Restore, work: Work, idle: Callable[[], None]) -> None:
        self._parts, self._restore, self._work = parts, restore, work
        self._idle = idle
        """Called whenever the last open verdict is in."""
        self._waits_for_records = 0
        self._records: dict[ExtentRef, Record] = {}
        self._expected: Sums | None = None
        self._unfetched: list[int] = []
        self._groups = 0
        self._unjudged: list[list[int]] = []
        self._bad_rows: dict[int, list[int]] = {}
        self._unverified = layer_tiles(work, parts.lanes.layer_count)
        self._stream: Stream = None
        self._copy: TileCopy

    @property
    def is_idle(self) -> bool:
        """Whether no record and no verdict is waited for; once dropped, no further sums are fetched."""
        unfetched = self._unfetched and not self._restore.dropped
        return not (self._waits_for_records or self._groups or unfetched)

    def start(self, copy: TileCopy, stream: Stream) -> None:
        """Refuse extents that have a later tenant, and look for the records of the others."""
        self._copy, self._stream = copy, stream
        for ref in extents_of(self._work.plan.runs):
            if self._parts.book.is_stale(ref):
                self._fail_extent(ref, "stale plan")
            elif self._parts.verify:
                self._want_record(ref)
        self._judge_waiting()

    def note_scattered(self, tile: int, bad: list[int], *, fetch: bool) -> None:
        """A tile's copy is queued; `fetch` its sums, and those of the tiles before it, now."""
        if not self._parts.verify:
            return
        self._unfetched.append(tile)
        if bad:
            self._bad_rows[tile] = bad
        if fetch:
            group, self._unfetched = self._unfetched, []
            self._copy.fetch_sums(group)
            fetched = self._parts.device.record(self._stream)
            self._groups += 1
            self._parts.pump.when(fetched, lambda: self._on_fetched(group), self)

    def end(self) -> None:
        """Let the records go."""
        for record in self._records.values():
            self._parts.book.let_go(record)
        self._records = {}

    def _on_fetched(self, group: list[int]) -> None:
        self._unjudged.append(group)
        self._judge_waiting()

    def _judge_waiting(self) -> None:
        if self._waits_for_records or not self._parts.verify:
            return
        if self._expected is None:
            layers = self._parts.lanes.layer_count
            self._expected = expected_sums(self._work.plan, self._work.pieces, self._records, layers)
        groups, self._unjudged = self._unjudged, []
        for group in groups:
            self._groups -= 1
            if not self._restore.dropped:
                self._judge(group, self._expected)
        if self.is_idle:
            self._idle()

    def _judge(self, group: list[int], expected: Sums) -> None:
        pieces, tiles = self._work.pieces, self._work.tiles
        bounds = pieces.tile_pieces
        rows = np.concatenate([np.arange(bounds[tile], bounds[tile + 1]) for tile in group])
        bad = [row for tile in group for row in self._bad_rows.pop(tile, ())]
        rows = np.setdiff1d(rows, bad) if bad else rows
        sums = self._copy.sums[rows]
        payload_bytes = self._parts.payload_bytes
        failed = failed_blocks(sums, expected[rows], pieces.seeds[rows], pieces.table[rows], payload_bytes)
        if len(failed):
            self._parts.counts["blocks_failed_checksum"] += len(failed)
            self._restore.damaged.update(failed.tolist())
            self._restore.note_bad(int(failed[0]), "checksum")
        for tile in group:
            for layer in range(int(tiles.tile_first_layer[tile]), int(tiles.tile_last_layer[tile]) + 1):
                self._unverified[layer] -= 1
                if not self._unverified[layer]:
                    self._restore.note_verified(layer)

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


def layer_tiles(work: Work, layers: int) -> list[int]:
    """Per layer: in how many tiles it lies."""
    inside = (work.tiles.tile_first_layer <= np.arange(layers)[:, None]) & (
        np.arange(layers)[:, None] <= work.tiles.tile_last_layer
    )
    counts: list[int] = inside.sum(axis=1).tolist()
    return counts
