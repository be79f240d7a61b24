"""What an engine tells the loop: its requests, where its pages come from, and how long things may take.

Values and a protocol; nothing here acts.  `loop` does, and hands a `loop.ready.Ready` back for each request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from flatcake.errors import PageTableError
from flatcake.fields import check_types, require
from flatcake.messages import Int64Array
from flatcake.sched.settings import SchedConfig, fit_window
from flatcake.store import Store
from flatcake.units import SECOND


class EnginePages(Protocol):
    """The engine's free pages.  Called from the loop's thread and from callers of `next_ready`, without a lock held.

    Every page that was taken is given back exactly once, by the loop, unless `done` says that the engine keeps it.
    """

    def take(self, count: int) -> Sequence[int] | Int64Array | None:
        """Hand over `count` distinct pages that no request uses; None: there are not so many now, ask again later."""

    def give_back(self, pages: Int64Array) -> None:
        """Nothing of the store will touch these pages any more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoopRequest:
    """A request whose cached prefix is to be brought into pages."""

    tokens: object
    """1-D integers from the first token on, or the keys of its blocks, as for `Store.match`."""
    session: str = ""
    """Whose it is; the loop only carries it."""
    salt: bytes = b""
    extra: bytes = b""
    pages: int = 0
    """Pages of its page table, at least those of its full blocks; 0: as many as its tokens fill."""
    timeout_ns: int = 0
    """Counted from `submit`: when it is not handed out with its prefix by then, it is to be recomputed; 0: never."""
    restore_ns_max: int = 0
    """Only if faster: recompute when the restore alone is expected to take longer; 0: always restore."""
    note: object = None
    """The caller's own; the loop only carries it."""

    def __post_init__(self) -> None:
        for name in ("pages", "timeout_ns", "restore_ns_max"):
            value = getattr(self, name)
            require(self, name, type(value) is int and value >= 0, "a whole number, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """Bounds of the loop's waits, and how many layers are enough to begin."""

    first_layers: int = 1
    """Under `ready_when="first_layers"`: a request is ready when so many leading layers are in its pages."""
    lease_ns: int = 600 * SECOND
    """A request's blocks stay pinned at most this long; after that its restore is a miss."""
    restore_ns: int = 60 * SECOND
    """A restore that takes longer is dropped: a miss."""
    grace_ns: int = 1 * SECOND
    """Reads of a dropped restore that have not returned after this are no longer waited for."""
    close_ns: int = 10 * SECOND
    """`close` waits this long for reads under way."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("first_layers", "lease_ns", "restore_ns", "grace_ns", "close_ns"):
            require(self, name, getattr(self, name) >= 1, "1 or more")


def sched_config(store: Store, **changes: object) -> SchedConfig:
    """Settings that fit the window of a store: a quarter of its slots is left to restores from DRAM.

    Args:
        store: Whose window it is.
        **changes: Fields of `SchedConfig` that win over what is derived.

    Raises:
        ConfigError: A changed field is out of range.
    """
    window = store.plane.parts.window
    return fit_window(window.slots, window.slot_bytes, **changes)


def pages_wanted(request: LoopRequest, store: Store, blocks: int) -> int:
    """How many pages a request asks for, given its full blocks.

    Raises:
        PageTableError: It asks for fewer than its full blocks fill.
    """
    least = blocks * store.geometry.pages_per_block
    if request.pages:
        if request.pages < least:
            raise PageTableError(f"LoopRequest.pages={request.pages}: expected 0, or at least {least} for its blocks")
        return request.pages
    tokens = request.tokens
    if isinstance(tokens, np.ndarray) and tokens.ndim == 2:  # keys
        return least
    return max(least, -(-len(tokens) // store.plane.kv.page_tokens))  # type: ignore[arg-type]


def as_table(pages: object, count: int) -> Int64Array:
    """What `EnginePages.take` handed over, as a page table of its own.

    Raises:
        PageTableError: Not `count` integers.
    """
    table = np.array(pages)
    if table.shape != (count,) or (count and not np.issubdtype(table.dtype, np.integer)):
        raise PageTableError(f"take({count}) gave {table.dtype} {list(table.shape)}: expected {count} page numbers")
    return table.astype(np.int64)
