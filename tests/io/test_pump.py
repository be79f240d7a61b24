"""The pump: order, timers, device events, handlers that fail, and its end."""

import ast
import threading
from functools import partial
from pathlib import Path

import pytest

import flatcake.io.pump
from flatcake.clock import ManualClock
from flatcake.io.device import CpuDevice
from flatcake.io.pump import Pump
from flatcake.io.seam import Files
from tests.fakes import FakeEvent
from tests.stores import SECOND, WAIT_NS, WAIT_S


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def pump(clock: ManualClock):
    made = Pump(CpuDevice(Files()), clock)
    yield made
    assert made.close(WAIT_NS)


def fence(pump: Pump) -> None:
    reached = threading.Event()
    pump.post(reached.set)
    assert reached.wait(WAIT_S)


def test_handlers_run_in_order_on_one_thread_that_is_not_the_callers(pump: Pump) -> None:
    seen: list[tuple[int, bool]] = []
    for number in range(100):
        pump.post(lambda number=number: seen.append((number, pump.on_thread())))
    fence(pump)
    assert seen == [(number, True) for number in range(100)] and not pump.on_thread()


def test_posts_of_many_threads_are_all_run_in_the_order_of_each(pump: Pump) -> None:
    seen: dict[int, list[int]] = {thread: [] for thread in range(4)}
    event = FakeEvent()
    pump.watch(event, event.reach)

    def post(thread: int) -> None:
        for number in range(1000):
            pump.post(partial(seen[thread].append, number))
            if not number % 100:  # The pump waits again and again.
                fence(pump)

    threads = [threading.Thread(target=post, args=(thread,)) for thread in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    fence(pump)
    assert all(numbers == list(range(1000)) for numbers in seen.values())
    event.reach()


def test_no_simple_queue_is_asked_for_a_short_time() -> None:
    """CPython 3.11's waits without an end where its thread loses the processor for longer than that time.

    `get` takes the lock of an empty queue, subtracts what has passed, and takes what is then negative for "no limit".
    With the 50 us of the pump it comes once in some ten thousand waits, and then no device event is looked at any more.
    """
    for path in Path(flatcake.io.pump.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
                assert not any(word.arg == "timeout" for word in node.keywords), f"{path.name}:{node.lineno}"


def test_timers_fire_in_the_order_of_their_times_and_not_before(pump: Pump, clock: ManualClock) -> None:
    seen: list[int] = []
    for when_ns in (30, 10, 20, 10):
        pump.at(when_ns, lambda when_ns=when_ns: seen.append(when_ns))
    fence(pump)
    assert not seen
    clock.advance(19)
    fence(pump)
    assert seen == [10, 10]
    clock.advance(11)
    fence(pump)
    assert seen == [10, 10, 20, 30]


def test_a_timer_that_is_forgotten_in_the_turn_that_set_it_never_fires(pump: Pump) -> None:
    seen: list[str] = []

    def change_mind() -> None:
        pump.forget(pump.at(0, lambda: seen.append("fired")))

    pump.post(change_mind)
    for _ in range(3):
        fence(pump)
    assert not seen


def test_an_event_that_is_reached_calls_at_once(pump: Pump) -> None:
    event, seen = FakeEvent(), list[str]()
    event.reach()

    def look() -> None:
        pump.when(event, lambda: seen.append("event"))
        seen.append("after")

    pump.post(look)
    fence(pump)
    assert seen == ["event", "after"]


def test_events_are_watched_until_they_are_reached(pump: Pump) -> None:
    events, reached = [FakeEvent() for _ in range(3)], [threading.Event() for _ in range(3)]
    for event, flag in zip(events, reached, strict=True):
        pump.post(lambda event=event, flag=flag: pump.when(event, flag.set))
    fence(pump)
    assert not any(flag.is_set() for flag in reached)
    for number in (2, 0, 1):
        events[number].reach()
        assert reached[number].wait(WAIT_S)


def test_events_of_one_line_are_handled_in_their_order(pump: Pump) -> None:
    events, line, seen, last = [FakeEvent() for _ in range(3)], object(), list[int](), threading.Event()

    def watch() -> None:
        for number, event in enumerate(events):
            pump.when(event, lambda number=number: seen.append(number), line)
        pump.when(events[2], last.set, line)

    pump.post(watch)
    fence(pump)
    events[1].reach()
    fence(pump)
    assert not seen
    events[0].reach()
    events[2].reach()
    assert last.wait(WAIT_S) and seen == [0, 1, 2]


def test_a_handler_that_fails_is_logged_told_and_survived(pump: Pump, caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def fail() -> None:
        raise ValueError("a broken handler")

    def on_failure() -> None:
        told.append("told")
        raise ValueError("a broken answer to it")

    pump.on_failure = on_failure
    pump.post(fail)
    pump.at(0, fail)
    fence(pump)
    fence(pump)
    assert told == ["told"] * 2 and caplog.text.count("a handler of the data plane failed") == 4


def test_close_runs_what_was_posted_before_and_nothing_after(clock: ManualClock) -> None:
    pump, seen = Pump(CpuDevice(Files()), clock), list[int]()
    pump.post(lambda: seen.append(1))
    assert pump.close(WAIT_NS)
    pump.post(lambda: seen.append(2))
    assert pump.close(WAIT_NS) and seen == [1]


def test_no_thread_is_taken_for_a_pump_that_has_ended(clock: ManualClock) -> None:
    pump, taken = Pump(CpuDevice(Files()), clock), list[bool]()
    assert not pump.on_thread() and pump.close(WAIT_NS)
    for _ in range(20):  # The system gives a new thread the identity of one that has ended.
        thread = threading.Thread(target=lambda: taken.append(pump.on_thread()))
        thread.start()
        thread.join()
    assert taken == [False] * 20


def test_close_gives_up_on_a_handler_that_does_not_end(clock: ManualClock) -> None:
    pump, gate = Pump(CpuDevice(Files()), clock), threading.Event()
    pump.post(lambda: gate.wait(WAIT_S) and None)
    assert not pump.close(0)
    gate.set()
    assert pump.close(WAIT_NS)


def test_a_fence_waits_for_what_was_posted_before_and_for_nothing_that_never_comes(pump: Pump) -> None:
    gate, done = threading.Event(), list[int]()
    pump.post(lambda: gate.wait(WAIT_S) and done.append(1))
    assert not pump.fence(20_000_000) and not done
    gate.set()
    assert pump.fence(WAIT_NS) and done == [1]
    assert pump.close(WAIT_NS) and pump.fence(WAIT_NS)


@pytest.mark.parametrize("is_slow", [False, True], ids=["quick", "slow"])
def test_slow_handlers_that_were_posted_give_way_to_events(pump: Pump, clock: ManualClock, is_slow: bool) -> None:
    seen: list[str] = []
    event = FakeEvent()

    def begin() -> None:
        pump.when(event, lambda: seen.append("event"))
        pump.post(event.reach)
        for name in ("first", "second"):
            pump.post(lambda name=name: handle(name))

    def handle(name: str) -> None:
        seen.append(name)
        clock.advance(SECOND if is_slow else 0)

    pump.post(begin)
    fence(pump)
    fence(pump)
    assert seen == (["first", "event", "second"] if is_slow else ["first", "second", "event"])
