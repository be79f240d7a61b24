"""One save, as its caller holds it: when the source pages are free again, and how it ended.

Write path:  placement -> pages -> [save]: gather -> window slot -> engine -> records -> reported -> published

Its tiles are moved by the pump's thread, in `io.writing`.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from flatcake.io.device import NOW, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """How a save ended."""

    blocks: int
    """Blocks of the turn, those that were stored already included."""
    written_blocks: int
    """Blocks that were published by this save."""
    reason: str
    """Why nothing was published; empty when all is well."""


class Save:
    """A turn on its way into the store."""

    def __init__(self, blocks: int, start: Callable[[], None]) -> None:
        self._blocks = blocks
        self._start: Callable[[], None] | None = start
        self._guard = threading.Condition()
        self._reusable: Event | None = None
        self._result: SaveResult | None = None

    def start(self) -> None:
        """Begin a save that was asked for with `deferred`; a second call does nothing."""
        with self._guard:
            start, self._start = self._start, None
        if start is not None:
            start()

    def reusable(self, timeout_s: float | None = None) -> bool:
        """Wait, on the host, until the source pages may be overwritten; False when the time is up."""
        with self._guard:
            if not self._guard.wait_for(lambda: self._reusable is not None, timeout_s):
                return False
            event = self._reusable
        assert event is not None
        event.wait()
        return True

    def result(self, timeout_s: float | None = None) -> SaveResult | None:
        """Wait until the turn is published, refused or failed; None when the time is up."""
        with self._guard:
            self._guard.wait_for(lambda: self._result is not None, timeout_s)
            return self._result

    def published(self, timeout_s: float | None = None) -> bool:
        """Wait; True when every block of the turn is visible."""
        found = self.result(timeout_s)
        return found is not None and not found.reason

    def note_reusable(self, event: Event) -> None:
        """The last gather has been queued for the device, before `event`."""
        with self._guard:
            if self._reusable is None:
                self._reusable = event
                self._guard.notify_all()

    def end(self, written_blocks: int, reason: str) -> None:
        """Settle the result; the first call counts."""
        with self._guard:
            if self._result is None:
                self._result = SaveResult(blocks=self._blocks, written_blocks=written_blocks, reason=reason)
            self._guard.notify_all()

    @classmethod
    def ended(cls, blocks: int, reason: str) -> "Save":
        """A save that is over before it began: refused, or nothing was left to write."""
        save = cls(blocks, lambda: None)
        save.note_reusable(NOW)
        save.end(0, reason)
        return save
