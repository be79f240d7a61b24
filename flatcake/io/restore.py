"""One restore: tiles read into window slots, scattered into pages, layer by layer.  Paper §3.4.

Read path:  plan -> [restore]: window slot -> engine -> kernels.scatter -> event -> compute

`Restore` is what the caller holds, from any thread.  Its tiles are moved by the pump's thread, in
`io.reading`; a condition guards what both see: who owns the pages, and how far each layer is.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flatcake.clock import Clock
from flatcake.errors import ShapeError
from flatcake.io.device import NOW, Device, Event
from flatcake.io.plan import TilePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """What a restore delivered."""

    blocks: int
    """Leading blocks of the request whose pages hold the right bytes in every layer."""
    tokens: int
    """The same in tokens."""
    reason: str
    """Why it is not all of them; empty when it is."""
    read_bytes: int
    """Bytes asked of the media, bridged holes included."""
    reads: int
    """Read commands, over all layers."""
    tiles: int
    """Window slots that were filled one after another for it."""
    first_layer_ns: int | None
    """From start until layer 0 was queued for the device; None if it never was."""
    total_ns: int


class Restore:
    """Delivers the blocks of a plan into the engine's pages."""

    def __init__(
        self, device: Device, clock: Clock, tiles: TilePlan, *, blocks: int, block_tokens: int, layers: int
    ) -> None:
        self._device, self._clock, self._tiles = device, clock, tiles
        self._blocks, self._block_tokens = blocks, block_tokens
        self._started_ns = clock.now_ns()
        self.lock = threading.RLock()
        """Held for every change below, and while a scatter is launched."""
        self._over, self._layered, self._verified = (threading.Condition(self.lock) for _ in range(3))
        """What one may wait for; nobody is woken for what he does not wait for."""
        moved = np.zeros(layers, np.bool_)
        moved[tiles.segments[:, 1]] = True
        self.layer_event: list[Event | None] = [None if each else NOW for each in moved.tolist()]
        """Of layers that are ready; where nothing is moved, from the start."""
        self.layer_verified: list[bool] = (~moved).tolist()
        self.last_event: Event = NOW
        self.first_bad: int | None = None
        self.reason = ""
        self.damaged: set[int] = set()
        """Blocks whose bytes are not what was saved; of the pump's thread."""
        self.dropped = ""
        """Why the caller has its pages back early; empty while the restore owns them."""
        self.on_drop: Callable[[], None] | None = None
        """Called once when that has happened, from any thread: nothing need be waited for that is not in flight."""
        self._first_layer_ns: int | None = None
        self._settled = False
        self._ended = False
        self._ended_ns = self._started_ns
        self._layer_calls: list[tuple[int, Callable[[], None]]] = []
        self._end_calls: list[Callable[[], None]] = []

    def wait_layer(self, layer: int, stream: object = None, *, verified: bool = False) -> bool:
        """Make work that `stream` is given from now on wait until a layer is in its pages.

        Args:
            layer: 0 … layers - 1.
            stream: A torch or CuPy stream, or its pointer; None for the caller's current one.  Of no meaning
                on the CPU.
            verified: Wait, on the host, for the checksums of the layer too.

        Returns:
            False when some block of the request failed, or the restore was cancelled or is late: pages from
            the first bad block on are undefined, and `result` says how many blocks are good.

        Raises:
            ShapeError: There is no such layer.
        """
        if not 0 <= layer < len(self.layer_event):
            raise ShapeError(f"layer {layer}: expected 0 … {len(self.layer_event) - 1}")
        with self.lock:
            changed = self._verified if verified else self._layered
            changed.wait_for(lambda: self._is_over() or self._is_ready(layer, verified))
            event = self.layer_event[layer]
            if self.dropped or self.first_bad is not None:
                return False
            assert event is not None
        self._device.wait(self._device.stream_of(stream), event)
        return True

    def result(self) -> RestoreResult:
        """Wait, on the host, until every layer is in its pages and verified.

        Must be asked before anything that was computed from the pages is shown to a user or saved.
        """
        with self.lock:
            self._over.wait_for(self.done)
            blocks = self._good_blocks()
            return RestoreResult(
                blocks=blocks,
                tokens=blocks * self._block_tokens,
                reason=self.dropped or self.reason,
                read_bytes=self._tiles.read_bytes,
                reads=len(self._tiles.reads),
                tiles=self._tiles.tiles,
                first_layer_ns=self._first_layer_ns,
                total_ns=self._ended_ns - self._started_ns,
            )

    def done(self) -> bool:
        """Whether `result` would return at once."""
        with self.lock:
            return self._ended or bool(self.dropped)

    def on_layer(self, layer: int, call: Callable[[], None]) -> None:
        """Call `call` once when a layer is ready for `wait_layer`: now if it is, else on the pump's thread.

        Never called if that layer never comes.  It must be short, must not block, and must not raise.
        """
        with self.lock:
            if self.layer_event[layer] is None:
                self._layer_calls.append((layer, call))
                return
        call()

    def on_end(self, call: Callable[[], None]) -> None:
        """Call `call` once when nothing is in flight any more, however it ended: now, or on the pump's thread.

        From then on `result` returns at once.  It must be short, must not block, and must not raise.
        """
        with self.lock:
            if not self._ended:
                self._end_calls.append(call)
                return
        call()

    def cancel(self, reason: str = "cancelled") -> Event:
        """Give the pages back to the caller: no scatter starts after this returns.

        Returns:
            An event after which the pages are the caller's again; done at once on the CPU.  Reads in flight
            end in their slots.  A restore that is over is left as it is.
        """
        call = None
        with self.lock:
            if not self.done() and not self._settled:
                self.dropped = reason
                self._ended_ns = self._clock.now_ns()
                self._wake_all()
                call, self.on_drop = self.on_drop, None
            event = self.last_event
        if call is not None:
            call()
        return event

    def note_bad(self, block: int, reason: str) -> None:
        """Keep the smallest bad block, and release all who wait."""
        with self.lock:
            if self.first_bad is None or block < self.first_bad:
                self.first_bad, self.reason = block, reason
                self._wake_all()

    def note_layers(self, layers: Sequence[int], event: Event) -> None:
        """The last tiles of these layers have been queued for the device, before `event`."""
        due = []
        with self.lock:
            for layer in layers:
                self.layer_event[layer] = event
            if layers[0] == 0:
                self._first_layer_ns = self._clock.now_ns() - self._started_ns
            self._layered.notify_all()
            if self._layer_calls:
                due = [call for number, call in self._layer_calls if number in layers]
                self._layer_calls = [entry for entry in self._layer_calls if entry[0] not in layers]
        for call in due:
            call()

    def note_verified(self, layers: Sequence[int]) -> None:
        """The checksums of these layers are right, or known not to be."""
        with self.lock:
            for layer in layers:
                self.layer_verified[layer] = True
            self._verified.notify_all()

    def settle(self) -> int:
        """Fix how the restore ended, before that is reported; returns the blocks that it delivered."""
        with self.lock:
            self._settled = True
            return self._good_blocks()

    def end(self) -> None:
        """Nothing is in flight any more, all verdicts are in, and the catalog knows."""
        with self.lock:
            if not self.done():
                self._ended_ns = self._clock.now_ns()
            self._ended, self.on_drop = True, None
            self._wake_all()
            due, self._end_calls, self._layer_calls = self._end_calls, [], []
        for call in due:
            call()

    def _wake_all(self) -> None:
        for condition in (self._over, self._layered, self._verified):
            condition.notify_all()

    def _good_blocks(self) -> int:
        good = self._blocks if self.first_bad is None else self.first_bad
        return 0 if self.dropped else good

    def _is_ready(self, layer: int, verified: bool) -> bool:
        return self.layer_event[layer] is not None and (not verified or self.layer_verified[layer])

    def _is_over(self) -> bool:
        return self.done() or self.first_bad is not None
