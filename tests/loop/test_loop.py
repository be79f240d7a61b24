"""The serving loop over a real store: who is handed out when, with what, and that nothing is left behind."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flatcake
from flatcake.clock import ManualClock
from flatcake.errors import ClosedError, ConfigError, PageTableError, ShapeError
from flatcake.gva import Medium
from flatcake.io.memory import Fault, MemoryEngine
from flatcake.loop.loop import Loop
from flatcake.loop.ready import Ready
from flatcake.loop.request import LoopOptions, LoopRequest, as_table, sched_config
from flatcake.sched.actions import Prefix
from flatcake.sched.settings import SchedConfig
from flatcake.store import Store
from flatcake.units import MS, SECOND
from tests.stores import (
    CHAT,
    ONE_SHOT,
    WAIT_S,
    Memory,
    Pages,
    branch,
    check,
    eventually,
    fence,
    make_config,
    make_store,
    make_tokens,
    memory_engine,
    save,
    simple_layout,
)

FIRST_PAGE = 32
"""Pages below are those that `save` stamps; the engine's free pages begin here."""


class Pool:
    """The engine's free pages; asserts that none is in two hands."""

    def __init__(self, first: int, count: int) -> None:
        self.free = list(range(first, first + count))
        self.out: set[int] = set()
        self.asked: list[int] = []
        self.fault: Exception | None = None
        self._lock = threading.Lock()

    def take(self, count: int) -> list[int] | None:
        with self._lock:
            self.asked.append(count)
            if self.fault is not None:
                raise self.fault
            if count > len(self.free):
                return None
            taken = [self.free.pop() for _ in range(count)]
            self.out |= set(taken)
            return taken

    def give_back(self, pages: Pages) -> None:
        with self._lock:
            assert set(pages.tolist()) <= self.out, "given back, but not taken"
            self.out -= set(pages.tolist())
            self.free += pages.tolist()

    def hide(self) -> list[int]:
        """Leave no page free; give the list back to `free` later."""
        with self._lock:
            hidden, self.free = self.free, []
            return hidden


class World:
    """A store over memory engines, an engine's pages, and a loop."""

    def __init__(self, config: dict[str, Any], options: dict[str, Any], pages: int) -> None:
        self.memory = Memory(simple_layout(page_count=FIRST_PAGE + pages))
        self.clock = ManualClock(1)
        self.store = make_store(self.memory, make_config(self.memory, dram_blocks=64), clock=self.clock)
        self.ssd = memory_engine(self.store, Medium.SSD)
        self.dram = memory_engine(self.store, Medium.DRAM)
        self.pool = Pool(FIRST_PAGE, pages)
        self.loop = Loop(
            self.store,
            sched_config(self.store, **config),
            pages=self.pool,
            clock=self.clock,
            options=LoopOptions(**options),
        )

    def has_dropped(self) -> bool:
        """Whether no restore owns its pages any more."""
        return all(restore.done() for restore in [*self.store.plane._restores.values()])

    def stored(self, name: str, blocks: int = 4, turn: Any = ONE_SHOT) -> Pages:
        """Tokens of a sequence that is saved now."""
        tokens = make_tokens(name, blocks)
        assert not save(self.store, self.memory, name, tokens, turn).reason
        return tokens

    def submit(self, tokens: Pages, **fields: Any) -> int:
        return self.loop.submit(LoopRequest(tokens=tokens, **fields))

    def next(self, timeout_s: float = WAIT_S) -> Ready:
        ready = self.loop.next_ready(timeout_s)
        assert ready is not None, "nothing became ready"
        return ready

    def delay(self, engine: MemoryEngine, kind: Any = "delay", **fields: Any) -> None:
        engine.inject(Fault(kind=kind, verb="read", batches=None, **fields))

    def release(self, *engines: MemoryEngine) -> None:
        for engine in engines or (self.ssd, self.dram):
            engine.heal()
            engine.release()
            engine.let_go()

    def until(self, what: Callable[[], bool]) -> None:
        eventually(self.store, what)

    def settle(self) -> None:
        """Let the loop's thread do all that it has been told until now."""
        before = self.stat("requests")
        self.loop.cancel(self.submit(make_tokens("a miss", 0)))
        self.until(lambda: self.stat("requests") == before)

    def stat(self, name: str) -> Any:
        return self.loop.stats()[name]

    def assert_holds(self, ready: Ready, tokens: Pages, blocks: int) -> None:
        """The leading pages hold what the store was given for these tokens."""
        found = ready.result()
        keys = self.store.keys(tokens)[:blocks]
        pages = ready.pages[: blocks * self.memory.layout.pages_per_block]
        assert (found.blocks, found.tokens) == (blocks, blocks * 8)
        assert self.memory.stamped_blocks(keys, pages) == blocks

    def assert_silent(self) -> None:
        """Nothing is left of any request."""
        self.until(lambda: not self.stat("requests"))
        stats = self.loop.stats()
        for name in ("waiting", "fetching", "ready", "running", "ended", "prefetches", "slots", "pages", "restores"):
            assert stats[name] == 0, stats
        assert stats["submitted"] == stats["forgotten"]
        assert not self.pool.out
        self.loop.check()
        check(self.store)


