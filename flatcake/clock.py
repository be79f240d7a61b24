"""Monotonic time as a value that is passed in, so that tests and replays can bring their own."""

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time in nanoseconds; never goes backwards, whatever the wall clock does."""

    def now_ns(self) -> int: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    now_ns = staticmethod(time.monotonic_ns)


class ManualClock:
    """A clock that stands still until a test or a replay moves it."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, step_ns: int) -> None:
        """Move forward by `step_ns` nanoseconds, 0 or more."""
        assert step_ns >= 0, step_ns
        self._now_ns += step_ns
