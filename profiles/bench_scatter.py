"""Time scatter and gather against a plain device copy of as many bytes, over page sizes from 4 KiB to 512 KiB.

    python profiles/bench_scatter.py [--json] [--smoke] [--device cuda] [--pages-kib 4 64 512] [--tile-units 1024 ...]

Every provider moves the whole window (1 GiB by default, more than any L2) in launches of one slot each, recorded in
a CUDA graph so that launches cost nothing; providers take turns within a round.  Bytes are counted read and written.
Lists given for `--tile-units`, `--steps`, `--warps`, `--per-sm` and `--wide-min` are swept.  Rows are printed as CSV;
the last table holds ratios to the copy.  `--smoke` moves a few KiB, on the CPU through Triton's interpreter.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the kernels are imported

import numpy as np
from common import append_rows, commit

from flatcake.kernels.gather import gather_pieces
from flatcake.kernels.kvtable import KVTable, Tuning
from flatcake.kernels.scatter import scatter_pieces
from flatcake.units import KiB, MiB

PAGES_KIB = (4, 16, 32, 64, 128, 512)
SLOT_MIB, SLOTS, COMPONENTS = 64, 16, 2
Provider = Callable[[int], object]
"""Moves the slot of this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one run moves."""

    page_bytes: int
    """One page of one component, contiguous unless `row_bytes` says otherwise."""
    row_bytes: int
    """Contiguous bytes; less than a page makes each page a column of rows twice as wide."""
    slot_bytes: int
    slots: int
    components: int

    @property
    def pages_slot(self) -> int:
        return self.slot_bytes // (self.page_bytes * self.components)

    @property
    def moved_bytes(self) -> int:
        """Read and written by one pass over all slots."""
        return 2 * self.slots * self.pages_slot * self.page_bytes * self.components


@dataclass(frozen=True, slots=True)
class Row:
    """One provider's figures; `ratio` is its rate over the copy's in the same rounds."""

    bench: str
    provider: str
    page_bytes: int
    row_bytes: int
    moved_bytes: int
    p20_us: float
    p50_us: float
    p80_us: float
    gb_per_s: float
    ratio: float
    device: str
    commit: str


class Setup:
    """A window, a pool as large as it for each component, and all that launches over them need."""

    def __init__(self, sizes: Sizes, tuning: Tuning, per_sm: int, device: str) -> None:
        self.sizes = sizes
        many = torch.cuda.get_device_properties(device).multi_processor_count if per_sm else 0
        self.programs_max = per_sm * many or None
        pages = sizes.slots * sizes.pages_slot
        spread = 1 if sizes.row_bytes == sizes.page_bytes else 2
        self.window = torch.zeros(sizes.slots * sizes.slot_bytes, dtype=torch.uint8, device=device)
        self.pool = torch.zeros(sizes.components, pages * sizes.page_bytes * spread, dtype=torch.uint8, device=device)
        rows = np.zeros((1, sizes.components, 6), np.int64)
        for component in range(sizes.components):
            rows[0, component] = (
                self.pool[component].data_ptr(),
                sizes.page_bytes * spread,
                sizes.page_bytes // sizes.row_bytes,
                sizes.row_bytes * spread,
                sizes.row_bytes,
                component * sizes.page_bytes,
            )
        self.kv = KVTable.from_bytes(rows, 1, device, tuning)
        shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        self.pages = [part.contiguous().to(device) for part in shuffled.chunk(sizes.slots)]
        number = torch.arange(sizes.pages_slot)
        offsets = number * (sizes.page_bytes * sizes.components)
        self.pieces = torch.stack([offsets, number, torch.zeros_like(number)], 1).contiguous().to(device)
        self.sums = torch.zeros(sizes.pages_slot, self.kv.sum_lanes, dtype=torch.int32, device=device)
        self.seeds = torch.arange(sizes.pages_slot, dtype=torch.int32, device=device)

    def slot(self, number: int) -> torch.Tensor:
        return self.window[number * self.sizes.slot_bytes :][: self.sizes.slot_bytes]

    def providers(self) -> dict[str, Provider]:
        used = self.sizes.moved_bytes // self.sizes.slots // 2
        flat = self.pool.view(-1)
        limit: dict[str, Any] = {"programs_max": self.programs_max}
        summed = {"sums": self.sums, "seeds": self.seeds, **limit}
        return {
            "copy": lambda n: flat[n * used :][:used].copy_(self.slot(n)[:used]),
            "scatter": lambda n: scatter_pieces(self.slot(n), self.pieces, self.pages[n], self.kv, **limit),
            "scatter+sum": lambda n: scatter_pieces(self.slot(n), self.pieces, self.pages[n], self.kv, **summed),
            "gather": lambda n: gather_pieces(self.slot(n), self.pieces, self.pages[n], self.kv, **limit),
            "gather+sum": lambda n: gather_pieces(self.slot(n), self.pieces, self.pages[n], self.kv, **summed),
        }


def record(provider: Provider, slots: int) -> Callable[[], object]:
    """One call that moves every slot: a CUDA graph, after the launches that compile the kernel."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        provider(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for slot in range(slots):
            provider(slot)
    return graph.replay


