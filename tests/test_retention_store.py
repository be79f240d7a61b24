"""Retention as a user of the store sees it: deletes under running restores, time to live and budgets over restarts."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatcake.clock import ManualClock
from flatcake.config import RetentionConfig
from flatcake.errors import ClosedError, ConfigError, OwnershipError
from flatcake.gva import Medium
from flatcake.io.memory import Fault
from flatcake.store import TICK_NS, Store
from flatcake.units import SECOND
from flatcake.wear import DAY_NS, DAY_S
from tests.io.test_manifestdb import Steps, full
from tests.stores import (
    CHAT,
    TURNS,
    WAIT_S,
    Memory,
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
    simple_layout,
)
from tests.test_restart import crashed

pytestmark = pytest.mark.usefixtures("no_leaks")

HOUR_S = 3600
TTL_NS = 24 * HOUR_S * SECOND


class Wall(Steps):
    """Files, and a wall clock that may be set."""

    now_s = 1_800_000_000

    def wall_s(self) -> int:
        return self.now_s


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout())


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"


def opened(
    memory: Memory, home: Path, *, files: Wall | None = None, clock: ManualClock | None = None, **retention: Any
) -> Store:
    config = make_config(memory, [home], retention=retention)
    return make_store(memory, config, clock=clock or ManualClock(5 * SECOND), files=files or Wall())


def tick(store: Store, clock: ManualClock, step_ns: int = 2 * TICK_NS) -> None:
    """Let time pass, and the store notice."""
    clock.advance(step_ns)
    for _ in range(3):
        fence(store)
        clock.advance(2 * TICK_NS)
    fence(store)


def blocks(store: Store, *names: str) -> list[int]:
    return [store.match(make_tokens(name, 4)).blocks for name in names]


# -- delete ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("medium", list(Medium))
def test_a_restore_of_a_deleted_session_ends_with_its_bytes_and_then_they_are_free(
    memory: Memory, medium: Medium
) -> None:
    """A case of the catalog of known failures: B15, with a lease."""
    with make_store(memory, make_config(memory, blocks=16, dram_blocks=16)) as store:
        engine, tokens = memory_engine(store, medium), make_tokens("a", 8)
        save(store, memory, "a", tokens, TURNS[medium])
        keys, pages = store.keys(tokens), np.arange(40, 56)
        engine.inject(Fault(kind="delay", verb="read", batches=None))
        with store.lease(store.match(tokens)) as lease:
            running = store.restore(lease, pages)
            fence(store)
            assert store.delete_session("a") == 8 and store.match(tokens).blocks == 0
            assert store.delete_session("a") == 0
            later = store.restore(lease, np.arange(60, 76) % 40, skip_blocks=2)
            for number in range(4):  # No byte that is being read goes to another.
                save(store, memory, f"b{number}", make_tokens(f"b{number}", 4), TURNS[medium], first_page=30)
            assert store.stats().draining_scopes == 1
            engine.heal()
            engine.release()
            assert running.result().blocks == later.result().blocks == 8
        assert memory.stamped_blocks(keys, pages) == 8
        check(store)
        assert save(store, memory, "a", tokens, TURNS[medium]).written_blocks == 8
        assert restore(store, memory, tokens).blocks == 8


def test_a_save_of_a_deleted_session_ends_as_a_refusal(memory: Memory) -> None:
    with make_store(memory) as store:
        engine = memory_engine(store, Medium.SSD)
        engine.inject(Fault(kind="delay", verb="write", batches=None))
        tokens = make_tokens("a", 4)
        late = store.save("a", tokens, np.arange(8))
        fence(store)
        assert store.delete_session("a") == 0
        engine.heal()
        engine.release()
        found = late.result(WAIT_S)
        assert found is not None and (found.written_blocks, found.reason) == (0, "session deleted")
        check(store)
        assert store.match(tokens).blocks == 0 and store.stats().media["ssd"].used_bytes == 0


@pytest.mark.parametrize("how", ["close", "crash"])
def test_a_deleted_session_does_not_come_back(memory: Memory, home: Path, how: str) -> None:
    store = opened(memory, home)
    for name, turn in (("a", TURNS[Medium.SSD]), ("b", CHAT), ("c", TURNS[Medium.SSD])):
        save(store, memory, name, make_tokens(name, 4), turn)
    store.save("a", make_tokens("more", 4), np.arange(8), CHAT).published(WAIT_S)
    assert store.delete_session("a") == 8
    left = crashed(home)
    assert store.delete_session("b") == 4
    store.close()
    home = home if how == "close" else left
    with opened(memory, home) as store:
        assert blocks(store, "a", "b", "c", "more") == [0, 0, 4, 0]
        assert store.delete_session("c") == 4, "by a name that was heard in an earlier run only"
        left = crashed(home, "again")
    with opened(memory, left) as store:
        assert blocks(store, "a", "b", "c") == [0, 0, 0]


def test_a_deletion_that_cannot_be_written_down_says_so(memory: Memory, home: Path) -> None:
    files = Wall()
    with opened(memory, home, files=files) as store:
        save(store, memory, "a", make_tokens("a", 4))
        files.broken = full
        with pytest.raises(OwnershipError, match="delete it again before a restart"):
            store.delete_session("a")
        assert blocks(store, "a") == [0]
        files.broken = lambda statement: None
        assert store.delete_session("a") == 0
        left = crashed(home)
    with opened(memory, left) as store:
        assert blocks(store, "a") == [0]


def test_sessions_are_deleted_while_others_are_saved_and_restored(memory: Memory, home: Path) -> None:
    store, failures, stop = opened(memory, home), list[BaseException](), threading.Event()

    def work(name: int) -> None:
        pages = np.arange(8) + 12 * name
        try:
            for turn in range(25):
                tokens = make_tokens(f"{name} {turn}", 4)
                keys = store.keys(tokens)
                memory.stamp(keys, pages)
                store.save(f"s{turn % 3}", tokens, pages, TURNS[Medium(turn % 2)]).result(WAIT_S)
                memory.stamp(keys ^ np.uint64(1), pages)
                with store.lease(store.match(tokens)) as lease:
                    found = store.restore(lease, pages).result()
                    assert found.blocks == lease.blocks
                    assert memory.stamped_blocks(keys[: found.blocks], pages[: 2 * found.blocks]) == found.blocks
        except BaseException as error:
            failures.append(error)
            raise

    def delete() -> None:
        while not stop.is_set():
            for name in range(3):
                store.delete_session(f"s{name}")

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    deleting = threading.Thread(target=delete)
    for thread in (*threads, deleting):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    deleting.join()
    assert not failures
    for name in range(3):
        store.delete_session(f"s{name}")
    check(store)
    assert all(medium.used_bytes == 0 for medium in store.stats().media.values())
    left = crashed(home)
    store.close()
    with opened(memory, left) as store:
        assert store.stats().blocks == 0


def test_wrong_arguments_are_named(memory: Memory) -> None:
    store = make_store(memory)
    for call in (store.delete_session, store.unpin):
        with pytest.raises(ConfigError, match="session=7: expected text"):
            call(7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="session=None: expected text"):
        store.pin(None, hold_ns=1)  # type: ignore[arg-type]
    for hold_ns in (0, -1, 1.5, "1h"):
        with pytest.raises(ConfigError, match="expected 1 or more nanoseconds"):
            store.pin("a", hold_ns=hold_ns)  # type: ignore[arg-type]
    store.close()
    for after in (store.delete_session, store.unpin, lambda name: store.pin(name, hold_ns=1)):
        with pytest.raises(ClosedError):
            after("a")
    for wrong in ({"ttl_ns": -1}, {"ssd_daily_write_bytes_max": -1}):
        with pytest.raises(ConfigError, match="expected 0 or more"):
            RetentionConfig(**wrong)


# -- time to live ---------------------------------------------------------------------------------------


def test_an_unused_session_goes_with_the_next_tick_and_its_rows_too(memory: Memory, home: Path) -> None:
    clock = ManualClock()
    store = opened(memory, home, clock=clock, ttl_ns=TTL_NS)
    for name, turn in (("a", TURNS[Medium.SSD]), ("b", CHAT), ("used", TURNS[Medium.SSD])):
        save(store, memory, name, make_tokens(name, 4), turn)
    tick(store, clock, TTL_NS // 2)
    restore(store, memory, make_tokens("used", 4))
    tick(store, clock, TTL_NS // 2)
    assert blocks(store, "a", "b", "used") == [0, 0, 4]
    assert store.stats().counts["expired_scopes"] == 2 and store.stats().counts["expired_blocks"] == 8
    check(store)
    manifest = store.keeper.manifest  # type: ignore[union-attr]
    eventually(store, lambda: not manifest._dropped_scopes)
    left = crashed(home)
    store.close()
    with opened(memory, left) as store:
        assert blocks(store, "a", "b", "used") == [0, 0, 4]


@pytest.mark.parametrize("how", ["close", "crash"])
def test_time_to_live_goes_on_while_the_store_is_closed(memory: Memory, home: Path, how: str) -> None:
    files, clock = Wall(), ManualClock()
    store = opened(memory, home, files=files, clock=clock, ttl_ns=TTL_NS)
    save(store, memory, "old", make_tokens("old", 4))
    save(store, memory, "read", make_tokens("read", 4))
    for _ in range(12):
        files.now_s += HOUR_S
        clock.advance(HOUR_S * SECOND)
    restore(store, memory, make_tokens("read", 4))
    save(store, memory, "new", make_tokens("new", 4))
    left = crashed(home)
    store.close()
    place = home if how == "close" else left
    files.now_s += 11 * HOUR_S
    with opened(memory, place, files=files, ttl_ns=TTL_NS) as store:
        assert blocks(store, "old", "read", "new") == [4, 4, 4]
        assert restore(store, memory, make_tokens("old", 4)).blocks == 4
        left = crashed(place, "again")
    place = place if how == "close" else left
    files.now_s += 2 * HOUR_S
    with opened(memory, place, files=files, ttl_ns=TTL_NS) as store:
        # After a crash only what was committed, or known at the last open, is remembered.
        assert blocks(store, "old", "read", "new") == ([4, 4, 4] if how == "close" else [0, 0, 4])
    files.now_s += 40 * HOUR_S
    with opened(memory, place, files=files) as store:
        assert sum(blocks(store, "old", "read", "new")), "without a time to live all stay"
    with opened(memory, place, files=files, ttl_ns=TTL_NS) as store:
        assert store.stats().blocks == 0 and store.stats().counts["expired_blocks"]
        rows = store.keeper.manifest._database.execute("SELECT count(*) FROM turns")  # type: ignore[union-attr]
        assert rows.fetchone()[0] == 0, "nor does their row outlive their bytes"


@pytest.mark.parametrize("how", ["close", "crash"])
@pytest.mark.parametrize("step_s", [-50 * 365 * DAY_S, -2 * DAY_S, 50 * 365 * DAY_S])
def test_a_wall_clock_that_was_set_keeps_nothing_for_ever(memory: Memory, home: Path, how: str, step_s: int) -> None:
    files = Wall()
    files.now_s += step_s  # Wrong while the session was saved, and put right afterwards.
    store = opened(memory, home, files=files, ttl_ns=TTL_NS)
    save(store, memory, "a", make_tokens("a", 4))
    left = crashed(home)
    store.close()
    home = home if how == "close" else left
    files.now_s -= step_s
    with opened(memory, home, files=files, ttl_ns=TTL_NS) as store:
        assert blocks(store, "a") == [4 if step_s > 0 else 0], "from the future: as if it was used now"
        left = crashed(home, "again")
    home = home if how == "close" else left
    files.now_s += 25 * HOUR_S
    with opened(memory, home, files=files, ttl_ns=TTL_NS) as store:
        assert blocks(store, "a") == [0]


def test_time_to_live_reaches_what_other_identities_left(memory: Memory, home: Path) -> None:
    files, clock = Wall(), ManualClock()
    with opened(memory, home, files=files) as store:
        save(store, memory, "a", make_tokens("a", 4))
    config = make_config(memory, [home], retention={"ttl_ns": TTL_NS})
    other = make_identity(memory, model="other")
    with make_store(memory, config, identity=other, clock=clock, files=files) as store:
        save(store, memory, "b", make_tokens("b", 4))
        tick(store, clock, TTL_NS - 10 * SECOND)
        assert store.stats().media["ssd"].foreign_bytes > 0
        restore(store, memory, make_tokens("b", 4))
        tick(store, clock, 20 * SECOND)
        assert store.stats().media["ssd"].foreign_bytes == 0 and blocks(store, "b") == [4]
        check(store)
    with opened(memory, home, files=files) as store:
        assert blocks(store, "a") == [0]


# -- pins -----------------------------------------------------------------------------------------------


def test_a_pinned_session_is_there_when_all_others_are_reclaimed(memory: Memory) -> None:
    clock = ManualClock()
    with make_store(memory, make_config(memory, blocks=32), clock=clock) as store:
        prompt = make_tokens("prompt", 4)
        save(store, memory, "parent", prompt)
        save(store, memory, "a", branch(prompt, "a", 2))
        assert store.pin("a", hold_ns=60 * SECOND) == 6 and store.pin("nobody", hold_ns=1) == 0
        for number in range(20):
            assert not save(store, memory, f"s{number}", make_tokens(number, 4)).reason
        assert restore(store, memory, branch(prompt, "a", 2)).blocks == 6
        assert store.stats().counts["reclaimed_pinned_scopes"] == 0 < store.stats().counts["reclaimed_scopes"]
        clock.advance(60 * SECOND)
        for number in range(20, 40):
            assert not save(store, memory, f"s{number}", make_tokens(number, 4)).reason
        assert store.match(branch(prompt, "a", 2)).blocks == 4, "the shared prompt is in DRAM by now"
        check(store)


def test_a_pin_ends_with_the_process(memory: Memory, home: Path) -> None:
    with opened(memory, home) as store:
        save(store, memory, "a", make_tokens("a", 4))
        assert store.pin("a", hold_ns=1 << 60) == 4
    with opened(memory, home) as store:
        assert all(scope.kept_until_ns < 0 for scope in store.catalog.space.scopes)
        assert store.pin("a", hold_ns=1 << 60) == 4


# -- wear -----------------------------------------------------------------------------------------------


def written(store: Store) -> dict[str, int]:
    return {name: medium.written_bytes for name, medium in store.stats().media.items()}


def test_bytes_written_are_counted_since_the_directory_was_made(memory: Memory, home: Path) -> None:
    total = {"dram": 0, "ssd": 0}
    for run in range(3):
        with opened(memory, home) as store:
            assert written(store) == total
            for name, turn in ((f"ssd {run}", TURNS[Medium.SSD]), (f"dram {run}", CHAT)):
                before, pieces = written(store), 4 * store.geometry.block_bytes
                save(store, memory, name, make_tokens(name, 4), turn)
                medium = name.split()[0]
                came = written(store)[medium] - before[medium]
                assert pieces < came <= pieces + 8192, "the pieces, and their checksums"
                save(store, memory, name, make_tokens(name, 4), turn)
                assert written(store) == before | {medium: before[medium] + came}
            left, total = crashed(home), written(store)
            dumped = sum(
                store.catalog.space.scope_bytes(scope)
                for scope in store.catalog.space.scopes
                if scope.medium is Medium.DRAM
            )
        total["ssd"] += dumped
    with opened(memory, left) as store:
        found = written(store)
        assert found["dram"] < total["dram"] or found == total | {"ssd": total["ssd"] - dumped}
        assert total["ssd"] - dumped == found["ssd"]


def test_a_damaged_record_of_wear_starts_anew(memory: Memory, home: Path) -> None:
    with opened(memory, home) as store:
        save(store, memory, "a", make_tokens("a", 4))
    with opened(memory, home) as store:
        assert written(store)["ssd"] > 0
        store.keeper.manifest._database.execute("UPDATE state SET body = x'00' WHERE number = 64")  # type: ignore[union-attr]
        left = crashed(home)
    with opened(memory, left) as store:
        assert written(store)["ssd"] == 0 and blocks(store, "a") == [4]


def test_the_budget_refuses_what_is_beyond_it_over_restarts_too(memory: Memory, home: Path) -> None:
    files, clock = Wall(), ManualClock()
    extent_bytes = 4 * simple_block_bytes(memory)
    daily = {"ssd_daily_write_bytes_max": 3 * extent_bytes}

    def spend(store: Store, *names: str) -> list[str]:
        return [save(store, memory, name, make_tokens(name, 4)).reason for name in names]

    with opened(memory, home, files=files, clock=clock, **daily) as store:
        assert store.stats().ssd_write_budget_bytes == 3 * extent_bytes
        assert spend(store, "a", "b", "c") == ["", "", "SSD write budget"]
        assert not save(store, memory, "dram", make_tokens("dram", 4), CHAT).reason
        assert store.stats().counts["refused: SSD write budget"] == 1
        clock.advance(DAY_NS // 3)
        assert spend(store, "c", "d") == ["", "SSD write budget"]
        left_bytes = store.stats().ssd_write_budget_bytes
    with opened(memory, home, files=files, **daily) as store:
        assert store.stats().ssd_write_budget_bytes == left_bytes
        assert spend(store, "d") == ["SSD write budget"]
    files.now_s -= 10 * DAY_S
    with opened(memory, home, files=files, **daily) as store:
        assert spend(store, "d") == ["SSD write budget"]
    files.now_s += 30 * DAY_S
    with opened(memory, home, files=files, **daily) as store:
        assert store.stats().ssd_write_budget_bytes == 3 * extent_bytes
        assert spend(store, "d", "e", "f") == ["", "", "SSD write budget"]
    with opened(memory, home, files=files) as store:
        assert store.stats().ssd_write_budget_bytes is None and spend(store, "f") == [""]
        check(store)


def simple_block_bytes(memory: Memory) -> int:
    return memory.kv.geometry(memory.layout.block_tokens).block_bytes
