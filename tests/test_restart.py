"""A store over restarts: after a clean close, after a kill, and with whatever has become of its directory."""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatcake.errors import OwnershipError
from flatcake.gva import Medium
from flatcake.io.dramdump import DUMP
from flatcake.io.manifestdb import MANIFEST
from flatcake.store import Store
from flatcake.units import SECOND
from tests import restart_worker
from tests.fakes import FaultyFiles
from tests.io.test_manifestdb import Steps, full
from tests.stores import (
    CHAT,
    TURNS,
    WAIT_S,
    Memory,
    branch,
    check,
    eventually,
    make_config,
    make_identity,
    make_store,
    make_tokens,
    restore,
    save,
    simple_layout,
)

NIGHTLY = bool(os.environ.get("FLATCAKE_NIGHTLY"))
KILLS = 1000 if NIGHTLY else 20


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout())


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "home"


def opened(memory: Memory, home: Path, identity: Any = None, files: Any = None, **changes: Any) -> Store:
    store = make_store(memory, make_config(memory, [home], **changes), identity=identity, files=files)
    check_all(store)
    return store


def check_all(store: Store) -> None:
    check(store)
    assert store.keeper is not None
    store.keeper.check()
    for table in store.catalog.space.tables.values():
        assert table.used_bytes + table.ranges.free_bytes == table.ranges.size_bytes


def fill(store: Store, memory: Memory, sessions: int = 4, blocks: int = 5) -> None:
    """Two turns of every session, half of them in DRAM."""
    for number in range(sessions):
        for length in (2, blocks):
            saved = save(store, memory, f"s{number}", make_tokens(number, length), TURNS[medium_of(number)])
            assert not saved.reason, saved


def medium_of(number: int) -> Medium:
    return Medium.DRAM if number % 2 else Medium.SSD


def hits(store: Store, memory: Memory, sessions: int = 4, blocks: int = 5) -> list[int]:
    """Blocks delivered of each session; every byte is compared."""
    return [restore(store, memory, make_tokens(number, blocks)).blocks for number in range(sessions)]


def crashed(home: Path, name: str = "crashed") -> Path:
    """What a killed process would leave now."""
    copy = home.parent / name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(home, copy)
    return copy


# -- clean --------------------------------------------------------------------------------------------


def test_after_a_clean_close_everything_hits_on_both_media(memory: Memory, home: Path) -> None:
    store = opened(memory, home)
    fill(store, memory)
    before = {number: store.match(make_tokens(number, 5)).hit.gvas.tolist() for number in range(4)}
    assert store.close()
    for _ in range(3):
        with opened(memory, home) as store:
            assert {n: store.match(make_tokens(n, 5)).hit.gvas.tolist() for n in range(4)} == before
            assert hits(store, memory) == [5] * 4
            counts = store.stats().counts
            assert counts["reopened_blocks_ssd"] == counts["reopened_blocks_dram"] == 10
            assert counts["blocks_delivered_dram"] == 10
            check_all(store)


def test_sessions_go_on_where_they_were(memory: Memory, home: Path) -> None:
    for length in range(1, 9):
        with opened(memory, home) as store:
            for name, turn in (("ssd", TURNS[Medium.SSD]), ("dram", CHAT)):
                saved = save(store, memory, name, make_tokens(name, length), turn)
                assert (saved.written_blocks, saved.reason) == (1, "")
                assert restore(store, memory, make_tokens(name, length)).blocks == length
            assert len(store.catalog.space.scopes) == 2
            check_all(store)


def test_a_shared_prompt_moves_back_to_ssd_by_a_crash_and_stays_in_dram_by_a_close(memory: Memory, home: Path) -> None:
    prompt = make_tokens("prompt", 4)
    store = opened(memory, home)
    for name in "abc":
        save(store, memory, name, branch(prompt, name, 1))
    assert store.match(prompt).hit.blocks_on(Medium.DRAM) == 4 and store.stats().counts["blocks_superseded"] == 4
    with opened(memory, crashed(home)) as after:
        assert after.match(prompt).hit.blocks_on(Medium.SSD) == restore(after, memory, prompt).blocks == 4
    store.close()
    with opened(memory, home) as store:
        assert store.match(prompt).hit.blocks_on(Medium.DRAM) == restore(store, memory, prompt).blocks == 4
        save(store, memory, "d", branch(prompt, "d", 1))
        check_all(store)