def time_cuda_us(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def time_host_us(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e3


def measure(setup: Setup, rounds: int, on_cuda: bool, label: str, where: tuple[str, str]) -> list[Row]:
    """Time all providers by turns; the first round only warms up."""
    sizes = setup.sizes
    providers = setup.providers()
    if on_cuda:
        calls = {name: record(provider, sizes.slots) for name, provider in providers.items()}
        timer = time_cuda_us
    else:
        calls = {name: lambda each=each: [each(n) for n in range(sizes.slots)] for name, each in providers.items()}  # type: ignore[misc]
        timer = time_host_us
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        names = list(calls)[turn % len(calls) :] + list(calls)[: turn % len(calls)]
        for name in names:
            spent_us = timer(calls[name])
            if turn:
                taken[name].append(spent_us)
    base_us = statistics.median(taken["copy"])
    rows = []
    for name, spent in taken.items():
        p20, p50, p80 = (float(np.percentile(spent, q)) for q in (20, 50, 80))
        full_name = name if name == "copy" else f"{name} {label}"
        rate = sizes.moved_bytes / p50 / 1e3
        rows.append(
            Row("scatter", full_name, sizes.page_bytes, sizes.row_bytes, sizes.moved_bytes, p20, p50, p80, rate,
                base_us / p50, *where)
        )  # fmt: skip
    return rows


def launch_us(setup: Setup) -> float:
    """Host time of one call of `scatter_pieces`, with checksums, while the device is idle enough to take it."""
    call = setup.providers()["scatter+sum"]
    call(0)
    spent = []
    for _ in range(50):
        torch.cuda.synchronize()
        spent.append(time_host_us(lambda: call(0)))
    return statistics.median(spent)


def sweep(args: argparse.Namespace) -> Iterator[tuple[str, int, Tuning]]:
    for tile_units, steps, warps, per_sm, wide_min in itertools.product(
        args.tile_units, args.steps, args.warps, args.per_sm, args.wide_min
    ):
        yield (
            f"t{tile_units} s{steps} w{warps} p{per_sm} m{wide_min}",
            per_sm,
            Tuning(tile_units=tile_units, steps=steps, warps=warps, wide_units_min=wide_min),
        )


def shapes(args: argparse.Namespace) -> Iterator[Sizes]:
    """One for each page size, and one for each row size in pages of 64 rows."""
    slot_bytes, slots = int(args.slot_mib * MiB), args.slots
    pairs = [(int(kib * KiB), int(kib * KiB)) for kib in args.pages_kib]
    for page_bytes, row_bytes in pairs + [(64 * row, row) for row in args.row_bytes]:
        yield Sizes(
            page_bytes=page_bytes, row_bytes=row_bytes, slot_bytes=slot_bytes, slots=slots, components=args.components
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Tuning()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pages-kib", type=float, nargs="*", default=PAGES_KIB)
    parser.add_argument("--row-bytes", type=int, nargs="*", default=[576, 656, 132], help="strided rows, 64 a page")
    parser.add_argument("--components", type=int, default=COMPONENTS)
    parser.add_argument("--slot-mib", type=float, default=SLOT_MIB, help="bytes of one launch")
    parser.add_argument("--slots", type=int, default=SLOTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tile-units", type=int, nargs="+", default=[defaults.tile_units])
    parser.add_argument("--steps", type=int, nargs="+", default=[defaults.steps])
    parser.add_argument("--warps", type=int, nargs="+", default=[defaults.warps])
    parser.add_argument("--per-sm", type=int, nargs="+", default=[0], help="programs a multiprocessor; 0: no limit")
    parser.add_argument("--wide-min", type=int, nargs="+", default=[defaults.wide_units_min])
    parser.add_argument("--smoke", action="store_true", help="a few KiB: only show that it runs")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--record", action="store_true", help="append rows to profiles/results")
    args = parser.parse_args()
    if args.smoke:
        args.pages_kib, args.row_bytes, args.slot_mib, args.slots, args.rounds = [4], [132], 1 / 32, 2, 1
    elif not args.device.startswith("cuda"):
        parser.error("only --smoke runs without a CUDA device")
    return args


def main() -> None:
    """Run every shape with every tuning, and print rows and ratios."""
    args = parse()
    on_cuda = args.device.startswith("cuda")
    where = (torch.cuda.get_device_name(args.device) if on_cuda else "cpu", commit())
    rows: list[Row] = []
    launches: list[float] = []
    for sizes, (label, per_sm, tuning) in itertools.product(shapes(args), sweep(args)):
        setup = Setup(sizes, tuning, per_sm, args.device)
        rows += measure(setup, args.rounds, on_cuda, label, where)
        launches += [launch_us(setup)] if on_cuda else []
    print(",".join(asdict(rows[0])))
    for row in rows:
        print(",".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    print(f"\n{'page':>8} {'row':>8}  {'provider':<32}{'GB/s':>8}{'of copy':>9}")
    for row in rows:
        print(f"{row.page_bytes:>8} {row.row_bytes:>8}  {row.provider:<32}{row.gb_per_s:>8.0f}{row.ratio:>9.3f}")
    if launches:
        print(f"host time of one launch: {statistics.median(launches):.0f} us")
    if args.record:
        cases: dict[str, dict[str, float]] = {}
        for row in rows:
            case = cases.setdefault(f"page {row.page_bytes} row {row.row_bytes}", {})
            case |= {f"{row.provider} gb_s": row.gb_per_s, f"{row.provider} of_copy": row.ratio}
        append_rows("scatter", " ".join(["python", *sys.argv]), where[0], cases)
    if args.json:
        print(json.dumps({"bench": "scatter", "launch_us": launches, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