Build = Callable[..., World]


@pytest.fixture
def build() -> Iterator[Build]:
    """Makes a world; at the end nothing may be left in it."""
    made: list[World] = []

    def make(*, pages: int = 64, options: dict[str, Any] | None = None, **config: Any) -> World:
        made.append(World(config, options or {}, pages))
        return made[-1]

    yield make
    for world in made:
        world.release()
        world.assert_silent()
        assert world.loop.close() and world.loop.close()
        assert world.store.close()


# -- what is handed out -----------------------------------------------------------------------------------


def test_a_prefix_on_ssd_is_in_the_pages_when_it_is_handed_out(build: Build) -> None:
    world = build()
    tokens = world.stored("a")
    number = world.submit(branch(tokens, "new", 1), session="a", note="mine")
    ready = world.next()
    assert (ready.request_id, ready.prefix, ready.tokens, ready.recompute) == (number, Prefix.FETCHED, 32, False)
    assert (ready.request.session, ready.request.note) == ("a", "mine")
    assert ready.is_restored and all(ready.wait_layer(layer, verified=True) for layer in range(3))
    assert len(ready.pages) == 10 and set(ready.pages.tolist()) == world.pool.out
    world.assert_holds(ready, tokens, 4)
    world.loop.done(ready)


def test_a_prefix_in_dram_is_restored_from_its_hand_out_on(build: Build) -> None:
    world = build()
    tokens = world.stored("a", turn=CHAT)
    world.delay(world.dram)
    world.submit(tokens, pages=11)
    assert not world.pool.asked
    ready = world.next()
    assert (ready.prefix, ready.tokens, len(ready.pages)) == (Prefix.DRAM, 32, 11)
    assert not ready.is_restored and not ready.recompute
    world.release()
    assert ready.wait_layer(2)
    world.assert_holds(ready, tokens, 4)
    world.loop.done(ready)
    assert not world.ssd.calls[1:] or all(call.verb == "write" for call in world.ssd.calls)


def test_a_hybrid_prefix_is_one_restore(build: Build) -> None:
    world = build()
    prompt = world.stored("prompt", 3, turn=CHAT)
    tokens = branch(prompt, "history", 2)
    assert not save(world.store, world.memory, "other", tokens).reason
    assert world.store.match(tokens).tokens_on(Medium.DRAM) == 24
    world.submit(tokens)
    ready = world.next()
    assert ready.prefix is Prefix.FETCHED
    world.assert_holds(ready, tokens, 5)
    world.loop.done(ready)
    block_bytes = world.store.geometry.block_bytes
    assert (world.stat("dram_bytes"), world.stat("ssd_bytes")) == (3 * block_bytes, 2 * block_bytes)


def test_a_request_of_which_nothing_is_stored_gets_its_pages_alone(build: Build) -> None:
    world = build()
    world.submit(make_tokens("new", 2, more=1))
    ready = world.next()
    assert (ready.prefix, ready.tokens, ready.recompute, len(ready.pages)) == (Prefix.DRAM, 0, False, 5)
    assert ready.wait_layer(0) and (ready.result().blocks, ready.result().reason) == (0, "")
    world.loop.done(ready)


def test_keys_stand_for_tokens(build: Build) -> None:
    world = build()
    tokens = world.stored("a")
    world.submit(world.store.keys(tokens))
    ready = world.next()
    assert len(ready.pages) == 8
    world.assert_holds(ready, tokens, 4)
    world.loop.done(ready)


def test_another_salt_hits_nothing(build: Build) -> None:
    world = build()
    world.submit(world.stored("a"), salt=b"tenant")
    ready = world.next()
    assert ready.tokens == 0
    world.loop.done(ready)


# -- who is handed out when -------------------------------------------------------------------------------


def test_a_prefetch_that_ends_is_delivered_without_another_arrival(build: Build) -> None:
    world = build()
    tokens = world.stored("a")
    world.delay(world.ssd)
    world.submit(tokens)
    found: list[Ready | None] = []
    waiter = threading.Thread(target=lambda: found.append(world.loop.next_ready(WAIT_S)))
    waiter.start()
    world.until(lambda: world.ssd.held > 0)
    assert world.loop.next_ready(0) is None and not found
    world.release()
    waiter.join(WAIT_S)
    assert found and found[0] is not None
    world.assert_holds(found[0], tokens, 4)
    world.loop.done(found[0])


