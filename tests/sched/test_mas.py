"""The scheduler's behaviours one by one; `test_simulation` mixes them at random."""

import itertools
from random import Random

import pytest

from flatcake.errors import ClosedError, ConfigError
from flatcake.sched.actions import CancelPrefetch, Dispatch, Forget, Prefix, Request, ReturnPages, StartPrefetch
from flatcake.sched.mas import Scheduler
from flatcake.sched.settings import SchedConfig
from flatcake.units import MS, MiB

BASELINE = Scheduler(SchedConfig()).stats()
HELD = ("waiting", "fetching", "ready", "running", "ended", "prefetches", "slots", "pages")


def scheduler(**settings) -> Scheduler:
    return Scheduler(SchedConfig(**settings))


def ssd(request_id, size_bytes=1, **more) -> Request:
    return Request(request_id=request_id, ssd_bytes=size_bytes, **more)


def dram(request_id, **more) -> Request:
    return Request(request_id=request_id, ssd_bytes=0, **more)


def end(machine: Scheduler, ticket: int, now_ns: int, size_bytes: int = 1):
    return machine.prefetch_done(ticket, now_ns, ssd_bytes=size_bytes, dram_bytes=0)


def drain(machine: Scheduler, now_ns: int) -> list:
    order = []
    while machine.can_dispatch():
        order.append(machine.next_ready(now_ns)[0].request_id)
    return order


def test_nothing_on_ssd_is_ready_at_once_in_order_of_arrival() -> None:
    machine = scheduler()
    for name in "abc":
        assert machine.submit(dram(name, dram_bytes=5), 1) == ()
    assert machine.next_ready(2) == (Dispatch("a", Prefix.DRAM, None, 0),)
    assert drain(machine, 3) == ["b", "c"]
    assert machine.next_ready(4) == ()


def test_any_byte_on_ssd_prepares_first() -> None:
    machine = scheduler()
    assert machine.submit(ssd("hybrid", dram_bytes=5, pages=7), 0) == (StartPrefetch(0, "hybrid", 7, 1),)
    machine.started(0, 0)
    assert not machine.can_dispatch()
    assert end(machine, 0, 5) == ()
    assert machine.next_ready(6) == (Dispatch("hybrid", Prefix.FETCHED, 0, 7),)
    assert machine.done("hybrid", 9) == (Forget("hybrid"),)
    machine.check()


def test_finished_prefetch_goes_before_younger_dram_hits() -> None:
    machine = scheduler()
    machine.submit(ssd("old"), 0)
    machine.started(0, 0)
    machine.submit(dram("young"), 1)
    end(machine, 0, 2)
    assert drain(machine, 3) == ["old", "young"]


def test_no_readmit_sends_it_to_the_tail() -> None:
    machine = scheduler(readmit="tail")
    machine.submit(ssd("old"), 0)
    machine.started(0, 0)
    machine.submit(dram("young"), 1)
    end(machine, 0, 2)
    machine.submit(dram("youngest"), 3)
    assert drain(machine, 3) == ["young", "old", "youngest"]


def test_single_queue_holds_younger_ones_back() -> None:
    machine = scheduler(order="single_queue")
    machine.submit(ssd("first", 100), 0)
    machine.started(0, 0)
    machine.submit(dram("second"), 1)
    machine.submit(ssd("third", 1), 2)
    machine.started(1, 2)
    end(machine, 1, 3)
    assert not machine.can_dispatch() and machine.next_ready(4) == ()
    end(machine, 0, 5)
    assert drain(machine, 6) == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("two_queues", ["busy", "small", "large"]), ("fifo_prefetch", ["busy", "large", "small"])],
)
def test_fifo_prefetch_ignores_sizes(order: str, expected: list[str]) -> None:
    machine = scheduler(order=order, prefetches_max=1)
    started = list(machine.submit(ssd("busy"), 0))
    machine.started(0, 0)
    machine.submit(ssd("large", 1000), 1)
    machine.submit(ssd("small", 10), 2)
    for ticket in range(2):
        started += end(machine, ticket, 100 + ticket)
        machine.started(ticket + 1, 100 + ticket)
    assert [start.request_id for start in started] == expected


def test_age_cap_is_strict_and_puts_the_oldest_first() -> None:
    for now_ns, expected in ((1001, "small"), (1002, "large")):
        machine = scheduler(prefetches_max=1, wait_ns_max=1000)
        machine.submit(ssd("busy"), 0)
        machine.started(0, 0)
        machine.submit(ssd("large", 1 << 40), 1)
        machine.submit(ssd("small"), 2)
        (start,) = end(machine, 0, now_ns)
        assert start.request_id == expected
        assert machine.stats()["over_age"] == (expected == "large")


