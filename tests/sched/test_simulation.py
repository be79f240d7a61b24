"""Random histories under a virtual clock: no request lost, none dispatched twice, bounds hold, silence is empty."""

import os
from fractions import Fraction
from random import Random

import pytest

from flatcake.sched.actions import Prefix, Request, StartPrefetch
from flatcake.sched.counters import Counters
from flatcake.sched.mas import Scheduler
from flatcake.sched.settings import SchedConfig
from flatcake.units import MS, MiB
from tests.sched.driver import Driver

SEEDS = 10_000 if os.environ.get("FLATCAKE_NIGHTLY") else 200
SEEDS_A_TEST = 50
COUNTERS = Counters().snapshot()


def random_config(random: Random) -> SchedConfig:
    order = random.choice(["two_queues", "two_queues", "fifo_prefetch", "single_queue"])
    window_slots = random.randint(1, 8)
    return SchedConfig(
        order=order,
        readmit="arrival" if order == "single_queue" else random.choice(["arrival", "tail"]),
        ready_when=random.choice(["whole_prefix", "first_layers"]),
        wait_ns_max=random.choice([0, 5 * MS, 50 * MS]),
        prefetches_max=random.randint(1, 6),
        window_slots=window_slots,
        restore_slots_max=random.randint(1, window_slots),
        pages_held_max=random.choice([0, 8, 40]),
        pages_retry_ns=random.choice([MS, 20 * MS]),
    )


def random_request(random: Random, number: int, now_ns: int) -> Request:
    ssd_bytes = random.choice([0, 1, random.randint(1, 4) * MiB, random.randint(1, 512) * MiB])
    return Request(
        request_id=random.choice([number, f"r{number}"]),
        ssd_bytes=ssd_bytes,
        dram_bytes=random.choice([0, MiB]),
        pages=random.randint(0, 30) if ssd_bytes else 0,
        deadline_ns=now_ns + random.randint(0, 60 * MS) if random.random() < 0.3 else 0,
        restore_ns_max=random.randint(1, 30 * MS) if random.random() < 0.1 else 0,
    )


def random_history(seed: int) -> Driver:
    """Submissions, cancels, repeated cancels and taking back, at random times; reads end in random order."""
    random = Random(seed)
    driver = Driver(
        Scheduler(random_config(random)),
        read_ns=lambda _: random.randint(0, 20 * MS),
        compute_ns=lambda _: random.randint(0, 5 * MS),
        first_layers_ns=lambda _: random.randint(0, 10 * MS),
        pages_total=random.randint(30, 100),
        running_max=random.randint(1, 4),
    )
    time_ns = 0
    for number in range(random.randint(1, 40)):
        time_ns += random.choice([0, 0, random.randint(0, 8 * MS)])
        request = random_request(random, number, time_ns)
        driver.at(time_ns, lambda request=request: driver.submit(request))
        while random.random() < 0.3:
            cancel_ns = time_ns + random.randint(0, 40 * MS)
            driver.at(cancel_ns, lambda name=request.request_id: driver.cancel(name))
        if random.random() < 0.2:
            pages = random.randint(0, 60)
            driver.at(time_ns + random.randint(0, 40 * MS), lambda pages=pages: driver.take_back(pages))
    driver.run()
    return driver


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_A_TEST))
def test_random_histories_lose_nothing_and_end_empty(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        try:
            random_history(seed).assert_silent()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


def test_histories_reach_what_they_are_for() -> None:
    """The random histories are worth nothing if they never come near the rare paths."""
    totals: dict[str, int] = {}
    prefixes = set()
    for seed in range(60):
        driver = random_history(seed)
        prefixes |= {dispatch.prefix for _, dispatch in driver.dispatched.values()}
        stats = driver.scheduler.stats()
        for name in COUNTERS:
            totals[name] = totals.get(name, 0) + int(stats[name])
    assert all(totals.values()), totals
    assert prefixes == set(Prefix)


def test_same_seed_same_order() -> None:
    for seed in range(20):
        assert random_history(seed).trace == random_history(seed).trace


@pytest.mark.parametrize("wait_ns_max", [0, 30 * MS])
@pytest.mark.parametrize("seed", range(15))
def test_every_prefetch_is_the_one_that_equation_1_names(seed: int, wait_ns_max: int) -> None:
    """Against a shadow of the waiting requests, without cancels and refusals, which would need a second scheduler."""
    random = Random(seed)
    config = SchedConfig(wait_ns_max=wait_ns_max, prefetches_max=random.randint(1, 3))
    scheduler = Scheduler(config)
    waiting: dict[int, tuple[int, int]] = {}
    ready: dict[int, int] = {}
    arrivals: dict[int, int] = {}
    reading: list[tuple[int, int]] = []
    now_ns, number = 0, 0

    def expected() -> int:
        oldest = min(waiting, key=lambda n: (waiting[n][1], n))
        if wait_ns_max and now_ns - waiting[oldest][1] > wait_ns_max:
            return oldest
        return min(waiting, key=lambda n: (-Fraction(now_ns - waiting[n][1], waiting[n][0]), *waiting[n], n))

    def carry_out(actions) -> None:
        for action in actions:
            assert isinstance(action, StartPrefetch)
            assert action.request_id == expected()
            del waiting[action.request_id]
            reading.append((action.ticket, action.request_id))
            carry_out(scheduler.started(action.ticket, now_ns))

    for _ in range(150):
        now_ns += random.choice([0, 1, random.randint(0, 4 * MS)])
        step = random.random()
        if step < 0.55:
            size_bytes = random.choice([0, random.randint(1, 9), random.randint(1, 1 << 30)])
            arrivals[number] = now_ns
            if size_bytes:
                waiting[number] = (size_bytes, now_ns)
            else:
                ready[number] = now_ns
            number += 1
            carry_out(scheduler.submit(Request(request_id=number - 1, ssd_bytes=size_bytes), now_ns))
        elif step < 0.8 and reading:
            ticket, done = reading.pop(random.randrange(len(reading)))
            ready[done] = arrivals[done]
            carry_out(scheduler.prefetch_done(ticket, now_ns, ssd_bytes=1, dram_bytes=0))
        elif ready:
            oldest = min(ready, key=lambda n: (ready[n], n))
            dispatch, *others = scheduler.next_ready(now_ns)
            assert dispatch.request_id == oldest
            del ready[oldest]
            carry_out(others)
        scheduler.check()