def test_a_dram_hit_passes_a_restore_that_reads_and_a_finished_one_keeps_its_place(build: Build) -> None:
    world = build()
    slow, quick = world.stored("slow"), world.stored("quick", turn=CHAT)
    world.delay(world.ssd)
    first, second, third = world.submit(slow), world.submit(quick), world.submit(quick)
    assert world.next().request_id == second
    world.release()
    world.until(lambda: world.stat("ready") == 2)
    assert [world.next().request_id for _ in range(2)] == [first, third]
    for number in (first, second, third):
        world.loop.done(number)


def test_a_restore_that_reads_leaves_window_slots_to_a_dram_hit(build: Build) -> None:
    world = build()
    slow, quick = world.stored("slow"), world.stored("quick", turn=CHAT)
    world.delay(world.ssd)
    first, second = world.submit(slow), world.submit(quick)
    world.until(lambda: world.ssd.held > 0)
    ready = world.next()
    assert ready.request_id == second
    world.assert_holds(ready, quick, 4)  # while the other still reads
    assert world.ssd.held == world.loop.stats()["slots"] < world.store.plane.parts.window.slots
    world.release()
    for number in (first, second):
        world.loop.cancel(number)


def test_single_queue_keeps_a_dram_hit_behind_a_restore(build: Build) -> None:
    world = build(order="single_queue")
    slow, quick = world.stored("slow"), world.stored("quick", turn=CHAT)
    world.delay(world.ssd)
    first, second = world.submit(slow), world.submit(quick)
    world.until(lambda: world.ssd.held > 0)
    assert world.loop.next_ready(0) is None
    world.release()
    assert [world.next().request_id for _ in range(2)] == [first, second]
    assert world.stat("order") == "single_queue"
    world.loop.done(first)
    world.loop.done(second)


@pytest.mark.parametrize(("order", "started"), [("two_queues", "small"), ("fifo_prefetch", "large")])
def test_the_order_of_prefetches_is_a_setting(build: Build, order: str, started: str) -> None:
    world = build(order=order, prefetches_max=1, wait_ns_max=0)
    stored = {"blocker": world.stored("blocker"), "large": world.stored("large", 8), "small": world.stored("small", 1)}
    world.delay(world.ssd)
    for tokens in stored.values():
        world.submit(tokens)
        world.clock.advance(MS)
    world.until(lambda: world.ssd.held > 0)
    world.clock.advance(SECOND)
    world.release()
    ready = [world.next() for _ in range(3)]
    assert world.pool.asked == [8, *([2, 16] if started == "small" else [16, 2])]
    assert (world.stat("order"), world.stat("readmit")) == (order, "arrival")
    for each in ready:
        world.loop.done(each)


def test_a_finished_prefetch_goes_to_the_tail_without_readmission(build: Build) -> None:
    world = build(readmit="tail")
    slow, quick = world.stored("slow"), world.stored("quick", turn=CHAT)
    world.delay(world.ssd)
    first, second = world.submit(slow), world.submit(quick)
    world.clock.advance(MS)
    world.release()
    world.until(lambda: world.stat("ready") == 2)
    assert [world.next().request_id for _ in range(2)] == [second, first]
    world.loop.done(first)
    world.loop.done(second)


def test_under_first_layers_the_rest_streams_while_it_is_computed(build: Build) -> None:
    world = build(ready_when="first_layers")
    tokens = world.stored("a")
    world.delay(world.ssd, first=1)
    world.submit(tokens)
    ready = world.next()
    assert ready.prefix is Prefix.STREAMING and ready.wait_layer(0) and not ready.is_restored
    world.release()
    assert ready.wait_layer(2, verified=True)
    world.assert_holds(ready, tokens, 4)
    world.loop.done(ready)


def test_how_many_layers_are_enough_is_an_option(build: Build) -> None:
    world = build(ready_when="first_layers", options={"first_layers": 2})
    tokens = world.stored("a")
    world.delay(world.ssd, first=1)
    world.submit(tokens)
    world.until(lambda: world.ssd.held > 0)
    assert world.loop.next_ready(0) is None
    world.release()
    world.loop.done(world.next())


# -- leases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [ONE_SHOT, CHAT])
def test_blocks_are_pinned_from_submit_on(build: Build, turn: Any) -> None:
    world = build()
    tokens = world.stored("kept", turn=turn)
    hidden = world.pool.hide()
    world.submit(tokens)
    assert world.store.stats().leases == 1
    for number in range(40):
        save(world.store, world.memory, f"new {number}", make_tokens(number, 8), turn)
    assert world.store.stats().counts["reclaimed_scopes"] > 0
    world.pool.free = hidden
    world.loop.pages_freed()
    ready = world.next()
    world.assert_holds(ready, tokens, 4)
    world.loop.done(ready)


