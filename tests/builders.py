"""Small geometries, spaces and catalogs, so that a test states only what it is about."""

import numpy as np
import numpy.typing as npt

from flatcake.catalog import Catalog, Refused
from flatcake.extents import ExtentTable, FreeRanges
from flatcake.geometry import Component, Geometry
from flatcake.gva import Medium
from flatcake.index import Index
from flatcake.io.plan import PlanLimits
from flatcake.layout import Growth, LaneTable, LayoutName, room_max
from flatcake.ledger import Outcome
from flatcake.messages import Completion, Plan
from flatcake.placement import Placement, TablePlacement, Turn
from flatcake.space import Space, Watermarks
from flatcake.units import SECOND, GiB, KiB, MiB

BLOCK_TOKENS = 16
LEASE_NS = 10 * SECOND
REPORT_NS = 20 * SECOND
IDLE_NS = 100 * SECOND

ONE_SHOT = Turn()
"""Rule 4: SSD."""
CHAT = Turn(index=2, prior_reply_tokens=1)
"""Rule 3: DRAM."""
AGENT = Turn(index=2, prior_reply_tokens=100_000)
"""Rule 2: SSD."""


def make_geometry(*piece_bytes: int, block_tokens: int = BLOCK_TOKENS, page_tokens: int = BLOCK_TOKENS) -> Geometry:
    """One layer for each given size, of one component without padding; two layers of 4 KiB by default."""
    pages = block_tokens // page_tokens
    layers = tuple((Component("kv", size // pages),) for size in piece_bytes or (4 * KiB, 4 * KiB))
    return Geometry(block_tokens=block_tokens, page_tokens=page_tokens, layers=layers)


def make_space(
    *,
    lanes: LaneTable | None = None,
    ssd_files: int = 2,
    dram_files: int = 1,
    file_bytes: int = 1 * MiB,
    entries: int = 10_000,
    layout: LayoutName = "lanes",
    percent: int = 25,
    marks: Watermarks | None = None,
) -> Space:
    """A DRAM arena of `dram_files` × `file_bytes`, an SSD pool of `ssd_files` files, and an index."""
    lanes = lanes or LaneTable.of(make_geometry())
    arena_bytes = dram_files * file_bytes
    tables = {
        Medium.DRAM: ExtentTable(Medium.DRAM, FreeRanges(size_bytes=arena_bytes, file_bytes=arena_bytes), lanes),
        Medium.SSD: ExtentTable(
            Medium.SSD, FreeRanges(size_bytes=ssd_files * file_bytes, file_bytes=file_bytes), lanes
        ),
    }
    growth = Growth(layout=layout, percent=percent, room_max=room_max(lanes, 8 * MiB, min(file_bytes, arena_bytes)))
    return Space(tables, Index(entries), growth, marks or Watermarks(high=0.95, low=0.9, dram_idle_ns_max=IDLE_NS))


def make_catalog(space: Space | None = None, *, placement: Placement | None = None, ranks: int = 1) -> Catalog:
    """A catalog with `ranks` live ranks, each of epoch 1; Table 2 with short limits by default."""
    placement = placement or TablePlacement(
        agent_tokens_min=1 << 40, short_reply_tokens_limit=512, shared_tokens_max=1 << 30
    )
    catalog = Catalog(
        space or make_space(), placement, block_tokens=BLOCK_TOKENS, lease_ns=LEASE_NS, report_ns=REPORT_NS
    )
    for rank in range(ranks):
        catalog.rank_started(rank, 1)
    return catalog


def make_limits(
    *,
    gap_bytes_limit: int = 64 * KiB,
    read_bytes_max: int = 8 * MiB,
    slot_bytes: int = 16 * MiB,
    file_bytes: int = GiB,
    first_tile_bytes: int = 4 * MiB,
) -> PlanLimits:
    return PlanLimits(
        gap_bytes_limit=gap_bytes_limit,
        read_bytes_max=read_bytes_max,
        slot_bytes=slot_bytes,
        file_bytes=file_bytes,
        first_tile_bytes=first_tile_bytes,
    )


def make_keys(name: str | int, blocks: int) -> npt.NDArray[np.uint64]:
    """uint64 [blocks, 2]: the keys of one token sequence; a longer call with the same name extends it."""
    seed = [*str(name).encode()]
    return np.random.default_rng(seed).integers(0, 2**64, (blocks, 2), dtype=np.uint64)


def branch(keys: npt.NDArray[np.uint64], name: str | int, blocks: int) -> npt.NDArray[np.uint64]:
    """`keys`, then `blocks` more that belong to the sequence `name` alone."""
    return np.concatenate([keys, make_keys(name, blocks)])


def report(catalog: Catalog, plan: Plan, rank: int = 0, bad: int | None = None, reason: str = "") -> Outcome | None:
    """A live rank says that it is done with a plan."""
    epoch = catalog.ranks.get(rank, 1)
    return catalog.finish(Completion(plan_id=plan.plan_id, rank=rank, epoch=epoch, first_bad_block=bad, reason=reason))


def begin(catalog: Catalog, session: str, keys: npt.NDArray[np.uint64], turn: Turn = ONE_SHOT, now_ns: int = 0) -> Plan:
    """`begin_save` that must not be refused."""
    plan = catalog.begin_save(session, keys, turn, now_ns)
    assert not isinstance(plan, Refused), plan
    return plan


def save(catalog: Catalog, session: str, keys: npt.NDArray[np.uint64], turn: Turn = ONE_SHOT, now_ns: int = 0) -> Plan:
    """Save a turn on every rank and have it published; returns the plan."""
    plan = begin(catalog, session, keys, turn, now_ns)
    for rank in catalog.ranks:
        report(catalog, plan, rank)
    return plan
