"""Time to ready of large SSD restores and small DRAM hits, under FC-MAS and under its ablations, on a real store.

    python profiles/bench_loop.py [--json] [--smoke] [--record] [--figure docs/figures/loop.svg]
                                  [--device cuda --directory /dev/shm] [--seconds 1.4] [--rounds 1]

One request in four restores a session from SSD (16, 32 or 64 blocks), the others hit one or two blocks in DRAM.  A
block is 1 MiB on the CPU and 8 MiB on a GPU.  The offered load is a share of the SSD restore bandwidth that a full
queue reached at the beginning of the same run.  Arrivals: Poisson, and a hyperexponential with a coefficient of
variation of 4; both scaled to the exact load.  All orders serve the same arrivals one after another, and who is first
changes from case to case.  A request is ready when its verified prefix is in its pages; counted from its arrival.
"""

import argparse
import dataclasses
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from typing import Any

import loop_figure
import numpy as np
import torch
from common import append_rows, device_name, huge_tensor

import flatcake
from flatcake.units import GiB, MiB

ORDERS = ("two_queues", "fifo_prefetch", "single_queue")
LOADS = (0.6, 0.9, 1.1)
ARRIVALS = {"poisson": 1.0, "bursty": 4.0}
LARGE_BLOCKS, SMALL_BLOCKS = (16, 32, 64), (1, 2)
LARGE_SHARE = 0.25
CONSUMERS = 16
"""Requests that are computed at once; a hit from DRAM occupies one while it is restored."""
CHAT = flatcake.Turn(index=2, prior_reply_tokens=1)
WAIT_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The engine's memory and what is stored."""

    layers: int
    heads: int
    dim: int
    page_tokens: int
    block_tokens: int = 64
    page_blocks: int = 448
    """Blocks that the pages have room for."""
    large: int = 12
    small: int = 24
    """Sequences stored on each medium."""

    @property
    def block_bytes(self) -> int:
        return self.layers * self.heads * self.dim * 2 * 2 * self.block_tokens

    @property
    def pages(self) -> int:
        return self.page_blocks * self.block_tokens // self.page_tokens


SHAPES = {
    "cpu": Shape(layers=16, heads=4, dim=64, page_tokens=64),
    "cuda": Shape(layers=32, heads=8, dim=128, page_tokens=16),
    "smoke": Shape(layers=2, heads=1, dim=16, page_tokens=64, large=3, small=3),
}


class FreePages:
    """The engine's free pages."""

    def __init__(self, count: int) -> None:
        self._free, self._lock = np.random.default_rng(3).permutation(count).tolist(), threading.Lock()
        self._count = count

    def out(self) -> int:
        """Pages that are not free."""
        return self._count - len(self._free)

    def take(self, count: int) -> list[int] | None:
        with self._lock:
            if count > len(self._free):
                return None
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give_back(self, pages: np.ndarray) -> None:
        with self._lock:
            self._free.extend(pages.tolist())