def test_a_lease_that_has_ended_is_a_miss(build: Build) -> None:
    world = build(options={"lease_ns": 5 * SECOND})
    tokens = world.stored("a")
    hidden = world.pool.hide()
    world.submit(tokens)
    world.clock.advance(6 * SECOND)
    world.pool.free = hidden
    world.loop.pages_freed()
    ready = world.next()
    assert ready.recompute and (ready.result().blocks, ready.result().reason) == (0, "lease expired")
    world.loop.done(ready)


# -- pages ------------------------------------------------------------------------------------------------


def test_a_prefetch_waits_for_pages_and_starts_when_some_are_freed(build: Build) -> None:
    world = build()
    tokens = world.stored("a")
    hidden = world.pool.hide()
    world.submit(tokens)
    world.until(lambda: world.stat("pages_refused") == 1)
    assert world.loop.next_ready(0) is None and world.stat("waiting") == 1
    world.pool.free = hidden
    world.loop.pages_freed()
    world.loop.done(world.next())


def test_a_refusal_is_asked_again_after_its_time(build: Build) -> None:
    world = build(pages_retry_ns=20 * MS)
    tokens = world.stored("a")
    hidden = world.pool.hide()
    world.submit(tokens)
    world.until(lambda: world.stat("pages_refused") == 1)
    world.pool.free = hidden
    world.loop.tick()
    assert world.stat("waiting") == 1
    world.clock.advance(21 * MS)
    world.loop.tick()
    world.loop.done(world.next())


def test_a_dram_hit_without_pages_waits_and_one_that_has_its_pages_goes_first(build: Build) -> None:
    world = build(pages=12)
    on_ssd, in_dram, later = world.stored("ssd"), world.stored("dram", turn=CHAT), world.stored("later", 1)
    world.delay(world.ssd)
    fetched = world.submit(on_ssd)
    world.until(lambda: world.ssd.held > 0)
    hit = world.submit(in_dram)
    assert world.loop.next_ready(0) is None and world.stat("short_of_pages") == 1
    small = world.submit(later)  # would fit, but may not pass the one that waits for pages
    world.until(lambda: world.stat("pages_refused") >= 1)
    world.release()
    ready = world.next()
    assert ready.request_id == fetched and world.loop.next_ready(0) is None
    world.loop.done(ready)
    ready = world.next()
    assert ready.request_id == hit
    world.assert_holds(ready, in_dram, 4)
    world.loop.done(ready)
    ready = world.next()
    assert ready.request_id == small
    world.loop.done(ready)


def test_pages_that_are_taken_back_return_and_the_request_waits_again(build: Build) -> None:
    world = build(pages=8)
    tokens = world.stored("a")
    number = world.submit(tokens)
    world.until(lambda: world.stat("ready") == 1)
    world.loop.take_back(3)
    world.until(lambda: len(world.pool.free) == 8)
    assert world.stat("taken_back") == 1
    assert world.loop.next_ready(0) is None and world.pool.asked == [8]  # they are the engine's now
    world.loop.pages_freed()
    ready = world.next()
    assert ready.request_id == number and world.stat("prefetches_started") == 2
    world.assert_holds(ready, tokens, 4)
    world.loop.done(ready)


def test_pages_taken_back_under_a_read_return_when_nothing_writes_to_them(build: Build) -> None:
    world = build(pages=8)
    tokens = world.stored("a")
    world.delay(world.ssd)
    world.submit(tokens)
    world.until(lambda: world.ssd.held > 0)
    world.loop.take_back(8)
    world.settle()
    assert not world.pool.free
    before = world.memory.snapshot()
    world.release()
    world.until(lambda: len(world.pool.free) == 8)
    assert world.memory.is_equal(before)
    world.loop.pages_freed()
    ready = world.next()
    assert not world.memory.is_equal(before)  # by the second read
    world.assert_holds(ready, tokens, 4)
    assert world.stat("prefetches_started") == 2
    world.loop.done(ready)


def test_the_engine_may_keep_the_pages(build: Build) -> None:
    world = build()
    tokens = world.stored("a", turn=CHAT)
    world.delay(world.dram)
    world.submit(tokens)
    ready = world.next()
    with pytest.raises(ClosedError, match="still being restored; ask result"):
        world.loop.done(ready, keep_pages=True)
    world.release()
    ready.result()
    world.loop.done(ready, keep_pages=True)
    world.loop.done(ready)
    world.until(lambda: not world.stat("requests"))
    assert world.pool.out == set(ready.pages.tolist())
    world.pool.give_back(ready.pages)


# -- errors of the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [ONE_SHOT, CHAT])
def test_what_a_callback_raises_reaches_next_ready_and_the_request_waits(build: Build, turn: Any) -> None:
    world = build()
    tokens = world.stored("a", turn=turn)
    world.pool.fault = RuntimeError("the engine's own")
    world.submit(tokens)
    with pytest.raises(RuntimeError, match="the engine's own"):
        world.next()
    world.pool.fault = None
    world.loop.pages_freed()
    ready = world.next()
    world.assert_holds(ready, tokens, 4)
    world.loop.done(ready)


