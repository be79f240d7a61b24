"""A ring of buffers, and the work that waits for one.

Work is started in order, each with a buffer of its own; the buffer comes back with the point after which the device
does not touch it any more.  The buffer that was used last is taken first, since it is warm.  Safe for several threads.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from flatcake.io.device import NOW, Point, When
from flatcake.io.engine import Buffer
from flatcake.io.shelf import Shelf

Work = TypeVar("Work")


class Ring(Generic[Work]):
    """Buffers and a queue."""

    def __init__(self, buffers: Iterable[Buffer], start: Callable[[Work, Buffer], None], when: When) -> None:
        """Take the buffers.

        Args:
            buffers: At least one.
            start: Called without a lock, never from inside another call of it in the same thread.
            when: How to hear that a buffer's point has been reached; used only while work waits.
        """
        self._shelf = Shelf(buffers)
        self._start, self._when = start, when
        self._lock = threading.Lock()
        self._queue: deque[Work] = deque()
        self._is_starting = False
        self._is_watched = False

    def put(self, work: Work) -> None:
        """Start work, or queue it as long as there is no buffer."""
        with self._lock:
            self._queue.append(work)
        self._run()

    def give_back(self, buffer: Buffer, after: Point = NOW) -> None:
        """Return a buffer that is unused once `after` has been reached, and start what waits.

        Points are expected to be reached in the order of these calls: one is asked for after those before it.
        """
        with self._lock:
            self._shelf.put(buffer, after, line=None)
        if self._queue:
            self._run()

    def drop(self) -> list[Work]:
        """Take away what waits."""
        with self._lock:
            work, self._queue = list(self._queue), deque()
        return work

    def is_idle(self) -> bool:
        """Whether nothing waits and all buffers are back."""
        with self._lock:
            self._shelf.collect()
            return not self._queue and self._shelf.is_whole

    def done(self) -> bool:
        """Whether a buffer is there, or none is coming: the point that is watched for what waits."""
        with self._lock:
            return self._shelf.has_news()

    def check(self) -> None:
        """Assert that no work waits while a buffer is free."""
        with self._lock:
            free = self._shelf.free
            assert len({buffer.address for buffer in free}) == len(free)
            assert not (self._queue and free)

    def _run(self) -> None:
        while self._queue and (pair := self._next()) is not None:
            try:
                self._start(*pair)
            finally:
                with self._lock:
                    self._is_starting = False

    def _next(self) -> tuple[Work, Buffer] | None:
        """Work and a buffer for it; None if there are not both, or somebody else looks already."""
        with self._lock:
            if self._is_starting or not self._queue:
                return None
            if not self._shelf.free:
                if self._is_watched:  # Whoever watches looks soon, and each look asks the device.
                    return None
                self._shelf.collect()
            if self._shelf.free:
                self._is_starting = True
                return self._queue.popleft(), self._shelf.take(warmest=True)
            if not self._shelf.coming:
                return None
            self._is_watched = True
        self._when(self, self._on_reached)
        return None

    def _on_reached(self) -> None:
        with self._lock:
            self._is_watched = False
        self._run()
