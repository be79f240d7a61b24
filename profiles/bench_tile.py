"""Time the Python of a restore, for each of its tiles: all else costs nothing and is done at once.

    python profiles/bench_tile.py [--json] [--smoke] [--record] [--rounds 31]

Copies, events, kernels and kvikio are empty calls here, memory is never touched, and nothing is waited for.  Plan,
window, ring, verdicts and reports are the store's own.  The figures are the processor time of the store's thread, the
start of the restore included, divided by its tiles: of all restores the median, and what a fifth of them stay below.
The two are far apart where somebody else computes on the other half of the core.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from common import append_rows, device_name
from gpu_store import CHAT, GQA, MLA, Model, pump_cpu_s, sequence

import flatcake
from flatcake.gva import Medium
from flatcake.io.arena import ArenaEngine
from flatcake.io.device import NOW, CpuDevice, Event, Stream
from flatcake.io.engine import Buffer, Engine
from flatcake.io.kvikio import KvikioEngine
from flatcake.io.seam import HUGE_PAGE_BYTES, Files, HostMemory
from flatcake.io.sizing import GPU_SLOT_BYTES, size_ring
from flatcake.io.staged import StagedEngine
from flatcake.units import MiB

ROUNDS = 31


class Untouched(Files):
    """Memory that the system has promised and not given yet."""

    def map_memory(self, size_bytes: int) -> HostMemory:
        raw = np.zeros(size_bytes + HUGE_PAGE_BYTES, np.uint8)
        skip = -int(raw.ctypes.data) % HUGE_PAGE_BYTES
        return HostMemory(raw[skip : skip + size_bytes], "small")


class Nothing(CpuDevice):
    """A GPU whose work is done before it is asked for."""

    is_host = False

    def record(self, stream: Stream) -> Event:
        return NOW

    def copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        return None


class Moved:
    """A future of kvikio that is done."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes

    def done(self) -> bool:
        return True

    def get(self) -> int:
        return self._size_bytes


class Kvikio:
    """The module, as far as the engine uses it."""

    class CuFile:
        def __init__(self, path: str, flags: str) -> None:
            return None

        def pread(self, view: object, size: int, file_offset: int) -> Moved:
            return Moved(size)

        pwrite = pread

        def close(self) -> None:
            return None

    class defaults:
        @staticmethod
        def set(settings: object) -> None:
            return None


class NoCopies:
    """A copier and its copies; all sums are zeros."""

    def start(self, tiles: object, pieces: Any, *_: object, **__: object) -> "NoCopies":
        self._sums = np.zeros(len(pieces.table), np.uint32)
        return self

    def push(self, rows: slice) -> None:
        return None

    def scatter(self, tile: int, slot: Buffer, skip: Sequence[int] = ()) -> None:
        return None

    def gather(self, tile: int, slot: Buffer) -> None:
        return None

    def sums_of(self, rows: slice) -> np.ndarray:
        return self._sums[rows]

    def fetch_sums(self, tiles: Sequence[int]) -> None:
        return None


def opened(model: Model, tokens: int, *, dram: bool) -> flatcake.Store:
    """A store on the CPU that is told to be one on a GPU."""
    kv, _ = model.paged(tokens, lambda *shape: torch.empty(shape, dtype=torch.uint8))
    io = flatcake.IOConfig(engine="memory", slot_bytes=GPU_SLOT_BYTES)
    files = Untouched()
    store = flatcake.open(model.settings(tokens, dram=dram, device="cpu", io=io), model.identity(), kv, files=files)
    parts, device = store.plane.parts, Nothing(files)
    parts.device, parts.copier = device, NoCopies()
    parts.streams.clear()
    [medium] = parts.media
    parts.media = {medium: parts.media[medium]._replace(engine=engine_of(store, medium, device, files))}
    return store


def engine_of(store: flatcake.Store, medium: Medium, device: Nothing, files: Files) -> Engine:
    parts = store.plane.parts
    if medium is Medium.DRAM:
        assert parts.arena is not None
        return ArenaEngine(parts.arena, device, parts.pump.watch)
    paths = [str(number) for number in range(1 << 10)]
    inner = KvikioEngine(Kvikio, paths, parts.pump.watch, threads=1, task_bytes=MiB, direct=True)
    return StagedEngine(inner, device, files, size_ring(GPU_SLOT_BYTES), parts.pump.watch)


def measure(model: Model, tokens: int, rounds: int, *, dram: bool) -> dict[str, float]:
    tokens = tokens // model.block_tokens * model.block_tokens
    taken, tiles = [], 0
    with opened(model, tokens, dram=dram) as store:
        pages = np.random.default_rng(0).permutation(tokens // model.page_tokens)
        assert store.save("s", sequence(tokens), pages, CHAT if dram else flatcake.Turn()).published()
        match = store.match(sequence(tokens))
        for _ in range(rounds + 2):
            before_s = pump_cpu_s()
            with store.lease(match) as lease:
                result = store.restore(lease, pages).result()
            assert result.tokens == tokens, result
            tiles = result.tiles
            taken.append((pump_cpu_s() - before_s) / tiles)
    p20, p50 = np.percentile(taken[2:], [20, 50]) * 1e6
    return {"python_us_a_tile": p50, "p20_us_a_tile": p20, "tiles": tiles}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--smoke", action="store_true", help="few tokens")
    parser.add_argument("--record", action="store_true", help="append rows to profiles/results")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="restores behind each median")
    args = parser.parse_args()
    sizes = (
        {"gqa": (GQA, 1_024), "mla-fp8": (MLA, 1_024)}
        if args.smoke
        else {"gqa 32k": (GQA, 32_768), "mla 7.5 KiB a token, 219k": (MLA, 218_880)}
    )
    found = {
        f"{name} {'dram' if dram else 'files'}": measure(model, tokens, args.rounds, dram=dram)
        for name, (model, tokens) in sizes.items()
        for dram in (False, True)
    }
    for case, figures in found.items():
        print(f"{case}: " + "  ".join(f"{name}={value:.4g}" for name, value in figures.items()))
    if args.record:
        append_rows("tile", " ".join(["python", *sys.argv]), device_name(), found)
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