@pytest.mark.parametrize("turn", [ONE_SHOT, CHAT])
def test_pages_that_the_store_refuses_are_given_back(build: Build, turn: Any) -> None:
    world = build(pages=8)
    tokens = world.stored("a", turn=turn)
    good = world.pool.free
    world.pool.free = [*good[:-1], 10_000]
    world.submit(tokens)
    with pytest.raises(PageTableError, match="10000"):
        world.next()
    world.until(lambda: not world.pool.out)
    world.pool.free = good
    world.loop.pages_freed()
    world.loop.done(world.next())


@pytest.mark.parametrize("pages", [[1, 2], [[1, 2, 3]], ["a", "b", "c"], [0.5, 1.0, 2.0], 3])
def test_a_page_table_is_checked(pages: Any) -> None:
    with pytest.raises(PageTableError, match=r"take\(3\) gave .*: expected 3 page numbers"):
        as_table(pages, 3)


def test_a_page_table_is_copied() -> None:
    mine = np.arange(3)
    table = as_table(mine, 3)
    mine[:] = 7
    assert table.tolist() == [0, 1, 2]


# -- late, slow, failed -----------------------------------------------------------------------------------


def test_a_deadline_makes_a_request_recompute_while_its_read_hangs(build: Build) -> None:
    world = build()
    tokens = world.stored("a")
    world.delay(world.ssd, "hang")
    number = world.submit(tokens, timeout_ns=5 * SECOND)
    world.until(lambda: world.ssd.held > 0)
    world.clock.advance(5 * SECOND)
    world.loop.tick()
    assert world.loop.next_ready(0) is None
    world.clock.advance(1)
    world.loop.tick()
    ready = world.next()
    assert (ready.request_id, ready.prefix, ready.recompute, ready.tokens) == (number, Prefix.LATE, True, 0)
    assert not ready.wait_layer(0) and (ready.result().blocks, ready.result().reason) == (0, "deadline")
    assert world.stat("late") == 1 and len(ready.pages) == 8
    world.until(world.has_dropped)  # Until then the pages of the prefetch may change.
    before = world.memory.snapshot()
    world.release()
    world.until(lambda: not world.stat("prefetches"))
    assert world.memory.is_equal(before)
    world.loop.done(ready)


def test_a_dram_hit_that_waited_for_pages_too_long_is_late(build: Build) -> None:
    world = build(pages_retry_ns=MS)
    tokens = world.stored("a", turn=CHAT)
    hidden = world.pool.hide()
    world.submit(tokens, timeout_ns=5 * SECOND)
    assert world.loop.next_ready(0) is None
    world.clock.advance(6 * SECOND)
    world.pool.free = hidden
    ready = world.next()
    assert ready.prefix is Prefix.LATE and ready.recompute and world.stat("late_at_hand_out") == 1
    world.loop.done(ready)


def test_only_if_faster(build: Build) -> None:
    world = build()
    tokens = world.stored("a")
    request = LoopRequest(tokens=tokens)
    assert world.loop.estimate(request) is None
    world.delay(world.ssd)
    world.submit(tokens)
    world.until(lambda: world.ssd.held > 0)
    world.clock.advance(10 * MS)
    world.release()
    world.loop.done(world.next())
    assert world.loop.estimate(request) == 10 * MS
    assert world.loop.estimate(LoopRequest(tokens=tokens[:16])) == 5 * MS
    world.submit(tokens, restore_ns_max=9 * MS)
    ready = world.next()
    assert ready.prefix is Prefix.SLOW and ready.recompute and not ready.wait_layer(0)
    assert ready.result().reason == "expected to be slow" and len(ready.pages) == 8
    world.loop.done(ready)
    world.submit(tokens, restore_ns_max=10 * MS)
    assert world.next().prefix is Prefix.FETCHED
    world.loop.done(3)
    assert world.stat("slow") == 1


def test_restores_from_dram_teach_the_estimate_too(build: Build) -> None:
    world = build()
    tokens = world.stored("a", turn=CHAT)
    world.delay(world.dram)
    world.submit(tokens)
    ready = world.next()
    world.clock.advance(4 * MS)
    world.release()
    ready.result()
    world.loop.done(ready)
    world.until(lambda: world.stat("dram_restores") == 1)
    assert world.loop.estimate(LoopRequest(tokens=tokens)) == world.stat("dram_restore_ns") == 4 * MS


