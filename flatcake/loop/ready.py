"""A request on its way through the loop, and the handle with which it is handed out.

Read path:  submit -> sched -> restore -> [ready]: wait_layer … -> result -> done
"""

from dataclasses import dataclass, field

import numpy as np

from flatcake.gva import Medium, decode_array
from flatcake.hits import Lease
from flatcake.io.restore import Restore, RestoreResult
from flatcake.loop.request import LoopRequest
from flatcake.messages import Int64Array
from flatcake.sched.actions import Prefix, Request


@dataclass(slots=True, eq=False)
class Fetch:
    """One restore of a request; its loop's lock guards it."""

    entry: "Entry"
    restore: Restore
    pages: Int64Array
    ticket: int | None
    """Of the scheduler; None for one that was started when the request was handed out."""
    give_up_ns: int
    begun: float = 0.0
    """Of the driver's `SharedClock`."""
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Entry:
    """A request from `submit` until nothing of it is left; its loop's lock guards it."""

    request: LoopRequest
    sched: Request
    lease: Lease
    media: Int64Array
    """int64 [blocks of the lease]: which medium each is on."""
    block_bytes: int
    arrival_ns: int
    prefix: Prefix = Prefix.DRAM
    ticket: int | None = None
    """Of the prefetch with which it was dispatched."""
    fetches: dict[int, Fetch] = field(default_factory=dict)
    """Its prefetches by ticket."""
    direct: Fetch | None = None
    """Its restore that was started when it was handed out."""
    pages: Int64Array | None = None
    """What goes back to the engine at the end."""
    is_handing: bool = False
    """Between its turn and being handed out, on a caller's thread."""
    is_out: bool = False
    """Handed out."""
    is_cancelled: bool = False
    is_forgotten: bool = False
    """The scheduler has said its last word on it."""

    def fetch(self) -> Fetch | None:
        """The restore with which it was handed out."""
        return self.direct if self.ticket is None else self.fetches[self.ticket]

    def bytes_of(self, blocks: int) -> dict[str, int]:
        """Bytes of its leading blocks by medium, as the scheduler wants them."""
        on_dram = int((self.media[:blocks] == int(Medium.DRAM)).sum())
        return {"dram_bytes": on_dram * self.block_bytes, "ssd_bytes": (blocks - on_dram) * self.block_bytes}


class Ready:
    """A request whose turn it is: compute it, then call `Loop.done`.  Safe to use from several threads."""

    def __init__(self, entry: Entry, restore: Restore, pages: Int64Array, waited_ns: int) -> None:
        self.request: LoopRequest = entry.request
        """As it was submitted."""
        self.request_id = int(entry.sched.request_id)
        """What `submit` gave."""
        self.pages = pages
        """int64 [pages]: the page table of the whole request; its prefix is, or will be, in the leading pages."""
        self.prefix = entry.prefix
        """Where its cached prefix is."""
        self.tokens = 0 if entry.prefix.recompute else entry.lease.tokens
        """Leading tokens that the restore was asked for; `result` says how many it delivered."""
        self.waited_ns = waited_ns
        """From `submit` until it was handed out."""
        self._restore = restore

    @property
    def recompute(self) -> bool:
        """Whether all tokens are to be computed: late, expected to be slow, or known to have failed."""
        if self.prefix.recompute:
            return True
        return bool(self.tokens) and self._restore.done() and self._restore.result().blocks == 0

    @property
    def is_restored(self) -> bool:
        """Whether `result` would return at once."""
        return self._restore.done()

    def wait_layer(self, layer: int, stream: object = None, *, verified: bool = False) -> bool:
        """Make `stream` wait until a layer of the prefix is in the pages; see `Restore.wait_layer`.

        Returns:
            False when the restore has failed, or there is none: `result` says how many tokens are good.
        """
        return self._restore.wait_layer(layer, stream, verified=verified)

    def result(self) -> RestoreResult:
        """Wait, on the host, until the prefix is in the pages and verified.

        Must be asked before anything that was computed from the pages is shown to a user or saved.
        """
        return self._restore.result()


def media_of(lease: Lease) -> Int64Array:
    """int64 [blocks]: the medium of each leased block."""
    return decode_array(lease.entry.gvas)[0].astype(np.int64)
