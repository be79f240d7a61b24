"""The pump's side of a restore: tiles through slots, and the report at the end.

Everything here runs on the pump's thread and never blocks.  The order of a tile: a free slot, its reads, all
results checked, then under the restore's lock the scatter and its event; with that event the slot goes back to the
window.  A restore is over when the device has reached the last of these events.  Verdicts are `io.judging`'s.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from flatcake.io.device import NOW, Event, Point, Stream
from flatcake.io.engine import Buffer, Result
from flatcake.io.judging import Judging
from flatcake.io.parts import Parts
from flatcake.io.pieces import Work
from flatcake.io.restore import Restore
from flatcake.io.tilebatch import Move, bad_pieces, tile_mover
from flatcake.io.tilecopy import TileCopy
from flatcake.messages import MEDIUM, Completion, Int64Array, block_column
from flatcake.trace import span

_TILES_A_TURN = 2


class Reading:
    """Moves one restore's tiles."""

    def __init__(
        self,
        parts: Parts,
        restore: Restore,
        work: Work,
        report: "Callable[[Reading, Completion], None]",
        slots_max: int,
    ) -> None:
        self._parts, self._restore, self._report, self._slots_max = parts, restore, report, slots_max
        self._work, self._plan, self._tiles = work, work.plan, work.tiles
        self._next_tile, self._tile_end = 0, work.tiles.tiles
        self._in_flight = 0
        """Tiles that are being read."""
        self._last: Point = NOW
        """After it, the device is through with all tiles that have been read."""
        self._is_ending = False
        self._has_started = False
        self.is_over = False
        self._judging = Judging(parts, restore, work, self.end_if_idle)
        self._stream: Stream = None
        self._unread: list[int]
        """Per layer: tiles that are not scattered yet."""
        self._tiles_ready = 0
        """The first tiles, for whose scatter all is there."""
        self._early: dict[int, Callable[[], None]] = {}
        """Tiles that have been read before that."""
        self._copy: TileCopy
        self._move: Move

    def start(self, pages: Int64Array, after: Event) -> None:
        """Begin; `after` is waited for on the device before the first scatter."""
        parts = self._parts
        if self._restore.dropped:  # Before its turn came: no medium is asked for anything.
            self.end_if_idle()
            return
        self._has_started = True
        parts.restores_active += 1
        self._stream = parts.take_stream()
        self._move = tile_mover(parts, self._tiles, write=False)
        self._judging.start(self._stream)
        self._advance()  # The media are at work while the rest is made.
        if not self._is_ending:  # Else it was dropped meanwhile, or has no tile.
            steps = self._prepare(pages, after)
            parts.pump.post(lambda: self._make_ready(steps))

    def _prepare(self, pages: Int64Array, after: Event) -> Iterator[None]:
        """Make what the scatters need; the pieces a share a step."""
        parts, pieces = self._parts, self._work.pieces
        parts.device.wait(self._stream, after)
        self._unread = list(self._work.layer_tiles)
        self._copy = parts.copier.start(self._tiles, pieces, pages, self._stream, sums=parts.verify)
        self._judging.use(self._copy)
        yield
        for rows in pieces.shares():
            self._copy.push(rows)
            self._tiles_ready = pieces.tiles_made
            yield

    def _make_ready(self, steps: Iterator[None]) -> None:
        """Take one step a turn, since reads need turns to go on; then scatter what has waited for it."""
        if self._is_ending or self._restore.dropped:
            return
        pump = self._parts.pump
        try:
            for _ in steps:
                pump.post(lambda: self._make_ready(steps))
                break
        except BaseException:
            pump.post(lambda: self.drop("internal error"))  # After all have heard of it.
            raise
        for tile in [tile for tile in self._early if tile < self._tiles_ready]:
            pump.post(self._early.pop(tile))

    def drop(self, reason: str) -> None:
        """Give the pages back; what is in flight ends in its slot.  It need not have started."""
        self._restore.cancel(reason)
        self.end_if_idle()

    def on_dropped(self) -> None:
        """The pages are the caller's again: nothing will be scattered, so no tile waits for that.

        In this very turn: when the store closes there is no other.
        """
        try:
            while self._early:
                self._early.popitem()[1]()
        except BaseException:  # On a device that has failed: the others come in a turn of their own.
            self._parts.pump.post(self.on_dropped)
            raise
        self.end_if_idle()

    def end_if_idle(self) -> None:
        """End when every tile is through, or was given up and nothing is in flight."""
        dropped = bool(self._restore.dropped)
        unstarted = not dropped and self._next_tile < self._tile_end
        if self._is_ending or self._in_flight or unstarted or not self._judging.is_idle:
            return
        self._is_ending = True
        self._parts.pump.when(self._last, self._end)

    def _end(self) -> None:
        self.is_over = True
        self._parts.window.leave(self._advance)
        self._parts.window.collect()
        self._judging.end()
        if self._has_started:
            self._parts.restores_active -= 1
            self._parts.streams.append(self._stream)
        self._count(self._restore.settle())
        try:
            self._report(
                self,
                Completion(
                    plan_id=self._plan.plan_id,
                    rank=self._parts.rank,
                    epoch=self._parts.epoch,
                    first_bad_block=self._restore.first_bad,
                    reason=self._restore.reason,
                    damaged_blocks=tuple(sorted(self._restore.damaged)),
                ),
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
        """Read into the slots that are free, a few a turn: what comes back meanwhile is not kept waiting."""
        turn = self._next_tile + _TILES_A_TURN
        while self._next_tile < self._tile_end and not self._restore.dropped and self._in_flight < self._slots_max:
            if self._next_tile == turn:
                self._parts.pump.post(self._advance)
                break
            slot = self._parts.window.take()
            if slot is None:
                self._parts.window.wait(self._advance)
                break
            tile = self._next_tile
            self._next_tile += 1
            self._in_flight += 1
            self._move(tile, slot, self._on_read)
        if not self._in_flight:
            self.end_if_idle()

    def _on_read(self, tile: int, slot: Buffer, results: list[Result], ready: Sequence[Event]) -> None:
        if tile >= self._tiles_ready and not self._restore.dropped:
            self._early[tile] = partial(self._on_read, tile, slot, results, ready)
            return
        try:
            for point in ready:  # Not before: the scatters queued until now need not wait for this tile.
                self._parts.device.wait(self._stream, point)
            event = self._scatter(tile, slot, results)
        except BaseException:
            self._parts.pump.post(lambda: self._on_failed(slot))  # After all have heard of it.
            raise
        self._retire(slot, event or self._parts.device.record(self._stream))

    def _bad_of(self, tile: int, results: list[Result]) -> list[int]:
        """Note what could not be read; rows of the pieces that did not come."""
        bad = bad_pieces(self._parts.lanes, self._tiles, self._work.pieces, tile, results)
        if bad:
            error = next((result.error for result in results if result.error), 0)
            block = int(self._work.pieces.table[bad, 1].min())
            self._restore.note_bad(block, f"read failed (errno {error})")
        return bad

    def _on_failed(self, slot: Buffer) -> None:
        """A tile is missing, so nothing may count."""
        self._restore.cancel("internal error")
        self._retire(slot, self._parts.device.record(self._stream))

    def _retire(self, slot: Buffer, event: Event) -> None:
        """A tile is through; `event` also covers a read from DRAM that was not scattered."""
        self._in_flight -= 1
        self._last = event
        self._parts.window.give_back(slot, event, self)
        self._advance()

    def _scatter(self, tile: int, slot: Buffer, results: list[Result]) -> Event | None:
        """Queue a tile's scatter, unless the pages have gone back to the caller; the event after it."""
        restore = self._restore
        with restore.lock:
            if restore.dropped:
                return None
            bad = [] if results == self._work.whole[tile] else self._bad_of(tile, results)
            with span("restore.scatter", size_bytes=slot.size_bytes):
                self._copy.scatter(tile, slot, bad)
            event = restore.last_event = self._parts.device.record(self._stream)
            complete = []
            for layer in self._work.tile_layers[tile]:
                self._unread[layer] -= 1
                if not self._unread[layer]:
                    complete.append(layer)
            if complete:
                restore.note_layers(complete, event)
            self._judging.note_scattered(tile, bad, complete)
            return event
