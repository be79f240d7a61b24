"""What a submit and a pop of the SSD-preparing queue cost, by number waiting and by shape of sizes and arrivals.

    python profiles/bench_sched.py [--json] [--smoke] [--pops N]

A pop is the whole of what the scheduler does to start the next prefetch: event, choice by equation 1, booking.
`--json` prints one line: `pop_us` and `submit_us` by number waiting (medians, random sizes), `worst_pop_us` by
number waiting (the slowest shape), and `shapes_pop_us` (p20, p50, p80 of each).  No files are written.
"""

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable

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


def main() -> None:
    """Measure all shapes at all numbers waiting, and print a table or one line of JSON."""
    parser = argparse.ArgumentParser(description="Cost of a submit and a pop of FC-MAS.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--smoke", action="store_true", help="a second or so: few waiting, few pops")
    parser.add_argument("--pops", type=int, default=300, help="pops to time at each number waiting")
    arguments = parser.parse_args()
    numbers, pops = (WAITING[:2], 20) if arguments.smoke else (WAITING, arguments.pops)

    submit_us, shapes = {}, {shape: {} for shape in SHAPES}
    for count in numbers:
        for shape in SHAPES:
            mean_us, samples = measure(shape, count, pops, seed=count)
            p20, p50, p80 = statistics.quantiles(samples, n=10)[1::3]
            shapes[shape][str(count)] = {"p20": round(p20, 2), "p50": round(p50, 2), "p80": round(p80, 2)}
            if shape == "random":
                submit_us[str(count)] = round(mean_us, 2)
    keys = [str(count) for count in numbers]
    result = {
        "bench": "sched",
        "pop_us": {key: shapes["random"][key]["p50"] for key in keys},
        "submit_us": submit_us,
        "worst_pop_us": {key: max(shapes[shape][key]["p50"] for shape in SHAPES) for key in keys},
        "shapes_pop_us": shapes,
        "pops": pops,
        "device": platform.machine(),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print("microseconds, median".ljust(22) + "".join(f"{key:>10}" for key in keys))
    print("submit".ljust(22) + "".join(f"{submit_us[key]:>10.1f}" for key in keys))
    for shape in SHAPES:
        print(f"pop, {shape}".ljust(22) + "".join(f"{shapes[shape][key]['p50']:>10.1f}" for key in keys))


if __name__ == "__main__":
    main()
