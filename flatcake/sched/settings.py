"""Settings of the scheduler, FC-MAS.  Paper §3.3; docs/design.md.

Pure.  `mas` obeys them; the loop over a store fills in what depends on the store, such as the window's slots.
"""

from dataclasses import dataclass
from typing import Literal

from flatcake.fields import check_types, require
from flatcake.units import MS, SECOND, MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedConfig:
    """How requests that need SSD reads are ordered, limited and handed out."""

    order: Literal["two_queues", "fifo_prefetch", "single_queue"] = "two_queues"
    """`two_queues`: FC-MAS.  Ablations: `fifo_prefetch` starts prefetches by arrival; `single_queue` hands out
    by arrival as well, so that a request waits for all that came before it."""
    readmit: Literal["arrival", "tail"] = "arrival"
    """Place of a finished prefetch among the ready: its original arrival, or (ablation `no_readmit`) the tail."""
    ready_when: Literal["whole_prefix", "first_layers"] = "whole_prefix"
    """Ready when all layers are in GPU memory (paper §3.3), or when the first are and the rest streams under
    compute (paper Fig. 5c)."""
    wait_ns_max: int = 2 * SECOND
    """Age cap: a request that has waited longer is prefetched before younger ones, oldest first; 0: no cap."""
    prefetches_max: int = 4
    """Prefetches in flight at once, cancelled ones included until their reads have returned."""
    window_slots: int = 8
    """Window slots that all prefetches together may count on."""
    restore_slots_max: int = 4
    """Window slots that one prefetch may count on."""
    slot_bytes: int = 32 * MiB
    """Size of a window slot: a small prefetch is counted with as many as its bytes fill."""
    pages_held_max: int = 0
    """GPU pages of requests that are not dispatched yet; one larger request may start alone; 0: no cap."""
    pages_retry_ns: int = 20 * MS
    """After a refusal of GPU pages, ask again at the latest after this."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("prefetches_max", "window_slots", "restore_slots_max", "slot_bytes", "pages_retry_ns"):
            require(self, name, getattr(self, name) >= 1, "1 or more")
        fits = self.restore_slots_max <= self.window_slots
        require(self, "restore_slots_max", fits, f"at most window_slots={self.window_slots}")
        alike = self.order != "single_queue" or self.readmit == "arrival"
        require(self, "readmit", alike, "arrival, as order=single_queue has no other place for a request")
        require(self, "wait_ns_max", self.wait_ns_max >= 0, "0 or more nanoseconds")
        require(self, "pages_held_max", self.pages_held_max >= 0, "0 or more pages")


def fit_window(window_slots: int, slot_bytes: int, **changes: object) -> SchedConfig:
    """Settings that fit a window: a quarter of its slots is left to restores from DRAM.

    Args:
        window_slots: Slots of the window that all restores share.
        slot_bytes: Size of one.
        **changes: Fields that win over what is derived.

    Raises:
        ConfigError: A changed field is out of range.
    """
    slots = max(1, window_slots - max(1, window_slots // 4))
    derived = {"window_slots": slots, "restore_slots_max": max(1, slots // 2), "slot_bytes": slot_bytes}
    return SchedConfig(**{**derived, **changes})  # type: ignore[arg-type]
