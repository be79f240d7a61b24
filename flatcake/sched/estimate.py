"""How long a restore will take, from how long past ones took.  docs/design.md.

Pure: durations are passed in, those that a restore takes alone (`SharedClock`).  Used for `estimate` and for "only if
faster than".

A bandwidth alone misleads: a small restore is mostly fixed cost.  So the recent restores of each medium are kept
by size class (powers of two), and a new one is read off the polyline through the medians of the classes.
"""

from collections import deque
from statistics import median_low

_SAMPLES_MAX = 15


class RestoreModel:
    """Expected restore time by bytes from DRAM and from SSD.  Bounded: 15 samples in each of 49 classes a medium."""

    def __init__(self) -> None:
        self._dram = _Medium()
        self._ssd = _Medium()

    def observe(self, *, dram_bytes: int, ssd_bytes: int, duration_ns: int) -> None:
        """Learn from one restore that has ended; bytes are those that moved.

        Of a restore from both media, the expected part of DRAM is taken off and the rest is SSD's.
        """
        if ssd_bytes > 0:
            self._ssd.add(ssd_bytes, max(1, duration_ns - (self._dram.expect_ns(dram_bytes) or 0)))
        elif dram_bytes > 0:
            self._dram.add(dram_bytes, max(1, duration_ns))

    def expect_ns(self, *, dram_bytes: int, ssd_bytes: int) -> int | None:
        """Expected duration of a restore alone; None as long as a medium is unmeasured."""
        dram_ns, ssd_ns = self._dram.expect_ns(dram_bytes), self._ssd.expect_ns(ssd_bytes)
        return None if dram_ns is None or ssd_ns is None else dram_ns + ssd_ns


class _Medium:
    def __init__(self) -> None:
        self._classes: dict[int, deque[tuple[int, int]]] = {}  # bit length of the bytes -> (bytes, ns)
        self._points: list[tuple[int, int]] = [(0, 0)]  # medians, by size

    def add(self, size_bytes: int, duration_ns: int) -> None:
        recent = self._classes.setdefault(size_bytes.bit_length(), deque(maxlen=_SAMPLES_MAX))
        recent.append((size_bytes, duration_ns))
        self._points = [(0, 0)] + [_middle(self._classes[key]) for key in sorted(self._classes)]

    def expect_ns(self, size_bytes: int) -> int | None:
        if size_bytes == 0:
            return 0
        if len(self._points) == 1:
            return None
        low_bytes, low_ns = self._points[0]
        for high_bytes, high_ns in self._points[1:]:
            if size_bytes <= high_bytes:
                return low_ns + (high_ns - low_ns) * (size_bytes - low_bytes) // (high_bytes - low_bytes)
            low_bytes, low_ns = high_bytes, high_ns
        return low_ns * size_bytes // low_bytes


def _middle(samples: deque[tuple[int, int]]) -> tuple[int, int]:
    # A size and a duration of their own: both medians, so that one slow read among many does not show.
    return median_low(size for size, _ in samples), median_low(duration for _, duration in samples)
