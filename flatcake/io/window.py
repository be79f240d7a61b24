"""The window: a fixed piece of device memory cut into equal slots, shared by everything in flight.

Its size never depends on a request.  Belongs to the pump's thread.
"""

from collections import deque
from collections.abc import Callable

from flatcake.io.device import Device
from flatcake.io.engine import Buffer


class Window:
    """Slots, and those who wait for one, first come first served."""

    def __init__(self, device: Device, *, slots: int, slot_bytes: int) -> None:
        memory = device.window(slots * slot_bytes)
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._free = deque(Buffer.of(memory[i * slot_bytes : (i + 1) * slot_bytes]) for i in range(slots))
        self._waiting: dict[Callable[[], None], None] = {}

    @property
    def size_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def take(self) -> Buffer | None:
        """A free slot, or None: then `wait` and try again."""
        return self._free.popleft() if self._free else None

    def wait(self, retry: Callable[[], None]) -> None:
        """Call `retry` once when a slot has become free; one that waits already keeps its place."""
        self._waiting[retry] = None

    def leave(self, retry: Callable[[], None]) -> None:
        """Wait no longer; one that does not wait is no error."""
        self._waiting.pop(retry, None)

    def give_back(self, slot: Buffer) -> None:
        """Return a slot in which nothing is in flight, and wake those who wait while there is one."""
        self._free.append(slot)
        assert len(self._free) <= self.slots
        while self._free and self._waiting:
            retry = next(iter(self._waiting))
            del self._waiting[retry]
            retry()
