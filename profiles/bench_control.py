"""Time the control plane: one long prefix looked up among all that an index holds, and its restore planned.

No GPU, no I/O.  Each section is a function from `Sizes` to a dict of figures; `main` merges and prints them.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from common import append_rows, device_name

from flatcake.extents import ExtentTable, FreeRanges
from flatcake.geometry import Component, Geometry
from flatcake.gva import Medium, encode_array
from flatcake.index import MISS, Index
from flatcake.io.pieces import Work
from flatcake.io.plan import PlanLimits, TilePlan, make_tiles
from flatcake.io.records import ExtentRef, Record
from flatcake.io.verdict import WantedSums
from flatcake.keys import Identity, chain
from flatcake.layout import Growth, LaneTable
from flatcake.messages import Plan, PlanKind, Runs
from flatcake.prefix import prefix_of
from flatcake.space import Space, Watermarks
from flatcake.units import GiB, KiB, MiB

T = TypeVar("T")
Figures = dict[str, float]
Section = Callable[["Sizes"], Figures]

_CHUNK = 250_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much one run does."""

    entries: int
    """Live entries of the index."""
    blocks: int
    """Blocks of the request that is looked up."""
    repeats: int
    """Timings behind each median."""
    seed: int
    """Of the random keys."""


def measure_keys(sizes: Sizes) -> Figures:
    """Hash the tokens of one request."""
    identity = Identity(model="bench", revision="0", kv_dtype="bf16", layout="bench", block_tokens=64)
    tokens = np.random.default_rng(sizes.seed).integers(0, 150_000, sizes.blocks * 64)
    return {"chain_us": _median_us(partial(chain, identity), [tokens] * sizes.repeats)}


def measure_index(sizes: Sizes) -> Figures:
    """Look up, publish and withdraw one request's keys in an index that is full but for them."""
    rng = np.random.default_rng(sizes.seed)
    index = Index(sizes.entries + sizes.blocks)
    keys = rng.integers(0, 2**64, (sizes.entries, 2), dtype=np.uint64)
    gvas = _addresses(sizes.entries)
    started = time.perf_counter()
    for start in range(0, sizes.entries, _CHUNK):
        index.publish(keys[start : start + _CHUNK], gvas[start : start + _CHUNK])
    fill_s = time.perf_counter() - started

    hits = [keys[rng.integers(0, sizes.entries, sizes.blocks)] for _ in range(sizes.repeats)]
    misses = [rng.integers(0, 2**64, (sizes.blocks, 2), dtype=np.uint64) for _ in range(sizes.repeats)]
    assert (index.lookup(hits[0]) != MISS).all() and (index.lookup(misses[0]) == MISS).all()
    new_gvas = _addresses(sizes.blocks)
    publish_us, withdraw_us = [], []
    for batch in misses:
        publish_us.append(_once_us(partial(index.publish, batch, new_gvas)))
        withdraw_us.append(_once_us(partial(index.withdraw, batch, new_gvas)))
    return {
        "lookup_us": _median_us(index.lookup, hits),
        "lookup_miss_us": _median_us(index.lookup, misses),
        "publish_us": statistics.median(publish_us),
        "withdraw_us": statistics.median(withdraw_us),
        "index_bytes": index.size_bytes,
        "index_fill_s": round(fill_s, 3),
        "reach_buckets_max": len(index.reach_counts()),
    }


def measure_plan(sizes: Sizes) -> Figures:
    """Plan the restore of one request: addresses to runs, runs to reads and tiles.

    `plan_ms` has the blocks in extents of 190, as a session has that grew over many turns; `plan_scattered_ms`
    has every block in an extent of its own, which is the worst that can happen.
    """
    geometry = Geometry(block_tokens=64, page_tokens=64, layers=((Component("latent", 64 * 656),),) * 43)
    lanes = LaneTable.of(geometry)
    limits = PlanLimits(
        gap_bytes_limit=64 * KiB, read_bytes_max=8 * MiB, slot_bytes=16 * MiB, file_bytes=GiB, first_tile_bytes=4 * MiB
    )
    figures: Figures = {}
    for name, room in (("plan", 190), ("plan_scattered", 1)):
        space, gvas = _stored(sizes.blocks, room, lanes)
        plans = partial(_plan_restore, space, lanes, limits)
        tiles = plans(gvas)
        assert tiles.read_bytes == sizes.blocks * lanes.block_bytes
        figures[f"{name}_ms"] = _median_us(plans, [gvas] * sizes.repeats) / 1e3
        figures[f"{name}_reads"] = len(tiles.reads)
    return figures