class Bench:
    """A store with sequences on both media, and the engine's memory."""

    def __init__(self, shape: Shape, device: str, directory: str) -> None:
        self.shape = shape
        size = (shape.layers, 2, shape.pages, shape.page_tokens, shape.heads, shape.dim)
        on_cpu = device == "cpu"
        self.pool = (
            huge_tensor(size, torch.bfloat16) if on_cpu else torch.empty(size, dtype=torch.bfloat16, device=device)
        )
        self.pool.view(torch.int16).random_()
        kv = flatcake.PagedKV.of_stacked(self.pool, page_tokens=shape.page_tokens, page_axis=2, split_axis=1)
        large_bytes = sum(LARGE_BLOCKS[n % 3] for n in range(shape.large)) * shape.block_bytes
        file_bytes = max(4 * MiB, min(GiB, 2 * max(LARGE_BLOCKS) * shape.block_bytes))
        room = flatcake.CapacityConfig(
            dram_bytes_max=max(8 * MiB, 4 * shape.small * shape.block_bytes),
            ssd_bytes_max=-(-2 * large_bytes // file_bytes) * file_bytes,
            pool_file_bytes=file_bytes,
            ssd_free_bytes_min=0,
        )
        config = flatcake.StoreConfig(directories=(directory,), capacity=room)
        identity = flatcake.Identity(
            model="bench", revision="0", kv_dtype="bf16", layout="bench", block_tokens=shape.block_tokens
        )
        self.store = flatcake.open(config, identity, kv)
        self.free = FreePages(shape.pages)
        self.large = [self._save(f"large {n}", LARGE_BLOCKS[n % 3], flatcake.Turn()) for n in range(shape.large)]
        self.small = [self._save(f"small {n}", SMALL_BLOCKS[n % 2], CHAT) for n in range(shape.small)]

    def _save(self, name: str, blocks: int, turn: flatcake.Turn) -> np.ndarray:
        tokens = np.random.default_rng([*name.encode()]).integers(0, 32_000, blocks * self.shape.block_tokens)
        done = self.store.save(name, tokens, np.arange(self.shape.pages), turn).result(WAIT_S)
        assert done is not None and not done.reason, done
        return self.store.keys(tokens)

    def bandwidth(self) -> float:
        """Bytes a second of SSD restores with a queue that is never empty."""
        rates = []
        for _ in range(2):
            with flatcake.Loop(self.store, pages=self.free) as loop:
                started = time.perf_counter()
                for keys in self.large * 2:
                    loop.submit(flatcake.LoopRequest(tokens=keys))
                for _ in range(2 * len(self.large)):
                    ready = loop.next_ready(WAIT_S)
                    assert ready is not None and ready.result().tokens == ready.tokens
                    loop.done(ready)
                elapsed = time.perf_counter() - started
            rates.append(2 * sum(map(len, self.large)) * self.shape.block_bytes / elapsed)
        return max(rates)


@dataclasses.dataclass(frozen=True)
class Work:
    """Arrivals of one case: when, and which keys."""

    at_s: np.ndarray
    keys: list[np.ndarray]
    is_large: list[bool]


def make_work(bench: Bench, rate: float, seconds: float, variation: float, seed: int) -> Work:
    """Draw arrivals whose SSD bytes come at exactly `rate` bytes a second."""
    rng = np.random.default_rng(seed)
    large_bytes = statistics.mean(map(len, bench.large)) * bench.shape.block_bytes
    count = max(8, round(rate * seconds / (LARGE_SHARE * large_bytes)))
    is_large = (rng.permutation(count) < round(LARGE_SHARE * count)).tolist()
    keys = [
        bench.large[rng.integers(len(bench.large))] if big else bench.small[rng.integers(len(bench.small))]
        for big in is_large
    ]
    gaps = rng.exponential(size=count)
    if variation > 1:  # two branches with balanced means
        square = variation**2
        share = (1 + math.sqrt((square - 1) / (square + 1))) / 2
        gaps /= np.where(rng.random(count) < share, 2 * share, 2 * (1 - share))
    ssd_bytes = sum(len(each) for each, big in zip(keys, is_large, strict=True) if big) * bench.shape.block_bytes
    at_s = np.cumsum(gaps)
    return Work(at_s * (ssd_bytes / rate / at_s[-1]), keys, is_large)


@dataclasses.dataclass
class Outcome:
    """What was seen of one order under one work."""

    ready_ms: dict[str, list[float]]
    estimates: dict[str, list[float]]
    """Expected over measured restore time, of requests that came one by one after the others; by class."""
    stats: dict[str, int | str]


def run_order(bench: Bench, work: Work, order: str) -> Outcome:
    """Serve the arrivals with one order."""
    outcome = Outcome({"large": [], "small": []}, {"large": [], "small": []}, {})
    arrivals: list[float] = [0.0] * len(work.keys)
    with flatcake.Loop(bench.store, flatcake.sched_config(bench.store, order=order), pages=bench.free) as loop:

        def consume() -> None:
            while (ready := loop.next_ready(WAIT_S)) is not None:
                result, now = ready.result(), time.perf_counter()
                assert result.tokens == ready.tokens and not ready.recompute, result
                kind, number, expected_ns = ready.request.note  # type: ignore[misc]
                if expected_ns is None:
                    outcome.ready_ms[kind].append(1e3 * (now - arrivals[number]))
                else:
                    outcome.estimates[kind].append(expected_ns / result.total_ns)
                loop.done(ready)

        def wait_for(done: int) -> None:
            end_s = time.perf_counter() + WAIT_S
            while loop.stats()["done"] < done:  # type: ignore[operator]
                assert time.perf_counter() < end_s, loop.stats()
                time.sleep(0.002)

        consumers = [threading.Thread(target=consume) for _ in range(CONSUMERS)]
        for thread in consumers:
            thread.start()
        begin = time.perf_counter() + 0.01
        for number, keys in enumerate(work.keys):
            arrivals[number] = begin + float(work.at_s[number])
            time.sleep(max(0.0, arrivals[number] - time.perf_counter()))
            kind = "large" if work.is_large[number] else "small"
            loop.submit(flatcake.LoopRequest(tokens=keys, note=(kind, number, None)))
        wait_for(len(work.keys))
        alone = [("large", keys) for keys in bench.large[:3]] + [("small", keys) for keys in bench.small[:2]]
        sent = len(work.keys)
        for kind, keys in alone:
            expected_ns = loop.estimate(flatcake.LoopRequest(tokens=keys))
            if expected_ns is not None:
                loop.submit(flatcake.LoopRequest(tokens=keys, note=(kind, -1, expected_ns)))
                sent += 1
                wait_for(sent)
        outcome.stats = loop.stats()
    for thread in consumers:
        thread.join()
    return outcome


def silence(bench: Bench, count: int) -> dict[str, float]:
    """Submit and cancel `count` requests, then wait until nothing of them is left: seconds of either."""
    with flatcake.Loop(bench.store, pages=bench.free) as loop:
        started = time.perf_counter()
        for number in range(count):
            keys = (bench.large if number % 2 else bench.small)[number % len(bench.small) % len(bench.large)]
            loop.cancel(loop.submit(flatcake.LoopRequest(tokens=keys)))
        cancelled = time.perf_counter()
        while loop.stats()["requests"] or bench.store.stats().leases or bench.free.out():
            assert time.perf_counter() < cancelled + WAIT_S, loop.stats()
            time.sleep(0.001)
        return {"submit_and_cancel_s": cancelled - started, "silence_s": time.perf_counter() - cancelled}


def spread(values: list[float]) -> dict[str, float]:
    return {
        "mean": statistics.fmean(values),
        "p50": float(np.quantile(values, 0.5)),
        "p99": float(np.quantile(values, 0.99)),
    }


def run(bench: Bench, seconds: float, rounds: int, cancels: int) -> dict[str, Any]:
    """All cases: figures by arrivals, load, order and class, and ratios of two queues to the others."""
    rate = bench.bandwidth()
    cases: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    estimates: dict[str, list[float]] = defaultdict(list)
    turn = 0
    for arrivals, variation in ARRIVALS.items():
        for load in LOADS:
            seen: dict[str, dict[str, list[float]]] = {order: defaultdict(list) for order in ORDERS}
            for number in range(rounds):
                work = make_work(bench, load * rate, seconds, variation, seed=100 + number)
                for order in ORDERS[turn % 3 :] + ORDERS[: turn % 3]:
                    outcome = run_order(bench, work, order)
                    for kind, values in outcome.ready_ms.items():
                        estimates[kind] += outcome.estimates[kind]
                        seen[order][kind] += values
                        seen[order]["all"] += values
                turn += 1
            cases[f"{arrivals} {load:.0%}"] = {
                order: {kind: spread(values) for kind, values in kinds.items()} for order, kinds in seen.items()
            }
    ratios = {
        case: {
            f"{kind} {figure} against {other}": orders["two_queues"][kind][figure] / orders[other][kind][figure]
            for other in ORDERS[1:]
            for kind in ("small", "large", "all")
            for figure in ("mean", "p50", "p99")
        }
        for case, orders in cases.items()
    }
    return {
        "bench": "loop",
        "restore_gb_s": rate / 1e9,
        "estimate_over_measured": {kind: statistics.median(ratios) for kind, ratios in estimates.items() if ratios},
        "estimate_within_2x": {
            kind: sum(0.5 <= ratio <= 2 for ratio in ratios) / len(ratios)
            for kind, ratios in estimates.items()
            if ratios
        },
        "ready_ms": cases,
        "ratios": ratios,
        "cancelled": silence(bench, cancels),
        "block_mib": bench.shape.block_bytes / MiB,
        "io_path": bench.store.stats().io_path,
    }


def show(result: dict[str, Any]) -> None:
    """A table for people."""
    columns = [(kind, figure) for kind in ("small", "large", "all") for figure in ("mean", "p50", "p99")]
    print(
        f"SSD restores: {result['restore_gb_s']:.2f} GB/s, {result['io_path']}; a block is {result['block_mib']:g} MiB"
    )
    print("time to ready, ms".ljust(32) + "".join(f"{kind + ' ' + figure:>12}" for kind, figure in columns))
    for case, orders in result["ready_ms"].items():
        for order, kinds in orders.items():
            values = [kinds[kind][figure] for kind, figure in columns]
            print(f"{case:14} {order:16} " + "".join(f"{value:12.2f}" for value in values))
    print("two queues against")
    for case, ratios in result["ratios"].items():
        for other in ORDERS[1:]:
            values = [ratios[f"{kind} {figure} against {other}"] for kind, figure in columns]
            print(f"{case:14} {other:16} " + "".join(f"{value:12.2f}" for value in values))
    for kind, ratio in result["estimate_over_measured"].items():
        within = result["estimate_within_2x"][kind]
        print(f"estimate over measured time of a restore alone, {kind}: median {ratio:.2f}, {within:.0%} within 2 x")
    print("submitted and cancelled: " + "  ".join(f"{name} {value:.3f}" for name, value in result["cancelled"].items()))


def record(result: dict[str, Any]) -> None:
    """Append rows to `results/loop.csv`."""
    rows = {
        f"{case} {order} {kind}": figures
        for case, orders in result["ready_ms"].items()
        for order, kinds in orders.items()
        for kind, figures in kinds.items()
    }
    rows |= {f"{case} ratio": ratios for case, ratios in result["ratios"].items()}
    rows["run"] = {"restore_gb_s": result["restore_gb_s"], **result["cancelled"]}
    rows |= {name: result[name] for name in ("estimate_over_measured", "estimate_within_2x")}
    append_rows("loop", " ".join(["python", *sys.argv]), result["device"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--smoke", action="store_true", help="a few MiB, to see that it runs")
    parser.add_argument("--record", action="store_true", help="append rows to profiles/results")
    parser.add_argument("--figure", help="write an SVG there")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--directory", default=os.environ.get("TMPDIR", "/var/tmp"), help="where the pool is made")
    parser.add_argument("--seconds", type=float, default=1.4, help="length of the arrivals of one case")
    parser.add_argument("--rounds", type=int, default=1, help="arrivals drawn for each case")
    args = parser.parse_args()
    shape = SHAPES["smoke" if args.smoke else args.device.partition(":")[0]]
    directory = tempfile.mkdtemp(dir=args.directory)
    bench = Bench(shape, args.device, directory)
    try:
        result = run(bench, 0.05 if args.smoke else args.seconds, args.rounds, 100 if args.smoke else 10_000)
    finally:
        bench.store.close()
        shutil.rmtree(directory)
    result["device"] = device_name(args.device)
    show(result)
    if args.figure:
        loop_figure.write(args.figure, result["ready_ms"], LOADS, ORDERS)
    if args.record:
        record(result)
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
