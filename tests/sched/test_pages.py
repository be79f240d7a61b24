"""Pages: ready and running requests cannot wait for each other.

A small engine: running requests need one page more at every step, and a ready one needs one free page to start.
Prefetches that hold all pages then block both, unless the engine takes pages back or a cap leaves it some.
"""

import pytest

from flatcake.sched.actions import CancelPrefetch, Dispatch, Request, ReturnPages, StartPrefetch
from flatcake.sched.mas import Scheduler
from flatcake.sched.settings import SchedConfig
from flatcake.units import MS

PREFIX_PAGES, STEPS, REQUESTS, PAGES_TOTAL = 4, 6, 12, 24


class Engine:
    """Steps in lock step with the clock; reads take one step."""

    def __init__(self, *, pages_held_max: int, takes_back: bool) -> None:
        self.scheduler = Scheduler(SchedConfig(pages_held_max=pages_held_max, prefetches_max=REQUESTS, window_slots=64))
        self.takes_back = takes_back
        self.free, self.now_ns, self.finished = PAGES_TOTAL, 0, 0
        self.running: dict[int, list[int]] = {}  # id -> [pages, steps left]
        self.reading: list[int] = []

    def run(self) -> bool:
        """Whether every request finished; False when a long time brings nothing."""
        for number in range(REQUESTS):
            self.act(self.scheduler.submit(Request(request_id=number, ssd_bytes=1, pages=PREFIX_PAGES), self.now_ns))
        for _ in range(2_000):
            self.now_ns += 30 * MS
            self.act(self.scheduler.tick(self.now_ns))
            for ticket in self.reading[:]:
                self.reading.remove(ticket)
                self.act(self.scheduler.prefetch_done(ticket, self.now_ns, ssd_bytes=1, dram_bytes=0))
            self.step()
            self.scheduler.check()
            if self.finished == REQUESTS:
                return True
        return False

    def step(self) -> None:
        for number in sorted(self.running):  # the oldest first: it gets what there is
            if self.need_page():
                self.running[number][0] += 1
                self.running[number][1] -= 1
            if self.running[number][1] == 0:
                self.free += self.running.pop(number)[0]
                self.finished += 1
                self.act(self.scheduler.done(number, self.now_ns))
                self.act(self.scheduler.pages_freed(self.now_ns))
        if len(self.running) < 2 and self.scheduler.can_dispatch() and self.need_page():
            self.free += 1  # only asked for: its first step takes it
            self.act(self.scheduler.next_ready(self.now_ns))

    def need_page(self) -> bool:
        if self.free == 0 and self.takes_back:
            self.act(self.scheduler.take_back(1, self.now_ns))
        if self.free == 0:
            return False
        self.free -= 1
        return True

    def act(self, actions) -> None:
        for action in actions:
            if isinstance(action, StartPrefetch) and action.pages > self.free:
                self.act(self.scheduler.pages_refused(action.ticket, self.now_ns))
            elif isinstance(action, StartPrefetch):
                self.free -= action.pages
                self.reading.append(action.ticket)
                self.act(self.scheduler.started(action.ticket, self.now_ns))
            elif isinstance(action, ReturnPages):
                self.free += action.pages
            elif isinstance(action, Dispatch):
                self.running[action.request_id] = [action.pages, STEPS]


def test_without_cap_and_taking_back_they_wait_for_each_other() -> None:
    """The engine of this file really can lock up; otherwise the next two tests would show nothing."""
    engine = Engine(pages_held_max=0, takes_back=False)
    assert not engine.run()
    assert engine.finished == 0 and engine.free == 0


def test_taking_back_alone_is_enough() -> None:
    engine = Engine(pages_held_max=0, takes_back=True)
    assert engine.run()
    assert engine.free == PAGES_TOTAL
    assert int(engine.scheduler.stats()["taken_back"]) > 0


def test_a_cap_that_leaves_running_requests_their_growth_is_enough() -> None:
    engine = Engine(pages_held_max=PAGES_TOTAL - 2 * (PREFIX_PAGES + STEPS), takes_back=False)
    assert engine.run()
    assert engine.free == PAGES_TOTAL
    assert engine.scheduler.stats()["taken_back"] == 0