def test_one_unanswered_start_at_a_time_and_prefetches_max() -> None:
    machine = scheduler(prefetches_max=2)
    assert len(machine.submit(ssd(0), 0)) == 1
    assert machine.submit(ssd(1), 0) == ()
    assert machine.submit(ssd(2), 0) == ()
    assert len(machine.started(0, 0)) == 1
    assert machine.started(1, 0) == ()
    machine.check()
    assert machine.stats()["prefetches"] == 2
    assert len(end(machine, 0, 1)) == 1


def test_window_slots_are_shared_and_capped() -> None:
    machine = scheduler(window_slots=4, restore_slots_max=3, slot_bytes=MiB)
    assert machine.submit(ssd(0, 100 * MiB), 0) == (StartPrefetch(0, 0, 0, 3),)
    assert machine.submit(ssd(1, 2 * MiB), 0) == ()
    assert machine.started(0, 0) == ()  # two slots wanted, one is left
    assert end(machine, 0, 1) == (StartPrefetch(1, 1, 0, 2),)


def test_first_layers_make_it_ready_while_the_rest_streams() -> None:
    machine = scheduler(ready_when="first_layers")
    machine.submit(ssd("a", pages=3), 0)
    machine.started(0, 0)
    assert machine.first_layers_done(0, 1) == () and machine.can_dispatch()
    assert machine.next_ready(2) == (Dispatch("a", Prefix.STREAMING, 0, 3),)
    assert machine.first_layers_done(0, 2) == ()
    assert machine.stats()["prefetches"] == 1
    assert end(machine, 0, 3) == ()
    assert machine.done("a", 4) == (Forget("a"),)
    machine.check()


def test_first_layers_are_not_enough_for_the_whole_prefix() -> None:
    machine = scheduler()
    machine.submit(ssd("a"), 0)
    machine.started(0, 0)
    assert machine.first_layers_done(0, 1) == () and not machine.can_dispatch()
    assert machine.first_layers_done(99, 1) == ()  # of a prefetch that is gone


def test_done_before_the_stream_ends_cancels_it() -> None:
    machine = scheduler(ready_when="first_layers")
    machine.submit(ssd("a", pages=3), 0)
    machine.started(0, 0)
    machine.first_layers_done(0, 1)
    machine.next_ready(2)
    assert machine.done("a", 3) == (CancelPrefetch(0, "a"),)
    assert machine.done("a", 3) == () and machine.cancel("a", 3) == ()
    assert end(machine, 0, 4) == (Forget("a"),)  # no ReturnPages: they were the engine's


@pytest.mark.parametrize("stage", ["waiting", "asked", "refused", "reading", "loaded", "streaming", "running", "done"])
def test_cancel_at_every_stage_twice(stage: str) -> None:
    machine = scheduler(prefetches_max=1, ready_when="first_layers")
    if stage == "waiting":
        machine.submit(ssd("other"), 0)
        machine.submit(ssd("a", pages=4), 0)
        assert machine.cancel("a", 1) == (Forget("a"),)
        machine.cancel("other", 1)
        assert machine.pages_refused(0, 1) == (Forget("other"),)
    else:
        machine.submit(ssd("a", pages=4), 0)
    if stage == "asked":
        assert machine.cancel("a", 1) == ()
        assert machine.cancel("a", 1) == ()
        assert machine.started(0, 2) == (CancelPrefetch(0, "a"),)
        assert end(machine, 0, 3) == (ReturnPages(0, "a", 4), Forget("a"))
    elif stage == "refused":
        assert machine.cancel("a", 1) == ()
        assert machine.pages_refused(0, 2) == (Forget("a"),)
    elif stage != "waiting":
        machine.started(0, 1)
    if stage == "reading":
        assert machine.cancel("a", 2) == (CancelPrefetch(0, "a"),)
        assert machine.cancel("a", 2) == ()
        assert end(machine, 0, 3) == (ReturnPages(0, "a", 4), Forget("a"))
    if stage == "streaming":
        machine.first_layers_done(0, 2)
        assert machine.cancel("a", 2) == (CancelPrefetch(0, "a"),)
        assert not machine.can_dispatch()
        assert end(machine, 0, 3) == (ReturnPages(0, "a", 4), Forget("a"))
    if stage in ("loaded", "running", "done"):
        end(machine, 0, 2)
    if stage == "loaded":
        assert machine.cancel("a", 3) == (ReturnPages(0, "a", 4), Forget("a"))
    if stage in ("running", "done"):
        machine.next_ready(3)
    if stage == "running":
        assert machine.cancel("a", 4) == (Forget("a"),)
    if stage == "done":
        assert machine.done("a", 4) == (Forget("a"),)
    assert machine.cancel("a", 9) == () and machine.done("a", 9) == ()
    machine.check()
    assert all(machine.stats()[name] == 0 for name in HELD)
    assert machine.submit(dram("a"), 10) == ()  # the id is free again


