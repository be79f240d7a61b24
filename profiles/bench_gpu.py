"""Time restores and saves on a GPU against what the machine can do, as ratios in one run.

    python profiles/bench_gpu.py [--json] [--smoke] [--record] [--fast DIR] [--disk DIR] [--rounds 7] [--only CASE ...]

`--fast` holds memory-backed files (/dev/shm), which stand in for a fast SSD; PCIe is then the ceiling.  Ceilings of the
same run: one large kvikio read of as many bytes into GPU memory, and a pinned 1 GiB copy from host to device.
Providers take turns within a round; figures are medians.  The kernels alone and the Python of a tile alone are those of
`bench_scatter.py` and `bench_tile.py`, which can do more.
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial

import bench_tile
import torch
from bench_scatter import PAGES_KIB
from common import append_rows, device_name
from gpu_cases import concurrent_case, matmul_case, restore_case, save_case, scatter_case, spin_case, turns_case
from gpu_store import DEVICE, GQA, MLA, WIDE_MLA

from flatcake.units import KiB


def cases(args: argparse.Namespace) -> dict[str, Callable[[], dict[str, float]]]:
    fast, rounds = args.fast, args.rounds
    if args.smoke:
        return {"gqa 512": lambda: restore_case(fast, GQA, 512, 1)}
    return {
        "gqa 32k": lambda: restore_case(fast, GQA, 32_768, rounds),
        "gqa 32k unverified": lambda: restore_case(fast, GQA, 32_768, rounds, verify="off"),
        "gqa 2k": lambda: restore_case(fast, GQA, 2_048, rounds * 3),
        "mla 7.5 KiB a token, 219k": lambda: restore_case(fast, MLA, 218_880, rounds),
        "mla 27.5 KiB a token, 219k": lambda: restore_case(fast, WIDE_MLA, 218_880, rounds),
        "gqa 32k dram": lambda: restore_case(fast, GQA, 32_768, rounds, dram=True),
        "gqa 32k pinned ring": lambda: restore_case(fast, GQA, 32_768, rounds, engine="posix"),
        "gqa 32k disk": lambda: restore_case(args.disk, GQA, 32_768, 3, is_disk=True),
        "4 at once": lambda: concurrent_case(fast, 4, rounds),
        "8 at once": lambda: concurrent_case(fast, 8, rounds),
        "16 at once": lambda: concurrent_case(fast, 16, rounds),
        "spinning thread": lambda: spin_case(fast, rounds),
        "251 turns, 7.5 KiB a token": lambda: turns_case(fast, rounds),
        "matmul, all multiprocessors": lambda: matmul_case(fast, rounds, 100),
        "matmul, 12 percent of them": lambda: matmul_case(fast, rounds, 12),
        "save 32k": lambda: save_case(fast, rounds, 32_768),
        "save 32k dram": lambda: save_case(fast, rounds, 32_768, dram=True),
        "save 8k dram": lambda: save_case(fast, rounds, 8_192, dram=True),
        "save 8k disk": lambda: save_case(args.disk, rounds, 8_192),
        "python of a tile, files": lambda: bench_tile.measure(GQA, 32_768, bench_tile.ROUNDS, dram=False),
        "python of a tile, dram": lambda: bench_tile.measure(GQA, 32_768, bench_tile.ROUNDS, dram=True),
        **{f"scatter, pages of {kib} KiB": partial(scatter_case, kib * KiB, 3 * rounds) for kib in PAGES_KIB},
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
    parser.add_argument("--skip", nargs="*", default=[], help="leave out cases whose name contains one of these")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu needs a CUDA device; there is none")
        return 0
    found: dict[str, dict[str, float]] = {}
    for name, run in cases(args).items():
        wanted = not args.only or any(part in name for part in args.only)
        if wanted and not any(part in name for part in args.skip):
            found[name] = run()
            print(f"{name}: " + "  ".join(f"{k}={v:.4g}" for k, v in found[name].items()), flush=True)
            if args.record:  # At once: device time may end before the last case.
                append_rows("gpu", " ".join(["python", *sys.argv]), device_name(DEVICE), {name: found[name]})
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
