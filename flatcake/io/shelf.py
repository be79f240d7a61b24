"""Buffers that are free, and buffers on their way back: those that the device still touches.

Nobody is told when the device is through with one; whoever wants a buffer looks.  Not safe for several threads.
"""

from collections import deque
from collections.abc import Iterable

from flatcake.io.device import Point
from flatcake.io.engine import Buffer


class Shelf:
    """Holds buffers that are in nobody's hands."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self.free = deque(buffers)
        self.coming: list[tuple[Point, Buffer]] = []
        self._count = len(self.free)

    @property
    def is_whole(self) -> bool:
        """Whether all buffers were free when somebody last looked."""
        return len(self.free) == self._count

    def put(self, buffer: Buffer, after: Point) -> None:
        """Take a buffer back that is unused once `after` has been reached."""
        if after.done():
            self.free.append(buffer)
        else:
            self.coming.append((after, buffer))
        assert len(self.free) + len(self.coming) <= self._count

    def collect(self) -> None:
        """Free the buffers whose points have been reached."""
        coming, self.coming = self.coming, []
        for after, buffer in coming:
            if after.done():
                self.free.append(buffer)
            else:
                self.coming.append((after, buffer))

    def has_news(self) -> bool:
        """Whether a buffer can be collected, or none is coming."""
        return not self.coming or any(after.done() for after, _ in self.coming)
