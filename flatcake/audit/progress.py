"""A line on a terminal that says how far something is; nothing where the output is no terminal."""

from typing import TextIO

from flatcake.clock import Clock
from flatcake.units import MS, SECOND, format_bytes

STEP_NS = 100 * MS
WIDTH = 30


class Progress:
    """Draws one line over and over; `close` wipes it."""

    def __init__(self, out: TextIO, clock: Clock, total_bytes: int) -> None:
        self._out, self._clock, self._total_bytes = out, clock, total_bytes
        self._is_shown = out.isatty()
        self._start_ns = self._drawn_ns = clock.now_ns()
        self._done_bytes = self._length = 0

    def advance(self, size_bytes: int) -> None:
        """So many bytes more are done."""
        self._done_bytes += size_bytes
        now_ns = self._clock.now_ns()
        if self._is_shown and now_ns - self._drawn_ns >= STEP_NS:
            self._drawn_ns = now_ns
            self._draw(self._line(now_ns))

    def close(self) -> None:
        """Wipe the line."""
        if self._length:
            self._draw("")

    def _line(self, now_ns: int) -> str:
        share = min(1.0, self._done_bytes / max(1, self._total_bytes))
        bar = "#" * int(share * WIDTH)
        rate = self._done_bytes * SECOND // max(1, now_ns - self._start_ns)
        done = f"{format_bytes(self._done_bytes)} of {format_bytes(self._total_bytes)}"
        return f"[{bar:<{WIDTH}}] {share:4.0%}  {done}, {format_bytes(rate)}/s"

    def _draw(self, line: str) -> None:
        self._out.write(f"\r{line:<{self._length}}" + ("" if line else "\r"))
        self._out.flush()
        self._length = len(line)