def test_two_stores_know_nothing_of_each_other(memory: Memory, tmp_path: Path) -> None:
    for turn in range(2):
        with opened(memory, tmp_path / "a") as a, opened(memory, tmp_path / "b") as b:
            if not turn:
                save(a, memory, "s", make_tokens("a", 3))
                save(b, memory, "s", make_tokens("b", 4))
            for store, own, other, blocks in ((a, "a", "b", 3), (b, "b", "a", 4)):
                assert restore(store, memory, make_tokens(own, 4)).blocks == blocks
                assert store.match(make_tokens(other, 4)).blocks == 0


def test_several_directories_are_one_store_after_a_restart(memory: Memory, tmp_path: Path) -> None:
    config = make_config(memory, [tmp_path / "a", tmp_path / "b"])
    with make_store(memory, config) as store:
        fill(store, memory)
    with make_store(memory, config) as store:
        assert hits(store, memory) == [5] * 4
    swapped = make_config(memory, [tmp_path / "b", tmp_path / "a"])
    with make_store(memory, swapped) as store:
        assert hits(store, memory) == [0] * 4


# -- what never hits ------------------------------------------------------------------------------------


CHANGES: list[dict[str, Any]] = [
    {"weight_version": 1},
    {"revision": "other"},
    {"kv_dtype": "f16"},
    {"model": "n"},
    {"tp_size": 2},
    {"pp_size": 2},
    {"layout": "y"},
    {"format_version": 2},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_nothing_hits_under_another_identity_and_all_is_there_when_the_first_comes_back(
    memory: Memory, home: Path, change: dict[str, Any]
) -> None:
    """A case of the catalog of known failures: B09."""
    with opened(memory, home) as store:
        fill(store, memory)
    with opened(memory, home) as store:
        keys = [store.keys(make_tokens(number, 5)) for number in range(4)]
        assert hits(store, memory) == [5] * 4
    with opened(memory, home, make_identity(memory, **change)) as store:
        assert hits(store, memory) == [0] * 4 and store.stats().blocks == 0
        assert all(store.match(ready).blocks == 0 for ready in keys), "not even by the old keys"
        assert store.stats().counts["reopen: rows of another identity or pool"] == 6, "two turns on SSD are two rows"
        for medium in store.stats().media.values():
            assert medium.foreign_bytes == medium.used_bytes > 0
        save(store, memory, "s1", make_tokens("new", 5))
        save(store, memory, "s1", make_tokens("new in DRAM", 5), CHAT)
        check_all(store)
    with opened(memory, home, make_identity(memory, **change)) as store:
        assert restore(store, memory, make_tokens("new", 5)).blocks == 5
        assert restore(store, memory, make_tokens("new in DRAM", 5)).blocks == 5
    with opened(memory, home) as store:
        assert hits(store, memory) == [5] * 4 and store.match(make_tokens("new", 5)).blocks == 0
        assert save(store, memory, "s1", make_tokens(1, 7), CHAT).written_blocks == 2
        check_all(store)
    with opened(memory, home, make_identity(memory, **change)) as store:
        assert restore(store, memory, make_tokens("new", 5)).blocks == 5
        assert restore(store, memory, make_tokens("new in DRAM", 5)).blocks == 5


def test_dram_of_another_identity_makes_room_and_what_is_left_comes_back(memory: Memory, home: Path) -> None:
    def chats(store: Store, name: str, count: int) -> list[int]:
        return [store.match(make_tokens(f"{name}{n}", 4)).hit.blocks_on(Medium.DRAM) for n in range(count)]

    with opened(memory, home) as store:
        for number in range(6):
            save(store, memory, f"a{number}", make_tokens(f"a{number}", 4), CHAT)
        assert chats(store, "a", 6) == [4] * 6
    other = make_identity(memory, model="n")
    with opened(memory, home, other) as store:
        for number in range(4):  # None of them is idle, but they are nobody's here.
            save(store, memory, f"b{number}", make_tokens(f"b{number}", 4), CHAT)
        assert chats(store, "b", 4) == [4] * 4 and store.stats().media["dram"].foreign_bytes > 0
        check_all(store)
        left = crashed(home)
    with opened(memory, home) as store:
        found = [restore(store, memory, make_tokens(f"a{number}", 4)).blocks for number in range(6)]
        assert found == sorted(found) and set(found) == {0, 4}, "the one used longest ago went first"
        check_all(store)
    with opened(memory, home, other) as store:
        assert [restore(store, memory, make_tokens(f"b{number}", 4)).blocks for number in range(4)] == [4] * 4
    with opened(memory, left) as store:
        assert chats(store, "a", 6) == [0] * 6, "a crash loses DRAM, whoever it is"


@pytest.mark.parametrize("how", ["close", "crash"])
def test_an_engine_of_another_shape_leaves_what_is_stored_alone(memory: Memory, home: Path, how: str) -> None:
    """Components, shard, dtype and pages differ: so do extents, and nothing of the one may be the other's."""
    config = make_config(memory, [home], blocks=96, dram_blocks=0)
    others = [simple_layout(layers=2, dim=40), simple_layout(layers=5, dim=8), simple_layout(block_tokens=16)]
    with make_store(memory, config) as store:
        fill(store, memory)
    used = store.stats().media["ssd"].used_bytes
    for number, layout in enumerate(others):
        for rank in (0, 1):
            other = Memory(layout)
            with make_store(other, replace(config, rank=rank)) as store:
                assert store.stats().blocks == 0 and store.stats().media["ssd"].foreign_bytes >= used
                tokens = make_tokens(f"{number} {rank}", 3, layout.block_tokens)
                assert not save(store, other, "s0", tokens).reason
                assert restore(store, other, tokens).blocks == 3
                check_all(store)
                left = crashed(home)
    config = replace(config, directories=(str(left if how == "crash" else home),))
    with make_store(memory, config) as store:
        assert hits(store, memory) == [5] * 4
        check_all(store)
        for number in range(100, 130):  # Now their room is needed.
            if not store.stats().media["ssd"].foreign_bytes:
                break
            assert not save(store, memory, f"s{number}", make_tokens(number, 5)).reason
        assert store.stats().media["ssd"].foreign_bytes == 0 and hits(store, memory) == [5] * 4
        check_all(store)
    with make_store(Memory(others[0]), config) as store:
        assert store.match(make_tokens("0 0", 3)).blocks == 0, "its bytes were reused"


def test_what_other_identities_left_is_reclaimed_before_anything_else(memory: Memory, home: Path) -> None:
    room: dict[str, Any] = {"blocks": 64, "dram_blocks": 0}
    for name in "abc":
        with opened(memory, home, make_identity(memory, model=name), **room) as store:
            for number in range(3):
                save(store, memory, f"{name}{number}", make_tokens(f"{name}{number}", 4))
    with opened(memory, home, **room) as store:
        assert save(store, memory, "first", make_tokens("first", 4)).written_blocks == 4
        before = store.stats().media["ssd"].foreign_bytes
        for number in range(9):
            assert not save(store, memory, f"n{number}", make_tokens(number, 4)).reason
        assert store.match(make_tokens("first", 4)).blocks == 4
        assert 0 < store.stats().media["ssd"].foreign_bytes < before
        check_all(store)
    found = []
    for name in "abc":
        with opened(memory, home, make_identity(memory, model=name), **room) as store:
            found += [restore(store, memory, make_tokens(f"{name}{number}", 4)).blocks for number in range(3)]
            check_all(store)
    assert found[-3:] == [4, 4, 4] and found == sorted(found) and 0 in found, "the one that is gone longest went first"


def test_a_crash_under_another_identity_loses_nothing_of_the_first(memory: Memory, home: Path) -> None:
    with opened(memory, home, dram_blocks=0, blocks=32) as store:
        fill(store, memory)
    for turn in range(6):
        store = opened(memory, home, make_identity(memory, model=f"n{turn % 2}"), dram_blocks=0, blocks=32)
        for number in range(turn):
            save(store, memory, f"n{number}", make_tokens(f"{turn} {number}", 3))
        left = crashed(home)
        with opened(memory, left, dram_blocks=0, blocks=32) as after:
            for number in range(4):
                found = restore(after, memory, make_tokens(number, 5))
                assert found.blocks in (0, 5) and not found.reason, "reused bytes have no row"
        assert store.close()


def test_reset_and_delete_reach_what_other_identities_left(memory: Memory, home: Path) -> None:
    with opened(memory, home, dram_blocks=0) as store:
        fill(store, memory)
    with opened(memory, home, make_identity(memory, model="n"), dram_blocks=0) as store:
        save(store, memory, "s1", make_tokens("new", 3))
        assert store.delete_session("s1") == 3
        check_all(store)
    with opened(memory, home, dram_blocks=0) as store:
        assert hits(store, memory) == [5, 0, 5, 5]
    with opened(memory, home, make_identity(memory, model="n"), dram_blocks=0) as store:
        assert store.reset() == 0
        assert store.stats().media["ssd"].used_bytes == 0
    with opened(memory, home, dram_blocks=0) as store:
        assert hits(store, memory) == [0] * 4


@pytest.mark.parametrize("how", ["close", "crash"])
def test_reset_outlives_the_process(memory: Memory, home: Path, how: str) -> None:
    files = FaultyFiles()
    store = opened(memory, home, files=files)
    fill(store, memory)
    gate = files.hold("write")
    tokens = make_tokens("late", 3)
    memory.stamp(store.keys(tokens), np.arange(6))
    late = store.save("late", tokens, np.arange(6))
    assert files.arrived.acquire(timeout=WAIT_S)
    assert store.reset() == 20
    left = crashed(home)
    gate.set()
    found = late.result(WAIT_S)
    assert found is not None and found.reason == "reset"
    save(store, memory, "new", make_tokens("new", 3))
    later = crashed(home, "later")
    store.close()
    with opened(memory, left) as after:
        assert hits(after, memory) == [0] * 4 and after.stats().blocks == 0
    for place in (later, home) if how == "crash" else (home,):
        with opened(memory, place) as after:
            assert hits(after, memory) == [0] * 4 and after.match(tokens).blocks == 0
            assert restore(after, memory, make_tokens("new", 3)).blocks == 3


def test_a_reset_that_cannot_be_written_down_says_so(memory: Memory, home: Path) -> None:
    files = Steps()
    with opened(memory, home, files=files) as store:
        fill(store, memory)
        files.broken = full
        with pytest.raises(OwnershipError, match="remove the store's files before a restart"):
            store.reset()
        assert hits(store, memory) == [0] * 4
        files.broken = lambda statement: None
        assert store.reset() == 0
    with opened(memory, home) as store:
        assert hits(store, memory) == [0] * 4


def test_reclaimed_scopes_do_not_come_back(memory: Memory, home: Path) -> None:
    store = opened(memory, home, blocks=32)
    for number in range(24):
        assert not save(store, memory, f"s{number}", make_tokens(number, 4)).reason
    assert store.stats().counts["reclaimed_scopes"] > 8
    before = [store.match(make_tokens(number, 4)).blocks for number in range(24)]
    used = store.stats().media["ssd"].used_bytes
    left = crashed(home)
    store.close()
    for place in (left, home):
        with opened(memory, place, blocks=32) as again:
            assert [restore(again, memory, make_tokens(number, 4)).blocks for number in range(24)] == before
            assert again.stats().media["ssd"].used_bytes == used
            for number in range(24, 40):
                assert not save(again, memory, f"s{number}", make_tokens(number, 4)).reason
            check_all(again)


def test_names_and_salts_are_not_in_the_directory(memory: Memory, home: Path) -> None:
    session, salt = "a very secret session ../../name", b"a very secret salt of a tenant"
    with opened(memory, home) as store:
        tokens = make_tokens("a", 3)
        for turn in TURNS.values():
            memory.stamp(store.keys(tokens, salt=salt), np.arange(6))
            assert store.save(session, tokens, np.arange(6), turn, salt=salt).published(WAIT_S)
            tokens = make_tokens("b", 3)
        left = crashed(home)
    with opened(memory, home) as store:
        assert store.match(make_tokens("a", 3), salt=salt).blocks == 3 and store.match(make_tokens("a", 3)).blocks == 0
        assert store.match(make_tokens("b", 3), salt=salt).blocks == 3
    for path in (*left.iterdir(), *home.iterdir()):
        assert b"secret" not in path.read_bytes() and "secret" not in path.name


# -- crashes --------------------------------------------------------------------------------------------


def test_a_crash_loses_dram_and_saves_in_flight_and_nothing_else(memory: Memory, home: Path) -> None:
    files = FaultyFiles()
    store = opened(memory, home, files=files)
    fill(store, memory)
    gate = files.hold("write")
    tokens = make_tokens(0, 8)
    memory.stamp(store.keys(tokens), np.arange(16))
    late = store.save("s0", tokens, np.arange(16))
    assert files.arrived.acquire(timeout=WAIT_S)
    left = crashed(home)
    gate.set()
    assert late.published(WAIT_S)
    store.close()
    with opened(memory, left) as after:
        assert hits(after, memory, blocks=8) == [5, 0, 5, 0]
        assert save(after, memory, "s0", tokens).written_blocks == 3
        assert restore(after, memory, tokens).blocks == 8
        check_all(after)
    with opened(memory, home) as after:
        assert restore(after, memory, tokens).blocks == 8


def test_a_later_turn_of_an_extent_survives_the_loss_of_an_earlier_one(memory: Memory, home: Path) -> None:
    files = FaultyFiles()
    store = opened(memory, home, files=files, file_blocks=32)
    gate = files.hold("write")
    memory.stamp(store.keys(make_tokens("first", 4)), np.arange(8))
    store.save("s", make_tokens("first", 4), np.arange(8))
    assert files.arrived.acquire(timeout=WAIT_S)
    gate.set()
    files._gates.clear()
    save(store, memory, "s", make_tokens("second", 2), first_page=8)
    left = crashed(home)
    store.close()
    with opened(memory, left, file_blocks=32) as after:
        assert restore(after, memory, make_tokens("second", 2)).blocks == 2
        check_all(after)


def test_whatever_moment_it_is_killed_at_saves_by_many_threads_are_whole(memory: Memory, home: Path) -> None:
    store = opened(memory, home, blocks=160)
    stop, failures = threading.Event(), list[BaseException]()

    def work(name: int) -> None:
        try:
            for turn in range(1, 30):
                tokens = make_tokens(f"{name} {turn // 5}", turn % 5 + 1)
                keys, pages = store.keys(tokens), np.arange(len(tokens) // 8 * 2) + name * 12
                memory.stamp(keys, pages)
                store.save(f"s{name}", tokens, pages, TURNS[medium_of(turn // 5)]).result(WAIT_S)
                if stop.is_set():
                    return
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    total = 0
    for number in range(4):
        left = crashed(home, f"crash{number}")
        other = Memory(simple_layout())
        with opened(other, left, blocks=160) as after:
            for name in range(4):
                for chunk in range(6):
                    tokens = make_tokens(f"{name} {chunk}", 5)
                    wanted = after.match(tokens).blocks
                    found = restore(after, other, tokens)
                    # A file is copied after the manifest, so what was reclaimed in between is a miss by checksum.
                    assert found.blocks == wanted or found.reason
                    total += found.blocks
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures and total
    check_all(store)
    store.close()


@pytest.fixture(scope="module")
def forks() -> Any:
    """Starts processes that have imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.restart_worker"])
    first = context.Process(target=restart_worker.main, args=(None, "", 0, 0, 0))
    first.start()
    first.join()
    return context


@dataclass
class Life:
    """What a killed process said."""

    saved: dict[int, tuple[int, int]]
    """Blocks that were saved of each session, and how many of them in DRAM."""
    last: int


def live_and_die(forks: Any, home: Path, first: int, sizes: tuple[int, int], words: int) -> Life:
    """Let a process save until it has said so many words, and kill it."""
    ours, theirs = forks.Pipe(duplex=False)
    child = forks.Process(target=restart_worker.main, args=(theirs, str(home), first, *sizes), daemon=True)
    child.start()
    theirs.close()
    life = Life({}, first)
    with ours:
        try:
            for said in itertools.count():
                if said == words:
                    child.kill()
                verb, number, length, in_dram = ours.recv()
                life.last = number
                if verb == "saved":
                    life.saved[number] = (length, in_dram)
        except EOFError:
            child.join()
    assert child.exitcode == -signal.SIGKILL
    child.close()
    return life


@pytest.mark.timeout(7200 if NIGHTLY else 120)
def test_killed_again_and_again_only_what_was_saved_hits(forks: Any, memory: Memory, home: Path) -> None:
    seed = 20_261
    dice, first, total, opens = random.Random(seed), 0, 0, 0
    known: dict[int, tuple[int, int]] = {}
    for kill in range(KILLS):
        sizes = dice.choice([(96, 16), (96, 32), (128, 16), (64, 0)])
        words = dice.randint(1, 40)
        life = live_and_die(forks, home, first, sizes, words)
        first, opens = life.last + 1, opens + 1
        known = dict(list((known | life.saved).items())[-24:])
        with opened(memory, home, blocks=sizes[0], dram_blocks=sizes[1]) as store:
            for number, (length, in_dram) in known.items():
                match = store.match(make_tokens(number, 6))
                found = restore(store, memory, make_tokens(number, 6))
                where = (seed, kill, number, found)
                assert found.blocks == match.blocks or found.reason, where
                if in_dram and number in life.saved:
                    assert found.blocks <= length - in_dram, where
                elif life.last - 3 < number in life.saved:  # Too new to be reclaimed.
                    assert found.blocks >= length, where
                total += found.blocks
            check_all(store)
    assert total > 20 * KILLS, (seed, total)


# -- sizes ----------------------------------------------------------------------------------------------


def test_another_size_keeps_what_fits(memory: Memory, home: Path) -> None:
    with opened(memory, home, blocks=64) as store:
        fill(store, memory, sessions=12)
    with opened(memory, home, blocks=128, dram_blocks=64) as store:
        assert hits(store, memory, sessions=12) == [5] * 12
        save(store, memory, "more", make_tokens("more", 16))
    with opened(memory, home, blocks=16, dram_blocks=8) as store:
        found = hits(store, memory, sessions=12)
        assert set(found[::2]) == {0, 2, 5} - ({2} - set(found)) and 0 < sum(found[::2]) < 30
        assert 0 < sum(found[1::2]) < 30
        assert store.stats().counts["reopen: rows that lie outside of the pool"] > 0
    with opened(memory, home, blocks=64, dram_blocks=0) as store:
        assert [n for n in hits(store, memory, sessions=12) if n] == [n for n in found[::2] if n]
    with opened(memory, home, blocks=64) as store:
        assert sum(hits(store, memory, sessions=12)) == sum(found[::2]), "DRAM left with its medium"


def test_files_of_another_size_are_another_pool(memory: Memory, home: Path) -> None:
    with opened(memory, home, file_blocks=16) as store:
        fill(store, memory)
    with opened(memory, home, file_blocks=32) as store:
        assert hits(store, memory) == [0] * 4 and store.stats().blocks == 0
        fill(store, memory)
    with opened(memory, home, file_blocks=32) as store:
        assert hits(store, memory) == [5] * 4


# -- damage ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["empty", "half", "zeros", "garbage", "gone", "longer"])
def test_any_file_may_be_damaged(memory: Memory, home: Path, how: str) -> None:
    with opened(memory, home) as store:
        fill(store, memory)
    names = sorted(path.name for path in home.iterdir())
    assert {MANIFEST, DUMP, "format", "lock", "pool-0000.fc"} <= set(names)
    total = 0
    for name in names:
        left = crashed(home)
        path, size = left / name, (left / name).stat().st_size
        if how in ("empty", "half"):
            os.truncate(path, 0 if how == "empty" else size // 2)
        elif how == "gone":
            path.unlink()
        elif how == "longer":
            path.write_bytes(path.read_bytes() + b"x" * 5000)
        else:
            path.write_bytes(bytes(size) if how == "zeros" else random.Random(name).randbytes(size))
        with opened(memory, left) as store:
            total += sum(hits(store, memory))
            for _ in range(6):  # Each restore finds one bad block.
                fill(store, memory, sessions=2)
                found = hits(store, memory, sessions=2)
            assert found == [5, 5], name
            check_all(store)
        with opened(memory, left) as store:
            assert hits(store, memory, sessions=2) == [5, 5], name
    assert total >= 20


def test_a_damaged_dump_is_a_miss(memory: Memory, home: Path) -> None:
    with opened(memory, home) as store:
        fill(store, memory)
    dump = bytearray((home / DUMP).read_bytes())
    at = 0
    found = []
    for step in range(8):
        at = (at + 4096 * 3 + step * 64) % len(dump)
        left = crashed(home)
        damaged = bytearray(dump)
        damaged[at : at + 64] = bytes(byte ^ 0x80 for byte in damaged[at : at + 64])
        (left / DUMP).write_bytes(damaged)
        with opened(memory, left) as store:
            found.append(hits(store, memory))
            check_all(store)
    assert any(sum(each) < 20 for each in found) and all(each[::2] == [5, 5] for each in found)


def test_data_that_is_missing_behind_a_manifest_is_a_miss(memory: Memory, home: Path) -> None:
    with opened(memory, home) as store:
        fill(store, memory)
    for path in home.glob("pool-*"):
        path.write_bytes(bytes(path.stat().st_size))
    with opened(memory, home) as store:
        assert store.match(make_tokens(0, 5)).blocks == 5
        result = restore(store, memory, make_tokens(0, 5))
        assert result.blocks == 0 and "checksum" in result.reason
        assert store.match(make_tokens(0, 5)).blocks == 0
        check_all(store)


def test_an_older_manifest_never_delivers_a_newer_tenants_bytes(memory: Memory, home: Path) -> None:
    store = opened(memory, home, blocks=32)
    fill(store, memory, sessions=3, blocks=6)
    store.close()
    older = (home / MANIFEST).read_bytes()
    with opened(memory, home, blocks=32) as store:
        for number in range(100, 124):
            save(store, memory, f"s{number}", make_tokens(number, 6))
    (home / MANIFEST).write_bytes(older)
    with opened(memory, home, blocks=32) as store:
        assert store.match(make_tokens(0, 6)).blocks == 6, "the old manifest says so"
        for number in (0, 2, *range(100, 124)):
            restore(store, memory, make_tokens(number, 6))
        assert restore(store, memory, make_tokens(0, 6)).blocks == 0
        check_all(store)


def test_without_checksums_only_a_clean_close_counts(memory: Memory, home: Path) -> None:
    off = {"verify": "off"}
    store = opened(memory, home, io=off)
    fill(store, memory)
    left = crashed(home)
    store.close()
    with opened(memory, left, io=off) as store:
        assert hits(store, memory) == [0] * 4
        assert store.stats().counts["reopen: rows that nothing could verify"] > 0
    with opened(memory, home, io=off) as store:
        assert hits(store, memory) == [5] * 4
    with opened(memory, home) as store:
        assert hits(store, memory) == [0] * 4, "there are no checksums to compare with"


# -- while it runs --------------------------------------------------------------------------------------


def test_flush_writes_data_before_the_manifest(memory: Memory, home: Path) -> None:
    files = Steps()
    with opened(memory, home, files=files) as store:
        fill(store, memory)
        seen: list[str] = []
        files.broken = seen.append
        calls = files.calls["sync"]
        assert store.flush()
        assert files.calls["sync"] - calls == len(store.plane.parts.pool.fds)  # type: ignore[union-attr]
        assert any("wal_checkpoint" in statement for statement in seen)
        seen.clear()
        files.fail("sync", 5)
        assert not store.flush() and not seen, "the manifest did not go before its data"
        assert store.stats().counts["flushes failed"] == 1 and store.flush()
    with make_store(memory) as store:
        assert store.flush() is False, "nothing is kept there"


def test_a_commit_that_hangs_stops_no_reader(memory: Memory, home: Path) -> None:
    files, reached, go = Steps(), threading.Event(), threading.Event()
    with opened(memory, home, files=files) as store:
        fill(store, memory)

        def hang(statement: str) -> None:
            if statement == "COMMIT":
                reached.set()
                assert go.wait(WAIT_S)

        files.broken = hang
        memory.stamp(store.keys(make_tokens("late", 3)), np.arange(6))
        late = store.save("late", make_tokens("late", 3), np.arange(6))
        assert reached.wait(WAIT_S) and late.reusable(WAIT_S)
        assert store.match(make_tokens("late", 3)).blocks == 0, "committed before it is visible"
        for number in range(4):
            match = store.match(make_tokens(number, 5))
            with store.lease(match) as lease:
                assert store.restore(lease, np.arange(10) + 20).result().blocks == 5
        assert late.result(0) is None
        go.set()
        assert late.published(WAIT_S) and store.match(make_tokens("late", 3)).blocks == 3


def test_a_manifest_that_cannot_be_written_costs_the_restart_only(memory: Memory, home: Path) -> None:
    files = Steps()
    with opened(memory, home, files=files) as store:
        fill(store, memory, sessions=1)
        files.broken = full
        assert not save(store, memory, "more", make_tokens("more", 3)).reason
        assert restore(store, memory, make_tokens("more", 3)).blocks == 3
        assert store.stats().counts["manifest transactions failed"] == 1
        left = crashed(home)
        files.broken = lambda statement: None
    with opened(memory, left) as after:
        assert hits(after, memory, sessions=1) == [5] and after.match(make_tokens("more", 3)).blocks == 0


def test_a_dump_leaves_the_space_of_others_alone(memory: Memory, home: Path) -> None:
    class Tight(FaultyFiles):
        def free_bytes(self, path: str) -> int:
            return self.left_bytes

        left_bytes = 1 << 40

    files = Tight()
    store = opened(memory, home, files=files)
    fill(store, memory, sessions=6)
    lanes = store.plane.parts.lanes
    extents = [e for s in store.catalog.space.scopes if s.medium is Medium.DRAM for e in s.extents]
    files.left_bytes = sum(lanes.extent_bytes(extent.room_blocks) for extent in extents) // 2
    store.close()
    with opened(memory, home) as after:
        found = hits(after, memory, sessions=6)
        assert found[::2] == [5, 5, 5] and 0 < sum(found[1::2]) < 15 and found[5] == 5, "the one used last came first"


@pytest.mark.parametrize("call", ["create_file", "write", "sync"])
def test_a_dump_that_fails_loses_dram_only(memory: Memory, home: Path, call: str) -> None:
    files = FaultyFiles()
    store = opened(memory, home, files=files)
    fill(store, memory)
    files.fail(call, 28)
    store.close()
    assert not files.open_fds
    with opened(memory, home) as after:
        assert hits(after, memory) == [5, 0, 5, 0]


def test_files_of_a_store_are_its_owners_alone(memory: Memory, home: Path) -> None:
    before = os.umask(0)
    try:
        with opened(memory, home) as store:
            fill(store, memory)
            modes = {path.name: path.stat().st_mode & 0o777 for path in home.iterdir()}
    finally:
        os.umask(before)
    modes |= {path.name: path.stat().st_mode & 0o777 for path in home.iterdir()}
    assert {MANIFEST, DUMP} <= set(modes) and set(modes.values()) == {0o600}


def test_what_is_reclaimed_is_forgotten_without_a_further_save(memory: Memory, home: Path) -> None:
    with opened(memory, home) as store:
        fill(store, memory)
        scope = next(s for s in store.catalog.space.scopes if s.medium is Medium.SSD)
        with store.catalog._lock:
            store.catalog.space.withdraw(scope)
        assert store.keeper is not None
        manifest = store.keeper.manifest
        eventually(store, lambda: store.keeper.tick() or not manifest._dropped_scopes)  # type: ignore[union-attr]
        left = crashed(home)
    with opened(memory, left) as after:
        assert sorted(hits(after, memory)) == [0, 0, 0, 5]


def test_a_session_must_be_text(memory: Memory, home: Path) -> None:
    with opened(memory, home) as store, pytest.raises(ValueError, match="session=7: expected text"):
        store.save(7, make_tokens("a", 2), np.arange(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("ttl_ns", [0, 24 * 3600 * SECOND])
def test_close_ends_in_time_while_a_commit_hangs_and_lets_go_later(memory: Memory, home: Path, ttl_ns: int) -> None:
    files, reached, go = Steps(), threading.Event(), threading.Event()
    store = opened(memory, home, files=files, timeouts={"close_ns": 200_000_000}, retention={"ttl_ns": ttl_ns})
    fill(store, memory, sessions=2)

    def hang(statement: str) -> None:
        if statement == "COMMIT":
            reached.set()
            assert go.wait(WAIT_S)

    files.broken = hang
    memory.stamp(store.keys(make_tokens("late", 3)), np.arange(6))
    late = store.save("late", make_tokens("late", 3), np.arange(6))
    assert reached.wait(WAIT_S)
    assert not store.close()
    found = late.result(0)
    assert found is not None and found.reason == "closed"
    with pytest.raises(OwnershipError, match="locked"):
        opened(memory, home)
    files.broken = lambda statement: None
    go.set()
    for thread in threading.enumerate():
        if thread.name == "flatcake-scribe":
            thread.join(WAIT_S)
    store.close()
    with opened(memory, home) as after:
        assert hits(after, memory, sessions=2) == [5, 0], "it counts as a crash"
        assert after.match(make_tokens("late", 3)).blocks == 0, "it was said to be lost"


def test_a_save_to_dram_waits_for_no_commit(memory: Memory, home: Path) -> None:
    files, reached, go = Steps(), threading.Event(), threading.Event()
    with opened(memory, home, files=files) as store:

        def hang(statement: str) -> None:
            if statement == "COMMIT":
                reached.set()
                assert go.wait(WAIT_S)

        files.broken = hang
        tokens = make_tokens("ssd", 3)
        memory.stamp(store.keys(tokens), np.arange(6))
        waiting = store.save("ssd", tokens, np.arange(6))
        assert reached.wait(WAIT_S)
        assert save(store, memory, "dram", make_tokens("dram", 3), CHAT, first_page=6).written_blocks == 3
        assert waiting.result(0) is None and not store.match(tokens).blocks
        go.set()
        assert waiting.published(WAIT_S)
        check_all(store)


@pytest.mark.leaves("stores")
def test_a_scribe_that_ends_while_it_is_given_up_leaves_no_manifest_open(memory: Memory, home: Path) -> None:
    store, go = opened(memory, home), threading.Event()
    keeper = store.keeper
    assert keeper is not None
    keeper.post(lambda: go.wait(WAIT_S))
    keeper._on_scribe_end()  # Its thread has looked, and is not gone yet.
    keeper.give_up(0)
    assert keeper.manifest._database is None
    go.set()
    store.close()


def test_a_second_close_touches_nothing(memory: Memory, home: Path) -> None:
    store = opened(memory, home)
    fill(store, memory)
    assert store.close()
    before = {path.name: path.read_bytes() for path in home.iterdir()}
    store.close()
    assert {path.name: path.read_bytes() for path in home.iterdir()} == before


@pytest.mark.parametrize("statement", ["BEGIN IMMEDIATE", "SELECT number, body FROM turns"])
def test_a_manifest_that_faults_at_open_refuses_and_leaves_nothing_behind(
    memory: Memory, home: Path, statement: str
) -> None:
    with opened(memory, home) as store:
        fill(store, memory)
    files = Steps()

    def fault(what: str) -> None:
        if what == statement:
            raise sqlite3.OperationalError("disk I/O error")

    files.broken = fault
    with pytest.raises(OwnershipError, match="use another directory"):
        make_store(memory, make_config(memory, [home]), files=files)
    assert not files.open_fds
    with opened(memory, home) as store:
        assert hits(store, memory) == [5] * 4
