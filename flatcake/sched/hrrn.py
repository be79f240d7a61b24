"""The SSD-preparing queue: highest response ratio next, `1 + wait / size`, exactly.  Paper §3.3, equation 1.

Pure: no I/O, no clock, no policy.  `mas` adds the age cap and decides when a prefetch may start.

The ratio changes with time, so it is no sort key.  Scanning sizes upward until `oldest wait / size` falls below
the best ratio is exact too, but under lasting load this order itself brings all ratios close together, and then
the bound cuts nothing; and when every larger request is also older, each may win.  A hull or a kinetic tree would
answer in O(log n), at the price of many lines and costly removals.  A table of numpy columns and one pass over it
takes 15 µs among 10,000 and does not care how sizes and arrivals are related, so that is what is here.
"""

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

from flatcake.gva import OFFSET_BYTES_LIMIT

TIME_NS_LIMIT = 1 << 62
"""Arrivals and the present lie below this: 146 years."""

_ROWS_MIN = 64
# The first pass computes `wait * (1 / size)` in float64: three roundings of at most 2**-53 each.  Whatever lies
# within this share of the largest product may be the true winner; nothing else can.
_NEAR = 1.0 - 2.0**-49

Ints = npt.NDArray[np.int64]


class ResponseRatioQueue:
    """Waiting requests by number; `best` finds the one with the highest ratio of wait to size.

    Ties: the smaller, then the older, then the one with the lower number.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # request number -> row of the columns; rows are dense
        self._by_age: SortedList = SortedList()  # (arrival_ns, number)
        self._allocate(_ROWS_MIN)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    def add(self, number: int, *, size_bytes: int, arrival_ns: int) -> None:
        """Add a request under a number that is not in the queue.  Cost: O(log n)."""
        assert number not in self._rows, number
        assert 1 <= size_bytes <= OFFSET_BYTES_LIMIT, size_bytes
        assert 0 <= arrival_ns < TIME_NS_LIMIT, arrival_ns
        row = len(self._rows)
        if row == len(self._numbers):
            self._grow()
        self._numbers[row], self._sizes[row], self._arrivals[row] = number, size_bytes, arrival_ns
        self._inverse[row] = 1.0 / size_bytes
        self._rows[number] = row
        self._by_age.add((arrival_ns, number))

    def remove(self, number: int) -> None:
        """Take a request out.  Cost: O(log n)."""
        row = self._rows.pop(number)
        self._by_age.remove((int(self._arrivals[row]), number))
        last = len(self._rows)
        if row != last:  # rows stay dense: the last one moves into the hole
            for column in (self._numbers, self._sizes, self._arrivals, self._inverse):
                column[row] = column[last]
            self._rows[int(self._numbers[row])] = row

    def oldest(self) -> tuple[int, int] | None:
        """Arrival in nanoseconds and number of the request that came first, if any."""
        return self._by_age[0] if self._rows else None

    def best(self, now_ns: int) -> int | None:
        """Number of the request with the highest `1 + wait / size` at `now_ns`, if any.

        Args:
            now_ns: At or after every arrival in the queue.

        Cost: O(n), one pass of a few vector operations.  Source: paper §3.3, equation 1.
        """
        count = len(self._rows)
        if count == 0:
            return None
        assert self._by_age[-1][0] <= now_ns < TIME_NS_LIMIT, (now_ns, self._by_age[-1])
        waits, ratios = self._waits[:count], self._ratios[:count]
        np.subtract(now_ns, self._arrivals[:count], out=waits)
        np.multiply(waits, self._inverse[:count], out=ratios)
        near = np.flatnonzero(ratios >= ratios.max() * _NEAR)
        if len(near) == 1:
            return int(self._numbers[near[0]])
        numbers, sizes = self._numbers[:count], self._sizes[:count]
        if len(near) < count:
            numbers, waits, sizes = numbers[near], waits[near], sizes[near]
        return _best_exactly(numbers, waits, sizes)

    def check(self) -> None:
        """Assert that the columns, the row numbers and the order by age agree."""
        count = len(self._rows)
        assert len(self._by_age) == count <= len(self._numbers)
        assert sorted(self._rows.values()) == list(range(count))
        for number, row in self._rows.items():
            assert self._numbers[row] == number
            assert self._inverse[row] == 1.0 / int(self._sizes[row])
            assert (int(self._arrivals[row]), number) in self._by_age

    def _allocate(self, rows: int) -> None:
        self._numbers: Ints = np.zeros(rows, np.int64)
        self._sizes: Ints = np.zeros(rows, np.int64)
        self._arrivals: Ints = np.zeros(rows, np.int64)
        self._inverse = np.zeros(rows, np.float64)
        self._waits: Ints = np.zeros(rows, np.int64)  # scratch of `best`, as are the ratios
        self._ratios = np.zeros(rows, np.float64)

    def _grow(self) -> None:
        old = self._numbers, self._sizes, self._arrivals, self._inverse
        count = len(self._numbers)
        self._allocate(2 * count)
        for column, values in zip((self._numbers, self._sizes, self._arrivals, self._inverse), old, strict=True):
            column[:count] = values


def _best_exactly(numbers: Ints, waits: Ints, sizes: Ints) -> int:
    # `wait_i * size_r - wait_r * size_i` says whether i is ahead of r.  Each product may need 110 bits, but the
    # ratios agree to 2**-48, so the difference stays below 2**62 and arithmetic modulo 2**64 yields it exactly.
    ahead = waits * sizes[0] - waits[0] * sizes
    while ahead.max() > 0:
        better = ahead > 0
        numbers, waits, sizes, ahead = numbers[better], waits[better], sizes[better], ahead[better]
        leader = int(ahead.argmax())
        ahead = waits * sizes[leader] - waits[leader] * sizes
    if ahead.any():
        numbers, sizes = numbers[ahead == 0], sizes[ahead == 0]
    smallest = sizes == sizes.min()  # equal ratio and equal size: equal arrival
    return int(numbers.min() if smallest.all() else numbers[smallest].min())
