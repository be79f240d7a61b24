"""Time restores and saves on a GPU against what the machine can do, as ratios in one run.

    python profiles/bench_gpu.py [--json] [--smoke] [--record] [--fast DIR] [--disk DIR] [--rounds 7] [--only CASE ...]

`--fast` holds memory-backed files (/dev/shm), which stand in for a fast SSD; PCIe is then the ceiling.  Ceilings of the
same run: one large kvikio read of as many bytes into GPU memory, and a pinned 1 GiB copy from host to device.
Providers take turns within a round; figures are medians.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from common import append_rows, device_name

import flatcake
from flatcake.io.device import load_kvikio
from flatcake.units import GiB, MiB

DEVICE = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A geometry: bytes of one token in one layer, as `parts` components of a page."""

    name: str
    layers: int
    token_bytes: int
    parts: int
    page_tokens: int
    block_tokens: int

    def paged(self, tokens: int) -> tuple[flatcake.PagedKV, list[list[torch.Tensor]]]:
        pages = -(-tokens // self.page_tokens)
        row = self.page_tokens * self.token_bytes // self.parts
        layers = [
            [torch.randint(0, 255, (pages, row), dtype=torch.uint8, device=DEVICE) for _ in range(self.parts)]
            for _ in range(self.layers)
        ]
        return flatcake.PagedKV.of_layers(layers, page_tokens=self.page_tokens), layers


GQA = Model(name="gqa", layers=32, token_bytes=8 * 128 * 2 * 2, parts=2, page_tokens=16, block_tokens=256)
MLA = Model(name="mla-fp8", layers=43, token_bytes=656, parts=1, page_tokens=64, block_tokens=256)


@contextmanager
def opened(
    root: str, model: Model, tokens: int, dram: bool = False, **io: object
) -> Iterator[tuple[flatcake.Store, object]]:
    """A store with room for one sequence, saved; yields it with the tensors and page count."""
    directory = tempfile.mkdtemp(dir=root)
    kv, layers = model.paged(tokens)
    room = -(-int(tokens * model.token_bytes * model.layers * 1.2) // GiB) * GiB + GiB
    settings = flatcake.StoreConfig(
        directories=() if dram else (directory,),
        device=DEVICE,
        capacity=flatcake.CapacityConfig(
            dram_bytes_max=room if dram else 0, ssd_bytes_max=0 if dram else room, ssd_free_bytes_min=0
        ),
        placement=flatcake.PlacementConfig(agent_tokens_min=10**9 if dram else 1, short_reply_tokens_limit=10**6),
        io=flatcake.IOConfig(**io),  # type: ignore[arg-type]
    )
    identity = flatcake.Identity(
        model=model.name, revision="0", kv_dtype="u8", layout="bench", block_tokens=model.block_tokens
    )
    store = flatcake.open(settings, identity, kv)
    try:
        yield store, layers
    finally:
        store.close()
        del kv, layers
        torch.cuda.empty_cache()
        shutil.rmtree(directory)


def sequence(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(0, 32_000, tokens)


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


class LargeRead:
    """One kvikio read of many bytes straight into GPU memory, with the settings that suit it best: a ceiling."""

    SETTINGS = {"num_threads": 16, "task_size": 8 * MiB}  # noqa: RUF012
    """kvikio has one set for the whole process: set before each read, and the store's put back after it."""

    def __init__(self, root: str, size_bytes: int) -> None:
        self.directory = tempfile.mkdtemp(dir=root)
        path = os.path.join(self.directory, "large")
        with open(path, "wb") as file:
            block = np.random.default_rng(0).bytes(64 * MiB)
            for _ in range(-(-size_bytes // len(block))):
                file.write(block)
        self.file = load_kvikio().CuFile(path, "r")
        self.buffer = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)
        self.size_bytes = size_bytes

    def seconds(self) -> float:
        defaults = load_kvikio().defaults
        with defaults.set(self.SETTINGS):
            self._read(16 * MiB)  # Its threads and their buffers are there.
            return seconds(lambda: self._read(self.size_bytes))

    def close(self) -> None:
        self.file.close()
        shutil.rmtree(self.directory)

    def _read(self, size_bytes: int) -> None:
        size_bytes = min(size_bytes, self.size_bytes)
        assert self.file.pread(self.buffer, size=size_bytes).get() == size_bytes


def pinned_copy() -> Callable[[], object]:
    host = torch.empty(GiB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GiB, dtype=torch.uint8, device=DEVICE)
    return lambda: device.copy_(host, non_blocking=True)


def pump_cpu_s() -> float:
    """Processor time of the store's thread until now: all of the Python and driver calls that tiles cost."""
    [pump] = [thread for thread in threading.enumerate() if thread.name == "flatcake-pump"]
    assert pump.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(pump.ident))


def restore_once(store: flatcake.Store, match: flatcake.Match, pages: int, took: dict[str, list[float]]) -> None:
    """One restore into other pages each time; notes its seconds, those of its first layer, and the pump's a tile."""
    table = np.random.default_rng(len(took["restore"])).permutation(pages)
    found: list[flatcake.RestoreResult] = []
    before_s = pump_cpu_s()
    with store.lease(match) as lease:
        took["restore"].append(seconds(lambda: found.append(store.restore(lease, table).result())))
    assert found[0].tokens == match.tokens, found
    took["first_layer"].append((found[0].first_layer_ns or 0) / 1e9)
    took["pump_tile"].append((pump_cpu_s() - before_s) / found[0].tiles)


def spin_case(root: str, rounds: int) -> dict[str, float]:
    """What a thread that only counts loses while 32 K tokens are restored, and what the restore loses to it."""
    tokens, counted, stop = 32_768, [0], threading.Event()

    def spin() -> None:
        while not stop.is_set():
            counted[0] += 1

    with opened(root, GQA, tokens) as (store, _):
        pages = torch.randperm(tokens // GQA.page_tokens).numpy()
        assert store.save("s", sequence(tokens), pages).published()
        match = store.match(sequence(tokens))
        took: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            restore_once(store, match, len(pages), took)
        alone_s = statistics.median(took["restore"][1:])
        thread = threading.Thread(target=spin)
        thread.start()
        losses, spun = [], defaultdict[str, list[float]](list)
        for _ in range(rounds):
            before, started = counted[0], time.perf_counter()
            time.sleep(0.2)
            free_rate = (counted[0] - before) / (time.perf_counter() - started)
            before, started = counted[0], time.perf_counter()
            restore_once(store, match, len(pages), spun)
            losses.append(1 - (counted[0] - before) / (time.perf_counter() - started) / free_rate)
        stop.set()
        thread.join()
    return {
        "spinner_loses": statistics.median(losses),
        "restore_alone_ms": alone_s * 1e3,
        "restore_beside_spinner_ms": statistics.median(spun["restore"]) * 1e3,
    }


def concurrent_case(root: str, count: int, rounds: int) -> dict[str, float]:
    """`count` restores of 2 K tokens at once, in all against one after another."""
    tokens = 2_048
    with opened(root, GQA, tokens * count) as (store, _):
        order = np.random.default_rng(0).permutation(tokens * count // GQA.page_tokens)
        tables = np.split(order, count)
        prompts = [np.random.default_rng(100 + i).integers(0, 32_000, tokens) for i in range(count)]
        for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
            assert store.save(f"s{i}", prompt, table).published()
        leases = [store.lease(store.match(prompt), hold_ns=10**12) for prompt in prompts]

        def together() -> None:
            for restore in [store.restore(lease, table) for lease, table in zip(leases, tables, strict=True)]:
                assert restore.result().tokens == tokens

        def in_turn() -> None:
            for lease, table in zip(leases, tables, strict=True):
                assert store.restore(lease, table).result().tokens == tokens

        pairs = [(seconds(together), seconds(in_turn)) for _ in range(rounds + 2)][2:]
        return {
            "gb_s": tokens * count * GQA.token_bytes * GQA.layers / statistics.median(a for a, _ in pairs) / 1e9,
            "to_one_at_a_time": statistics.median(b / a for a, b in pairs),
            "window_mib": store.stats().window_bytes / MiB,
        }


def restore_case(
    root: str, model: Model, tokens: int, rounds: int, *, dram: bool = False, **io: object
) -> dict[str, float]:
    """One sequence restored into shuffled pages, against the ceilings."""
    tokens = tokens // model.block_tokens * model.block_tokens
    with opened(root, model, tokens, dram, **io) as (store, _):
        pages = torch.randperm(tokens // model.page_tokens).numpy()
        saved: list[float] = []
        result = None

        def save() -> None:
            nonlocal result
            turn = flatcake.Turn(index=2, prior_reply_tokens=1) if dram else flatcake.Turn()
            result = store.save("s", sequence(tokens), pages, turn).result()

        saved.append(seconds(save))
        assert result is not None and not result.reason, result
        match = store.match(sequence(tokens))
        assert match.tokens == tokens, match.tokens
        large = None if dram else LargeRead(root, match.size_bytes)
        copy = pinned_copy()
        took: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds + 2):
            restore_once(store, match, len(pages), took)
            took["copy"].append(seconds(copy))
            if large is not None:
                took["large"].append(large.seconds())
        figures = {
            "restore_gb_s": match.size_bytes / statistics.median(took["restore"][2:]) / 1e9,
            "copy_gb_s": GiB / statistics.median(took["copy"][2:]) / 1e9,
            "first_layer_ms": statistics.median(took["first_layer"][2:]) * 1e3,
            "save_gb_s": match.size_bytes / saved[0] / 1e9,
            "pump_us_a_tile": statistics.median(took["pump_tile"][2:]) * 1e6,
            "window_mib": store.stats().window_bytes / MiB,
        }
        figures["to_copy"] = figures["restore_gb_s"] / figures["copy_gb_s"]
        if large is not None:
            figures["large_gb_s"] = match.size_bytes / statistics.median(took["large"][2:]) / 1e9
            pairs = zip(took["large"][2:], took["restore"][2:], strict=True)
            figures["to_large_read"] = statistics.median(a / b for a, b in pairs)
            large.close()
        print(f"# io_path {store.stats().io_path} ({store.stats().io_reason})", file=sys.stderr)
        return figures


def cases(args: argparse.Namespace) -> dict[str, Callable[[], dict[str, float]]]:
    fast, rounds = args.fast, args.rounds
    if args.smoke:
        return {"gqa 512": lambda: restore_case(fast, GQA, 512, 1)}
    return {
        "gqa 32k": lambda: restore_case(fast, GQA, 32_768, rounds),
        "gqa 32k unverified": lambda: restore_case(fast, GQA, 32_768, rounds, verify="off"),
        "gqa 2k": lambda: restore_case(fast, GQA, 2_048, rounds * 3),
        "mla-fp8 219k": lambda: restore_case(fast, MLA, 218_880, rounds),
        "gqa 32k dram": lambda: restore_case(fast, GQA, 32_768, rounds, dram=True),
        "gqa 32k pinned ring": lambda: restore_case(fast, GQA, 32_768, rounds, engine="posix"),
        "gqa 32k disk": lambda: restore_case(args.disk, GQA, 32_768, 3),
        "4 at once": lambda: concurrent_case(fast, 4, rounds),
        "16 at once": lambda: concurrent_case(fast, 16, rounds),
        "spinning thread": lambda: spin_case(fast, rounds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--smoke", action="store_true", help="one small case")
    parser.add_argument("--record", action="store_true", help="append rows to profiles/results")
    parser.add_argument("--fast", default="/dev/shm", help="memory-backed directory")
    parser.add_argument("--disk", default="/var/tmp", help="directory on a real disk")
    parser.add_argument("--rounds", type=int, default=7, help="timings behind each median")
    parser.add_argument("--only", nargs="*", default=[], help="run cases whose name contains one of these")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu needs a CUDA device; there is none")
        return 0
    found: dict[str, dict[str, float]] = {}
    for name, run in cases(args).items():
        if not args.only or any(part in name for part in args.only):
            found[name] = run()
            print(f"{name}: " + "  ".join(f"{k}={v:.4g}" for k, v in found[name].items()), flush=True)
    if args.record:
        append_rows("gpu", " ".join(["python", *sys.argv]), device_name(DEVICE), found)
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
