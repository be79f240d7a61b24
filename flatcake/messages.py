"""What the catalog and a data plane tell each other: plans one way, completions the other.

Plain values that pickle: addresses, generations, keys, numbers.  Nothing here refers to an object of either
side, so that the same plan serves every rank, in this process or in another (docs/design.md).
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from flatcake.geometry import Geometry

Int64Array = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
KeyArray = npt.NDArray[np.uint64]

MEDIUM, BASE, ROOM, GENERATION, FIRST_SLOT, BLOCKS, FIRST_BLOCK = range(7)
RUN_COLUMNS = 7


class PlanKind(StrEnum):
    RESTORE = "restore"
    SAVE = "save"


@dataclass(frozen=True, eq=False, slots=True)
class Runs:
    """Runs of one request: consecutive blocks that are adjacent in one extent.

    `table` is int64 [runs, 7], a row per run: medium, base of the extent in bytes, its room in blocks, its
    generation, slot of the run's first block in the extent, number of blocks, and the index of the first
    block in the request.
    """

    table: Int64Array

    def __post_init__(self) -> None:
        assert self.table.ndim == 2 and self.table.shape[1] == RUN_COLUMNS, self.table.shape

    @classmethod
    def none(cls) -> "Runs":
        return cls(np.empty((0, RUN_COLUMNS), np.int64))

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: int) -> Int64Array:
        return self.table[:, name]

    @property
    def blocks(self) -> int:
        """Blocks of all runs together."""
        return int(self.table[:, BLOCKS].sum())


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Plan:
    """One restore or save, as every rank runs it."""

    kind: PlanKind
    plan_id: int
    runs: Runs
    keys: KeyArray
    """uint64 [blocks of the request, 2]: seeds of the checksums; row i belongs to block i of the request."""
    release: int = 0
    """Grows with every withdrawal of everything (`reset`); plans of an older release are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one rank says when nothing of a plan is in flight there any more."""

    plan_id: int
    rank: int
    epoch: int
    """Start number of that rank's process: a restarted rank has another."""
    first_bad_block: int | None = None
    """Smallest index, in the request, of a block that failed there; None when all went well."""
    reason: str = ""
    damaged_blocks: tuple[int, ...] = ()
    """All blocks of a restore whose bytes are not what was saved, the first one included; nobody should try again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What a rank says once its data plane is open: all that a catalog in another process must know of it."""

    rank: int
    epoch: int
    geometry: Geometry
    """Of its paged tensors; the same on every rank."""
    pool_kept: bool
    """Whether the files of an earlier run are still in their places, so that what was written about them may hold."""
    pool_file_bytes: int
    """0 without an SSD pool."""
    directories: tuple[str, ...]
    """Of that pool, without symbolic links; empty without one."""
    verifies: bool
    """Whether restored bytes are compared with their checksums."""
    window_slots: int
    slot_bytes: int
    io_path: str
    """How bytes reach the SSD."""


def block_column(plan: Plan, column: int) -> Int64Array:
    """int64 [blocks of the request]: a column of the run that each block is in; -1 for blocks in no run."""
    counts = plan.runs.column(BLOCKS)
    nth = np.arange(plan.runs.blocks) - np.repeat(np.cumsum(counts) - counts, counts)
    values = np.full(len(plan.keys), -1, np.int64)
    values[np.repeat(plan.runs.column(FIRST_BLOCK), counts) + nth] = np.repeat(plan.runs.column(column), counts)
    return values
