"""What the scheduler has done since it was made, by name.

Pure.  Sums of times go with the counter of what was timed, so that a reader can form means.
"""

from dataclasses import asdict, dataclass


@dataclass(slots=True)
class Counters:
    """Totals; none ever falls."""

    submitted: int = 0
    dispatched: int = 0
    done: int = 0
    cancelled: int = 0
    forgotten: int = 0
    late: int = 0
    """Recomputed because the deadline passed before the prefetch had ended."""
    slow: int = 0
    """Recomputed because the restore was expected to take too long."""
    prefetches_started: int = 0
    prefetches_done: int = 0
    prefetches_abandoned: int = 0
    """Cancelled on the way, or loaded and given back."""
    pages_refused: int = 0
    taken_back: int = 0
    """Requests that gave their pages back to the engine and wait again."""
    over_age: int = 0
    """Prefetches that were chosen by the age cap."""
    ssd_bytes: int = 0
    dram_bytes: int = 0
    prefetch_wait_ns: int = 0
    """In the SSD-preparing queue, summed over prefetches chosen."""
    prefetch_ns: int = 0
    """From started to done, summed over prefetches done."""
    to_ready_ns: int = 0
    """From submission to ready, summed over requests with bytes on SSD that became ready."""
    became_ready: int = 0
    """How many those were; one that was taken back counts again."""
    ready_wait_ns: int = 0
    """In the ready queue, summed over requests dispatched."""
    service_ns: int = 0
    """From dispatch to done, summed over requests done."""

    def snapshot(self) -> dict[str, int]:
        """All totals as plain values."""
        return asdict(self)