@pytest.mark.parametrize("turn", [ONE_SHOT, CHAT])
def test_a_failed_read_is_a_miss_that_says_so(build: Build, turn: Any) -> None:
    world = build()
    tokens = world.stored("a", turn=turn)
    world.ssd.inject(Fault(kind="error", verb="read"))
    world.dram.inject(Fault(kind="error", verb="read"))
    world.submit(tokens)
    ready = world.next()
    result = ready.result()
    assert result.blocks == 0 and "read failed" in result.reason and ready.recompute
    assert not ready.wait_layer(0)
    world.loop.done(ready)
    world.until(lambda: world.stat("restores_short") == 1)


@pytest.mark.parametrize("turn", [ONE_SHOT, CHAT])
def test_a_read_that_never_returns_is_given_up(build: Build, turn: Any) -> None:
    world = build(options={"restore_ns": 5 * SECOND, "grace_ns": SECOND})
    tokens = world.stored("a", turn=turn)
    engine = world.ssd if turn is ONE_SHOT else world.dram
    world.delay(engine, "hang")
    world.submit(tokens)
    ready = world.next() if turn is CHAT else None
    world.until(lambda: engine.held > 0)
    world.clock.advance(6 * SECOND)
    world.loop.tick()
    ready = ready or world.next()
    assert ready.result().blocks == 0 and ready.result().reason == "deadline" and ready.recompute
    assert world.stat("restores_given_up") == 1 and not world.stat("restores")
    world.loop.done(ready)
    world.until(lambda: not world.stat("requests"))
    assert not world.pool.out
    before = world.memory.snapshot()
    world.release()
    check(world.store)
    assert world.memory.is_equal(before)


def test_a_reset_makes_what_is_on_its_way_a_miss(build: Build) -> None:
    world = build()
    tokens = world.stored("a")
    world.delay(world.ssd)
    world.submit(tokens)
    world.until(lambda: world.ssd.held > 0)
    world.store.reset()
    world.release()
    ready = world.next()
    assert ready.recompute and ready.result().reason == "reset"
    world.loop.done(ready)


# -- cancel -----------------------------------------------------------------------------------------------


def bring_waiting(world: World) -> int:
    world.pool.fault = None
    world.pool.hide()
    return world.submit(world.stored("a"))


def bring_reading(world: World) -> int:
    tokens = world.stored("a")
    world.delay(world.ssd)
    number = world.submit(tokens)
    world.until(lambda: world.ssd.held > 0)
    return number


def bring_ready(world: World) -> int:
    number = world.submit(world.stored("a"))
    world.until(lambda: world.stat("ready") == 1)
    return number


def bring_short(world: World) -> int:
    world.pool.hide()
    number = world.submit(world.stored("a", turn=CHAT))
    assert world.loop.next_ready(0) is None
    return number


def bring_fetched(world: World) -> Ready:
    bring_ready(world)
    return world.next()


def bring_streaming(world: World) -> Ready:
    tokens = world.stored("a")
    world.delay(world.ssd, first=1)
    world.submit(tokens)
    return world.next()


def bring_dram(world: World) -> Ready:
    tokens = world.stored("a", turn=CHAT)
    world.delay(world.dram)
    world.submit(tokens)
    ready = world.next()
    world.until(lambda: world.dram.held > 0)
    return ready


STATES: dict[str, Callable[[World], Ready | int]] = {
    "waiting": bring_waiting,
    "reading": bring_reading,
    "ready": bring_ready,
    "short": bring_short,
    "fetched": bring_fetched,
    "streaming": bring_streaming,
    "dram": bring_dram,
}
OUT = ("fetched", "streaming", "dram")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("calls", ["cancel", "cancel cancel", "cancel done", "done cancel", "done done cancel"])
def test_cancel_is_safe_in_every_state_in_any_order(build: Build, state: str, calls: str) -> None:
    world = build(ready_when="first_layers" if state == "streaming" else "whole_prefix")
    pages = set(world.pool.free)
    request = STATES[state](world)
    *_, last = names = calls.split()
    for call in names:
        if call == "done" and state not in OUT and not calls.startswith("cancel"):
            with pytest.raises(ClosedError, match="done.1.: not handed out"):
                world.loop.done(request)
        else:
            getattr(world.loop, call)(request)
    world.release()
    world.until(lambda: not world.stat("requests"))
    getattr(world.loop, last)(request)
    assert world.loop.next_ready(0) is None
    assert not world.pool.out and set(world.pool.free) in (pages, set())


def test_the_handle_of_a_cancelled_request_says_so(build: Build) -> None:
    world = build()
    ready = bring_dram(world)
    world.loop.cancel(ready)
    world.until(lambda: ready.is_restored)
    assert not ready.wait_layer(0) and ready.result().reason == "cancelled" and ready.recompute
    assert world.pool.out  # until the read has returned
    world.release()
    world.until(lambda: not world.pool.out)


