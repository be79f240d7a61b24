"""How much time a restore had for itself, when several shared the media.  docs/design.md.

Pure: time is passed in.  With n restores under way each is given a n-th of the time that passes, as processor
sharing does.  So what is learnt under load says how long a restore takes alone, and a busy hour does not make the next
quiet one look slow.
"""


class SharedClock:
    """Counts the restores under way, and the time that each of them had."""

    def __init__(self) -> None:
        self._count = 0
        self._now_ns = 0
        self._given_ns = 0.0

    def begin(self, now_ns: int) -> float:
        """A restore starts; keep what this returns for `end`."""
        self._pass(now_ns)
        self._count += 1
        return self._given_ns

    def end(self, begun: float, now_ns: int) -> int:
        """A restore has ended: nanoseconds that it had for itself, at most those that have passed.

        Args:
            begun: What `begin` returned for it.
            now_ns: Monotonic time.
        """
        assert self._count > 0, "more restores end than began"
        self._pass(now_ns)
        self._count -= 1
        return round(self._given_ns - begun)

    def _pass(self, now_ns: int) -> None:
        passed_ns = max(0, now_ns - self._now_ns)
        self._now_ns += passed_ns
        if self._count:
            self._given_ns += passed_ns / self._count
