"""`flatcake inspect` and `verify` on what an engine leaves: one manifest, and a pool on every rank."""

import io
import itertools
import json
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatcake.about import RankHomes, decode_about, encode_about
from flatcake.assemble import open_dataplane
from flatcake.audit.progress import Progress
from flatcake.audit.stores import group, read_store
from flatcake.audit.verify import claimed, verify
from flatcake.cli import main
from flatcake.clock import MonotonicClock
from flatcake.errors import ConfigError, OwnershipError
from flatcake.io.manifestdb import MANIFEST
from flatcake.io.pooldir import FORMAT, LOCK
from flatcake.io.seam import Files
from flatcake.manifest import session_digest
from tests.audit.test_inspect import edit_header, execute
from tests.audits import called, filled, flip
from tests.fakes import FaultyFiles
from tests.ranks import BLOCKS, SESSIONS, Engine
from tests.stores import Memory, simple_layout

ROOT = Path(__file__).resolve().parents[2]
ALL = SESSIONS * BLOCKS
pytestmark = pytest.mark.usefixtures("no_leaks")


class Kept:
    """The directories of an engine that was filled and closed, and where its blocks are."""

    def __init__(self, directories: Path | Sequence[Path], **settings: Any) -> None:
        self.directories, self.settings = directories, settings
        self.first = directories if isinstance(directories, Path) else directories[0]
        with self.open() as engine:
            engine.fill()
            self.places = [engine.places(number) for number in range(SESSIONS)]
            self.file_bytes = engine.file_bytes
            self.homes = [[Path(home) for home in config.directories] for config in engine.configs]
            assert {len(set(places)) for places in self.places} == {BLOCKS}

    def open(self) -> Engine:
        return Engine(self.directories, **self.settings)

    def flip(self, rank: int, number: int, block: int) -> None:
        """Damage a block of a session on one rank."""
        place = self.places[number][block]
        homes = self.homes[rank]
        flip(homes[place[1] // self.file_bytes % len(homes)], place, self.file_bytes)

    def in_file(self, number: int) -> int:
        """Blocks in a pool file."""
        return sum(offset // self.file_bytes == number for places in self.places for _, offset in places)


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "fc")


def tree(*homes: Path, but: Sequence[str] = (), is_open: bool = False) -> dict[str, tuple[int, bytes]]:
    """Every name below directories, with the time of the last change, and content.

    Not the content where this process has a manifest open: closing the file would let go of SQLite's lock.
    """
    found = {}
    for path in [*homes, *(path for home in homes for path in home.rglob("*"))]:
        if path.name not in but:
            content = path.read_bytes() if path.is_file() and not is_open else b""
            found[str(path)] = (0 if but and path.is_dir() else path.lstat().st_mtime_ns, content)
    return found


def commanded(*words: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run a command in a process of its own: exit code, stores and what it said besides."""
    done = subprocess.run(
        [sys.executable, "-m", "flatcake", *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    return done.returncode, json.loads(done.stdout)["stores"] if done.stdout else [], done.stderr


def reasons(store: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By session, of those with failed blocks."""
    return {scope["session"]: scope["reasons"] for scope in store["scopes"] if scope["reasons"]}


def digest(number: int) -> str:
    return session_digest(f"s{number}").hex()


# -- inspect --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", ["", "catalog"])
def test_an_engine_is_one_store_and_not_touched(kept: Kept, below: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(kept.first)
    code, (store,) = called(capsys, "inspect", str(kept.first / below))
    assert tree(kept.first) == before and len(before) > 12
    assert (code, store["problems"], store["owner"]) == (0, [], None)
    assert (store["path"], store["catalog"]) == (str(kept.first), f"{kept.first}/catalog")
    assert store["ranks"] == [
        {"rank": rank, "owner": None, "directories": [f"{kept.first}/rank-{rank}"]} for rank in range(2)
    ]
    for rank, entry in enumerate(store["directories"]):
        assert (entry["rank"], entry["format"]["rank"], entry["faults"]) == (rank, rank, [])
        assert entry["pool_files"] == entry["format"]["files"] == 4
        assert entry["format"]["geometry"] == store["format"]["geometry"]
    assert store["manifest"]["closed"] is True and store["manifest"]["manifest_bytes"] > 0
    assert store["identity"]["model"] == "m" and store["geometry"]["block_tokens"] == 8
    (medium,) = store["media"]
    assert (medium["medium"], medium["blocks"], medium["size_bytes"]) == ("ssd", ALL, 4 * kept.file_bytes)
    found = {scope["session"]: (scope["blocks"], scope["turns"], scope["use"] is None) for scope in store["scopes"]}
    assert found == {digest(number): (BLOCKS, 2, False) for number in range(SESSIONS)}
    assert any("DRAM" in note and "gone when they end" in note for note in store["notes"])


def test_the_table_has_a_row_for_each_rank(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    os.unlink(kept.homes[1][0] / "pool-0002.fc")
    assert main(["inspect", str(kept.first)], environ={}) == 1
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if re.match(r"[01] +/", line)]
    assert "2 ranks: 0, 1" in said and len(rows) == 2 and "sound" in rows[0] and "pool-0002.fc is missing" in rows[1]
    assert f"catalog    {kept.first}/catalog" in said


def test_a_single_rank_is_refused_and_says_what_to_name(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(kept.first)
    for command in ("inspect", "verify"):
        assert main([command, str(kept.first / "rank-1")], environ={}) == 2
        said = capsys.readouterr()
        assert "one rank of an engine" in said.err and said.err.rstrip().endswith(f"name {kept.first}")
    assert tree(kept.first) == before


def test_what_a_running_engine_has_is_seen_from_another_process(kept: Kept) -> None:
    with kept.open() as engine:
        engine.save("live", 4)
        before = tree(kept.first, is_open=True)
        code, (store,), _ = commanded("inspect", str(kept.first))
        assert code == 0 and tree(kept.first, is_open=True) == before
        assert f"pid {os.getpid()} " in store["owner"]
        assert [f"pid {os.getpid()} " in rank["owner"] for rank in store["ranks"]] == [True, True]
        assert store["media"][0]["blocks"] == ALL + 4 and store["problems"] == []
        engine.close_ranks()
        code, (store,), _ = commanded("inspect", str(kept.first))
        assert code == 0 and store["owner"] == "another process", "who holds the manifest alone"


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def forget_about(home: Path) -> None:
    """As a manifest of before there were descriptions."""
    execute(home / "catalog", "DELETE FROM state WHERE number = 1")


DAMAGES: dict[str, tuple[Any, str]] = {
    "rank gone": (lambda home: shutil.rmtree(home / "rank-1"), "/rank-1: there is no such directory"),
    "rank a file": (lambda home: (shutil.rmtree(home / "rank-1"), (home / "rank-1").touch()), "no such directory"),
    "rank empty": (lambda home: (shutil.rmtree(home / "rank-1"), (home / "rank-1").mkdir()), "there is no pool in it"),
    "first rank gone": (lambda home: shutil.rmtree(home / "rank-0"), "/rank-0: there is no such directory"),
    "all ranks gone": (lambda home: [shutil.rmtree(home / f"rank-{n}") for n in range(2)], "/rank-1: there is no"),
    "pool file gone": (lambda home: (home / "rank-1/pool-0002.fc").unlink(), "/rank-1: pool-0002.fc is missing"),
    "pool file cut": (lambda home: os.truncate(home / "rank-1/pool-0001.fc", 4096), "pool-0001.fc has 4096 bytes"),
    "header gone": (lambda home: (home / "rank-1" / FORMAT).unlink(), "/rank-1: format is missing"),
    "header damaged": (lambda home: (home / "rank-0" / FORMAT).write_bytes(b"\xff" * 4096), "format is damaged"),
    "other geometry": (lambda home: edit_header(home / "rank-1", geometry="0" * 32), "/rank-1: header and manifest"),
    "other rank": (lambda home: edit_header(home / "rank-1", rank=0), "/rank-1: header and manifest tell of"),
    "more files": (lambda home: edit_header(home / "rank-1", files=3), "/rank-1: header and manifest tell of"),
    "catalog gone": (lambda home: shutil.rmtree(home / "catalog"), "there is no manifest"),
    "manifest gone": (lambda home: (home / "catalog" / MANIFEST).unlink(), "there is no manifest"),
    "manifest a directory": (lambda home: make_directory(home / "catalog" / MANIFEST), "no regular file"),
    "manifest garbage": (lambda home: (home / "catalog" / MANIFEST).write_bytes(os.urandom(9000)), "is damaged"),
    "description gone": (forget_about, "open the store once"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_said_and_left_as_it_is(kept: Kept, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, expected = DAMAGES[how]
    damage(kept.first)
    before = tree(kept.first, but=[LOCK])
    code, (store,) = called(capsys, "inspect", str(kept.first))
    assert code == 1 and expected in " ".join(store["problems"])
    assert main(["inspect", str(kept.first)], environ={}) == 1
    assert expected in capsys.readouterr().out
    code, (store,) = called(capsys, "verify", str(kept.first))
    assert code == 1 and expected in " ".join(store["problems"]) and not store["good"]
    assert tree(kept.first, but=[LOCK]) == before, "nothing was made, either"


def test_a_manifest_without_a_description_still_hits_and_gets_one(
    kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_about(kept.first)
    assert called(capsys, "inspect", str(kept.first))[0] == 1
    with kept.open() as engine:
        assert engine.hits() == [BLOCKS] * SESSIONS
    code, (store,) = called(capsys, "inspect", str(kept.first))
    assert code == 0 and store["media"][0]["blocks"] == ALL


def test_without_checksums_nothing_is_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = Kept(tmp_path / "fc", io={"verify": "off"})
    code, (store,) = called(capsys, "inspect", str(kept.first))
    assert code == 1 and "without checksums" in store["problems"][0]
    with kept.open() as engine:
        assert engine.hits() == [0] * SESSIONS


def test_ranks_of_an_earlier_run_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Kept(tmp_path, ranks=3)
    Kept(tmp_path, ranks=2)
    code, (store,) = called(capsys, "inspect", str(tmp_path))
    assert code == 0 and [rank["rank"] for rank in store["ranks"]] == [0, 1]
    assert any(f"{tmp_path}/rank-2: the last run had no such rank" in note for note in store["notes"])
    code, (store,) = called(capsys, "verify", str(tmp_path))
    assert code == 0 and store["outcomes"]["good"] == ALL


# -- several directories, several replicas ----------------------------------------------------------------


def test_several_directories_by_the_first_or_all_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    homes = [tmp_path / name for name in "ab"]
    kept = Kept(homes)
    code, alone = called(capsys, "inspect", str(homes[0]))
    assert code == 0 and [entry["path"] for entry in alone[0]["directories"]] == [
        f"{home}/rank-{rank}" for rank in range(2) for home in homes
    ]
    assert called(capsys, "inspect", *map(str, homes)) == (0, alone)
    code, (further,) = called(capsys, "inspect", str(homes[1]))
    assert code == 0 and "directory 2 of 2: the first has the manifest" in further["notes"]
    assert main(["verify", str(homes[1])], environ={}) == 2
    assert "name the first one" in capsys.readouterr().err
    session, block = next(
        (number, at)
        for number, places in enumerate(kept.places)
        for at, (_, offset) in enumerate(places)
        if offset // kept.file_bytes % 2
    )
    kept.flip(1, session, block)
    code, (store,) = called(capsys, "verify", str(homes[0]), "--drop")
    assert code == 1 and reasons(store) == {digest(session): {"rank 1: checksum": 1}} and store["dropped_blocks"] == 1
    files = FaultyFiles()
    with claimed(files, [str(homes[0])]):
        assert files.calls["lock"] == 4, "those that the manifest alone names are locked too"
    for home in homes:
        home.rename(home.with_name(f"moved {home.name}"))
    moved = [home.with_name(f"moved {home.name}") for home in homes]
    assert main(["inspect", str(moved[0])], environ={}) == 2
    assert re.search("was .*/a/rank-0 when its store was open; name all of its 2", capsys.readouterr().err)
    code, (store,) = called(capsys, "verify", *map(str, moved))
    assert code == 0 and store["outcomes"]["good"] == ALL - 1


def test_a_rank_on_another_disk_is_found_by_its_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "fc").mkdir()
    (tmp_path / "fc/rank-1").symlink_to(tmp_path / "disk")
    Kept(tmp_path / "fc")
    code, (store,) = called(capsys, "verify", str(tmp_path / "fc"))
    assert code == 0 and store["directories"] == [f"{tmp_path}/fc/rank-0", f"{tmp_path}/disk"]
    assert store["outcomes"]["good"] == ALL and not store["notes"]


def test_some_but_not_all_directories_are_a_mistake(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in "abc"]
    Kept(homes)
    with pytest.raises(ConfigError, match="3 directories, 2 are named"):
        group(Files(), [str(home) for home in homes[:2]])


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("again", ["", "catalog", "../fc"])
def test_a_directory_named_twice_is_a_mistake_and_not_in_use(
    tmp_path: Path, command: str, again: str, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "fc"
    Kept(home)
    assert main([command, str(home), f"{home}/{again}"], environ={}) == 2
    assert f"{home}: named twice" in capsys.readouterr().err


def test_each_replica_is_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    homes = [tmp_path / name for name in "ab"]
    kept = [Kept(homes, replica=(number, 2)) for number in range(2)]
    code, stores = called(capsys, "inspect", str(homes[0]))
    assert code == 0 and [store["path"] for store in stores] == [f"{homes[0]}/replica-{number}" for number in range(2)]
    assert called(capsys, "inspect", *map(str, homes)) == (0, stores)
    assert called(capsys, "inspect", f"{homes[0]}/replica-1") == (0, stores[1:])
    kept[1].flip(0, 3, 2)
    code, stores = called(capsys, "verify", str(homes[0]))
    assert code == 1 and [store["good"] for store in stores] == [True, False]
    assert reasons(stores[1]) == {digest(3): {"rank 0: checksum": 1}}


def test_a_store_and_an_engine_in_one_directory_are_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(Memory(simple_layout()), tmp_path)
    Kept(tmp_path)
    code, stores = called(capsys, "verify", str(tmp_path))
    assert code == 0 and [len(store["ranks"]) for store in stores] == [1, 2]
    assert [store["catalog"] for store in stores] == [str(tmp_path), f"{tmp_path}/catalog"]


@pytest.mark.parametrize("directories", [1, 2])
def test_a_copy_without_its_ranks_is_not_sound_because_of_the_original(
    tmp_path: Path, directories: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Kept([tmp_path / name for name in "ab"[:directories]])
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "a" / "catalog", copy / "catalog")
    for command in ("inspect", "verify"):
        code = main([command, str(copy)], environ={})
        said = capsys.readouterr()
        if directories == 1:
            assert code == 1 and f"{copy}/rank-0: there is no such directory" in said.out
        else:
            assert code == 2 and "when its store was open; name all of its 2 directories" in said.err


def test_the_manifest_says_where_the_ranks_are(kept: Kept) -> None:
    found = read_store(Files(), group(Files(), [str(kept.first)])[0])
    assert found.about is not None
    assert found.about.ranks == tuple(RankHomes(rank, (f"{kept.first}/rank-{rank}",)) for rank in range(2))


# -- verify ---------------------------------------------------------------------------------------------


def test_a_sound_engine_is_good_on_every_rank(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(kept.first, but=[LOCK])
    code, (store,) = called(capsys, "verify", str(kept.first), "--drop")
    assert code == 0 and store["good"] and store["blocks"] == store["outcomes"]["good"] == ALL
    assert [rank["outcomes"]["good"] for rank in store["ranks"]] == [ALL, ALL]
    block_bytes = Memory(simple_layout()).kv.geometry(8).block_bytes
    assert store["read_bytes"] >= 2 * ALL * block_bytes and tree(kept.first, but=[LOCK]) == before
    with kept.open() as engine:
        assert engine.hits() == [BLOCKS] * SESSIONS


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("block", [0, 3])
def test_one_byte_on_one_rank_is_one_block(
    kept: Kept, rank: int, block: int, capsys: pytest.CaptureFixture[str]
) -> None:
    kept.flip(rank, 1, block)
    before = tree(kept.first, but=[LOCK])
    code, (store,) = called(capsys, "verify", str(kept.first))
    assert code == 1 and reasons(store) == {digest(1): {f"rank {rank}: checksum": 1}}
    assert [each["reasons"] for each in store["ranks"]] == [{"checksum": 1} if n == rank else {} for n in range(2)]
    assert (store["outcomes"]["good"], store["outcomes"]["bad"]) == (ALL - 1, 1)
    assert tree(kept.first, but=[LOCK]) == before, "nothing is changed without --drop"
    pools = {path: entry for path, entry in tree(kept.first).items() if "pool-" in path}
    assert called(capsys, "verify", str(kept.first), "--drop")[1][0]["dropped_blocks"] == 1
    assert {path: entry for path, entry in tree(kept.first).items() if "pool-" in path} == pools
    assert called(capsys, "verify", str(kept.first))[0] == 0
    with kept.open() as engine:
        expected = [block if number == 1 else BLOCKS for number in range(SESSIONS)]
        assert engine.coordinator.match(engine.keys(1, BLOCKS)).blocks == block, "the block is not offered"
        assert engine.hits() == expected
        assert engine.save(1, BLOCKS) == 1, "those behind it were there still"
        assert engine.hits() == [BLOCKS] * SESSIONS
    assert called(capsys, "verify", str(kept.first))[0] == 0


@pytest.mark.parametrize("seed", range(4))
def test_what_is_damaged_on_any_rank_is_what_is_dropped(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, ranks = random.Random(seed), 1 + seed % 3
    kept = Kept(tmp_path / "fc", ranks=ranks)
    everything = list(itertools.product(range(ranks), range(SESSIONS), range(BLOCKS)))
    damaged = rng.sample(everything, rng.randrange(2, 9))
    for each in damaged:
        kept.flip(*each)
    blocks = {(number, block) for _, number, block in damaged}
    code, (store,) = called(capsys, "verify", str(kept.first), "--drop")
    assert code == 1 and store["outcomes"]["bad"] == store["dropped_blocks"] == len(blocks)
    assert [each["outcomes"]["bad"] for each in store["ranks"]] == [
        sum(each == rank for each, _, _ in damaged) for rank in range(ranks)
    ]
    assert all(text.startswith("rank ") == (ranks > 1) for text in store["reasons"])
    with kept.open() as engine:
        assert engine.hits() == [
            min([block for each, block in blocks if each == number], default=BLOCKS) for number in range(SESSIONS)
        ]
    code, (store,) = called(capsys, "verify", str(kept.first))
    assert code == 0 and store["outcomes"]["good"] == ALL - len(blocks)


def test_a_missing_pool_file_costs_what_was_in_it(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    (kept.homes[1][0] / "pool-0000.fc").unlink()
    code, (store,) = called(capsys, "verify", str(kept.first), "--drop")
    lost = kept.in_file(0)
    assert code == 1 and 0 < lost < ALL and store["reasons"] == {"rank 1: its file is missing": lost}
    assert store["dropped_blocks"] == lost and "the next open finds nothing" in store["problems"][0]


def test_a_missing_rank_costs_everything(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(kept.homes[1][0])
    code, (store,) = called(capsys, "verify", str(kept.first))
    assert code == 1 and store["reasons"] == {"rank 1: its file is missing": ALL}
    assert [rank["outcomes"]["good"] for rank in store["ranks"]] == [ALL, 0]
    assert not kept.homes[1][0].exists()


def test_the_command_names_rank_and_scope(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    kept.flip(1, 2, 1)
    assert main(["verify", str(kept.first)], environ={}) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if re.match(r"[01] ", line)][:2] == [
        ["0", str(ALL), str(ALL), "0", "0", "0", "-"],
        ["1", str(ALL), str(ALL - 1), "0", "1", "0", "1", "checksum"],
    ]
    (scope,) = (line for line in lines if digest(2)[:12] in line)
    assert scope.endswith("1 rank 1: checksum") and lines[-1] == "NOT all good"


# -- who may, and what stays ------------------------------------------------------------------------------


def test_a_running_engine_is_refused(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    with kept.open() as engine:
        before = tree(kept.first, but=[LOCK], is_open=True)
        for words in ([], ["--drop"]):
            assert main(["verify", str(kept.first), *words], environ={}) == 2
            assert f"in use by flatcake-pool pid {os.getpid()} " in capsys.readouterr().err
        engine.planes[0].close(10**10)
        assert main(["verify", str(kept.first)], environ={}) == 2, "one rank is enough"
        assert "/rank-1/lock: in use by" in capsys.readouterr().err
        engine.planes[1].close(10**10)
        code, _, said = commanded("verify", str(kept.first), "--drop")
        assert code == 2 and f"catalog/{MANIFEST}: in use by another process" in said, "so is the scheduler alone"
        assert tree(kept.first, but=[LOCK], is_open=True) == before
    assert called(capsys, "verify", str(kept.first))[0] == 0


def test_no_rank_can_be_opened_meanwhile(kept: Kept) -> None:
    memory, files = Memory(simple_layout()), FaultyFiles()
    with kept.open() as engine:
        configs, geometry = engine.configs, engine.starts[0].geometry
    with claimed(files, [str(kept.first)]):
        assert files.calls["lock"] == 2
        for config in configs:
            with pytest.raises(OwnershipError, match=f"pid {os.getpid()}"):
                open_dataplane(config, geometry, memory.kv, clock=MonotonicClock(), files=Files(), epoch=1)
    assert not files.open_fds
    with kept.open() as engine:
        assert engine.hits() == [BLOCKS] * SESSIONS


@pytest.mark.parametrize("drop", [False, True])
def test_an_interrupt_on_the_second_rank_leaves_all_as_it_was(kept: Kept, drop: bool) -> None:
    kept.flip(0, 0, 0)
    before, files, clock = tree(kept.first, but=[LOCK]), FaultyFiles(), MonotonicClock()

    class Interrupted(Progress):
        done = 0

        def advance(self, size_bytes: int) -> None:
            Interrupted.done += size_bytes
            if 2 * Interrupted.done > total[0]:
                raise KeyboardInterrupt

    total: list[int] = []

    def progress(total_bytes: int) -> Progress:
        total.append(total_bytes)
        return Interrupted(io.StringIO(), clock, total_bytes)

    with pytest.raises(KeyboardInterrupt), claimed(files, [str(kept.first)]) as (store,):
        verify(files, clock, store, drop=drop, progress=progress)
    assert tree(kept.first, but=[LOCK]) == before and not files.open_fds
    with kept.open() as engine:
        assert engine.coordinator.match(engine.keys(0, BLOCKS)).blocks == BLOCKS, "nothing was dropped"


def test_progress_counts_every_rank(kept: Kept) -> None:
    files, clock, done, totals = Files(), MonotonicClock(), [], []

    class Counting(Progress):
        def advance(self, size_bytes: int) -> None:
            done.append(size_bytes)

    def progress(total_bytes: int) -> Progress:
        totals.append(total_bytes)
        return Counting(io.StringIO(), clock, total_bytes)

    with claimed(files, [str(kept.first)]) as (store,):
        verify(files, clock, store, drop=False, progress=progress)
    assert totals == [sum(done)] and totals[0] == 2 * ALL * Memory(simple_layout()).kv.geometry(8).block_bytes


@pytest.mark.parametrize("seed", range(3))
def test_any_bytes_anywhere_give_a_report_or_a_refusal(
    kept: Kept, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, codes = random.Random(seed), set()
    for number in range(6):
        copy = kept.first.with_name(f"copy{number}")
        shutil.copytree(kept.first, copy)
        names = [f"rank-{rank}/{name}" for rank in range(2) for name in (FORMAT, LOCK, "pool-0000.fc")]
        path = copy / rng.choice([*names, f"catalog/{MANIFEST}"])
        data = bytearray(path.read_bytes())
        for _ in range(rng.choice([1, 200])):
            data[rng.randrange(min(len(data), 30000))] = rng.randrange(256)
        path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        for words in (["inspect"], ["verify"], ["verify", "--drop"]):
            codes.add(main([*words, str(copy)], environ={}))
            said = capsys.readouterr()
            assert said.out or said.err
    assert codes <= {0, 1, 2} and 1 in codes


def test_a_description_of_uneven_ranks_is_none(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    about = read_store(Files(), group(Files(), [str(kept.first)])[0]).about
    assert about is not None and decode_about(encode_about(about)) == about
    odd = encode_about(replace(about, ranks=(RankHomes(0, ("/a",)), RankHomes(1, ()))))
    database = sqlite3.connect(kept.first / "catalog" / MANIFEST)
    with database:
        database.execute("UPDATE state SET body = ? WHERE number = 1", (odd,))
    database.close()
    code, (store,) = called(capsys, "inspect", str(kept.first))
    assert code == 1 and "open the store once" in " ".join(store["problems"])
