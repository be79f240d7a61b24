"""The age cap: a large restore among small ones at several loads, on one device under a virtual clock.

Small restores take 1 ms and come at regular times; the large one is 1,024 times as big.  Equation 1 serves it at
once while there is room, and never once small ones offer more than the device can do: the oldest of them ages too.
"""

import pytest

from flatcake.sched.actions import Request
from flatcake.sched.mas import Scheduler
from flatcake.sched.settings import SchedConfig
from flatcake.units import MS, SECOND, GiB, MiB
from tests.sched.driver import Driver

SMALL_BYTES, LARGE_BYTES = 4 * MiB, 4 * GiB
SMALL_NS = 1 * MS
LARGE_ARRIVAL_NS = 500 * MS + 1
HORIZON_NS = 30 * SECOND


def service_ns(request: Request) -> int:
    return SMALL_NS * request.ssd_bytes // SMALL_BYTES


def large_start_ns(load_percent: int, config: SchedConfig, horizon_ns: int) -> tuple[int | None, Driver]:
    """When the large one's reads began, if within the horizon."""
    driver = Driver(Scheduler(config), read_ns=service_ns, compute_ns=lambda _: 0, running_max=1 << 30, check=False)
    gap_ns = SMALL_NS * 100 // load_percent

    def arrive(number: int) -> None:
        driver.submit(Request(request_id=number, ssd_bytes=SMALL_BYTES))
        if (number + 1) * gap_ns <= horizon_ns:
            driver.at((number + 1) * gap_ns, lambda: arrive(number + 1))

    driver.at(0, lambda: arrive(0))
    large = Request(request_id="large", ssd_bytes=LARGE_BYTES)
    driver.at(LARGE_ARRIVAL_NS, lambda: driver.submit(large))
    while "large" not in {name for _, name in driver.starts[-1:]}:
        before = driver.now_ns
        driver.run(until_ns=before + SMALL_NS)
        driver.now_ns = max(driver.now_ns, before + SMALL_NS)
        if driver.now_ns > horizon_ns:
            return None, driver
    return driver.starts[-1][0], driver


@pytest.mark.parametrize("wait_ns_max", [20 * MS, 2 * SECOND])
@pytest.mark.parametrize("load_percent", [50, 99, 110, 160])
def test_large_restore_starts_within_the_cap_and_what_is_older(load_percent: int, wait_ns_max: int) -> None:
    config = SchedConfig(prefetches_max=1, wait_ns_max=wait_ns_max)
    start_ns, driver = large_start_ns(load_percent, config, HORIZON_NS)
    assert start_ns is not None
    over_age_ns = LARGE_ARRIVAL_NS + wait_ns_max
    # What may come first: reads in flight when it came of age, and requests older than itself still waiting then.
    older = [n for at_ns, n in driver.starts if at_ns > over_age_ns and n != "large"]
    gap_ns = SMALL_NS * 100 // load_percent
    assert all(n * gap_ns <= LARGE_ARRIVAL_NS for n in older)
    assert start_ns <= over_age_ns + SMALL_NS + len(older) * SMALL_NS + 1


def test_equation_1_alone_starves_it_just_above_capacity() -> None:
    config = SchedConfig(prefetches_max=1, wait_ns_max=0)
    assert large_start_ns(50, config, HORIZON_NS)[0] is not None
    assert large_start_ns(99, config, HORIZON_NS)[0] is not None
    start_ns, driver = large_start_ns(110, config, HORIZON_NS)
    assert start_ns is None
    assert driver.scheduler.stats()["waiting"] > 1_000  # and a thousand small ones that came after it
    assert len(driver.starts) > (HORIZON_NS - LARGE_ARRIVAL_NS) // SMALL_NS  # were not what the device lacked time for
