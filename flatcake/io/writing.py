"""The pump's side of a save: pages gathered into slots, slots written, records written, then the report.

Everything here runs on the pump's thread and never blocks.  A save holds at most one slot while a restore is
under way: reads come first.  After a fault or past the deadline no further tile is begun, and the report
follows when nothing is in flight any more.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from flatcake.io.device import NOW, Event, Stream
from flatcake.io.engine import Buffer, Result
from flatcake.io.parts import Parts
from flatcake.io.pieces import Work
from flatcake.io.recording import Recording
from flatcake.io.save import Save
from flatcake.io.tilebatch import Move, bad_pieces, tile_mover
from flatcake.io.tilecopy import TileCopy
from flatcake.kernels.checksum import finish
from flatcake.messages import Completion, Int64Array
from flatcake.trace import span

FETCHES = 2
"""After each of so many last tiles the checksums until then come to the host: after the very last few are missing."""


class Writing:
    """Moves one save's tiles."""

    def __init__(self, parts: Parts, save: Save, work: Work, report: "Callable[[Writing, Completion], None]") -> None:
        self._parts, self._save, self._work, self._report = parts, save, work, report
        self._next_tile = 0
        self._in_flight = 0
        self._last_gather: Event = NOW
        self._recording = Recording(parts, work.plan)
        self._is_recording = False
        self._is_over = False
        self._bad_block: int | None = None
        self._reason = ""
        self._fetched_tiles = 0
        """Tiles whose checksums have been asked for."""
        self._fetching = 0
        self._has_sums = False
        self._has_started = False
        self._stream: Stream = None
        self._copy: TileCopy

    def start(self, pages: Int64Array, after: Event, deadline_ns: int) -> None:
        """Begin, unless it is over or late; `after` is waited for on the device before the first gather."""
        parts, work = self._parts, self._work
        if parts.clock.now_ns() > deadline_ns:  # Which may not have been set yet.
            self.give_up("deadline")
        if self._is_over:
            return
        self._has_started = True
        self._stream = parts.take_stream()
        parts.device.wait(self._stream, after)
        self._copy = parts.copier.start(work.tiles, work.pieces, pages, self._stream, sums=parts.verify)
        for rows in work.pieces.shares():
            self._copy.push(rows)
        if any(parts.book.is_stale(ref) for ref in self._recording.runs):
            self._fail(0, "stale plan")
        else:
            self._recording.note()
            parts.pump.post(self._recording.prepare)  # After the first gathers.
        self._advance()

    def give_up(self, reason: str) -> None:
        """Begin no further tile, and let the caller go; the report follows.  It need not have started."""
        if not self._is_over:
            self._fail(0, reason)
            self._save.end(0, reason)
            self._advance()

    def abandon(self, reason: str) -> None:
        """Let the caller go when there is no pump any more that could report."""
        self._save.note_reusable(self._last_gather)
        self._save.end(0, reason)

    def _fail(self, block: int, reason: str) -> None:
        if self._bad_block is None or block < self._bad_block:
            self._bad_block, self._reason = block, reason
        self._save.note_reusable(self._last_gather)

    # -- tiles ------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        while self._next_tile < self._work.tiles.tiles and self._bad_block is None:
            if self._parts.restores_active and self._in_flight:
                break
            slot = self._parts.save_window.take()
            if slot is None:
                self._parts.save_window.wait(self._advance)
                break
            self._gather(slot)
        if self._in_flight or self._fetching or self._is_recording:
            return
        if self._bad_block is not None:
            self._end()
        elif self._next_tile == self._work.tiles.tiles and self._has_sums:
            self._is_recording = True
            self._recording.start(self._sums, self._on_recorded)

    @cached_property
    def _move(self) -> Move:
        return tile_mover(self._parts, self._work.tiles, write=True)

    def _gather(self, slot: Buffer) -> None:
        tile = self._next_tile
        self._next_tile += 1
        self._in_flight += 1
        try:
            with span("save.gather", size_bytes=slot.size_bytes):
                self._copy.gather(tile, slot)
        except BaseException:
            self._parts.pump.post(lambda: self._on_failed(slot))  # After all have heard of it.
            raise
        event = self._last_gather = self._parts.device.record(self._stream)
        left = self._work.tiles.tiles - self._next_tile
        if not left:
            self._save.note_reusable(event)
        _ = self._move  # The first is gathered meanwhile.
        self._parts.pump.when(event, lambda: self._on_gathered(tile, slot), self)
        if left < FETCHES:
            self._fetch_sums()

    def _on_failed(self, slot: Buffer) -> None:
        """A tile is missing; its slot is free after what was queued of it."""
        self._fail(0, "internal error")
        self._parts.pump.when(self._parts.device.record(self._stream), lambda: self._release(slot), self)

    def _on_gathered(self, tile: int, slot: Buffer) -> None:
        self._move(tile, slot, self._on_written)

    def _on_written(self, tile: int, slot: Buffer, results: list[Result], _: Sequence[Event]) -> None:
        if results != self._work.whole[tile]:
            bad = bad_pieces(self._parts.lanes, self._work.tiles, self._work.pieces, tile, results)
            if bad:
                error = next((result.error for result in results if result.error), 0)
                self._fail(int(self._work.pieces.table[bad, 1].min()), f"write failed (errno {error})")
        self._release(slot)

    def _release(self, slot: Buffer) -> None:
        self._in_flight -= 1
        self._parts.save_window.give_back(slot)
        self._advance()

    @cached_property
    def _sums(self) -> npt.NDArray[np.uint64]:
        """uint64 [blocks of the request, layers]: the finished checksums, 0 where they are off or not there yet."""
        return np.zeros((len(self._work.plan.keys), self._parts.lanes.layer_count), np.uint64)

    def _fetch_sums(self) -> None:
        """Have the checksums of the tiles that were gathered since the last call brought to the host."""
        tiles = range(self._fetched_tiles, self._next_tile)
        self._fetched_tiles = self._next_tile
        if self._parts.verify:
            self._copy.fetch_sums(tiles)
        fetched = self._parts.device.record(self._stream)
        self._fetching += 1
        # A turn later: the copy of the tile that comes next does not wait for it.
        pump = self._parts.pump
        pump.when(fetched, lambda: pump.post(lambda: self._on_fetched(tiles)), self)

    def _on_fetched(self, tiles: range) -> None:
        """Finish the checksums of tiles, while the last ones are on their way to their media."""
        self._fetching -= 1
        pieces = self._work.pieces
        if self._parts.verify:
            rows = slice(int(pieces.tile_pieces[tiles.start]), int(pieces.tile_pieces[tiles.stop]))
            _, blocks, layers = pieces.table[rows].T
            sizes = np.asarray(self._parts.payload_bytes)[layers]
            self._sums[blocks, layers] = finish(self._copy.sums_of(rows), sizes, pieces.seeds[rows])
        self._has_sums = tiles.stop == self._work.tiles.tiles
        self._advance()

    # -- the end ----------------------------------------------------------------------------------------

    def _on_recorded(self, error: str) -> None:
        if error:
            self._fail(0, error)
        self._end()

    def _end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._parts.save_window.leave(self._advance)
        self._recording.close()
        self._save.note_reusable(self._last_gather)
        if self._has_started:
            self._parts.streams.append(self._stream)
        if self._reason:
            self._parts.counts[f"saves failed: {self._reason}"] += 1
        self._report(self, self._parts.completion(self._work.plan.plan_id, self._bad_block, self._reason))
