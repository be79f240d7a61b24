"""The values that go into the scheduler and come out of it: a request, and the actions of the driver.

Pure.  `mas` makes actions; the driver (the loop over a store, a replay, a test) carries them out in the given
order.  None refers to an object of the other side: requests go by the caller's id, prefetches by a ticket.
"""

from dataclasses import dataclass
from enum import StrEnum

from flatcake.fields import require
from flatcake.gva import OFFSET_BYTES_LIMIT

RequestId = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the scheduler must know of a request; the hit itself stays with the driver."""

    request_id: RequestId
    """Unused by any request that the scheduler still knows."""
    ssd_bytes: int
    """To be read from SSD: the size of equation 1.  0: ready at once."""
    dram_bytes: int = 0
    """To be copied from DRAM, by the same prefetch when there is one."""
    pages: int = 0
    """GPU pages that a prefetch fills; asked for when it starts."""
    deadline_ns: int = 0
    """Monotonic time after which an unfinished prefetch is given up and the prefix recomputed; 0: none."""
    restore_ns_max: int = 0
    """Only if faster: recompute when the restore is expected to take longer than this; 0: always restore."""

    def __post_init__(self) -> None:
        for name in ("ssd_bytes", "dram_bytes"):
            size = getattr(self, name)
            require(
                self, name, type(size) is int and 0 <= size <= OFFSET_BYTES_LIMIT, f"0 to {OFFSET_BYTES_LIMIT} bytes"
            )
        for name in ("pages", "deadline_ns", "restore_ns_max"):
            value = getattr(self, name)
            require(self, name, type(value) is int and value >= 0, "a whole number, 0 or more")


class Prefix(StrEnum):
    """Where a dispatched request finds its cached prefix."""

    FETCHED = "fetched"
    """Its prefetch has ended: what it delivered is in the pages."""
    STREAMING = "streaming"
    """The first layers are in the pages, the others follow: wait for each layer."""
    DRAM = "dram"
    """Nothing is on SSD and nothing was started: restore it now, or there is nothing to restore."""
    LATE = "late"
    """The deadline passed first: recompute."""
    SLOW = "slow"
    """Expected to take longer than `restore_ns_max`: recompute."""

    @property
    def recompute(self) -> bool:
        """Whether the request is to be computed without its cached prefix."""
        return self in (Prefix.LATE, Prefix.SLOW)


@dataclass(frozen=True, slots=True)
class StartPrefetch:
    """Get `pages` GPU pages and start to restore the request into them.

    Answer with `started(ticket)` or `pages_refused(ticket)`; until then no other prefetch is started.  A started
    one ends with exactly one `prefetch_done(ticket)`, also when it fails or is cancelled.
    """

    ticket: int
    request_id: RequestId
    pages: int
    slots: int
    """Window slots that it was counted with."""


@dataclass(frozen=True, slots=True)
class CancelPrefetch:
    """Stop a prefetch; report `prefetch_done` when none of its reads is in flight any more."""

    ticket: int
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ReturnPages:
    """Give the pages of a prefetch that has ended, and that nobody will use, back to the engine."""

    ticket: int
    request_id: RequestId
    pages: int


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Compute this request.  Its pages, if any, are the engine's from here on; end with `done` or `cancel`."""

    request_id: RequestId
    prefix: Prefix
    ticket: int | None
    """The prefetch that filled or is filling the pages; None unless `prefix` is FETCHED or STREAMING."""
    pages: int
    """Pages that come with it."""


@dataclass(frozen=True, slots=True)
class Forget:
    """The last word on a request: nothing of it is in flight, so drop its lease, and free what it was given."""

    request_id: RequestId


Action = StartPrefetch | CancelPrefetch | ReturnPages | Dispatch | Forget
Actions = tuple[Action, ...]
