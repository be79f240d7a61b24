"""The store as users hold it: hits, saves, leases, waits, closing, and what it says of itself."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatcake.assemble import open_store
from flatcake.clock import ManualClock
from flatcake.errors import ClosedError, ConfigError
from flatcake.gva import Medium
from flatcake.io.memory import Fault
from flatcake.io.save import Save
from flatcake.placement import Decision, Turn, TurnSignals
from flatcake.store import TICK_NS, Store
from flatcake.units import MS, SECOND
from tests.stores import (
    CHAT,
    ONE_SHOT,
    TURNS,
    WAIT_S,
    Memory,
    Pages,
    branch,
    check,
    eventually,
    fence,
    make_config,
    make_identity,
    make_store,
    make_tokens,
    memory_engine,
    restore,
    save,
    shuffled,
    simple_layout,
)


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout())


@pytest.fixture
def store(memory: Memory):
    with make_store(memory) as opened:
        yield opened
        check(opened)


def written_bytes(store: Store) -> int:
    return sum(size for name, size in store.stats().counts.items() if "write_bytes" in name)


# -- hits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("medium", list(Medium))
def test_a_saved_sequence_is_restored_from_its_medium(store: Store, memory: Memory, medium: Medium) -> None:
    tokens = make_tokens("a", 6, more=3)
    assert store.match(tokens).blocks == 0
    saved = save(store, memory, "s", tokens, TURNS[medium])
    assert (saved.blocks, saved.written_blocks, saved.reason) == (6, 6, "")
    match = store.match(tokens)
    assert (match.blocks, match.tokens, match.tokens_on(medium)) == (6, 48, 48)
    assert match.size_bytes == 6 * store.geometry.block_bytes
    result = restore(store, memory, tokens)
    assert (result.blocks, result.tokens, result.reason) == (6, 48, "")
    counts = store.stats().counts
    assert counts[f"blocks_delivered_{medium.name.lower()}"] == counts[f"blocks_saved_{medium.name.lower()}"] == 6


def test_a_longer_request_hits_what_is_stored_of_it(store: Store, memory: Memory) -> None:
    tokens = make_tokens("a", 5)
    save(store, memory, "s", tokens[: 3 * 8])
    assert store.match(tokens).blocks == restore(store, memory, tokens).blocks == 3
    assert store.match(branch(tokens[:16], "other", 4)).blocks == 2
    assert store.match(branch(tokens[:7], "other", 4)).blocks == 0


def test_a_session_that_shares_a_prompt_hits_it_and_writes_only_its_own(store: Store, memory: Memory) -> None:
    prompt = make_tokens("prompt", 4)
    save(store, memory, "one", branch(prompt, "one", 2))
    other = branch(prompt, "two", 3)
    assert restore(store, memory, other).blocks == 4
    saved = save(store, memory, "two", other, Turn(prior_reply_tokens=10_000))
    assert saved.blocks == 7 and not saved.reason
    assert restore(store, memory, other).blocks == 7
    assert restore(store, memory, branch(prompt, "one", 2)).blocks == 6
    assert store.stats().blocks == 4 + 2 + 3


def test_a_sub_agent_replays_its_parents_prefix_without_a_write(store: Store, memory: Memory) -> None:
    parent = make_tokens("parent", 6)
    save(store, memory, "parent", parent, CHAT)
    before = written_bytes(store)
    assert restore(store, memory, parent[:40]).blocks == 5
    saved = save(store, memory, "child", parent[:40], CHAT)
    assert (saved.blocks, saved.written_blocks, saved.reason) == (5, 0, "")
    assert written_bytes(store) == before > 0


def test_saving_what_is_stored_writes_nothing(store: Store, memory: Memory) -> None:
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 6)
    save(store, memory, "s", tokens)
    before, calls = written_bytes(store), len(ssd.calls)
    again = store.save("s", tokens, np.arange(12))
    assert again.reusable(0) and again.result(0) is not None
    assert written_bytes(store) == before and len(ssd.calls) == calls
    longer = save(store, memory, "s", branch(tokens, "more", 1))
    assert longer.written_blocks == 1
    assert written_bytes(store) > before


def test_a_turn_writes_each_of_its_bytes_once(store: Store, memory: Memory) -> None:
    save(store, memory, "s", make_tokens("a", 6))
    assert store.stats().counts["write_bytes:memory"] == 6 * store.geometry.block_bytes


@pytest.mark.parametrize("change", [{"salt": b"tenant"}, {"extra": b"adapter"}])
def test_no_hit_across_salt_or_extra(store: Store, memory: Memory, change: dict[str, bytes]) -> None:
    tokens = make_tokens("a", 4)
    save(store, memory, "s", tokens)
    assert store.match(tokens).blocks == 4
    assert store.match(tokens, **change).blocks == 0
    saved = store.save("s", tokens, np.arange(8), **change).result(WAIT_S)
    assert saved is not None and saved.written_blocks == 4
    assert store.match(tokens, **change).blocks == 4
    assert store.match(tokens, salt=b"another", extra=b"another").blocks == 0


def test_no_hit_across_identities(memory: Memory) -> None:
    tokens = make_tokens("a", 4)
    with make_store(memory) as one, make_store(memory, identity=make_identity(memory, revision="r2")) as two:
        assert (one.keys(tokens) != two.keys(tokens)).all()
        with make_store(memory) as same:
            assert (one.keys(tokens) == same.keys(tokens)).all()


def test_ready_made_keys_stand_for_tokens(store: Store, memory: Memory) -> None:
    tokens = make_tokens("a", 4)
    keys = store.keys(tokens)
    save(store, memory, "s", tokens)
    assert store.match(keys).blocks == 4 and store.match(keys[:3]).blocks == 3


def test_a_request_shorter_than_a_block_is_nothing(store: Store, memory: Memory) -> None:
    tokens = make_tokens("a", 0, more=7)
    saved = save(store, memory, "s", tokens)
    assert (saved.blocks, saved.written_blocks, saved.reason) == (0, 0, "")
    with store.lease(store.match(tokens)) as lease:
        found = store.restore(lease, [])
        assert found.wait_layer(0) and found.result().blocks == 0 and found.result().reason == ""


# -- restores -------------------------------------------------------------------------------------------


def test_skipped_blocks_are_left_alone_and_count_as_good(store: Store, memory: Memory) -> None:
    tokens = make_tokens("a", 6)
    save(store, memory, "s", tokens)
    keys, pages = store.keys(tokens), shuffled(memory, 6)
    memory.fill(seed=1)
    before = memory.snapshot()
    with store.lease(store.match(tokens)) as lease:
        result = store.restore(lease, pages, skip_blocks=2).result()
    assert (result.blocks, result.reason) == (6, "")
    assert memory.stamped_blocks(keys[2:], pages[4:]) == 4
    assert memory.stamped_blocks(keys[:2], pages[:4]) == 0
    assert memory.is_equal(memory.with_pages(before, pages[4:], memory.take(pages[4:])))
    assert store.stats().counts["blocks_delivered_ssd"] == 4


@pytest.mark.parametrize("skip", [6, 7])
def test_skipping_everything_reads_nothing(store: Store, memory: Memory, skip: int) -> None:
    tokens = make_tokens("a", 6)
    save(store, memory, "s", tokens)
    ssd = memory_engine(store, Medium.SSD)
    calls = len(ssd.calls)
    with store.lease(store.match(tokens)) as lease:
        found = store.restore(lease, shuffled(memory, 6), skip_blocks=skip)
        assert found.wait_layer(2, verified=True) and found.result().blocks == 6
        with pytest.raises(ConfigError, match="skip_blocks=-1: expected 0 or more"):
            store.restore(lease, shuffled(memory, 6), skip_blocks=-1)
    assert len(ssd.calls) == calls


def test_layers_become_ready_one_after_another(store: Store, memory: Memory) -> None:
    tokens = make_tokens("a", 4)
    save(store, memory, "s", tokens)
    ssd = memory_engine(store, Medium.SSD)
    ssd.inject(Fault(kind="delay", verb="read", first=1, batches=None))
    keys, pages = store.keys(tokens), shuffled(memory, 4)
    memory.fill(seed=1)
    with store.lease(store.match(tokens)) as lease:
        found = store.restore(lease, pages)
    assert found.wait_layer(0, verified=True) and not found.done()
    fence(store)
    assert ssd.held == 2 and memory.stamped_blocks(keys, pages) == 0
    assert found.layer_event[1] is None and found.layer_event[2] is None
    ssd.release()
    assert found.wait_layer(1) and found.wait_layer(2)
    assert found.result().blocks == memory.stamped_blocks(keys, pages) == 4
    ssd.heal()


def test_restores_beyond_the_limit_wait_for_their_turn(memory: Memory) -> None:
    tokens = make_tokens("a", 4)
    with make_store(memory, make_config(memory, io={"restores_max": 2})) as store:
        save(store, memory, "s", tokens)
        ssd = memory_engine(store, Medium.SSD)
        ssd.inject(Fault(kind="delay", verb="read", batches=None))
        with store.lease(store.match(tokens)) as lease:
            found = [store.restore(lease, np.arange(8 * n, 8 * n + 8)) for n in range(5)]
        fence(store)
        assert store.plane.parts.restores_active == 2
        ssd.heal()
        ssd.release()
        assert [each.result().blocks for each in found] == [4] * 5
        check(store)


def test_restores_that_wait_for_their_turn_keep_their_deadline_and_may_be_reset(memory: Memory) -> None:
    tokens, clock = make_tokens("a", 4), ManualClock()
    with make_store(memory, make_config(memory, io={"restores_max": 1}), clock=clock) as store:
        save(store, memory, "s", tokens)
        ssd = memory_engine(store, Medium.SSD)
        ssd.inject(Fault(kind="hang", verb="read", batches=None))
        with store.lease(store.match(tokens)) as lease:
            first, late, other, last = (
                store.restore(lease, np.arange(8), timeout_ns=limit * SECOND) for limit in (50, 5, 50, 50)
            )
        clock.advance(6 * SECOND)
        assert (late.result().blocks, late.result().reason) == (0, "deadline")
        assert not first.done() and not other.done()
        assert other.cancel().done() and other.result().reason == "cancelled"
        assert store.reset() == 4
        assert first.result().reason == last.result().reason == "reset"
        eventually(store, lambda: store.stats().plans == 1)  # What hangs still holds its plan.
        ssd.heal()
        ssd.let_go()
        check(store)


# -- leases ---------------------------------------------------------------------------------------------


def test_a_lease_pins_blocks_and_may_be_closed_twice(store: Store, memory: Memory) -> None:
    tokens = make_tokens("a", 4)
    save(store, memory, "s", tokens)
    lease = store.lease(store.match(tokens))
    assert (lease.blocks, lease.tokens, store.stats().leases) == (4, 32, 1)
    lease.close()
    lease.close()
    found = store.restore(lease, shuffled(memory, 4))
    assert not found.wait_layer(0) and found.result().blocks == 0 and found.result().reason == "lease expired"
    with store.lease(store.match(tokens)) as lease:
        assert store.restore(lease, shuffled(memory, 4)).result().blocks == 4


def test_a_lease_ends_after_its_time(memory: Memory) -> None:
    tokens, clock = make_tokens("a", 4), ManualClock()
    with make_store(memory, clock=clock) as store:
        save(store, memory, "s", tokens)
        lease = store.lease(store.match(tokens), hold_ns=10 * MS)
        clock.advance(9 * MS)
        assert store.restore(lease, shuffled(memory, 4)).result().blocks == 4
        clock.advance(1 * MS)
        assert store.restore(lease, shuffled(memory, 4)).result().reason == "lease expired"
        clock.advance(TICK_NS)
        eventually(store, lambda: store.stats().leases == 0)
        assert store.stats().counts["leases_expired"] == 1
        check(store)


def test_a_lease_outlives_the_reclaim_of_everything_else(memory: Memory) -> None:
    with make_store(memory, make_config(memory, blocks=16, dram_blocks=0)) as store:
        kept, gone = make_tokens("kept", 4), make_tokens("gone", 4)
        save(store, memory, "kept", kept)
        save(store, memory, "gone", gone)
        with store.lease(store.match(kept)) as lease:
            for number in range(6):
                assert not save(store, memory, f"new {number}", make_tokens(number, 6)).reason
            assert store.match(gone).blocks == 0 and store.match(kept).blocks == 4
            memory.fill(seed=1)
            pages = shuffled(memory, 4)
            assert store.restore(lease, pages).result().blocks == 4
            assert memory.stamped_blocks(store.keys(kept), pages) == 4
        assert store.stats().counts["reclaimed_scopes"] > 0
        check(store)


# -- saves ----------------------------------------------------------------------------------------------


def test_pages_are_reusable_before_the_turn_is_published(store: Store, memory: Memory) -> None:
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 2)
    memory.stamp(store.keys(tokens), np.arange(4))
    ssd.inject(Fault(kind="delay", verb="write", batches=None))
    handle = store.save("s", tokens, np.arange(4))
    assert handle.reusable(WAIT_S)
    fence(store)
    assert ssd.held > 0 and handle.result(0) is None and store.match(tokens).blocks == 0
    memory.fill(seed=1)
    ssd.heal()
    ssd.release()
    assert handle.published(WAIT_S)
    assert restore(store, memory, tokens).blocks == 2


def test_a_deferred_save_touches_nothing_until_it_is_started(store: Store, memory: Memory) -> None:
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 4)
    handle = store.save("s", tokens, np.arange(8), deferred=True)
    fence(store)
    assert not ssd.calls and not handle.reusable(0) and handle.result(0) is None
    memory.stamp(store.keys(tokens), np.arange(8))
    handle.start()
    handle.start()
    assert handle.published(WAIT_S)
    assert restore(store, memory, tokens).blocks == 4


def test_a_deferred_save_that_is_never_started_is_given_up(memory: Memory) -> None:
    tokens, clock = make_tokens("a", 4), ManualClock()
    with make_store(memory, clock=clock) as store:
        used = store.stats().media["ssd"].used_bytes
        handle = store.save("s", tokens, np.arange(8), deferred=True, timeout_ns=5 * SECOND)
        assert store.stats().plans == 1 and store.stats().media["ssd"].used_bytes > used
        clock.advance(6 * SECOND)
        found = handle.result(WAIT_S)
        assert found is not None and (found.written_blocks, found.reason) == (0, "deadline")
        assert handle.reusable(0) and not handle.published(0)
        check(store)
        assert store.stats().media["ssd"].used_bytes == used
        handle.start()
        fence(store)
        assert not memory_engine(store, Medium.SSD).calls and store.match(tokens).blocks == 0
        assert save(store, memory, "s", tokens).written_blocks == 4


def test_saves_beyond_the_limit_are_refused(memory: Memory) -> None:
    with make_store(memory, make_config(memory, io={"saves_max": 2})) as store:
        ssd = memory_engine(store, Medium.SSD)
        ssd.inject(Fault(kind="delay", verb="write", batches=None))
        held = [store.save(f"s{n}", make_tokens(n, 2), np.arange(4)) for n in range(2)]
        refused = store.save("s2", make_tokens(2, 2), np.arange(4)).result(0)
        assert refused is not None and refused.reason == "too many saves under way"
        assert store.stats().counts["refused: too many saves under way"] == 1
        ssd.heal()
        ssd.release()
        assert all(handle.published(WAIT_S) for handle in held)
        check(store)


def test_callers_at_once_never_pass_the_limit_of_saves(memory: Memory) -> None:
    with make_store(memory, make_config(memory, blocks=128, io={"saves_max": 3})) as store:
        memory_engine(store, Medium.SSD).inject(Fault(kind="delay", verb="write", batches=None))
        start, found = threading.Barrier(12), list[Save]()

        def work(name: int) -> None:
            start.wait(WAIT_S)
            for turn in range(4):
                found.append(store.save(f"s{name}", make_tokens(f"{name} {turn}", 2), np.arange(4), deferred=True))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reasons = [handle.result(0) for handle in found]
        assert sum(result is None for result in reasons) == 3 == len(store._saves)
        assert {result.reason for result in reasons if result is not None} == {"too many saves under way"}
        assert store.stats().counts["refused: too many saves under way"] == 45
        for handle in found:
            handle.start()
        memory_engine(store, Medium.SSD).heal()
        fence(store)
        memory_engine(store, Medium.SSD).release()
        assert sum(handle.published(WAIT_S) for handle in found) == 3 and not len(store._saves)
        check(store)


def test_a_save_whose_plan_cannot_be_made_gives_its_place_back(memory: Memory) -> None:
    class Broken:
        def place(self, signals: TurnSignals) -> Decision:
            raise RuntimeError("a placement of the user's")

    config = make_config(memory, io={"saves_max": 1})
    with open_store(config, make_identity(memory), memory.kv, placement=Broken()) as store:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="of the user's"):
                store.save("s", make_tokens("a", 2), np.arange(4))
        assert not len(store._saves) and "refused: too many saves under way" not in store.stats().counts


def test_a_page_table_is_checked_once(memory: Memory) -> None:
    class Table:
        """Counts how often it is looked at."""

        looks = 0

        def __array__(self, dtype: object = None, copy: object = None) -> Pages:
            self.looks += 1
            return np.arange(8)

    with make_store(memory) as store:
        tokens, once, again = make_tokens("a", 4), Table(), Table()
        assert store.save("s", tokens, once).published(WAIT_S)
        with store.lease(store.match(tokens)) as lease:
            assert store.restore(lease, again).result().blocks == 4
        assert once.looks == again.looks == 1


def test_a_turn_that_does_not_fit_is_refused(memory: Memory) -> None:
    with make_store(memory, make_config(memory, blocks=16, dram_blocks=0)) as store:
        found = save(store, memory, "s", make_tokens("a", 30))
        assert (found.blocks, found.written_blocks, found.reason) == (30, 0, "no room")
        assert store.stats().counts["refused: no room"] == 1
        assert save(store, memory, "s", make_tokens("a", 10)).written_blocks == 10
        check(store)


def test_a_later_turn_may_be_written_before_an_earlier_one_of_its_extent(store: Store, memory: Memory) -> None:
    """The record of an extent begins with its first turn, whichever turn is recorded first."""
    tokens = make_tokens("a", 12)
    memory.stamp(store.keys(tokens), np.arange(24))
    save(store, memory, "s", tokens[: 8 * 8])  # The next extent has room for more than a block.
    ssd = memory_engine(store, Medium.SSD)
    ssd.inject(Fault(kind="delay", verb="write", batches=3))
    memory.stamp(store.keys(tokens), np.arange(24))
    first = store.save("s", tokens[: 9 * 8], np.arange(24))
    eventually(store, lambda: ssd.held > 0)
    ssd.heal()
    second = store.save("s", tokens[: 10 * 8], np.arange(24))
    found = second.result(WAIT_S)
    assert found is not None and not found.reason
    ssd.release()
    assert first.published(WAIT_S)
    assert restore(store, memory, tokens).blocks == 10


# -- reset, close ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("medium", list(Medium))
def test_reset_ends_what_is_under_way_and_forgets_everything(memory: Memory, medium: Medium) -> None:
    with make_store(memory) as store:
        engine, tokens = memory_engine(store, medium), make_tokens("a", 4)
        save(store, memory, "s", tokens, TURNS[medium])
        old = store.lease(store.match(tokens))
        engine.inject(Fault(kind="delay", batches=None))
        reading = store.restore(old, np.arange(8))
        writing = store.save("t", make_tokens("b", 4), np.arange(8, 16), TURNS[medium])
        eventually(store, lambda: engine.held >= 2)
        assert store.reset() == 4
        assert (reading.result().blocks, reading.result().reason) == (0, "reset")
        assert not reading.wait_layer(0)
        assert store.match(tokens).blocks == 0 and store.stats().blocks == 0
        assert store.restore(old, np.arange(8)).result().reason == "reset"
        engine.heal()
        engine.release()
        found = writing.result(WAIT_S)
        assert found is not None and (found.written_blocks, found.reason) == (0, "reset")
        old.close()
        check(store)
        assert all(media.used_bytes == 0 for media in store.stats().media.values())
        save(store, memory, "s", tokens, TURNS[medium])
        assert restore(store, memory, tokens).blocks == 4


@pytest.mark.leaves("stores")  # Its transfers return after the pump has ended.
def test_close_ends_every_handle_and_may_be_called_twice(memory: Memory) -> None:
    store = make_store(memory, make_config(memory, io={"restores_max": 1}, timeouts={"close_ns": 200 * MS}))
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 4)
    save(store, memory, "s", tokens)
    ssd.inject(Fault(kind="hang", batches=None))
    match = store.match(tokens)
    with store.lease(match) as lease:
        reading, waiting = store.restore(lease, np.arange(8)), store.restore(lease, np.arange(8))
    writing = store.save("t", make_tokens("b", 2), np.arange(8, 12))
    unstarted = store.save("u", make_tokens("c", 2), np.arange(8, 12), deferred=True)
    eventually(store, lambda: ssd.held >= 2)
    assert not store.close()
    for handle in (reading, waiting):
        assert handle.result().reason == "closed" and not handle.wait_layer(0)
    for pending in (writing, unstarted):
        found = pending.result(0)
        assert found is not None and found.reason == "closed" and pending.reusable(0)
    memory.fill(seed=1)
    before = memory.snapshot()
    ssd.let_go()
    assert memory.is_equal(before), "a read that returned after close reached the pages"
    assert store.close()
    unstarted.start()
    lease.close()
    for call in (
        lambda: store.match(tokens),
        lambda: store.lease(match),
        lambda: store.restore(lease, np.arange(8)),
        lambda: store.save("s", tokens, np.arange(8)),
        store.reset,
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


@pytest.mark.leaves("stores")  # Its pump is stuck until after the close.
def test_close_ends_every_handle_even_when_the_pump_is_stuck(memory: Memory) -> None:
    store = make_store(memory, make_config(memory, timeouts={"close_ns": 50 * MS}))
    tokens, gate = make_tokens("a", 4), threading.Event()
    save(store, memory, "s", tokens)
    store.plane.parts.pump.post(lambda: gate.wait(WAIT_S) and None)
    with store.lease(store.match(tokens)) as lease:
        reading = store.restore(lease, np.arange(8))
    writing = store.save("t", make_tokens("b", 2), np.arange(8, 12))
    assert not store.close()
    found = writing.result(0)
    assert reading.result().reason == "closed" and not reading.wait_layer(0)
    assert found is not None and found.reason == "closed" and writing.reusable(0)
    memory.fill(seed=1)
    before = memory.snapshot()
    gate.set()
    assert store.close() and memory.is_equal(before)


def test_close_waits_for_reads_and_writes_under_way(memory: Memory, tmp_path: Path) -> None:
    store = make_store(memory, make_config(memory, [tmp_path]))
    tokens = make_tokens("a", 4)
    save(store, memory, "s", tokens)
    with store.lease(store.match(tokens)) as lease:
        handles = [store.restore(lease, np.arange(8)) for _ in range(8)]
    assert store.close() and all(handle.done() for handle in handles)


def race_with_close(memory: Memory) -> list[bool]:
    """Two callers go on until the store is closed under them; whether each of their handles ended."""
    store, tokens = make_store(memory), make_tokens("a", 4)
    save(store, memory, "s", tokens)
    ready, ended = threading.Barrier(3), list[bool]()

    def work() -> None:
        lease = store.lease(store.match(tokens))
        ready.wait(WAIT_S)
        try:
            for number in range(50):
                found = store.restore(lease, np.arange(8))
                handle = store.save("t", make_tokens(number, 1), np.arange(8, 10))
                found.result()
                ended.append(handle.result(WAIT_S) is not None and handle.reusable(WAIT_S))
        except ClosedError:
            ended.append(True)
        finally:
            lease.close()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(WAIT_S)
    store.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a handle never ended"
    return ended


@pytest.mark.leaves("stores")  # A save that begins while its store closes is abandoned with its plan.
def test_calls_that_race_with_close_end(memory: Memory) -> None:
    for _ in range(20):
        ended = race_with_close(memory)
        assert ended and all(ended)


# -- layouts, directories, statistics -------------------------------------------------------------------


@pytest.mark.parametrize("turns", [2, 6])
def test_lanes_read_each_layer_once_and_segments_once_a_turn(memory: Memory, turns: int) -> None:
    reads = {}
    tokens = make_tokens("a", 6)
    wide = {"slot_bytes": 1 << 20, "window_bytes_max": 5 << 20, "gap_bytes_limit": 0}
    for kind in ("lanes", "segments"):
        layout = {"kind": kind, "growth_percent": 1000}
        with make_store(memory, make_config(memory, io=wide, layout=layout)) as store:
            save(store, memory, "s", make_tokens("before", 2))
            for turn in range(1, turns + 1):
                assert not save(store, memory, "s", tokens[: turn * 48 // turns]).reason
                save(store, memory, "other", make_tokens(f"other {turn}", 1))
            reads[kind] = restore(store, memory, tokens).reads
            check(store)
    assert reads == {"lanes": 3, "segments": 3 * turns}


def test_the_window_does_not_grow_with_the_context(memory: Memory) -> None:
    with make_store(memory) as store:
        sizes = {store.stats().window_bytes}
        for blocks in (1, 8, 32):
            tokens = make_tokens("a", blocks)
            save(store, memory, "s", tokens)
            assert restore(store, memory, tokens).blocks == blocks
            sizes.add(store.stats().window_bytes)
        assert len(sizes) == 1
        check(store)


def test_several_directories_share_the_pool(memory: Memory, tmp_path: Path) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    with make_store(memory, make_config(memory, homes, blocks=64)) as store:
        sequences = [make_tokens(n, 10) for n in range(5)]
        for number, tokens in enumerate(sequences):
            save(store, memory, f"s{number}", tokens)
        assert [restore(store, memory, tokens).blocks for tokens in sequences] == [10] * 5
        check(store)
    pools = [sorted(home.glob("pool-*.fc")) for home in homes]
    assert [len(files) for files in pools] == [2, 2]
    assert all(any(np.fromfile(file, np.uint8).any() for file in files) for files in pools)


def test_statistics_add_up(store: Store, memory: Memory) -> None:
    empty = store.stats()
    assert empty.blocks == empty.leases == empty.plans == 0 and empty.io_path == "memory"
    save(store, memory, "s", make_tokens("a", 6), ONE_SHOT)
    save(store, memory, "t", make_tokens("b", 4), CHAT)
    restore(store, memory, make_tokens("a", 6))
    restore(store, memory, make_tokens("b", 3))
    stats = store.stats()
    block_bytes = store.geometry.block_bytes
    assert stats.blocks == 10
    assert stats.media["ssd"].payload_bytes == 6 * block_bytes and stats.media["dram"].payload_bytes == 4 * block_bytes
    assert stats.counts["read_bytes:memory"] == 6 * block_bytes and stats.counts["read_bytes:dram"] == 3 * block_bytes
    assert stats.counts["blocks_delivered_ssd"] == 6 and stats.counts["blocks_delivered_dram"] == 3
    assert all(1.0 <= media.space_amplification < 2 for media in stats.media.values())
    assert not any(name.startswith(("refused", "restores", "saves")) for name in stats.counts)


def test_result_comes_after_the_books_are_settled(store: Store, memory: Memory) -> None:
    tokens = make_tokens("a", 4)
    save(store, memory, "s", tokens)
    for number in range(1, 30):
        with store.lease(store.match(tokens)) as lease:
            store.restore(lease, np.arange(8)).result()
        assert store.stats().plans == 0 and store.stats().counts["blocks_delivered_ssd"] == 4 * number


# -- many threads ---------------------------------------------------------------------------------------

CALLERS, STEPS, LONGEST = 16, 40, 5


class Caller:
    """One of many: saves, restores, cancels, looks; every page that it gets must say what it should."""

    def __init__(self, store: Store, memory: Memory, number: int) -> None:
        self.store, self.memory = store, memory
        self.rng = np.random.default_rng(number)
        self.first_page = number * LONGEST * memory.layout.pages_per_block
        self.delivered = 0
        self.errors: list[BaseException] = []

    def run(self) -> None:
        try:
            for _ in range(STEPS):
                tokens = self.tokens()
                pick = self.rng.random()
                if pick < 0.45:
                    self.save(tokens)
                elif pick < 0.98:
                    self.restore(tokens, cancel=self.rng.random() < 0.2)
                else:
                    self.store.reset()
        except BaseException as error:
            self.errors.append(error)

    def tokens(self) -> np.ndarray:
        prompt = make_tokens(f"prompt {self.rng.integers(2)}", 2)
        return branch(prompt, f"session {self.rng.integers(8)}", int(self.rng.integers(0, LONGEST - 1)))

    def save(self, tokens: np.ndarray) -> None:
        keys = self.store.keys(tokens)
        pages = self.first_page + self.rng.permutation(len(keys) * self.memory.layout.pages_per_block)
        self.memory.stamp(keys, pages)
        turn = [ONE_SHOT, CHAT, Turn(index=3, prior_reply_tokens=5000)][self.rng.integers(3)]
        handle = self.store.save(f"s{self.rng.integers(8)}", tokens, pages, turn)
        assert handle.reusable(WAIT_S)
        self.memory.stamp(keys[::-1] ^ np.uint64(1), pages)
        if self.rng.random() < 0.5:
            assert handle.result(WAIT_S) is not None

    def restore(self, tokens: np.ndarray, *, cancel: bool) -> None:
        with self.store.lease(self.store.match(tokens)) as lease:
            keys = lease.entry.keys
            pages = self.first_page + self.rng.permutation(len(keys) * self.memory.layout.pages_per_block)
            self.memory.stamp(keys[::-1] ^ np.uint64(2), pages)
            handle = self.store.restore(lease, pages)
        if cancel:
            handle.cancel()
            mine = [[part.clone() for part in layer] for layer in self.memory.take(pages)]
        result = handle.result()
        self.delivered += result.blocks
        good = result.blocks * self.memory.layout.pages_per_block
        assert self.memory.stamped_blocks(keys[: result.blocks], pages[:good]) == result.blocks
        if cancel:
            again = self.memory.take(pages)
            assert all((a == b).all() for x, y in zip(mine, again, strict=True) for a, b in zip(x, y, strict=True))


def test_many_callers_get_only_what_was_saved_for_their_tokens(tmp_path: Path) -> None:
    memory = Memory(simple_layout(page_count=CALLERS * LONGEST * 2))
    config = make_config(memory, [tmp_path], blocks=24, file_blocks=8, dram_blocks=8)
    with make_store(memory, config) as store:
        callers = [Caller(store, memory, number) for number in range(CALLERS)]
        threads = [threading.Thread(target=caller.run) for caller in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * WAIT_S)
            assert not thread.is_alive(), "a caller never came back"
        for caller in callers:
            for error in caller.errors:
                raise error
        check(store)
        counts = store.stats().counts
        delivered = counts["blocks_delivered_ssd"] + counts["blocks_delivered_dram"]
        assert delivered == sum(caller.delivered for caller in callers) > 0
        assert counts["blocks_delivered_ssd"] > 0 and counts["blocks_delivered_dram"] > 0
        assert counts.get("blocks_failed_checksum", 0) == 0


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda store, lease: store.lease(np.arange(8)), r"match=array.*: expected what `match` has returned"),
        (lambda store, lease: store.lease(store.match(np.arange(8)), hold_ns=-1), r"hold_ns=-1: expected 1 or more"),
        (lambda store, lease: store.restore(store.match(np.arange(8)), [0, 1]), r"lease=.*: expected what `lease`"),
        (lambda store, lease: store.restore(lease, [0, 1], timeout_ns="1s"), r"timeout_ns='1s': expected a whole"),
        (lambda store, lease: store.restore(lease, [0, 1], slots_max=0), r"slots_max=0: expected 1 or more"),
        (lambda store, lease: store.restore(lease, [0, 1], skip_blocks=1.5), r"skip_blocks=1.5: expected 0 or more"),
        (lambda store, lease: store.save("s", np.arange(8), [0, 1], 3), r"turn=3: expected a `flatcake.Turn`"),
        (lambda store, lease: store.save("s", np.arange(8), [0, 1], timeout_ns=0.5), r"timeout_ns=0.5: expected a"),
        (lambda store, lease: store.save(7, np.arange(8), [0, 1]), r"session=7: expected text"),
        (lambda store, lease: store.pin("s", hold_ns=True), r"hold_ns=True: expected 1 or more"),
        (lambda store, lease: store.pin("s", hold_ns=None), r"hold_ns=None: expected 1 or more"),
    ],
)
def test_a_wrong_kind_of_argument_is_named_and_begins_nothing(memory: Memory, call: Any, says: str) -> None:
    with make_store(memory) as store:
        save(store, memory, "a", np.arange(8))
        with store.lease(store.match(np.arange(8))) as lease:
            with pytest.raises(ConfigError, match=says):
                call(store, lease)
            check(store, leases=1)
            assert store.restore(lease, np.array([0, 1]), timeout_ns=np.int64(10**10)).result().blocks == 1
