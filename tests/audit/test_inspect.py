"""`flatcake inspect`: what it says of directories in any state, and that it leaves no trace in them."""

import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from flatcake.audit.copy import ATTEMPTS, copied
from flatcake.audit.report import as_mapping, columns
from flatcake.audit.stores import describe, group
from flatcake.cli import main
from flatcake.errors import CapacityError, ConfigError, OwnershipError
from flatcake.io.dramdump import DUMP
from flatcake.io.manifestdb import MANIFEST
from flatcake.io.pooldir import FORMAT, LOCK
from flatcake.io.seam import Files
from flatcake.manifest import session_digest
from tests import restart_worker
from tests.audits import LENGTHS, SESSIONS, called, fill, filled, hits, medium_of, opened, snapshot
from tests.fakes import FaultyFiles
from tests.stores import WAIT_S, Memory, branch, make_tokens, save, simple_layout

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = LENGTHS[-1]
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout())


@pytest.fixture
def home(tmp_path: Path, memory: Memory) -> Path:
    filled(memory, tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture(scope="module")
def forks() -> Any:
    """Starts processes that have imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.restart_worker"])
    first = context.Process(target=restart_worker.main, args=(None, "", 0, 0, 0))
    first.start()
    first.join()
    return context


def keys_of(value: object) -> set[str]:
    """All names in nested objects."""
    if isinstance(value, dict):
        return set(value) | {name for each in value.values() for name in keys_of(each)}
    return {name for each in value for name in keys_of(each)} if isinstance(value, list) else set()


# -- sound directories ----------------------------------------------------------------------------------


def test_a_closed_store_is_described_and_not_touched(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(home)
    code, (store,) = called(capsys, "inspect", str(home))
    assert snapshot(home) == before and len(before) > 8
    assert code == 0 and store["problems"] == [] and store["owner"] is None
    assert store["identity"]["model"] == "m" and store["geometry"]["block_tokens"] == 8
    assert store["format"]["version"] == 1 and store["manifest"]["closed"] is True
    assert store["directories"][0]["dump_bytes"] == (home / DUMP).stat().st_size > 0
    by_session = {scope["session"]: scope for scope in store["scopes"]}
    assert len(by_session) == SESSIONS
    for number in range(SESSIONS):
        scope = by_session[session_digest(f"s{number}").hex()]
        assert (scope["kind"], scope["blocks"], scope["medium"]) == ("session", BLOCKS, medium_of(number).name.lower())
        assert scope["size_bytes"] == BLOCKS * store["geometry"]["block_bytes"]
        assert scope["turns"] == (1 if number % 2 else 2), "DRAM is written down as a whole, at the close"
        assert scope["use"] == SESSIONS - number, "the last one was used last"
        assert 0 < scope["runs"] <= BLOCKS and scope["generation_min"] <= scope["generation_max"]
    for medium in store["media"]:
        assert medium["extent_bytes"] + medium["free_bytes"] == medium["size_bytes"]
        assert medium["blocks"] == BLOCKS * SESSIONS // 2 and medium["runs"] == sum(
            scope["runs"] for scope in store["scopes"] if scope["medium"] == medium["medium"]
        )
        assert 1 <= medium["space_amplification"] == round(medium["extent_bytes"] / medium["block_bytes"], 4)
        assert 0 < medium["largest_free_bytes"] <= medium["free_bytes"]


def test_figures_are_those_of_the_store_itself(memory: Memory, tmp_path: Path) -> None:
    with opened(memory, tmp_path / "home") as store:
        fill(store, memory)
        for name in "abc":
            save(store, memory, name, branch(make_tokens("prompt", 4), name, 1))
    facts = describe(Files(), group(Files(), [str(tmp_path / "home")])[0])
    assert facts.survey is not None and not facts.problems
    with opened(memory, tmp_path / "home") as store:
        for mine in facts.survey.media:
            table = store.catalog.space.tables[mine.medium]
            stats = store.stats().media[mine.medium.name.lower()]
            assert (mine.extents, mine.extent_bytes) == (len(table), table.used_bytes) and mine.extents
            assert (mine.free_ranges, mine.largest_free_bytes) == (table.ranges.range_count, table.ranges.largest_bytes)
            assert mine.block_bytes == stats.payload_bytes
        shared = [scope for scope in facts.survey.scopes if scope.session is None]
        assert len(shared) == 1 and shared[0].blocks == 4
        assert sum(scope.superseded_blocks for scope in facts.survey.scopes) == 4


def test_the_table_is_aligned_and_short(memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with opened(memory, tmp_path, blocks=256) as store:
        for number in range(25):
            save(store, memory, f"s{number}", make_tokens(number, 1 + number % 3))
    assert main(["inspect", str(tmp_path)], environ={}) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(at for at, line in enumerate(lines) if line.startswith("scope"))
    assert len(lines) - head == 1 + 20 + 1 and re.fullmatch(r"\.\.\. 5 more scopes .*--all.*", lines[-1])
    assert len({len(line) for line in lines[head : head + 21]}) == 1, "all columns end where their heads do"
    assert main(["inspect", str(tmp_path), "--all"], environ={}) == 0
    more = capsys.readouterr().out.splitlines()
    assert len(more) - head == 1 + 25 and more[:head] == lines[:head]


def test_columns_line_up() -> None:
    assert columns([("a", "n"), ("long", "1000")], text=1) == ["a        n", "long  1000"]


def test_every_key_is_documented(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/inspect.md").read_text()
    documented = set(re.findall(r"`([a-z_]+)`", page))
    for command in ("inspect", "verify"):
        _, stores = called(capsys, command, str(home))
        stores[0].pop("reasons", None)
        missing = {name for name in keys_of(stores) if re.fullmatch("[a-z_]+", name)} - documented
        assert not missing and len(keys_of(stores)) > 10


def test_an_empty_store_is_no_problem(memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened(memory, tmp_path).close()
    code, (store,) = called(capsys, "inspect", str(tmp_path))
    assert (code, store["scopes"], store["problems"]) == (0, [], [])
    assert {medium["extents"] for medium in store["media"]} == {0}
    assert main(["inspect", str(tmp_path)], environ={}) == 0


def test_several_directories_are_found_by_the_first(memory: Memory, tmp_path: Path) -> None:
    homes = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    filled(memory, homes)
    files = Files()
    facts = describe(files, group(files, [str(homes[0])])[0])
    assert [home.path for home in facts.found.homes] == list(map(str, homes)) and not facts.problems
    assert sum(home.pool_files for home in facts.found.homes) == 6
    (named,) = group(files, list(map(str, homes)))
    assert describe(files, named) == facts or as_mapping(describe(files, named)) == as_mapping(facts)
    further = describe(files, group(files, [str(homes[1])])[0])
    assert further.found.is_further and "directory 2 of 3" in further.notes[0] and not further.problems
    with pytest.raises(ConfigError, match="2 are named"):
        group(files, list(map(str, homes[:2])))
    moved = tmp_path / "moved"
    shutil.copytree(homes[0], moved)
    with pytest.raises(ConfigError, match="was .*/a when its store was open"):
        describe(files, group(files, [str(moved)])[0])
    shutil.rmtree(homes[2])
    with pytest.raises(ConfigError, match="no such directory"):
        describe(files, group(files, [str(homes[0])])[0])


def test_ranks_are_stores_of_their_own(memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        filled(memory, tmp_path / f"{rank}", rank=rank)
    code, stores = called(capsys, "inspect", str(tmp_path / "0"), str(tmp_path / "1"))
    assert code == 0 and [store["format"]["rank"] for store in stores] == [0, 1]
    assert all(len(store["scopes"]) == SESSIONS for store in stores)


# -- open elsewhere -------------------------------------------------------------------------------------


def test_a_live_store_is_seen_from_another_process_without_a_trace(memory: Memory, tmp_path: Path) -> None:
    with opened(memory, tmp_path) as store:
        fill(store, memory)
        assert (tmp_path / f"{MANIFEST}-wal").stat().st_size > 0, "what was committed must be in the log"
        before = snapshot(tmp_path)
        done = subprocess.run(
            [sys.executable, "-m", "flatcake", "inspect", str(tmp_path), "--json"],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        assert snapshot(tmp_path) == before
        (found,) = json.loads(done.stdout)["stores"]
        assert f"pid {os.getpid()} " in found["owner"] and found["problems"] == []
        assert sum(scope["blocks"] for scope in found["scopes"]) == BLOCKS * SESSIONS // 2, "SSD alone"
        assert [medium["medium"] for medium in found["media"]] == ["ssd"]
        assert any("DRAM" in note for note in found["notes"])
        assert hits(store, memory) == [BLOCKS] * SESSIONS
        assert not save(store, memory, "later", make_tokens("later", 3)).reason
    with opened(memory, tmp_path) as store:
        assert hits(store, memory) == [BLOCKS] * SESSIONS and store.match(make_tokens("later", 3)).blocks == 3


def test_a_store_that_is_being_written_is_described_again_and_again(forks: Any, tmp_path: Path) -> None:
    ours, theirs = forks.Pipe(duplex=False)
    child = forks.Process(target=restart_worker.main, args=(theirs, str(tmp_path), 0, 64, 16), daemon=True)
    child.start()
    theirs.close()
    assert ours.poll(WAIT_S) and ours.recv()[0] == "open"
    saved = itertools.count()

    def drain() -> None:
        try:
            while ours.recv():
                next(saved)
        except EOFError:
            return

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        seen = set()
        for _ in range(12):
            facts = describe(Files(), group(Files(), [str(tmp_path)])[0])
            assert (
                facts.found.owner is not None
                and f"pid {child.pid} " in facts.found.owner
                and facts.found.rows is not None
            )
            assert not facts.problems and not facts.found.rows.bad_rows and facts.survey is not None
            seen.add(facts.found.rows.stored.sequence)
            assert sum(scope.blocks for scope in facts.survey.scopes) <= 64
        assert len(seen) > 1 and child.is_alive(), "it was written meanwhile"
    finally:
        child.kill()
        child.join()
        reader.join()
        ours.close()
        child.close()
    assert next(saved) > 1
    facts = describe(Files(), group(Files(), [str(tmp_path)])[0])
    assert facts.found.owner is None and facts.found.rows is not None and facts.found.rows.state is not None
    assert not facts.found.rows.state.was_closed and len(facts.found.rows.stored)


def test_a_crash_leaves_what_the_next_open_finds(memory: Memory, tmp_path: Path) -> None:
    with opened(memory, tmp_path / "live") as store:
        fill(store, memory)
        shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    facts = describe(Files(), group(Files(), [str(tmp_path / "crashed")])[0])
    assert facts.survey is not None and facts.found.owner is None and not facts.problems
    assert sum(scope.blocks for scope in facts.survey.scopes) == BLOCKS * SESSIONS // 2
    assert all(scope.use is None for scope in facts.survey.scopes), "the order of use is written at a close"
    with opened(memory, tmp_path / "crashed") as store:
        assert hits(store, memory) == [BLOCKS, 0] * (SESSIONS // 2)


class Interrupting(Files):
    """Lets the store do something whenever the manifest's log is about to be copied."""

    def __init__(self, act: Any, times: int) -> None:
        self.act, self.left = act, times

    def modified_ns(self, fd: int) -> int:
        if self.left:
            self.left -= 1
            self.act(self.left)
        return super().modified_ns(fd)


@pytest.mark.parametrize("times", [1, 2 * ATTEMPTS], ids=["once", "always"])
def test_a_copy_is_taken_again_when_the_manifest_changes_under_it(memory: Memory, tmp_path: Path, times: int) -> None:
    with opened(memory, tmp_path) as store:
        fill(store, memory)
        sequences = []

        def act(number: int) -> None:
            sequences.append(number)
            assert not save(store, memory, f"t{number}", make_tokens(f"t{number}", 2)).reason
            assert store.flush(), "the log is begun anew"

        files = Interrupting(act, times)
        facts = describe(files, group(files, [str(tmp_path)])[0])
        assert sequences and facts.found.rows is not None and not facts.found.rows.bad_rows
        assert facts.found.rows.is_steady == (times == 1)
        assert any("different moments" in note for note in facts.notes) == (times > 1)
        assert len(facts.found.rows.stored) >= SESSIONS


# -- damage ---------------------------------------------------------------------------------------------

DAMAGES: dict[str, tuple[Any, str]] = {
    "header gone": (lambda home: (home / FORMAT).unlink(), "format is missing"),
    "header garbage": (lambda home: (home / FORMAT).write_bytes(b"\xff" * 4096), "format is damaged"),
    "header empty": (lambda home: (home / FORMAT).write_bytes(b""), "format is damaged"),
    "header absurd": (lambda home: edit_header(home, files=10**15), "says what cannot be"),
    "other geometry": (lambda home: edit_header(home, geometry="0" * 32), "tell of different stores"),
    "pool file gone": (lambda home: (home / "pool-0001.fc").unlink(), "pool-0001.fc is missing"),
    "pool file a link": (lambda home: relink(home / "pool-0001.fc"), "pool-0001.fc is missing"),
    "pool file cut": (lambda home: os.truncate(home / "pool-0001.fc", 4096), "pool-0001.fc has 4096 bytes"),
    "manifest gone": (lambda home: (home / MANIFEST).unlink(), "no manifest"),
    "manifest empty": (lambda home: (home / MANIFEST).write_bytes(b""), ""),
    "manifest garbage": (lambda home: (home / MANIFEST).write_bytes(os.urandom(9000)), "manifest is damaged"),
    "manifest cut": (lambda home: os.truncate(home / MANIFEST, 8192), "manifest is damaged"),
    "manifest a directory": (lambda home: redirect(home / MANIFEST), "no regular file"),
    "manifest a link": (lambda home: relink(home / MANIFEST), "no regular file"),
    "manifest a pipe": (lambda home: repipe(home / MANIFEST), "no regular file"),
    "state gone": (lambda home: execute(home, "DELETE FROM state WHERE number = 0"), ""),
    "state and description gone": (lambda home: execute(home, "DELETE FROM state"), "nothing says whose"),
    "description gone": (lambda home: execute(home, "DELETE FROM state WHERE number = 1"), "open the store once"),
    "description damaged": (lambda home: execute(home, "UPDATE state SET body = x'00' WHERE number = 1"), "open the"),
    "rows damaged": (lambda home: execute(home, "UPDATE turns SET body = x'00'"), "turns of the manifest are damaged"),
}


def edit_header(home: Path, **changes: object) -> None:
    found = json.loads((home / FORMAT).read_text())
    (home / FORMAT).write_text(json.dumps(found | changes).ljust(4096))


def relink(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def redirect(path: Path) -> None:
    path.unlink()
    path.mkdir()


def repipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def execute(home: Path, statement: str) -> None:
    database = sqlite3.connect(home / MANIFEST)
    with database:
        assert database.execute(statement).rowcount
    database.close()


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_said_and_left_as_it_is(home: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, expected = DAMAGES[how]
    damage(home)
    before = snapshot(home)
    code, (store,) = called(capsys, "inspect", str(home))
    assert code == (1 if expected else 0) and snapshot(home) == before
    assert expected in " ".join(store["problems"]) and bool(store["problems"]) == bool(expected)
    assert main(["inspect", str(home)], environ={}) == code
    shown = capsys.readouterr().out
    assert all(problem in shown for problem in store["problems"])
    if how == "state gone":
        assert sum(scope["blocks"] for scope in store["scopes"]) == BLOCKS * SESSIONS


def test_a_page_of_the_manifest_costs_what_it_held(memory: Memory, tmp_path: Path) -> None:
    with opened(memory, tmp_path, blocks=512) as store:
        for number in range(160):
            save(store, memory, f"s{number}", make_tokens(number, 2))
    size_bytes = (tmp_path / MANIFEST).stat().st_size
    assert size_bytes > 8 * 4096
    with (tmp_path / MANIFEST).open("r+b") as file:
        file.seek(size_bytes // 4096 // 2 * 4096)
        file.write(b"\xff" * 4096)
    facts = describe(Files(), group(Files(), [str(tmp_path)])[0])
    assert facts.found.rows is not None and facts.survey is not None
    assert facts.found.rows.damages and "damaged" in facts.problems[0] and 0 < len(facts.found.rows.stored) < 160
    assert len(facts.survey.scopes) == len(facts.found.rows.stored)


def test_set_aside_files_are_named(home: Path, memory: Memory, capsys: pytest.CaptureFixture[str]) -> None:
    (home / MANIFEST).write_bytes(b"garbage" * 1000)
    opened(memory, home).close()
    code, (store,) = called(capsys, "inspect", str(home))
    assert code == 0 and store["directories"][0]["aside"] == [f"{MANIFEST}.damaged"] and store["notes"]


def test_without_checksums_a_crash_is_a_problem(memory: Memory, tmp_path: Path) -> None:
    with opened(memory, tmp_path / "live", io={"verify": "off"}) as store:
        fill(store, memory)
        shutil.copytree(tmp_path / "live", tmp_path / "crashed")
    files = Files()
    assert describe(files, group(files, [str(tmp_path / "crashed")])[0]).problems
    assert not describe(files, group(files, [str(tmp_path / "live")])[0]).problems


@pytest.mark.parametrize("seed", range(6))
def test_any_bytes_anywhere_give_a_report_or_a_refusal(
    home: Path, memory: Memory, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    codes = set()
    for round_number in range(8):
        copy = home.with_name(f"copy{round_number}")
        shutil.copytree(home, copy)
        path = copy / rng.choice([FORMAT, LOCK, MANIFEST, MANIFEST, MANIFEST, DUMP])
        data = bytearray(path.read_bytes()[: rng.choice([None, None, rng.randrange(9000)])])
        for _ in range(rng.choice([1, 30])):
            if data:
                data[rng.randrange(min(len(data), 30000))] = rng.randrange(256)
        path.write_bytes(data)
        before = snapshot(copy)
        codes.add(main(["inspect", str(copy)], environ={}))
        codes.add(main(["inspect", str(copy), "--json"], environ={}))
        assert snapshot(copy) == before
        capsys.readouterr()
    assert codes <= {0, 1, 2}


# -- refusals -------------------------------------------------------------------------------------------


def mark_newer(home: Path) -> None:
    database = sqlite3.connect(home / MANIFEST)
    database.execute(f"PRAGMA application_id={0x4643_0000 + 2}")
    database.execute("PRAGMA user_version=2")
    database.close()


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda home: edit_header(home, version=2), "format 2, this program writes 1"),
        (mark_newer, "format 2, this program writes 1"),
        (shutil.rmtree, "no such directory"),
        (lambda home: (shutil.rmtree(home), home.write_text("x")), "no such directory"),
        (lambda home: (shutil.rmtree(home), home.mkdir()), "no FlatCake store"),
        (lambda home: ((home / FORMAT).write_text("mine"), (home / LOCK).unlink()), "not the header"),
    ],
    ids=["header", "manifest", "gone", "a file", "empty", "foreign"],
)
def test_a_callers_mistake_is_2(home: Path, prepare: Any, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(home)
    before = snapshot(home) if home.is_dir() else {}
    for command in ("inspect", "verify"):
        assert main([command, str(home)], environ={}) == 2
        said = capsys.readouterr()
        assert expected in said.err and str(home) in said.err and not said.out
        assert (snapshot(home, but=[LOCK]) if home.is_dir() else {}) == {
            path: entry for path, entry in before.items() if not path.endswith(LOCK)
        }


class Denied(Files):
    """A file that may not be read."""

    def __init__(self, name: str) -> None:
        self.name, self.refusals = name, 0

    def open_reading(self, path: str, *, direct: bool) -> int:
        if path.endswith(self.name):
            self.refusals += 1
            raise PermissionError(13, "Permission denied", path)
        return super().open_reading(path, direct=direct)

    def list_directory(self, path: str) -> list[str]:
        if not self.name:
            self.refusals += 1
            raise PermissionError(13, "Permission denied", path)
        return super().list_directory(path)


@pytest.mark.parametrize("name", ["", MANIFEST, "pool-0000.fc"])
def test_no_permission_is_a_refusal(home: Path, name: str) -> None:
    files = Denied(name)
    with pytest.raises(OwnershipError, match="Permission denied.*let this user read"):
        describe(files, group(files, [str(home)])[0])
    assert files.refusals


def test_a_copy_that_does_not_fit_says_where(home: Path) -> None:
    files = FaultyFiles()
    files.fail("write", 28)
    with pytest.raises(CapacityError, match="TMPDIR"), copied(files, f"{home}/{MANIFEST}"):
        pytest.fail("there is no copy")
    assert files.calls["write"] == 1 and not files.open_fds


@pytest.mark.parametrize("call", ["open_reading", "open_file", "create_file", "read", "write"])
def test_whatever_call_fails_the_answer_is_an_error_of_ours(home: Path, call: str) -> None:
    before = snapshot(home)
    fired = 0
    for number in range(12):
        files = FaultyFiles()
        files.fail(call, *[None] * number, 5)
        try:
            describe(files, group(files, [str(home)])[0])
        except (OwnershipError, CapacityError):
            fired += 1
        assert not files.open_fds
    assert fired and snapshot(home) == before


def test_a_directory_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect"], environ={})
    assert caught.value.code == 2 and "DIRECTORY" in capsys.readouterr().err
