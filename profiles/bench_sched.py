"""What a submit and a pop of the SSD-preparing queue cost, by number waiting and by shape of sizes and arrivals.

    python profiles/bench_sched.py [--json] [--smoke] [--record] [--pops N]

A pop is the whole of what the scheduler does to start the next prefetch: event, choice by equation 1, booking.
`--json` prints one line: `pop_us` and `submit_us` by number waiting (medians, random sizes), `worst_pop_us` by
number waiting (the slowest shape), and `shapes_pop_us` (p20, p50, p80 of each).
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from common import append_rows, device_name

from flatcake.sched.actions import Request, StartPrefetch
from flatcake.sched.mas import Scheduler
from flatcake.sched.settings import SchedConfig

WAITING = (10, 1_000, 10_000, 100_000)
NOW_NS = 1 << 40
CONFIG = SchedConfig(wait_ns_max=0, prefetches_max=1, window_slots=1, restore_slots_max=1)

Shape = Callable[[int, int, random.Random], tuple[int, int]]  # (index, count, random) -> (size_bytes, wait_ns)

SHAPES: dict[str, Shape] = {
    "random": lambda i, n, r: (r.randint(4 << 20, 4 << 30), r.randint(0, 60_000_000_000)),
    # Lasting load: equation 1 itself brings all ratios close together, so no bound on sizes cuts anything.
    "equalised": lambda i, n, r: ((s := r.randint(4 << 20, 4 << 30)), s * 10 - r.randint(0, 4 << 20)),
    # Each is larger and older than the last, in convex position: everyone wins at some time.
    "staircase": lambda i, n, r: (4096 * (i + 1), (i + 1) ** 2 + 1),
    # Every ratio is the same fraction, which no float holds.
    "tied": lambda i, n, r: (3 * (i + 1), 7 * (i + 1)),
    # One burst of one size: only the order of submission tells them apart.
    "equal": lambda i, n, r: (4 << 20, 1_000_000),
}


def measure(shape: str, count: int, pops: int, seed: int) -> tuple[float, list[float]]:
    """Mean microseconds of a submit, and those of each of `pops` pops with `count` waiting."""
    source = random.Random(seed)
    points = sorted((SHAPES[shape](i, count, source) for i in range(count + 1)), key=lambda point: -point[1])
    scheduler = Scheduler(CONFIG)
    scheduler.submit(Request(request_id="first", ssd_bytes=1), 0)  # occupies the only prefetch until the pops begin
    scheduler.started(0, 0)
    requests = [Request(request_id=i, ssd_bytes=size_bytes) for i, (size_bytes, _) in enumerate(points)]
    arrivals_ns = [NOW_NS - wait_ns for _, wait_ns in points]
    begin = time.perf_counter_ns()
    for request, arrival_ns in zip(requests, arrivals_ns, strict=True):
        scheduler.submit(request, arrival_ns)
    submit_us = (time.perf_counter_ns() - begin) / 1e3 / len(requests)

    ticket, samples = 0, []
    for extra in range(min(pops, count)):
        begin = time.perf_counter_ns()
        actions = scheduler.prefetch_done(ticket, NOW_NS, ssd_bytes=0, dram_bytes=0)
        samples.append((time.perf_counter_ns() - begin) / 1e3)
        (start,) = (action for action in actions if isinstance(action, StartPrefetch))
        ticket = start.ticket
        scheduler.started(ticket, NOW_NS)
        if count > 10:  # keep as many waiting; the newcomer has waited for nothing and does not change the shape
            scheduler.submit(Request(request_id=f"extra {extra}", ssd_bytes=1 << 40), NOW_NS)
    return submit_us, samples


def run(numbers: tuple[int, ...], pops: int) -> dict[str, Any]:
    """Measure all shapes at all numbers waiting."""
    keys = [str(count) for count in numbers]
    submit_us: dict[str, float] = {}
    shapes: dict[str, dict[str, dict[str, float]]] = {shape: {} for shape in SHAPES}
    for count, key in zip(numbers, keys, strict=True):
        for shape in SHAPES:
            mean_us, samples = measure(shape, count, pops, seed=count)
            p20, p50, p80 = (round(value, 2) for value in statistics.quantiles(samples, n=10)[1::3])
            shapes[shape][key] = {"p20": p20, "p50": p50, "p80": p80}
            if shape == "random":
                submit_us[key] = round(mean_us, 2)
    return {
        "bench": "sched",
        "pop_us": {key: shapes["random"][key]["p50"] for key in keys},
        "submit_us": submit_us,
        "worst_pop_us": {key: max(shapes[shape][key]["p50"] for shape in SHAPES) for key in keys},
        "shapes_pop_us": shapes,
        "pops": pops,
        "device": device_name(),
    }


def main() -> None:
    """Measure, and print a table or one line of JSON."""
    parser = argparse.ArgumentParser(description="Cost of a submit and a pop of FC-MAS.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--smoke", action="store_true", help="a second or so: few waiting, few pops")
    parser.add_argument("--record", action="store_true", help="append rows to profiles/results")
    parser.add_argument("--pops", type=int, default=300, help="pops to time at each number waiting")
    arguments = parser.parse_args()
    numbers, pops = (WAITING[:2], 20) if arguments.smoke else (WAITING, arguments.pops)
    result = run(numbers, pops)
    shapes = result["shapes_pop_us"]
    if arguments.record:
        cases = {f"{shape} {key}": spread for shape in SHAPES for key, spread in shapes[shape].items()}
        cases |= {f"submit {key}": {"mean": value} for key, value in result["submit_us"].items()}
        append_rows("sched", " ".join(["python", *sys.argv]), result["device"], cases)
    if arguments.json:
        print(json.dumps(result))
        return
    print("microseconds, median".ljust(22) + "".join(f"{count:>10,}" for count in numbers))
    print("submit (mean)".ljust(22) + "".join(f"{value:>10.1f}" for value in result["submit_us"].values()))
    for shape in SHAPES:
        print(f"pop, {shape}".ljust(22) + "".join(f"{spread['p50']:>10.1f}" for spread in shapes[shape].values()))


if __name__ == "__main__":
    main()
