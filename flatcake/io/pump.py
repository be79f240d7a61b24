"""One thread that moves every restore and save of a data plane forward, event by event.

Engines post their completions here, timers and device events are watched here, and no handler blocks.  All
state of restores and saves that is not guarded otherwise belongs to this thread.
"""

import contextlib
import itertools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable

from sortedcontainers import SortedDict

from flatcake.clock import Clock
from flatcake.io.device import Device, Point

log = logging.getLogger(__name__)

Handler = Callable[[], None]
Timer = tuple[int, int]

_POLL_S = 50e-6
_TURN_NS = 200_000
"""What has been posted gives way to timers and events after so long: a ring that is not refilled runs dry."""
_FENCE_S = 0.01
_PATIENCE_S_MAX = 3600.0
_FOR_EVER_S = -1
_NEVER_NS = sys.maxsize
_NS_PER_S = 1e9


class Pump:
    """A daemon thread with a queue of handlers, timers, and device events to watch."""

    def __init__(self, device: Device, clock: Clock) -> None:
        self._device = device
        self._clock = clock
        self._queue: deque[Handler] = deque()
        self._news = threading.Lock()
        """Open where something may have been posted since the pump last waited.  No `queue.SimpleQueue`: where `get`
        loses the processor for longer than it is to wait, it waits for ever (CPython 3.11)."""
        self._news.acquire()
        self._timers: SortedDict = SortedDict()
        self._due_ns = _NEVER_NS
        """No timer is due before."""
        self._turn_ns = 0
        """When this turn began."""
        self._numbers = itertools.count()
        self._watched: dict[int, deque[tuple[Point, Handler]]] = {}
        """By line: events of one line come one after another, so only the first of each is asked for."""
        self.on_failure: Handler = _nothing
        """Called on the pump's thread when a handler has raised; set it before the first `post`."""
        self._thread = threading.Thread(target=self._run, name="flatcake-pump", daemon=True)
        self._ident: int | None = None
        """While it runs: another thread may be given the same one later."""
        self._thread.start()

    def post(self, handler: Handler) -> None:
        """Run `handler` on the pump's thread, soon.  From any thread."""
        self._queue.append(handler)
        if self._news.locked():
            with contextlib.suppress(RuntimeError):  # Somebody else has just opened it.
                self._news.release()

    def at(self, when_ns: int, handler: Handler) -> Timer:
        """Run `handler` at a time of the clock, or soon after, unless it is forgotten.  From any thread."""
        timer = (when_ns, next(self._numbers))
        if self.on_thread():  # It may be forgotten in this very turn.
            self._set(timer, handler)
        else:
            self.post(lambda: self._set(timer, handler))
        return timer

    def forget(self, timer: Timer | None) -> None:
        """Drop what `at` was told; one that has fired is no error, nor is none.  On the pump's thread only."""
        self._timers.pop(timer, None)

    def when(self, event: Point, handler: Handler, line: object = None) -> None:
        """Run `handler` once the device has reached `event`: now if it has.  On the pump's thread only.

        Args:
            event: Of one of the device's streams.
            handler: What to run.
            line: Whose events are reached in the order of these calls, since they are of one stream; None for
                an event of its own.
        """
        number = id(event if line is None else line)
        if number in self._watched:
            self._watched[number].append((event, handler))
        elif event.done():
            handler()
        else:
            self._watched[number] = deque([(event, handler)])

    def watch(self, event: Point, handler: Handler) -> None:
        """Run `handler` on the pump's thread once `event` has been reached.  From any thread."""
        if self.on_thread():
            self.when(event, handler)
        else:
            self.post(lambda: self.when(event, handler))

    def on_thread(self) -> bool:
        return threading.get_ident() == self._ident

    def fence(self, wait_ns: int) -> bool:
        """Wait until everything that was posted before has run, or never will; False when the time is up."""
        if self.on_thread():
            return True
        reached = threading.Event()
        self.post(reached.set)
        for _ in range(1 + int(wait_ns / _NS_PER_S / _FENCE_S)):
            if reached.wait(_FENCE_S) or not self._thread.is_alive():
                return True
        return False

    def close(self, wait_ns: int) -> bool:
        """Stop after what is queued now; True when the thread has ended.  A second call does nothing."""
        self.post(_end)
        if not self.on_thread():
            self._thread.join(wait_ns / _NS_PER_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._ident = threading.get_ident()
        try:
            self._device.enter_thread()
            while self._run_posted():
                self._fire_timers()
                self._fire_events()
        finally:
            self._ident = None

    def _run_posted(self) -> bool:
        """Wait for handlers, then run those that are there now, for a turn's time; False when the last was the end."""
        if not self._queue:
            self._news.acquire(timeout=self._patience_s())
        self._turn_ns = self._clock.now_ns()
        for number in range(len(self._queue)):
            if number and self._clock.now_ns() > self._turn_ns + _TURN_NS:
                break
            handler = self._queue.popleft()
            if handler is _end:
                return False
            self._call(handler)
        return True

    def _patience_s(self) -> float:
        if self._watched:
            return _POLL_S
        if self._due_ns == _NEVER_NS:
            return _FOR_EVER_S
        wait_ns = self._due_ns - self._clock.now_ns()
        return min(max(0.0, wait_ns / _NS_PER_S), _PATIENCE_S_MAX)

    def _set(self, timer: Timer, handler: Handler) -> None:
        self._timers[timer] = handler
        self._due_ns = min(self._due_ns, timer[0])

    def _fire_timers(self) -> None:
        if self._turn_ns < self._due_ns:
            return
        while self._timers and self._timers.peekitem(0)[0][0] <= self._clock.now_ns():
            self._call(self._timers.popitem(0)[1])
        self._due_ns = self._timers.peekitem(0)[0][0] if self._timers else _NEVER_NS

    def _fire_events(self) -> None:
        for number, waiting in list(self._watched.items()):
            while waiting and waiting[0][0].done():
                self._call(waiting.popleft()[1])
            if not waiting:
                del self._watched[number]

    def _call(self, handler: Handler) -> None:
        try:
            handler()
        except Exception:
            log.exception("a handler of the data plane failed")
            if handler is not self.on_failure:
                self._call(self.on_failure)


def _nothing() -> None:
    return None


def _end() -> None:
    """Posted, it ends the thread."""