def test_ten_thousand_submits_and_cancels_leave_nothing() -> None:
    machine, random = scheduler(pages_held_max=50), Random(1)
    asked, reading, now_ns = [], [], 0

    def carry_out(actions) -> None:
        asked.extend(action.ticket for action in actions if isinstance(action, StartPrefetch))

    for number in range(10_000):
        now_ns += random.randint(0, 9)
        carry_out(machine.submit(ssd(number, random.randint(0, 3), pages=9, deadline_ns=now_ns + 1_000), now_ns))
        if asked and random.random() < 0.6:
            reading.append(asked.pop())
            carry_out(machine.started(reading[-1], now_ns))
        elif asked:
            carry_out(machine.pages_refused(asked.pop(), now_ns))
        if reading and random.random() < 0.3:
            carry_out(end(machine, reading.pop(random.randrange(len(reading))), now_ns))
        carry_out(machine.cancel(number, now_ns))
    while asked or reading:
        for ticket in asked[:]:
            asked.remove(ticket)
            carry_out(machine.pages_refused(ticket, now_ns))
        for ticket in reading[:]:
            reading.remove(ticket)
            carry_out(end(machine, ticket, now_ns))
    machine.check()
    stats = machine.stats()
    assert all(stats[name] == 0 for name in HELD)
    assert stats["submitted"] == stats["cancelled"] == stats["forgotten"] == 10_000
    assert machine.next_tick_ns() is None


def test_deadline_while_waiting_means_recompute() -> None:
    machine = scheduler(prefetches_max=1)
    machine.submit(ssd("busy"), 0)
    machine.started(0, 0)
    machine.submit(ssd("a", deadline_ns=50), 1)
    assert machine.next_tick_ns() == 51
    assert machine.tick(50) == () and not machine.can_dispatch()
    assert machine.tick(51) == () and machine.can_dispatch()
    (dispatch,) = machine.next_ready(52)
    assert dispatch == Dispatch("a", Prefix.LATE, None, 0) and dispatch.prefix.recompute
    assert machine.stats()["late"] == 1 and machine.next_tick_ns() is None


def test_deadline_while_reading_does_not_wait_for_the_read() -> None:
    machine = scheduler()
    machine.submit(ssd("a", pages=6, deadline_ns=50), 0)
    machine.started(0, 0)
    assert machine.tick(51) == (CancelPrefetch(0, "a"),)
    assert machine.next_ready(52) == (Dispatch("a", Prefix.LATE, None, 0),)
    assert machine.done("a", 53) == ()  # its read may hang; the lease stays until it is back
    assert end(machine, 0, 54) == (ReturnPages(0, "a", 6), Forget("a"))


def test_prefetch_that_ends_after_its_deadline_unnoticed_is_used() -> None:
    machine = scheduler()
    machine.submit(ssd("a", deadline_ns=50), 0)
    machine.started(0, 0)
    assert end(machine, 0, 60) == ()
    assert machine.next_ready(61)[0].prefix == Prefix.FETCHED
    assert machine.stats()["late"] == 0


def test_deadline_in_the_past_is_late_at_once() -> None:
    machine = scheduler()
    assert machine.submit(ssd("a", deadline_ns=5), 6) == ()
    assert machine.next_ready(6)[0].prefix == Prefix.LATE


def test_only_if_faster_than() -> None:
    machine = scheduler()
    slow = ssd("unknown", 8 * MiB, restore_ns_max=1)
    assert machine.estimate(slow) is None
    (start,) = machine.submit(slow, 0)  # nothing measured: try, and learn
    machine.started(start.ticket, 0)
    end(machine, start.ticket, 8 * MS, 8 * MiB)
    assert machine.estimate(ssd("x", 4 * MiB)) == 4 * MS
    assert machine.submit(ssd("no", 4 * MiB, restore_ns_max=4 * MS - 1), 9 * MS) == ()
    machine.next_ready(9 * MS)
    assert machine.next_ready(9 * MS) == (Dispatch("no", Prefix.SLOW, None, 0),)
    (start,) = machine.submit(ssd("yes", 4 * MiB, restore_ns_max=4 * MS), 10 * MS)
    assert start.request_id == "yes" and machine.stats()["slow"] == 1


def test_cancelled_prefetches_teach_nothing() -> None:
    machine = scheduler()
    machine.submit(ssd("a", 100), 0)
    machine.started(0, 0)
    machine.cancel("a", 1)
    machine.prefetch_done(0, 2, ssd_bytes=50, dram_bytes=0)
    assert machine.estimate(ssd("b")) is None and machine.stats()["ssd_bytes"] == 50


