"""The manifest's file: commits, what survives which damage, and what is refused."""

import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatcake.errors import FlatCakeError, FormatError, OwnershipError
from flatcake.gva import Medium
from flatcake.io.manifestdb import GENERATION_STEP, MANIFEST, ManifestDB
from flatcake.io.manifestfile import ASIDE
from flatcake.io.seam import Files
from flatcake.manifest import Stored, TurnRow
from flatcake.tenancy import TENANTS_MAX
from tests.fakes import WAIT_S, FaultyFiles

ORIGIN, OTHER = b"o" * 16, b"x" * 16


def row(scope: int, number: int, blocks: int = 3) -> TurnRow:
    return TurnRow(
        scope_id=scope,
        session=scope.to_bytes(16, "little"),
        medium=Medium.SSD,
        shared_blocks=0,
        parts=np.array([[4096 * scope, 8, scope, number, blocks]]),
        keys=np.random.default_rng([scope, number]).integers(0, 2**63, (blocks, 2)).astype(np.uint64),
    )


class Steps(FaultyFiles):
    """Files whose database fails or stalls at a statement, as told."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: Callable[[str], None] = lambda statement: None

    def open_database(self, path: str, *, blob_bytes_max: int) -> sqlite3.Connection:
        inner = super().open_database(path, blob_bytes_max=blob_bytes_max)
        return Database(inner, self)  # type: ignore[return-value]

    def close_database(self, database: sqlite3.Connection) -> None:
        super().close_database(database.inner)  # type: ignore[attr-defined]


class Database:
    """A connection that asks first."""

    def __init__(self, inner: sqlite3.Connection, files: Steps) -> None:
        self.inner, self.files = inner, files

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        self.files.broken(statement)
        return self.inner.execute(statement, *values)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def full(statement: str) -> None:
    if statement == "COMMIT":
        raise sqlite3.OperationalError("database or disk is full")


def opened(where: Path, *, files: Files | None = None, origin: bytes = ORIGIN) -> tuple[ManifestDB, Stored]:
    manifest = ManifestDB(files or FaultyFiles(), f"{where}/{MANIFEST}", origin)
    stored = manifest.load(trusted=True)
    manifest.start(())
    return manifest, stored


def filled(where: Path, scopes: int = 5, turns: int = 4) -> None:
    manifest, _ = opened(where)
    for number in range(turns):
        for scope in range(1, scopes + 1):
            assert manifest.commit_turn(row(scope, number), scope)
    manifest.close(clean=True)


def found(where: Path, origin: bytes = ORIGIN) -> set[tuple[int, int]]:
    """Scope and number of each row; all that is read must be what was written."""
    manifest, stored = opened(where, origin=origin)
    manifest.check()
    manifest.close()
    at, rows = 0, set()
    for scope, part in zip(stored.scopes.tolist(), stored.parts.tolist(), strict=True):
        assert part == row(scope, part[3]).parts[0].tolist()
        assert (stored.keys[at : at + part[4]] == row(scope, part[3]).keys).all()
        at += part[4]
        rows.add((scope, part[3]))
    return rows


ALL = {(scope, number) for scope in range(1, 6) for number in range(4)}


def test_commits_come_back_in_order_and_go_on(tmp_path: Path) -> None:
    filled(tmp_path)
    manifest, stored = opened(tmp_path)
    assert stored.parts[:, 3].tolist() == [n for n in range(4) for _ in range(5)] and len(stored) == 20
    assert manifest.commit_turn(row(9, 0), 50)
    manifest.check()
    manifest.close(clean=True)
    assert found(tmp_path) == ALL | {(9, 0)}


def test_a_commit_is_there_for_whoever_opens_next_without_a_close(tmp_path: Path) -> None:
    manifest, _ = opened(tmp_path)
    for number in range(3):
        manifest.commit_turn(row(1, number), 1)
        copy = tmp_path / f"copy{number}"
        copy.mkdir()
        for path in tmp_path.glob(f"{MANIFEST}*"):
            shutil.copy(path, copy)
        assert found(copy) == {(1, n) for n in range(number + 1)}
    manifest.close()


def test_what_is_dropped_goes_with_the_next_transaction(tmp_path: Path) -> None:
    filled(tmp_path)
    manifest, stored = opened(tmp_path)
    manifest.drop_scope(2)
    manifest.drop_turns(stored.numbers[:1].tolist())
    assert manifest.commit_turn(row(7, 0), 7)
    manifest.drop_scope(7)
    manifest.check()
    manifest.close()
    assert found(tmp_path) == {pair for pair in ALL if pair[0] != 2} - {(1, 0)} | {(7, 0)}
    manifest, _ = opened(tmp_path)
    manifest.drop_scope(7)
    assert manifest.settle() and manifest.settle()
    manifest.close()
    assert (7, 0) not in found(tmp_path)


def test_reset_forgets_what_is_below_and_refuses_it_from_then_on(tmp_path: Path) -> None:
    filled(tmp_path)
    manifest, _ = opened(tmp_path)
    assert manifest.reset(4) and manifest.commit_turn(row(3, 9), 1) == 0 and manifest.commit_turn(row(8, 0), 8)
    manifest.check()
    manifest.close()
    assert found(tmp_path) == {pair for pair in ALL if pair[0] >= 4} | {(8, 0)}


def test_rows_of_another_origin_are_kept_and_counted(tmp_path: Path) -> None:
    filled(tmp_path)
    manifest, stored = opened(tmp_path, origin=OTHER)
    assert set(stored.tenants.tolist()) == {1} and stored.piece_bytes == ((),)
    assert manifest.counts["reopen: rows of another identity or pool"] == len(stored) == 20
    assert manifest.commit_turn(row(9, 0), 9)
    manifest.check()
    manifest.close(clean=True)
    manifest, stored = opened(tmp_path)
    assert stored.tenants.tolist() == [0] * 20 + [1] and manifest.counts["reopen: damaged rows"] == 0
    manifest.check()
    manifest.close()


def test_rows_of_so_many_other_origins_are_kept_and_no_more(tmp_path: Path) -> None:
    origins = [bytes([number + 1]) * 16 for number in range(TENANTS_MAX + 3)]
    for number, origin in enumerate(origins, 1):
        manifest, _ = opened(tmp_path, origin=origin)
        manifest.commit_turn(row(number, 0), number)
        manifest.close(clean=True)
    manifest, stored = opened(tmp_path, origin=ORIGIN)
    assert sorted(stored.scopes.tolist()) == list(range(4, TENANTS_MAX + 4))
    assert manifest.counts["reopen: damaged rows"] == 1, "the others went one by one"
    manifest.drop_scope(7)
    manifest.settle()
    manifest.check()
    manifest.close()
    manifest, stored = opened(tmp_path, origin=origins[6])
    assert set(stored.tenants.tolist()) == set(range(1, TENANTS_MAX)), "of the one without rows nothing is left"
    manifest.close()


def test_everything_is_forgotten_with_its_identities(tmp_path: Path) -> None:
    filled(tmp_path)
    manifest = ManifestDB(Files(), f"{tmp_path}/{MANIFEST}", OTHER)
    assert len(manifest.load(trusted=True)) == 20
    manifest.start((), everything=True)
    manifest.close(clean=True)
    manifest, stored = opened(tmp_path, origin=ORIGIN)
    assert not len(stored)
    manifest.close()


def test_without_checksums_rows_count_only_if_every_run_since_was_closed(tmp_path: Path) -> None:
    for first, second, kept in ((True, True, 20), (False, True, 0), (True, False, 0)):
        home = tmp_path / f"{first} {second}"
        home.mkdir()
        filled(home)
        if not first:
            manifest, _ = opened(home)
            manifest.close()
        manifest, _ = opened(home, origin=OTHER)
        manifest.close(clean=second)
        manifest = ManifestDB(Files(), f"{home}/{MANIFEST}", ORIGIN)
        assert len(manifest.load(trusted=False)) == kept
        manifest.close()


def test_generations_only_grow(tmp_path: Path) -> None:
    last = 0
    for extents in (1, 5, 0):
        manifest, stored = opened(tmp_path)
        assert stored.generation > last
        last = stored.generation + extents
        if extents:
            manifest.commit_turn(row(1, extents), last)
        manifest.close()


def test_generations_are_promised_before_they_are_used(tmp_path: Path) -> None:
    manifest, stored = opened(tmp_path)
    last = stored.generation + 5 * GENERATION_STEP
    manifest.commit_turn(row(1, 0), last)
    manifest.close()
    manifest, stored = opened(tmp_path)
    assert stored.generation > last
    manifest.close()
    assert b"generation" not in (tmp_path / MANIFEST).read_bytes()


def test_what_nothing_verifies_counts_only_after_a_clean_close(tmp_path: Path) -> None:
    filled(tmp_path)
    manifest = ManifestDB(Files(), f"{tmp_path}/{MANIFEST}", ORIGIN)
    assert len(manifest.load(trusted=False)) == 20
    manifest.start(())
    manifest.close()
    manifest = ManifestDB(Files(), f"{tmp_path}/{MANIFEST}", ORIGIN)
    assert len(manifest.load(trusted=False)) == 0
    assert manifest.counts["reopen: rows that nothing could verify"] == 20
    manifest.start(())
    manifest.close()
    assert found(tmp_path) == set()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_may_read(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        manifest, _ = opened(tmp_path)
        manifest.commit_turn(row(1, 0), 1)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob(f"{MANIFEST}*")}
        manifest.close()
    finally:
        os.umask(before)
    assert len(modes) >= 2 and set(modes.values()) == {0o600}, modes
    os.chmod(tmp_path / MANIFEST, 0o666)
    opened(tmp_path)[0].close()
    assert (tmp_path / MANIFEST).stat().st_mode & 0o777 == 0o600


# -- faults while it runs -------------------------------------------------------------------------------


def test_a_full_disk_is_counted_and_what_comes_later_is_kept(tmp_path: Path) -> None:
    files = Steps()
    manifest, _ = opened(tmp_path, files=files)
    assert manifest.commit_turn(row(1, 0), 1)
    files.broken = full
    manifest.drop_scope(1)
    assert manifest.commit_turn(row(2, 0), 2) == 0 and not manifest.settle() and not manifest.checkpoint()
    assert not manifest.reset(1)
    files.broken = lambda statement: None
    assert manifest.commit_turn(row(3, 0), 3) and manifest.counts["manifest transactions failed"] == 4
    manifest.check()
    manifest.close()
    assert found(tmp_path) == {(3, 0)}, "the drop that failed was done with the next commit"


def test_drops_do_not_wait_for_a_commit_that_hangs(tmp_path: Path) -> None:
    files, reached, go = Steps(), threading.Event(), threading.Event()
    manifest, _ = opened(tmp_path, files=files)

    def hang(statement: str) -> None:
        if statement == "COMMIT":
            reached.set()
            assert go.wait(WAIT_S)

    files.broken = hang
    thread = threading.Thread(target=manifest.commit_turn, args=(row(1, 0), 1))
    thread.start()
    assert reached.wait(WAIT_S)
    manifest.drop_scope(5)
    manifest.drop_turns([7])
    go.set()
    thread.join()
    assert manifest.settle()
    manifest.close()


def test_after_close_nothing_is_committed_and_nothing_raised(tmp_path: Path) -> None:
    manifest, _ = opened(tmp_path)
    assert manifest.close(clean=True) and not manifest.close(clean=True)
    assert manifest.commit_turn(row(1, 0), 1) == 0 and not manifest.reset(5) and not manifest.checkpoint()
    manifest.drop_scope(3)
    assert not manifest.settle()
    manifest.check()


# -- what lies there at open ----------------------------------------------------------------------------


def test_locked_by_another_is_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    other = sqlite3.connect(tmp_path / MANIFEST, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(OwnershipError, match="locked by another process"):
        opened(tmp_path)
    other.execute("ROLLBACK")
    other.close()
    assert found(tmp_path) == ALL


@pytest.mark.parametrize("call", ["open_file", "create_file"])
def test_without_permission_it_is_refused(tmp_path: Path, call: str) -> None:
    if call == "open_file":
        filled(tmp_path)
    files = FaultyFiles()
    files.fail(call, PermissionError(13, "Permission denied"))
    with pytest.raises(OwnershipError, match="let this user read and write it"):
        opened(tmp_path, files=files)
    assert not files.open_fds


def test_a_newer_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    database = sqlite3.connect(tmp_path / MANIFEST)
    mark = database.execute("PRAGMA application_id").fetchone()[0]
    database.execute(f"PRAGMA application_id={mark + 1}")
    database.execute("PRAGMA user_version=2")
    database.close()
    before = (tmp_path / MANIFEST).read_bytes()
    with pytest.raises(FormatError, match="format 2, this program writes 1"):
        opened(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == before


def test_one_odd_mark_is_damage_and_its_rows_are_saved(tmp_path: Path) -> None:
    filled(tmp_path)
    database = sqlite3.connect(tmp_path / MANIFEST)
    database.execute("PRAGMA user_version=2")
    database.close()
    assert found(tmp_path) == ALL and (tmp_path / f"{MANIFEST}{ASIDE}").exists()


@pytest.mark.parametrize(
    "statement", ["CREATE TABLE more (a)", "CREATE TRIGGER t AFTER INSERT ON turns BEGIN DELETE FROM turns; END"]
)
def test_a_foreign_schema_is_not_run(tmp_path: Path, statement: str) -> None:
    filled(tmp_path)
    database = sqlite3.connect(tmp_path / MANIFEST)
    database.execute(statement)
    database.close()
    manifest, stored = opened(tmp_path)
    assert len(stored) == 20 and manifest.commit_turn(row(9, 9), 9)
    manifest.close()
    assert found(tmp_path) == ALL | {(9, 9)}


@pytest.mark.parametrize("kind", ["symlink", "dangling", "directory", "pipe"])
def test_what_is_no_file_is_set_aside_and_not_followed(tmp_path: Path, kind: str) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.write_bytes(b"not ours")
    path = home / MANIFEST
    if kind == "symlink":
        path.symlink_to(elsewhere)
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "directory":
        path.mkdir()
    else:
        os.mkfifo(path)
    manifest, stored = opened(home)
    assert not len(stored) and manifest.counts["reopen: damaged manifests"] == 1 and manifest.commit_turn(row(1, 0), 1)
    manifest.close()
    assert found(home) == {(1, 0)} and elsewhere.read_bytes() == b"not ours"
    assert not (tmp_path / "nowhere").exists() and os.path.lexists(home / f"{MANIFEST}{ASIDE}")


@pytest.mark.parametrize(
    "content", [b"", b"garbage" * 1000, bytes(8192), b"SQLite format 3\0" + bytes(4080), b"\xff" * 100]
)
@pytest.mark.parametrize("tail", ["", "-wal", "-journal", "-shm"])
def test_any_content_opens(tmp_path: Path, content: bytes, tail: str) -> None:
    filled(tmp_path)
    (tmp_path / f"{MANIFEST}{tail}").write_bytes(content)
    assert found(tmp_path) <= ALL
    manifest, _ = opened(tmp_path)
    assert manifest.commit_turn(row(9, 9), 9)
    manifest.close(clean=True)
    assert (9, 9) in found(tmp_path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_file_that_is_cut_keeps_what_is_before_the_cut(tmp_path: Path, share: float) -> None:
    filled(tmp_path, scopes=60, turns=20)
    path = tmp_path / MANIFEST
    os.truncate(path, int(path.stat().st_size * share))
    rows = found(tmp_path)
    assert len(rows) < 1200 and (len(rows) > 600 * share or share < 0.3)


def test_a_damaged_page_costs_what_it_held(tmp_path: Path) -> None:
    filled(tmp_path, scopes=60, turns=20)
    path, whole = tmp_path / MANIFEST, (tmp_path / MANIFEST).read_bytes()
    pages, dice = len(whole) // 4096, random.Random(5)
    least = 1200
    for page in dice.sample(range(3, pages), 12):
        for junk in (bytes(4096), dice.randbytes(4096)):
            shutil.rmtree(tmp_path, ignore_errors=False)
            tmp_path.mkdir()
            path.write_bytes(whole[: page * 4096] + junk + whole[(page + 1) * 4096 :])
            rows = found(tmp_path)
            least = min(least, len(rows))
            assert len(rows) >= 1200 - 40 or len(rows) == 0 or page < 4, (page, len(rows))
    assert least < 1200, "some page held rows"


def test_a_flipped_bit_costs_its_turn_at_most_a_page(tmp_path: Path) -> None:
    filled(tmp_path, scopes=20, turns=10)
    path, whole = tmp_path / MANIFEST, (tmp_path / MANIFEST).read_bytes()
    dice, counts = random.Random(6), []
    for _ in range(120):
        bit = dice.randrange(4096 * 2, len(whole) * 8)
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        path.write_bytes(damaged)
        counts.append(len(found(tmp_path)))
    assert min(counts) < 200 and sorted(counts)[12] >= 160, sorted(counts)[:20]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bytes_keep_it_from_opening(tmp_path: Path, data: st.DataObject) -> None:
    base = tmp_path / "base"
    if not base.exists():
        base.mkdir()
        filled(base, scopes=6, turns=6)
        manifest, _ = opened(base)
        manifest.commit_turn(row(7, 0), 7)
        for path in base.glob(f"{MANIFEST}*"):
            shutil.copy(path, tmp_path / path.name)
        manifest.close()
    home = tmp_path / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    for name in (MANIFEST, f"{MANIFEST}-wal"):
        content = bytearray((tmp_path / name).read_bytes())
        for _ in range(data.draw(st.integers(0, 4))):
            at = data.draw(st.integers(0, max(0, len(content) - 1)))
            kind = data.draw(st.sampled_from(["flip", "junk", "cut", "zero", "copy"]))
            if kind == "flip" and content:
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            elif kind == "junk":
                junk = data.draw(st.binary(max_size=64))
                content[at : at + len(junk)] = junk
            elif kind == "cut":
                del content[at:]
            elif kind == "zero":
                content[at : at + 512] = bytes(len(content[at : at + 512]))
            else:
                to = data.draw(st.integers(0, max(0, len(content) - 1)))
                content[to : to + 4096] = content[at : at + 4096]
        (home / name).write_bytes(content)
    try:
        rows = found(home)
    except FlatCakeError as error:
        assert isinstance(error, FormatError) and "this program writes" in str(error)
        return
    assert rows <= {(scope, number) for scope in range(1, 8) for number in range(6)}
    manifest, _ = opened(home)
    assert manifest.commit_turn(row(9, 9), 9)
    manifest.close(clean=True)
    assert found(home) == rows | {(9, 9)}


@pytest.mark.parametrize("where", [b"CREATE TABLE turns", b"CREATE TABLE state"])
def test_damaged_text_of_the_schema_is_damage(tmp_path: Path, where: bytes) -> None:
    filled(tmp_path)
    data = (tmp_path / MANIFEST).read_bytes()
    start, damages = data.index(where), 0
    for at in range(start - 20, start + 60, 4):
        home = tmp_path / f"at{at}"
        home.mkdir()
        (home / MANIFEST).write_bytes(data[:at] + b"\xe3" + data[at + 1 :])
        manifest, stored = opened(home)
        damages += manifest.counts["reopen: damaged manifests"]
        assert len(stored) <= len(ALL)
        manifest.check()
        manifest.close()
    assert damages > 10


def test_a_row_that_has_become_text_costs_itself_alone(tmp_path: Path) -> None:
    filled(tmp_path)
    database = sqlite3.connect(tmp_path / MANIFEST)
    with database:
        query = "UPDATE turns SET body = CAST(x'ff' AS TEXT) WHERE number = (SELECT min(number) FROM turns)"
        assert database.execute(query).rowcount == 1
    database.close()
    assert len(found(tmp_path)) == len(ALL) - 1
