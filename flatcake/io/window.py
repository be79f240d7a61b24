"""The window: a fixed piece of device memory cut into equal slots, shared by everything in flight.

Its size never depends on a request.  Belongs to the pump's thread.
"""

from collections.abc import Callable, Hashable

from flatcake.io.device import NOW, Device, Point, When
from flatcake.io.engine import Buffer
from flatcake.io.shelf import Shelf


class Window:
    """Slots, and those who wait for one, first come first served.

    A slot comes back with the point after which the device does not touch it any more.  Nobody is told when that has
    been reached: the slots on their way are looked at when one is asked for, and watched only while somebody waits.
    """

    def __init__(self, device: Device, *, slots: int, slot_bytes: int, when: When) -> None:
        memory = device.window(slots * slot_bytes)
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._when = when
        self._shelf = Shelf(Buffer.of(memory[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(slots))
        self._waiting: dict[Callable[[], None], None] = {}
        self._is_watched = False

    @property
    def size_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def free_slots(self) -> int:
        """Slots that were free when somebody last looked."""
        return len(self._shelf.free)

    def take(self) -> Buffer | None:
        """A free slot, or None: then `wait` and try again."""
        if not self._shelf.free:
            self.collect()
        return self._shelf.take() if self._shelf.free else None

    def wait(self, retry: Callable[[], None]) -> None:
        """Call `retry` once when a slot has become free; one that waits already keeps its place."""
        self._waiting[retry] = None
        self._watch()

    def leave(self, retry: Callable[[], None]) -> None:
        """Wait no longer; one that does not wait is no error."""
        self._waiting.pop(retry, None)

    def give_back(self, slot: Buffer, after: Point = NOW, line: Hashable = None) -> None:
        """Return a slot that is unused once `after` has been reached, and wake those who wait while there is one.

        Points of one `line` must be reached in the order of these calls.
        """
        self._shelf.put(slot, after, line)
        if self._waiting and (self._shelf.free or not self._is_watched):  # Each look asks the device.
            self._serve()

    def collect(self) -> None:
        """Free the slots whose points have been reached."""
        self._shelf.collect()

    def done(self) -> bool:
        """Whether a slot is there, or none is coming: the point that is watched for those who wait."""
        return self._shelf.has_news()

    def _serve(self) -> None:
        self.collect()
        while self._shelf.free and self._waiting:
            retry = next(iter(self._waiting))
            del self._waiting[retry]
            retry()
        self._watch()

    def _watch(self) -> None:
        if self._waiting and self._shelf.coming and not self._is_watched:
            self._is_watched = True
            self._when(self, self._on_reached)

    def _on_reached(self) -> None:
        self._is_watched = False
        self._serve()
