"""Buffers that are free, and buffers on their way back: those that the device still touches.

Nobody is told when the device is through with one; whoever wants a buffer looks.  Points of one line are reached in
the order in which they were put, so only the first of each line is asked for.  Not safe for several threads.
"""

from collections import deque
from collections.abc import Hashable, Iterable

from flatcake.io.device import NOW, Point
from flatcake.io.engine import Buffer


class Shelf:
    """Holds buffers that are in nobody's hands."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self.free = deque(buffers)
        self.coming: dict[Hashable, deque[tuple[Point, Buffer]]] = {}
        """By line; never an empty one."""
        self._taken = 0

    @property
    def is_whole(self) -> bool:
        """Whether all buffers were free when somebody last looked."""
        return not self._taken and not self.coming

    def take(self, *, warmest: bool = False) -> Buffer:
        """The free buffer that was used last, or the one that has been free longest; there must be one."""
        self._taken += 1
        return self.free.pop() if warmest else self.free.popleft()

    def put(self, buffer: Buffer, after: Point, line: Hashable) -> None:
        """Take a buffer back that is unused once `after` has been reached, which is a point of `line`."""
        assert self._taken, "a buffer comes back twice"
        self._taken -= 1
        if after is NOW:
            self.free.append(buffer)
        else:
            self.coming.setdefault(line, deque()).append((after, buffer))

    def collect(self) -> None:
        """Free the buffers whose points have been reached."""
        for line, queue in list(self.coming.items()):
            while queue and queue[0][0].done():
                self.free.append(queue.popleft()[1])
            if not queue:
                del self.coming[line]

    def has_news(self) -> bool:
        """Whether a buffer is free or can be collected, or none is coming."""
        return bool(self.free) or not self.coming or any(queue[0][0].done() for queue in self.coming.values())
