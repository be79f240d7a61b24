"""From addresses back to runs, extents and the scopes that own them; and which leading blocks are shared.

Pure.  Runs are maximal: consecutive blocks of the request in consecutive slots of one extent.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatcake.gva import Medium, decode, decode_array
from flatcake.messages import BLOCKS, FIRST_BLOCK, FIRST_SLOT, RUN_COLUMNS, Int64Array, KeyArray, Runs
from flatcake.scopes import Scope
from flatcake.space import GvaArray, Slots, Space


@dataclass(frozen=True, eq=False, slots=True)
class Hit:
    """The longest stored prefix of a request: a hint until it is leased."""

    keys: KeyArray
    """uint64 [blocks, 2]: keys of the blocks found."""
    gvas: GvaArray
    """uint64 [blocks]: their addresses when they were looked up."""

    @property
    def blocks(self) -> int:
        return len(self.keys)

    def blocks_on(self, medium: Medium) -> int:
        """How many of the blocks are on one medium."""
        return int((decode_array(self.gvas)[0] == int(medium)).sum())


@dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """Stored blocks of a request, as runs in the order of the request."""

    runs: Runs
    owners: list[Scope]
    """The scope of each run."""
    scopes: list[Scope]
    """Each owner once, in the order of its first block: root first."""


def prefix_of(gvas: npt.NDArray[np.uint64], blocks: Int64Array, space: Space) -> Prefix:
    """Find the runs of stored blocks.

    Args:
        gvas: uint64 [n], addresses of live blocks.
        blocks: int64 [n], their indices in the request, ascending.
        space: Owner of the extents.

    Cost: O(n) array elements and O(runs × log extents).
    """
    if not len(gvas):
        return Prefix(Runs(np.empty((0, RUN_COLUMNS), np.int64)), [], [])
    piece_bytes = int(space.tables[Medium.SSD].lanes.piece_bytes[0])
    breaks = (gvas[1:] - gvas[:-1] != piece_bytes) | (blocks[1:] - blocks[:-1] != 1)
    bounds = np.concatenate([[0], breaks.nonzero()[0] + 1, [len(gvas)]])
    firsts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
    rows, owners = [], []
    for gva, count, first in zip(gvas[firsts].tolist(), counts.tolist(), blocks[firsts].tolist(), strict=True):
        medium, _, offset = decode(gva)
        table = space.tables[medium]
        extent = table.at(offset)
        assert extent is not None, f"address {medium}:{offset} is in no extent"
        slot = table.slot_of(extent, offset)
        rows.append((medium, extent.base_bytes, extent.room_blocks, extent.generation, slot, count, first))
        owners.append(space.scopes.get(extent.scope_id))
    return Prefix(Runs(np.array(rows, np.int64)), owners, list(dict.fromkeys(owners)))


def runs_of(slots: list[Slots], blocks: Int64Array) -> Runs:
    """The runs of reserved slots, where `blocks[i]` of the request goes to the i-th slot."""
    cuts = ((blocks[1:] - blocks[:-1] != 1).nonzero()[0] + 1).tolist()
    rows: list[tuple[int, ...]] = []
    at = nth = 0
    for part in slots:
        extent, begin, end = part.extent, at, at + part.count
        while at < end:
            while nth < len(cuts) and cuts[nth] <= at:
                nth += 1
            stop = min(end, cuts[nth]) if nth < len(cuts) else end
            slot = part.first + at - begin
            row = (int(extent.medium), extent.base_bytes, extent.room_blocks, extent.generation, slot, stop - at)
            rows.append((*row, int(blocks[at])))
            at = stop
    return Runs(np.array(rows, np.int64).reshape(-1, RUN_COLUMNS))


def runs_from(runs: Runs, first_block: int) -> Runs:
    """What is left of runs without the blocks of the request before `first_block`."""
    if not first_block:
        return runs
    table = runs.table.copy()
    skipped = np.clip(first_block - table[:, FIRST_BLOCK], 0, table[:, BLOCKS])
    table[:, FIRST_SLOT] += skipped
    table[:, FIRST_BLOCK] += skipped
    table[:, BLOCKS] -= skipped
    return Runs(table[table[:, BLOCKS] > 0])


def shared_prefix(session: str, known: Prefix) -> int:
    """Leading blocks that `session` shares with another session; the scopes remember that it uses them."""
    shared = 0
    for (*_, count, first), owner in zip(known.runs.table.tolist(), known.owners, strict=True):
        if owner.session != session:
            owner.shared_blocks = max(owner.shared_blocks, first + count)
        end = min(first + count, owner.shared_blocks)
        if first <= shared < end:
            shared = end
    return shared


def leading(flags: npt.NDArray[np.bool_]) -> int:
    """Length of the leading stretch of True."""
    return len(flags) if flags.all() else int(np.argmin(flags))