def test_time_that_steps_back_stands_still() -> None:
    machine = scheduler(prefetches_max=1)
    machine.submit(ssd("busy"), 1_000)
    machine.started(0, 1_000)
    machine.submit(ssd("a", 10, deadline_ns=5_000), 10)
    machine.submit(ssd("b", 5), 0)
    assert machine.tick(0) == ()
    (start,) = end(machine, 0, 999)
    assert start.request_id == "b"  # both have waited for nothing: the smaller
    assert machine.stats()["to_ready_ns"] == 0
    machine.check()


def test_ties_smaller_then_submission() -> None:
    machine = scheduler(prefetches_max=1)
    machine.submit(ssd("busy"), 0)
    for name, size_bytes in (("a", 9), ("b", 5), ("c", 5)):
        machine.submit(ssd(name, size_bytes), 7)
    machine.started(0, 7)
    started = []
    for ticket in range(3):
        (start,) = end(machine, ticket, 7)
        started.append(start.request_id)
        machine.started(ticket + 1, 7)
    assert started == ["b", "c", "a"]


def test_protocol_mistakes_are_named_and_change_nothing() -> None:
    machine = scheduler()
    machine.submit(ssd("a"), 0)
    before = machine.stats()
    mistakes = [
        (ConfigError, "in use", lambda: machine.submit(dram("a"), 0)),
        (ClosedError, "not dispatched", lambda: machine.done("a", 0)),
        (ClosedError, "waits for no answer", lambda: machine.started(1, 0)),
        (ClosedError, "waits for no answer", lambda: machine.pages_refused(1, 0)),
        (ClosedError, "not in flight", lambda: end(machine, 0, 0)),
    ]
    for error, text, mistake in mistakes:
        with pytest.raises(error, match=text):
            mistake()
        machine.check()
        assert machine.stats() == before
    machine.started(0, 0)
    with pytest.raises(ClosedError):
        machine.started(0, 0)
    end(machine, 0, 0)
    with pytest.raises(ClosedError):
        end(machine, 0, 0)
    machine.check()


def test_unknown_requests_may_be_cancelled_and_done() -> None:
    machine = scheduler()
    assert machine.cancel("never", 0) == () and machine.done("never", 0) == ()
    assert machine.stats() == BASELINE


def test_stats_add_up() -> None:
    machine = scheduler(prefetches_max=1)
    machine.submit(ssd("a", 8, pages=2), 0)
    machine.started(0, 10)
    machine.submit(ssd("b", 8), 20)
    machine.submit(dram("c"), 30)
    machine.prefetch_done(0, 110, ssd_bytes=8, dram_bytes=3)
    stats = machine.stats()
    assert (stats["order"], stats["readmit"], stats["ready_when"]) == ("two_queues", "arrival", "whole_prefix")
    assert (stats["waiting"], stats["fetching"], stats["ready"], stats["pages"]) == (0, 1, 2, 2)
    assert (stats["prefetch_wait_ns"], stats["prefetch_ns"]) == (90, 100)
    assert (stats["to_ready_ns"], stats["became_ready"]) == (110, 1)
    assert (stats["ssd_bytes"], stats["dram_bytes"]) == (8, 3)
    machine.next_ready(150)
    machine.done("a", 450)
    stats = machine.stats()
    assert (stats["ready_wait_ns"], stats["service_ns"], stats["done"]) == (40, 300, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"order": "lifo"},
        {"wait_ns_max": -1},
        {"prefetches_max": 0},
        {"window_slots": 2, "restore_slots_max": 3},
        {"pages_held_max": -1},
        {"order": "single_queue", "readmit": "tail"},
        {"pages_retry_ns": 0},
    ],
)
def test_settings_are_checked(settings) -> None:
    with pytest.raises(ConfigError, match="SchedConfig"):
        SchedConfig(**settings)


@pytest.mark.parametrize(
    "field", [{"ssd_bytes": -1}, {"ssd_bytes": 2**48 + 1}, {"dram_bytes": 1.5}, {"pages": -1}, {"deadline_ns": -1}]
)
def test_requests_are_checked(field) -> None:
    with pytest.raises(ConfigError, match="Request"):
        Request(**{"request_id": 0, "ssd_bytes": 0, **field})


def test_every_order_of_ending_three_reads_gives_the_order_of_arrival() -> None:
    for order in itertools.permutations(range(3)):
        machine = scheduler()
        for number in range(3):
            machine.submit(ssd(number), number)
            machine.started(number, number)
        for ticket in order:
            end(machine, ticket, 10)
        assert drain(machine, 11) == [0, 1, 2]