def loaded(count: int, **settings) -> Scheduler:
    """A scheduler with `count` ready requests of 10 pages each, ids and tickets from 0."""
    scheduler = Scheduler(SchedConfig(prefetches_max=count, window_slots=64, **settings))
    for number in range(count):
        scheduler.submit(Request(request_id=number, ssd_bytes=1, pages=10), number)
        scheduler.started(number, number)
    for number in range(count):
        scheduler.prefetch_done(number, 100, ssd_bytes=1, dram_bytes=0)
    return scheduler


def test_take_back_takes_the_youngest_and_only_what_is_needed() -> None:
    scheduler = loaded(4)
    assert scheduler.take_back(11, 200) == (ReturnPages(3, 3, 10), ReturnPages(2, 2, 10))
    assert scheduler.stats()["pages"] == 20
    assert scheduler.next_ready(201)[0] == Dispatch(0, "fetched", 0, 10)
    scheduler.check()


def test_what_was_taken_back_waits_at_its_original_arrival() -> None:
    scheduler = loaded(2)
    scheduler.take_back(20, 200)
    scheduler.submit(Request(request_id="young", ssd_bytes=1), 201)
    assert scheduler.pages_freed(202) == (StartPrefetch(2, 0, 10, 1),)
    assert scheduler.stats()["taken_back"] == 2


def test_all_pages_of_undispatched_requests_can_be_had_back() -> None:
    scheduler = loaded(3)
    scheduler.next_ready(150)
    scheduler.take_back(1_000, 200)
    scheduler.check()
    assert scheduler.stats()["pages"] == 0  # the dispatched one's are the engine's own
    assert not scheduler.can_dispatch()


def test_pages_under_a_read_come_back_only_after_it() -> None:
    scheduler = Scheduler(SchedConfig())
    scheduler.submit(Request(request_id="a", ssd_bytes=1, pages=10), 0)
    scheduler.started(0, 0)
    assert scheduler.take_back(10, 1) == (CancelPrefetch(0, "a"),)
    assert scheduler.take_back(10, 2) == ()  # on their way already
    assert scheduler.prefetch_done(0, 3, ssd_bytes=0, dram_bytes=0) == (ReturnPages(0, "a", 10),)
    assert scheduler.pages_freed(4) == (StartPrefetch(1, "a", 10, 1),)


def test_pages_on_their_way_back_are_not_taken_a_second_time() -> None:
    scheduler = Scheduler(SchedConfig())
    for number in range(2):
        scheduler.submit(Request(request_id=number, ssd_bytes=1, pages=10), 0)
        scheduler.started(number, 0)
    assert scheduler.take_back(10, 1) == (CancelPrefetch(1, 1),)
    assert scheduler.take_back(10, 2) == ()
    assert scheduler.take_back(11, 3) == (CancelPrefetch(0, 0),)


def test_refusal_waits_for_freed_pages_or_the_retry_time_and_nobody_passes() -> None:
    scheduler = Scheduler(SchedConfig(pages_retry_ns=50))
    (start,) = scheduler.submit(Request(request_id="a", ssd_bytes=8, pages=10), 0)
    assert scheduler.pages_refused(start.ticket, 10) == ()
    assert scheduler.submit(Request(request_id="b", ssd_bytes=4, pages=1), 11) == ()
    assert scheduler.next_tick_ns() == 60
    assert scheduler.tick(59) == ()
    assert scheduler.tick(60) == (StartPrefetch(1, "b", 1, 1),)  # equation 1 at 60: 49/4 against 60/8
    assert scheduler.pages_refused(1, 61) == ()
    assert scheduler.pages_freed(62) == (StartPrefetch(2, "b", 1, 1),)


@pytest.mark.parametrize(("first", "second", "starts"), [(10, 20, 2), (10, 21, 1), (40, 1, 1)])
def test_cap_on_held_pages(first: int, second: int, starts: int) -> None:
    """Two fit together, two do not, and one beyond the cap goes alone."""
    scheduler = Scheduler(SchedConfig(pages_held_max=30))
    actions = scheduler.submit(Request(request_id=0, ssd_bytes=1, pages=first), 0)
    assert len(actions) == 1
    scheduler.submit(Request(request_id=1, ssd_bytes=1, pages=second), 0)
    assert len(scheduler.started(0, 0)) == starts - 1
    scheduler.check()
    if starts == 1:  # held until dispatched, not until loaded
        assert scheduler.prefetch_done(0, 1, ssd_bytes=1, dram_bytes=0) == ()
        dispatch, start = scheduler.next_ready(2)
        assert dispatch.pages == first and start == StartPrefetch(1, 1, second, 1)
