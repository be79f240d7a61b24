"""Time restores of interleaved sessions against a bare sequential read of as many bytes, paired one by one.

    python profiles/bench_restore.py [--json] [--smoke] [--directory DIR] [--pages 256 16] [--rounds 3] [--record]

The store: 6 sessions of 4 turns of 512 tokens, saved turn by turn in turn; 32 layers, 8 KV heads x 128, bf16; blocks
of 256 tokens; page tables shuffled.  Before and after each restore the floor reads as many bytes, in order, with
O_DIRECT into huge pages, from a file of its own as large as the store.  The figure is the median of floor time, the
mean of the two, over restore time.

`fresh` is that store, or one of longer sessions with `--fresh-tokens`; `aged` is a small pool after writing three times
its capacity, sessions interleaved block by block; `turns` is one session of 32 turns of one block, in lanes and in the
paper's segments.  `--verify full` turns checksums on.
"""

import argparse
import itertools
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from common import append_rows, device_name, huge_tensor

import flatcake
from flatcake.gva import Medium
from flatcake.io.engine import Buffer, Result, Transfer
from flatcake.io.posix import PosixEngine
from flatcake.io.seam import Files
from flatcake.units import GiB, MiB, align_up

BLOCK_TOKENS = 256
FLOOR_TASK_BYTES = 4 * MiB
FLOOR_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The work."""

    layers: int = 32
    heads: int = 8
    dim: int = 128
    sessions: int = 6
    turns: int = 4
    turn_tokens: int = 512
    page_tokens: int = 256
    block_tokens: int = BLOCK_TOKENS

    @property
    def session_tokens(self) -> int:
        return self.turns * self.turn_tokens

    @property
    def session_bytes(self) -> int:
        return self.session_tokens * self.layers * self.heads * self.dim * 2 * 2


class Paged:
    """Paged KV of one engine: room for two sessions, on huge pages."""

    def __init__(self, shape: Shape) -> None:
        self.pages = 2 * shape.session_tokens // shape.page_tokens
        size = (shape.layers, 2, self.pages, shape.page_tokens, shape.heads, shape.dim)
        self.tensor = huge_tensor(size, torch.bfloat16)
        self.words = self.tensor.view(torch.int16)
        self.kv = flatcake.PagedKV.of_stacked(self.tensor, page_tokens=shape.page_tokens, page_axis=2, split_axis=1)

    def fill(self, seed: int) -> None:
        self.words.random_(generator=torch.Generator().manual_seed(seed))


class Floor:
    """A bare sequential read of a file of its own, as large as the store, another part of it each time."""

    def __init__(self, directory: str, size_bytes: int, parts: int) -> None:
        self.files = Files()
        self.fd = self.files.open_file(os.path.join(directory, "floor"), create=True, direct=True)
        self.memory = Buffer.of(huge_tensor([size_bytes], torch.uint8))
        self.engine = PosixEngine(self.files, [self.fd], threads=FLOOR_THREADS, task_bytes=FLOOR_TASK_BYTES)
        self.size_bytes, self.parts, self.next_part = size_bytes, parts, 0
        self.memory.tensor.random_(generator=torch.Generator().manual_seed(1))
        for _ in range(parts):
            self._run(self.engine.write)

    def seconds(self) -> float:
        return self._run(self.engine.read)

    def close(self) -> None:
        self.engine.close(10**9)
        self.files.close(self.fd)

    def _run(self, move: Callable[..., None]) -> float:
        ended, results = threading.Event(), list[Result]()

        def done(found: list[Result], _: object) -> None:
            results.extend(found)
            ended.set()

        offset = self.next_part * self.size_bytes
        self.next_part = (self.next_part + 1) % self.parts
        started = time.perf_counter()
        move([Transfer(0, offset, self.size_bytes, 0)], self.memory, done)
        ended.wait()
        elapsed = time.perf_counter() - started
        assert results == [Result(self.size_bytes, 0)], results
        return elapsed


def open_store(directory: str, paged: Paged, shape: Shape, pool_bytes: int, layout: str, verify: str) -> flatcake.Store:
    config = flatcake.StoreConfig(
        directories=(directory,),
        capacity=flatcake.CapacityConfig(
            dram_bytes_max=0, ssd_bytes_max=pool_bytes, pool_file_bytes=min(GiB, pool_bytes), ssd_free_bytes_min=0
        ),
        layout=flatcake.LayoutConfig(kind=layout),
        io=flatcake.IOConfig(verify=verify),
    )
    identity = flatcake.Identity(
        model="bench", revision="0", kv_dtype="bf16", layout="bench", block_tokens=shape.block_tokens
    )
    return flatcake.open(config, identity, paged.kv)


def tokens_of(session: int, count: int) -> np.ndarray:
    return np.random.default_rng(1000 + session).integers(0, 32_000, count)


def save(store: flatcake.Store, session: int, tokens: int, pages: np.ndarray) -> None:
    result = store.save(f"s{session}", tokens_of(session, tokens), pages).result()
    assert result is not None and not result.reason, result


def io_bytes() -> tuple[int, int]:
    """Bytes that this process has read from and written to block devices."""
    with open("/proc/self/io") as file:
        found = dict(line.split(": ") for line in file.read().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def restore(
    store: flatcake.Store, session: int, tokens: int, pages: np.ndarray
) -> tuple[float, flatcake.RestoreResult]:
    match = store.match(tokens_of(session, tokens))
    with store.lease(match) as lease:
        started = time.perf_counter()
        result = store.restore(lease, pages).result()
        elapsed = time.perf_counter() - started
    assert result.tokens == match.tokens and not result.reason, (result, match.tokens)
    return elapsed, result


def measure(store: flatcake.Store, paged: Paged, floor: Floor, shape: Shape, rounds: int) -> dict[str, float]:
    """Restore every stored session, each between two floor reads of as many bytes."""
    rng = np.random.default_rng(7)
    ratios, reads, cpu, moved, gbs = [], [], 0.0, 0, []
    read_before, block_bytes = io_bytes()[0], store.geometry.block_bytes
    floors = [floor.seconds()]
    for _ in range(rounds):
        for session in rng.permutation(shape.sessions):
            tokens = store.match(tokens_of(session, shape.session_tokens)).tokens
            if not tokens:
                continue
            pages = rng.permutation(paged.pages)[: tokens // shape.page_tokens]
            size_bytes = tokens // shape.block_tokens * block_bytes
            used = cpu_s()
            took_s, result = restore(store, session, tokens, pages)
            cpu += cpu_s() - used
            moved += size_bytes
            floors.append(floor.seconds())
            ratios.append(statistics.mean(floors[-2:]) * size_bytes / floor.size_bytes / took_s)
            gbs.append(size_bytes / took_s / 1e9)
            reads.append(result.reads / shape.layers)
    read_bytes = io_bytes()[0] - read_before - len(floors) * floor.size_bytes
    return {
        "ratio_to_floor": statistics.median(ratios),
        "ratio_low": float(np.quantile(ratios, 0.25)),
        "ratio_high": float(np.quantile(ratios, 0.75)),
        "gb_s": statistics.median(gbs),
        "cpu_s_per_gb": cpu / (moved / 1e9),
        "read_amplification": read_bytes / moved,
        "reads_per_layer": statistics.mean(reads),
        "restores": len(ratios),
    }


def run_fresh(root: str, shape: Shape, rounds: int, layout: str, verify: str) -> dict[str, float]:
    """A store of interleaved sessions, saved turn by turn."""
    directory = tempfile.mkdtemp(dir=root)
    paged, floor = Paged(shape), Floor(directory, shape.session_bytes, shape.sessions)
    pool_bytes = -(-int(shape.session_bytes * shape.sessions * 1.3) // GiB) * GiB
    with open_store(directory, paged, shape, pool_bytes, layout, verify) as store:
        paged.fill(3)
        pages = np.random.default_rng(5).permutation(paged.pages)
        written = io_bytes()[1]
        for turn in range(1, shape.turns + 1):
            for session in range(shape.sessions):
                save(store, session, turn * shape.turn_tokens, pages)
        payload = shape.sessions * shape.session_tokens // shape.block_tokens * store.geometry.block_bytes
        amplification = (io_bytes()[1] - written) / payload
        figures = measure(store, paged, floor, shape, rounds)
        figures["write_amplification"] = amplification
        figures["space_amplification"] = store.stats().media["ssd"].space_amplification
    floor.close()
    shutil.rmtree(directory)
    return figures


def run_turns(root: str, shape: Shape, rounds: int, layout: str, verify: str) -> dict[str, float]:
    """One session of many short turns among others: what the order of bytes in an extent is worth."""
    directory = tempfile.mkdtemp(dir=root)
    many = replace(shape, sessions=3, turns=32, turn_tokens=64, block_tokens=64, page_tokens=64)
    paged, floor = Paged(many), Floor(directory, many.session_bytes, many.sessions)
    with open_store(directory, paged, many, 2 * GiB, layout, verify) as store:
        pages = np.random.default_rng(5).permutation(paged.pages)
        for turn in range(1, many.turns + 1):
            for session in range(many.sessions):
                save(store, session, turn * many.turn_tokens, pages)
        figures = measure(store, paged, floor, many, rounds)
        figures["extents_per_session"] = store.stats().media["ssd"].extents / many.sessions
        figures["space_amplification"] = store.stats().media["ssd"].space_amplification
    floor.close()
    shutil.rmtree(directory)
    return figures


def run_aged(root: str, shape: Shape, rounds: int, verify: str) -> dict[str, float]:
    """A small pool after three times its capacity, sessions interleaved block by block."""
    directory = tempfile.mkdtemp(dir=root)
    paged, floor = Paged(shape), Floor(directory, shape.session_bytes, shape.sessions)
    pool_bytes = align_up(2 * shape.sessions * shape.session_bytes // 3, MiB)
    blocks = shape.session_tokens // shape.block_tokens
    with open_store(directory, paged, shape, pool_bytes, "lanes", verify) as store:
        paged.fill(4)
        pages = np.random.default_rng(6).permutation(paged.pages)
        written, first = 0, 0
        while written < 3 * pool_bytes:
            for block in range(1, blocks + 1):
                for session in range(first, first + 3):
                    save(store, session, block * shape.block_tokens, pages)
                    written += store.geometry.block_bytes
            first += 3
        live = [s for s in range(first) if store.match(tokens_of(s, shape.session_tokens)).blocks == blocks]
        stats = store.stats()
        figures = measure(store, paged, floor, replace(shape, sessions=first), rounds)
        figures["space_amplification"] = stats.media["ssd"].space_amplification
        figures["extents_per_session"] = stats.media["ssd"].extents / max(1, len(live))
        figures["sessions_kept"] = len(live)
        store.catalog.check()
    floor.close()
    shutil.rmtree(directory)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--smoke", action="store_true", help="a few MiB, to see that it runs")
    parser.add_argument("--record", action="store_true", help="append rows to profiles/results")
    parser.add_argument("--directory", default=os.environ.get("TMPDIR", "/var/tmp"), help="where the pool is made")
    parser.add_argument("--pages", type=int, nargs="+", default=[256, 16], help="page sizes in tokens")
    parser.add_argument("--rounds", type=int, default=3, help="restores of each session")
    parser.add_argument("--fresh-tokens", type=int, nargs="+", default=[2_048], help="sessions of `fresh`, in tokens")
    parser.add_argument("--verify", choices=("off", "full"), default="off", help="checksums")
    args = parser.parse_args()
    base = {"layers": 2, "heads": 1, "dim": 16, "sessions": 3} if args.smoke else {}
    cases: dict[str, dict[str, float]] = {}
    for tokens, page in itertools.product(args.fresh_tokens, args.pages):
        shape = Shape(page_tokens=page, turn_tokens=tokens // 4, **base)
        name = f"fresh lanes page={page}" + (f" tokens={tokens}" if tokens != Shape().session_tokens else "")
        cases[name] = run_fresh(args.directory, shape, args.rounds, "lanes", args.verify)
    shape = Shape(page_tokens=args.pages[0], **base)
    for layout in ("lanes", "segments"):
        cases[f"turns {layout}"] = run_turns(args.directory, shape, args.rounds, layout, args.verify)
    cases[f"aged lanes page={args.pages[0]}"] = run_aged(args.directory, shape, args.rounds, args.verify)
    for case, figures in cases.items():
        print(f"{case}: " + "  ".join(f"{name}={value:.4g}" for name, value in figures.items()))
    if args.record:
        append_rows("restore", " ".join(["python", *sys.argv]), device_name(), cases)
    if args.json:
        print(json.dumps(summary(cases, args.pages)))
    return 0


def summary(cases: dict[str, dict[str, float]], pages: list[int]) -> dict[str, object]:
    first = cases[f"fresh lanes page={pages[0]}"]
    aged = cases[f"aged lanes page={pages[0]}"]
    return {
        "ratio_to_floor": {str(p): cases[f"fresh lanes page={p}"]["ratio_to_floor"] for p in pages},
        "cpu_s_per_gb": statistics.mean(cases[f"fresh lanes page={p}"]["cpu_s_per_gb"] for p in pages),
        "cpu_s_per_gb_by_page": {str(p): cases[f"fresh lanes page={p}"]["cpu_s_per_gb"] for p in pages},
        "read_amplification": max(cases[f"fresh lanes page={p}"]["read_amplification"] for p in pages),
        "write_amplification": first["write_amplification"],
        "reads_per_layer": {
            "lanes": cases["turns lanes"]["reads_per_layer"],
            "segments": cases["turns segments"]["reads_per_layer"],
        },
        "aged": aged,
        "medium": Medium.SSD.name.lower(),
    }


if __name__ == "__main__":
    raise SystemExit(main())
