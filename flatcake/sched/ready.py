"""The ready queue: requests whose prefix needs no SSD read any more, in the order in which they arrived.  Paper §3.3.

Pure: no I/O, no clock.  `mas` says by which time a request is ordered: a finished prefetch comes back at its
original arrival, ahead of younger requests that were ready at once.
"""

from sortedcontainers import SortedList


class ReadyQueue:
    """Requests by number, ordered by a time that is fixed when they are added; ties by number."""

    def __init__(self) -> None:
        self._order: SortedList = SortedList()  # (order_ns, number)
        self._times: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, number: int) -> bool:
        return number in self._times

    def add(self, number: int, order_ns: int) -> None:
        """Add a request under a number that is not in the queue.  Cost: O(log n)."""
        assert number not in self._times, number
        self._times[number] = order_ns
        self._order.add((order_ns, number))

    def first(self) -> int | None:
        """Number of the request that is next, if any."""
        return self._order[0][1] if self._times else None

    def remove(self, number: int) -> None:
        """Take a request out.  Cost: O(log n)."""
        self._order.remove((self._times.pop(number), number))

    def check(self) -> None:
        """Assert that both views hold the same requests."""
        assert sorted((order_ns, number) for number, order_ns in self._times.items()) == list(self._order)