def test_a_cancelled_hung_read_keeps_its_pages_until_it_is_given_up(build: Build) -> None:
    world = build(options={"restore_ns": 5 * SECOND, "grace_ns": SECOND})
    tokens = world.stored("a")
    world.delay(world.ssd, "hang")
    number = world.submit(tokens)
    world.until(lambda: world.ssd.held > 0)
    world.loop.cancel(number)
    fence(world.store)
    assert world.pool.out and world.stat("requests") == 1
    world.clock.advance(7 * SECOND)
    world.loop.tick()
    world.until(lambda: not world.stat("requests"))
    assert not world.pool.out


def test_ten_thousand_submitted_and_cancelled_leave_nothing(build: Build) -> None:
    world = build()
    keys = [world.store.keys(world.stored("a", 2)), world.store.keys(world.stored("b", 1, CHAT))]
    threads = threading.active_count()
    for number in range(10_000):
        world.loop.cancel(world.submit(keys[number % 2]))
    world.assert_silent()
    assert world.stat("cancelled") == 10_000
    assert threading.active_count() == threads
    assert world.store.stats().leases == 0 and len(world.pool.free) == 64


# -- closing ----------------------------------------------------------------------------------------------


def test_close_releases_waiters_and_gives_everything_back(build: Build) -> None:
    world = build()
    slow, quick = world.stored("slow"), world.stored("quick", turn=CHAT)
    world.submit(quick)
    out = world.next()
    world.delay(world.ssd)
    for _ in range(5):
        world.submit(slow)
    found: list[Ready | None] = []
    waiter = threading.Thread(target=lambda: found.append(world.loop.next_ready()))
    waiter.start()
    world.until(lambda: world.ssd.held > 0)
    closer = threading.Thread(target=world.loop.close)
    closer.start()
    waiter.join(WAIT_S)
    assert found == [None]
    world.release()
    closer.join(WAIT_S)
    assert not closer.is_alive() and not world.pool.out and not world.stat("requests")
    world.loop.done(out)
    world.loop.cancel(out)
    assert world.loop.next_ready() is None
    with pytest.raises(ClosedError, match="the loop is closed"):
        world.submit(slow)


def test_close_leaves_a_hung_read_behind_but_no_pages(build: Build) -> None:
    world = build(options={"close_ns": 10 * MS})
    tokens = world.stored("a")
    world.delay(world.ssd, "hang")
    world.submit(tokens)
    world.until(lambda: world.ssd.held > 0)
    assert not world.loop.close()
    assert not world.pool.out and not world.stat("requests")
    before = world.memory.snapshot()
    world.release()
    check(world.store)
    assert world.memory.is_equal(before)


def test_a_loop_is_a_context_manager(build: Build) -> None:
    world = build()
    with Loop(world.store, pages=world.pool) as loop:
        number = loop.submit(LoopRequest(tokens=world.stored("a")))
        ready = loop.next_ready(WAIT_S)
        assert ready is not None and ready.request_id == number
    assert not world.pool.out
    with pytest.raises(ClosedError):
        loop.submit(LoopRequest(tokens=[1]))


def test_a_store_that_is_closed_first_is_said(build: Build) -> None:
    world = build()
    number = bring_short(world)
    world.store.close()
    world.pool.free = list(range(FIRST_PAGE, FIRST_PAGE + 64))
    world.loop.pages_freed()
    with pytest.raises(ClosedError, match="the store is closed"):
        world.next()
    with pytest.raises(ClosedError, match="the store is closed"):
        world.submit(make_tokens("b", 1))
    world.loop.cancel(number)
    assert world.loop.close()


# -- wrong use, settings, statistics ------------------------------------------------------------------------


def test_wrong_requests_are_refused_and_leave_nothing(build: Build) -> None:
    world = build()
    with pytest.raises(ShapeError):
        world.submit(np.zeros((2, 2), np.int64))
    with pytest.raises(PageTableError, match="LoopRequest.pages=3: expected 0, or at least 4"):
        world.submit(make_tokens("a", 2), pages=3)
    for wrong in ({"pages": -1}, {"timeout_ns": 0.5}, {"restore_ns_max": True}):
        with pytest.raises(ConfigError, match=f"LoopRequest.{next(iter(wrong))}="):
            LoopRequest(tokens=[1], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="LoopOptions.first_layers=0"):
        LoopOptions(first_layers=0)
    with pytest.raises(ClosedError, match="not handed out"):
        world.loop.done(world.submit(make_tokens("a", 1)))
    world.loop.done(12345)
    world.loop.cancel(12345)
    world.loop.cancel(1)
    assert world.stat("submitted") == 1


def test_settings_follow_the_window_and_may_be_changed(build: Build) -> None:
    world = build()
    window = world.store.plane.parts.window
    config = sched_config(world.store)
    assert isinstance(config, SchedConfig) and config.slot_bytes == window.slot_bytes
    assert 1 <= config.restore_slots_max <= config.window_slots < window.slots
    assert sched_config(world.store, prefetches_max=9).prefetches_max == 9
    with pytest.raises(ConfigError, match="order"):
        sched_config(world.store, order="lifo")


