"""Plans and leases that are still open: who holds what, and what is waited for.

Pure.  The catalog keeps one ledger; a scope can be freed when nothing here holds it any more.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from flatcake.messages import KeyArray, PlanKind, Runs
from flatcake.scopes import Scope
from flatcake.space import Slots


@dataclass(eq=False, slots=True, kw_only=True)
class LeaseEntry:
    """A pinned prefix: valid until released, expired, or everything is withdrawn."""

    lease_id: int
    keys: KeyArray
    gvas: npt.NDArray[np.uint64]
    runs: Runs
    scopes: list[Scope]
    deadline_ns: int
    release: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a plan ended, once every rank has reported or its time is up."""

    plan_id: int
    kind: PlanKind
    published_blocks: int = 0
    first_bad_block: int | None = None
    reason: str = ""


@dataclass(eq=False, slots=True, kw_only=True)
class OpenPlan:
    """A restore or save that not every rank has reported yet."""

    kind: PlanKind
    keys: KeyArray
    gvas: npt.NDArray[np.uint64]
    """uint64 [blocks of the request]: where each block is, or will be."""
    blocks: npt.NDArray[np.int64]
    """Blocks of the request that the plan moves; for a save in the order of `slots`."""
    pinned: list[Scope]
    slots: list[Slots] = field(default_factory=list)
    plan_id: int = 0
    waiting: set[int] = field(default_factory=set)
    """Ranks that have not reported."""
    deadline_ns: int = 0
    release: int = 0
    first_bad_block: int | None = None
    reason: str = ""
    timed_out: bool = False
    committed: list[int] = field(default_factory=list)
    """What the manifest calls the rows of a save."""

    @property
    def first_block(self) -> int:
        """The first block of the request that the plan moves; 0 if it moves none."""
        return int(self.blocks.min()) if len(self.blocks) else 0

    def note_failure(self, first_bad_block: int, reason: str) -> None:
        """Keep the smallest bad block over all ranks, and the reason that came with it."""
        if self.first_bad_block is None or first_bad_block < self.first_bad_block:
            self.first_bad_block, self.reason = first_bad_block, reason

    def is_last(self, rank: int) -> bool:
        """Note a rank's report; whether no other one is waited for."""
        self.waiting.discard(rank)
        return not self.waiting

    def outcome(self, published_blocks: int = 0) -> Outcome:
        return Outcome(
            plan_id=self.plan_id,
            kind=self.kind,
            published_blocks=published_blocks,
            first_bad_block=self.first_bad_block,
            reason=self.reason,
        )


@dataclass(slots=True)
class Ledger:
    """Open leases and plans by number."""

    leases: dict[int, LeaseEntry] = field(default_factory=dict)
    plans: dict[int, OpenPlan] = field(default_factory=dict)
    last_id: int = 0

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def holders(self) -> Iterator[list[Scope]]:
        """The pinned scopes of every open lease and plan."""
        yield from (lease.scopes for lease in self.leases.values())
        yield from (plan.pinned for plan in self.plans.values())