def measure_pieces(sizes: Sizes) -> Figures:
    """What a data plane makes of a plan: a row and a seed for each piece, and the sum that each must have.

    They are made share by share while media are at work.
    """
    geometry = Geometry(block_tokens=16, page_tokens=16, layers=((Component("kv", 64 * KiB),),) * 32)
    lanes = LaneTable.of(geometry)
    limits = PlanLimits(
        gap_bytes_limit=64 * KiB,
        read_bytes_max=24 * MiB,
        slot_bytes=24 * MiB,
        file_bytes=64 * GiB,
        first_tile_bytes=2 * MiB,
    )
    rng, blocks = np.random.default_rng(sizes.seed), sizes.blocks
    keys = rng.integers(0, 2**64, (blocks, 2), dtype=np.uint64)
    ref = ExtentRef(int(Medium.SSD), 0, blocks, 1)
    runs = Runs(np.array([[ref.medium, ref.base_bytes, ref.room_blocks, ref.generation, 0, blocks, 0]]))
    plan = Plan(kind=PlanKind.RESTORE, plan_id=1, runs=runs, keys=keys)
    tiles = make_tiles(runs, lanes, limits)
    pieces = Work(plan, tiles, lanes, 1).pieces.complete()
    sums = rng.integers(0, 2**32, (blocks, 32), dtype=np.uint64)
    records, payload_bytes = {ref: Record(ref, sums.view(np.uint8).reshape(-1), sums)}, [64 * KiB] * 32
    made, rows = [plan] * sizes.repeats, slice(len(pieces))
    return {
        "pieces": len(pieces.table),
        "pieces_ms": _median_us(lambda each: Work(each, tiles, lanes, 1).pieces.complete(), made) / 1e3,
        "verdicts_ms": _median_us(lambda each: WantedSums(each, pieces, records, payload_bytes).of(rows), made) / 1e3,
    }


SECTIONS: tuple[Section, ...] = (measure_keys, measure_plan, measure_pieces, measure_index)


def main() -> None:
    """Run all sections and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=5_000_000, help="live entries of the index")
    parser.add_argument("--blocks", type=int, default=3_421, help="blocks of one request")
    parser.add_argument("--repeats", type=int, default=101, help="timings behind each median")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only show that it runs")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--record", action="store_true", help="append rows to profiles/results")
    args = parser.parse_args()
    sizes = Sizes(entries=args.entries, blocks=args.blocks, repeats=args.repeats, seed=args.seed)
    if args.smoke:
        sizes = Sizes(entries=20_000, blocks=256, repeats=3, seed=args.seed)
    figures: Figures = {"entries": sizes.entries, "blocks": sizes.blocks}
    for section in SECTIONS:
        figures |= section(sizes)
    for name, value in figures.items():
        print(f"{name:<20}{value:>16,.1f}")
    if args.record:
        append_rows("control", " ".join(["python", *sys.argv]), device_name(), {"all": figures})
    if args.json:
        print(json.dumps({"bench": "control", **figures}))


def _addresses(count: int) -> npt.NDArray[np.uint64]:
    return encode_array(Medium.SSD, 0, np.arange(count) * (4 * KiB))


def _stored(blocks: int, room: int, lanes: LaneTable) -> tuple[Space, npt.NDArray[np.uint64]]:
    """A space in which `blocks` blocks of one session lie in extents of `room`, and their addresses in order."""
    file_bytes = GiB // lanes.extent_bytes(room) * lanes.extent_bytes(room)
    files = blocks * lanes.extent_bytes(room) // file_bytes + 2
    tables = {Medium.SSD: ExtentTable(Medium.SSD, FreeRanges(size_bytes=files * GiB, file_bytes=GiB), lanes)}
    growth = Growth(layout="segments", percent=0, room_max=room)
    space = Space(tables, Index(blocks), growth, Watermarks(high=1.0, low=0.9, dram_idle_ns_max=0))
    slots = space.reserve(space.scopes.create("bench", Medium.SSD, 0), blocks, 0)
    assert slots is not None
    return space, np.concatenate([space.gvas(part) for part in slots])


def _plan_restore(space: Space, lanes: LaneTable, limits: PlanLimits, gvas: npt.NDArray[np.uint64]) -> TilePlan:
    return make_tiles(prefix_of(gvas, np.arange(len(gvas)), space).runs, lanes, limits)


def _once_us(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e3


def _median_us(call: Callable[[T], object], batches: list[T]) -> float:
    return statistics.median(_once_us(partial(call, batch)) for batch in batches)


if __name__ == "__main__":
    main()
