"""What the scheduler's side and a worker's side of the adapter tell each other at each step.

Plain values that pickle.  They ride on vLLM's own messages; the plans in them are the store's.
"""

from dataclasses import dataclass, field

from flatcake.messages import Completion, Int64Array, Plan, RankStart


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class LoadOrder:
    """Restore a request's prefix into its blocks."""

    request_id: str
    plan: Plan | None
    """None when the catalog had none any more: all of it is to be reported as failed."""
    blocks: Int64Array
    """int64 [groups, n]: vLLM's block ids from the request's first token on; -1 for those that need no load."""
    is_async: bool
    """Whether the request waits for the load, and not the forward pass of this step."""
    slots_max: int | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SaveOrder:
    """Save blocks of a request; they are held until that is over."""

    request_id: str
    plan: Plan
    blocks: Int64Array
    """int64 [groups, n]: vLLM's block ids from the request's first token on; -1 before the first one to save."""


@dataclass(eq=False, slots=True, kw_only=True)
class Orders:
    """What workers are to do in one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """Requests whose load is to be dropped; its end is reported all the same."""


@dataclass(eq=False, slots=True, kw_only=True)
class Reports:
    """What workers have to say after one step."""

    completions: list[Completion] = field(default_factory=list)

    def joined(self, other: "Reports") -> "Reports":
        return Reports(completions=[*self.completions, *other.completions])


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a worker says once its data plane is open."""

    start: RankStart
    layout: str
    """How the engine lays out a block, in words."""