def test_statistics_add_up(build: Build) -> None:
    world = build()
    on_ssd, in_dram = world.stored("a"), world.stored("b", turn=CHAT)
    world.delay(world.ssd)
    world.submit(on_ssd)
    world.until(lambda: world.ssd.held > 0)
    world.clock.advance(3 * MS)
    world.submit(in_dram)
    hit = world.next()
    assert hit.waited_ns == 0
    assert (world.stat("fetching"), world.stat("running"), world.stat("waiting")) == (1, 1, 0)
    world.clock.advance(4 * MS)
    world.release()
    assert hit.result().blocks == 4
    world.until(lambda: world.stat("ready") == 1)
    world.clock.advance(2 * MS)
    ready = world.next()
    assert ready.waited_ns == 9 * MS
    world.clock.advance(5 * MS)
    world.loop.done(ready)
    world.loop.done(hit)
    world.until(lambda: not world.stat("requests"))
    stats, block_bytes = world.loop.stats(), world.store.geometry.block_bytes
    assert (stats["to_ready_ns"], stats["became_ready"], stats["ready_wait_ns"]) == (7 * MS, 1, 2 * MS)
    assert stats["prefetch_ns"] == 7 * MS and stats["service_ns"] == 5 * MS + 11 * MS
    assert (stats["ssd_bytes"], stats["dram_bytes"]) == (4 * block_bytes, 4 * block_bytes)
    assert (stats["dispatched"], stats["done"], stats["dram_restores"]) == (2, 2, 1)


def test_public_names_are_reexported() -> None:
    for name in ("Loop", "LoopRequest", "LoopOptions", "EnginePages", "Ready", "Prefix", "SchedConfig", "sched_config"):
        assert name in flatcake.__all__ and hasattr(flatcake, name)


# -- many threads, on a real pool of files -------------------------------------------------------------------


class Server:
    """One of several threads that serve: every prefix that it gets must say what it should."""

    def __init__(self, world: "FileWorld", seed: int) -> None:
        self.world, self.rng = world, np.random.default_rng(seed)
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        try:
            while (ready := self.world.loop.next_ready(WAIT_S)) is not None:
                self.serve(ready)
        except BaseException as error:
            self.errors.append(error)

    def serve(self, ready: Ready) -> None:
        if self.rng.random() < 0.2:
            self.world.loop.cancel(ready)
        else:
            for layer in range(3):
                ready.wait_layer(layer)
            result = ready.result()
            memory = self.world.memory
            pages = ready.pages[: result.blocks * memory.layout.pages_per_block]
            keys = self.world.store.keys(ready.request.tokens)[: result.blocks]
            assert memory.stamped_blocks(keys, pages) == result.blocks
            self.world.delivered += result.blocks
        self.world.loop.done(ready)


class FileWorld:
    """A store on files, and few pages."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.memory = Memory(simple_layout(page_count=FIRST_PAGE + 40))
        self.store: Store = make_store(self.memory, make_config(self.memory, [path]))
        self.pool = Pool(FIRST_PAGE, 40)
        self.loop = Loop(self.store, sched_config(self.store, **config), pages=self.pool)
        self.delivered = 0


@pytest.mark.parametrize("ready_when", ["whole_prefix", "first_layers"])
def test_many_threads_serve_many_requests(tmp_path: Path, ready_when: str) -> None:
    world = FileWorld(tmp_path, ready_when=ready_when, pages_retry_ns=MS)
    stored = [make_tokens(number, 1 + number % 6) for number in range(10)]
    for number, tokens in enumerate(stored):
        save(world.store, world.memory, f"s{number}", tokens, CHAT if number % 3 == 0 else ONE_SHOT)
    servers = [Server(world, seed) for seed in range(3)]
    for server in servers:
        server.thread.start()
    rng = np.random.default_rng(1)
    for step in range(300):
        number = world.loop.submit(
            LoopRequest(tokens=stored[rng.integers(10)], timeout_ns=int(rng.integers(0, 2)) * SECOND)
        )
        if rng.random() < 0.2:
            world.loop.cancel(number)
        if rng.random() < 0.1:
            world.loop.take_back(int(rng.integers(1, 20)))
        if step % 20 == 0:
            world.loop.check()
    eventually(world.store, lambda: not world.loop.stats()["requests"] or any(s.errors for s in servers))
    world.loop.check()
    assert world.loop.close()
    for server in servers:
        server.thread.join(WAIT_S)
        assert not server.thread.is_alive() and not server.errors, server.errors
    assert world.delivered > 100 and not world.pool.out
    stats = world.loop.stats()
    assert stats["submitted"] == stats["forgotten"] == 300
    check(world.store)
    assert world.store.close()
