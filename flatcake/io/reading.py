"""The pump's side of a restore: tiles through slots, records, verdicts, and the report at the end.

Everything here runs on the pump's thread and never blocks.  The order of a tile: a free slot, its reads, all
results checked, then under the restore's guard the scatter and its event, then the verdict, then the slot is
free again.
"""

from collections.abc import Callable

import numpy as np

from flatcake.io.device import Event, Stream
from flatcake.io.engine import Buffer, Result
from flatcake.io.parts import Parts
from flatcake.io.pieces import Work
from flatcake.io.records import ExtentRef, Record, extents_of
from flatcake.io.restore import Restore
from flatcake.io.tilebatch import TileMover, bad_pieces
from flatcake.io.tilecopy import TileCopy
from flatcake.io.verdict import expected_sums, failed_blocks
from flatcake.kernels.checksum import Sums
from flatcake.messages import BASE, MEDIUM, Completion, Int64Array, block_column
from flatcake.trace import span


class Reading:
    """Moves one restore's tiles."""

    def __init__(self, parts: Parts, restore: Restore, work: Work, report: Callable[[Completion], None]) -> None:
        self._parts, self._restore, self._report = parts, restore, report
        self._plan, self._tiles, self._pieces = work.plan, work.tiles, work.pieces
        self._next_tile = 0
        self._in_flight = 0
        self._waits_for_slot = False
        self._waits_for_records = 0
        self._records: dict[ExtentRef, Record] = {}
        self._expected: Sums | None = None
        self._unjudged: list[tuple[int, list[int]]] = []
        self._has_started = False
        self.is_over = False
        layers = np.arange(parts.lanes.layer_count)[:, None]
        inside = (self._tiles.tile_first_layer <= layers) & (layers <= self._tiles.tile_last_layer)
        self._unread: Int64Array = inside.sum(axis=1)
        """Per layer: tiles that are not scattered yet."""
        self._unverified = self._unread.copy()
        self._stream: Stream = None
        self._copy: TileCopy
        self._mover: TileMover

    def start(self, pages: Int64Array, after: Event) -> None:
        """Begin; `after` is waited for on the device before the first scatter."""
        parts = self._parts
        self._has_started = True
        parts.restores_active += 1
        self._stream = parts.take_stream()
        self._mover = TileMover(parts, self._tiles, self._stream, write=False)
        parts.device.wait(self._stream, after)
        self._copy = parts.copier.start(self._tiles, self._pieces, pages, self._stream, sums=parts.verify)
        for ref in extents_of(self._plan.runs):
            if parts.book.is_stale(ref):
                self._fail_extent(ref, "stale plan")
            elif parts.verify:
                self._want_record(ref)
        if parts.verify and not self._waits_for_records:
            self._judge_all()
        self._advance()

    def drop(self, reason: str) -> None:
        """Give the pages back; what is in flight ends in its slot.  It need not have started."""
        self._restore.cancel(reason)
        self.end_if_idle()

    def end_if_idle(self) -> None:
        """End when every tile is through, or was given up and nothing is in flight."""
        dropped = bool(self._restore.dropped)
        unstarted = not dropped and self._next_tile < self._tiles.tiles
        unjudged = self._waits_for_records or (self._unjudged and not dropped)
        if self.is_over or self._in_flight or unstarted or unjudged:
            return
        self.is_over = True
        for record in self._records.values():
            self._parts.book.let_go(record)
        if self._has_started:
            self._parts.restores_active -= 1
            self._parts.streams.append(self._stream)
        self._count(self._restore.settle())
        try:
            self._report(
                Completion(
                    plan_id=self._plan.plan_id,
                    rank=self._parts.rank,
                    epoch=self._parts.epoch,
                    first_bad_block=self._restore.first_bad,
                    reason=self._restore.reason,
                )
            )
        finally:
            self._restore.end()

    def _count(self, good_blocks: int) -> None:
        counts, media = self._parts.counts, block_column(self._plan, MEDIUM)[:good_blocks]
        for medium in self._parts.media:
            counts[f"blocks_delivered_{medium.name.lower()}"] += int((media == int(medium)).sum())
        if self._restore.dropped:
            counts[f"restores dropped: {self._restore.dropped}"] += 1
        elif self._restore.first_bad is not None:
            counts[f"restores failed: {self._restore.reason}"] += 1

    # -- tiles ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        while self._next_tile < self._tiles.tiles and not self._restore.dropped:
            slot = self._parts.window.take()
            if slot is None:
                if not self._waits_for_slot:
                    self._waits_for_slot = True
                    self._parts.window.wait(self._on_slot)
                break
            self._read(self._next_tile, slot)
        self.end_if_idle()

    def _on_slot(self) -> None:
        self._waits_for_slot = False
        self._advance()

    def _read(self, tile: int, slot: Buffer) -> None:
        self._next_tile += 1
        self._in_flight += 1
        self._mover.move(tile, slot, lambda results: self._on_read(tile, slot, results))

    def _on_read(self, tile: int, slot: Buffer, results: list[Result]) -> None:
        bad = bad_pieces(self._parts, self._tiles, self._pieces, tile, results)
        if bad:
            error = next((result.error for result in results if result.error), 0)
            block = int(self._pieces.table[bad, 1].min())
            self._restore.note_bad(block, f"read failed (errno {error})")
        event = self._scatter(tile, slot, bad)
        self._parts.pump.when(event, lambda: self._on_scattered(tile, slot, bad))

    def _scatter(self, tile: int, slot: Buffer, bad: list[int]) -> Event:
        """Queue a tile's scatter, unless the pages have gone back to the caller.

        Returns:
            An event after which the slot is unused: a read from DRAM may itself still be in the stream.
        """
        restore, tiles = self._restore, self._tiles
        with restore.guard:
            if restore.dropped:
                return self._parts.device.record(self._stream)
            with span("restore.scatter", size_bytes=len(slot.tensor)):
                self._copy.scatter(tile, slot, bad)
            event = restore.last_event = self._parts.device.record(self._stream)
            layers = range(int(tiles.tile_first_layer[tile]), int(tiles.tile_last_layer[tile]) + 1)
            self._unread[layers.start : layers.stop] -= 1
            for layer in layers:
                if not self._unread[layer]:
                    restore.note_layer(layer, event)
            return event

    def _on_scattered(self, tile: int, slot: Buffer, bad: list[int]) -> None:
        if self._parts.verify and not self._restore.dropped:
            if self._expected is None:
                self._unjudged.append((tile, bad))
            else:
                self._judge(tile, bad)
        self._give_back(slot)

    def _give_back(self, slot: Buffer) -> None:
        self._in_flight -= 1
        self._parts.window.give_back(slot)
        self._advance()

    # -- records and verdicts ---------------------------------------------------------------------------

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
            self._fail_extent(ref, "no valid checksum record")
        else:
            self._records[ref] = self._parts.book.hold(record)
        if not self._waits_for_records:
            self._judge_all()
            self.end_if_idle()

    def _judge_all(self) -> None:
        self._expected = expected_sums(self._plan, self._pieces, self._records, self._parts.lanes.layer_count)
        waiting, self._unjudged = self._unjudged, []
        for tile, bad in waiting:
            self._judge(tile, bad)

    def _judge(self, tile: int, bad: list[int]) -> None:
        assert self._expected is not None
        first, end = int(self._pieces.tile_pieces[tile]), int(self._pieces.tile_pieces[tile + 1])
        kept = np.ones(end - first, np.bool_)
        kept[np.array(bad, np.int64) - first] = False
        rows = np.flatnonzero(kept) + first
        table, seeds = self._pieces.table[rows], self._pieces.seeds[rows]
        sums = self._copy.sums(tile)[kept]
        failed = failed_blocks(sums, self._expected[rows], seeds, table, self._parts.payload_bytes)
        if len(failed):
            self._parts.counts["blocks_failed_checksum"] += len(failed)
            self._restore.note_bad(int(failed[0]), "checksum")
        layers = slice(int(self._tiles.tile_first_layer[tile]), int(self._tiles.tile_last_layer[tile]) + 1)
        self._unverified[layers] -= 1
        for layer in range(layers.start, layers.stop):
            if not self._unverified[layer]:
                self._restore.note_verified(layer)

    def _fail_extent(self, ref: ExtentRef, reason: str) -> None:
        places = block_column(self._plan, MEDIUM), block_column(self._plan, BASE)
        blocks = np.flatnonzero((places[0] == ref.medium) & (places[1] == ref.base_bytes))
        if len(blocks):
            self._restore.note_bad(int(blocks[0]), reason)
