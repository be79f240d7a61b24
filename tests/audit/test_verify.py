"""`flatcake verify`: exactly what was damaged is found, and dropped only when asked for."""

import errno
import io
import os
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatcake.audit.checking import Checker, _extents_apart, runs_of_rows
from flatcake.audit.progress import WIDTH, Progress
from flatcake.audit.sources import Sources
from flatcake.audit.stores import group, read_store
from flatcake.audit.tally import Verified
from flatcake.audit.verdicts import CHECKSUM, FAILED, NO_FILE, Outcome, Verdict, Verdicts
from flatcake.audit.verify import claimed, verify
from flatcake.cli import main
from flatcake.clock import ManualClock, MonotonicClock
from flatcake.errors import ConfigError, OwnershipError
from flatcake.gva import Medium
from flatcake.io.dramdump import DUMP
from flatcake.io.manifestdb import MANIFEST, ManifestDB
from flatcake.io.pooldir import FORMAT, LOCK
from flatcake.io.posix import PosixEngine
from flatcake.io.seam import Files
from flatcake.manifest import TurnRow, session_digest
from flatcake.units import SECOND, MiB
from tests.audits import LENGTHS, SESSIONS, called, filled, flip, hits, medium_of, opened, places, snapshot
from tests.fakes import FaultyFiles
from tests.io.test_manifestdb import Steps, full
from tests.stores import Memory, make_tokens, restore, save, simple_layout

pytestmark = pytest.mark.usefixtures("no_leaks")
BLOCKS = LENGTHS[-1]
ALL = BLOCKS * SESSIONS
NIGHTLY = bool(os.environ.get("FLATCAKE_NIGHTLY"))


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout())


class Kept:
    """A directory of a closed store, and where its blocks are."""

    def __init__(self, memory: Memory, home: Path, **changes: Any) -> None:
        self.memory, self.home, self.changes = memory, home, changes
        filled(memory, home, **changes)
        with self.open() as store:
            self.places = [places(store, number) for number in range(SESSIONS)]
            self.file_bytes = store.catalog.space.tables[Medium.SSD].ranges.file_bytes
            self.lanes = store.catalog.space.tables[Medium.SSD].lanes
            spans = [
                (scope.session, extent.medium, extent.base_bytes, extent.used_blocks)
                for scope in store.catalog.space.scopes
                for extent in scope.extents
            ]
            self.extents = spans

    def open(self) -> Any:
        return opened(self.memory, self.home, **self.changes)

    def flip(self, number: int, block: int, layer: int = 0) -> None:
        """Damage one piece: its layer-0 piece's place is known, the others' follow in an extent of one or more."""
        medium, offset_bytes = self.places[number][block]
        if layer:
            base, room = self.extent_of(medium, offset_bytes)
            slot = (offset_bytes - base - self.lanes.record_bytes(room)) // int(self.lanes.piece_bytes[0])
            starts = self.lanes.lane_offsets(np.array([room]))[:, 0]
            offset_bytes = base + int(starts[layer]) + slot * int(self.lanes.piece_bytes[layer])
        flip(self.home, (medium, offset_bytes), self.file_bytes)

    def extent_of(self, medium: Medium, offset_bytes: int) -> tuple[int, int]:
        """Base and room of the extent that holds an offset."""
        facts = read_store(Files(), group(Files(), [str(self.home)])[0]).rows
        assert facts is not None
        media = np.repeat(facts.stored.media, facts.stored.part_counts)
        for found, (base, room, *_) in zip(media.tolist(), facts.stored.parts.tolist(), strict=True):
            if found == medium and base <= offset_bytes < base + self.lanes.extent_bytes(room):
                return base, room
        raise AssertionError((medium, offset_bytes))


@pytest.fixture
def kept(memory: Memory, tmp_path: Path) -> Kept:
    return Kept(memory, tmp_path / "home")


def run(files: Files, home: Path, *, drop: bool = False) -> Verified:
    """Verify one store."""
    clock = MonotonicClock()
    with claimed(files, [str(home)]) as (store,):
        return verify(files, clock, store, drop=drop, progress=lambda total: Progress(io.StringIO(), clock, total))


def failing(found: Verified) -> dict[str | None, dict[str, int]]:
    """Reasons by session, of those with failed blocks."""
    return {
        scope.session: {verdict.reason: count for verdict, count in scope.counts.items() if verdict.outcome in FAILED}
        for scope in found.scopes
        if scope.has_failed
    }


def digest(number: int) -> str:
    return session_digest(f"s{number}").hex()


# -- finding --------------------------------------------------------------------------------------------


def test_a_sound_store_is_good_and_stays_as_it_is(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(kept.home, but=[LOCK])
    for words in ([], ["--drop"]):
        code, (store,) = called(capsys, "verify", str(kept.home), *words)
        assert code == 0 and store["good"] and store["outcomes"] == {
            "skipped": 0, "good": ALL, "unchecked": 0, "bad": 0, "unreadable": 0
        }  # fmt: skip
        assert store["read_bytes"] >= ALL * kept.lanes.block_bytes and store["read_bytes_s"] > 0
        assert store["buffer_bytes"] == 64 * MiB and store["dropped_blocks"] == 0
        assert [scope["outcomes"]["good"] for scope in store["scopes"]] == [BLOCKS] * SESSIONS
        assert snapshot(kept.home, but=[LOCK]) == before
    assert main(["verify", str(kept.home)], environ={}) == 0
    assert "all good" in capsys.readouterr().out
    with kept.open() as store:
        assert hits(store, kept.memory) == [BLOCKS] * SESSIONS


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("medium", [Medium.SSD, Medium.DRAM])
@pytest.mark.parametrize("block", [0, 1, 4])
def test_one_flipped_bit_is_one_block(kept: Kept, medium: Medium, block: int, layer: int) -> None:
    number = 2 if medium is Medium.SSD else 3
    assert medium_of(number) is medium
    kept.flip(number, block, layer)
    before = snapshot(kept.home, but=[LOCK])
    found = run(Files(), kept.home)
    assert failing(found) == {digest(number): {"checksum": 1}}
    assert found.counts == {Verdict(Outcome.GOOD): ALL - 1, CHECKSUM: 1} and not found.is_good
    assert snapshot(kept.home, but=[LOCK]) == before, "nothing is changed without --drop"
    dropped = run(Files(), kept.home, drop=True)
    assert (dropped.dropped_blocks, dropped.problems) == (1, ())
    again = run(Files(), kept.home)
    assert again.is_good and again.counts == {Verdict(Outcome.GOOD): ALL - 1}
    with kept.open() as store:
        tokens = make_tokens(number, BLOCKS)
        assert store.match(tokens).blocks == block, "the block is not offered"
        expected = [BLOCKS] * SESSIONS
        expected[number] = block
        assert hits(store, kept.memory) == expected and "blocks_failed_checksum" not in store.stats().counts
        saved = save(store, kept.memory, f"s{number}", tokens)
        assert (saved.written_blocks, saved.reason) == (1, ""), "those behind it were there still"
        assert hits(store, kept.memory) == [BLOCKS] * SESSIONS
    with kept.open() as store:
        assert hits(store, kept.memory) == [BLOCKS] * SESSIONS
    assert run(Files(), kept.home).is_good


def test_the_command_says_which_scope_and_why(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    kept.flip(0, 3)
    assert main(["verify", str(kept.home)], environ={}) == 1
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if digest(0)[:12] in line)
    assert re.fullmatch(r"\d+ +session +\w+ +SSD +5 +4 +0 +1 +0 +1 checksum", row) and "NOT all good" in said
    assert digest(2)[:12] not in said and "29 good, 1 bad" in said
    assert main(["verify", str(kept.home), "--all"], environ={}) == 1
    assert digest(2)[:12] in capsys.readouterr().out
    assert main(["verify", str(kept.home), "--drop"], environ={}) == 1, "something failed, if only once more"
    assert "dropped    1 blocks" in capsys.readouterr().out
    assert main(["verify", str(kept.home)], environ={}) == 0


def test_a_damaged_record_costs_its_extent(kept: Kept) -> None:
    session, medium, base, used = next(span for span in kept.extents if span[1] is Medium.SSD)
    flip(kept.home, (medium, base), kept.file_bytes)
    found = run(Files(), kept.home, drop=True)
    assert failing(found) == {session.hex(): {"no valid checksum record": used}} and 0 < used < BLOCKS
    with kept.open() as store:
        got = hits(store, kept.memory)
        assert sorted(got) == sorted([*[BLOCKS] * (SESSIONS - 1), got[0]]) and got[0] in (0, BLOCKS - used)


def test_bytes_of_another_block_are_seen(kept: Kept) -> None:
    (_, at), (_, other) = kept.places[0][3], kept.places[2][3]
    data = (kept.home / f"pool-{other // kept.file_bytes:04d}.fc").read_bytes()[other % kept.file_bytes :]
    with (kept.home / f"pool-{at // kept.file_bytes:04d}.fc").open("r+b") as file:
        file.seek(at % kept.file_bytes)
        file.write(data[: int(kept.lanes.piece_bytes[0])])
    assert failing(run(Files(), kept.home)) == {digest(0): {"checksum": 1}}


class BadSector(FaultyFiles):
    """Reads that touch some bytes of one file fail, or end before them."""

    def __init__(self, path: Path, at: int, *, short: bool = False) -> None:
        super().__init__()
        self.path, self.at, self.short, self.hits = str(path), at, short, 0
        self.where: dict[int, str] = {}

    def open_reading(self, path: str, *, direct: bool) -> int:
        fd = super().open_reading(path, direct=direct)
        self.where[fd] = path
        return fd

    def read(self, fd: int, into: Sequence[memoryview], offset_bytes: int) -> int:
        size_bytes = sum(map(len, into))
        if self.where.get(fd) == self.path and offset_bytes <= self.at < offset_bytes + size_bytes:
            self.hits += 1
            if not self.short or self.at == offset_bytes:
                raise OSError(errno.EIO, "bad sector")
            into = [into[0][: self.at - offset_bytes]]
        return super().read(fd, into, offset_bytes)


@pytest.mark.parametrize("short", [False, True])
def test_a_bad_sector_costs_the_blocks_of_its_read(kept: Kept, short: bool) -> None:
    _, offset_bytes = kept.places[2][4]
    path = kept.home / f"pool-{offset_bytes // kept.file_bytes:04d}.fc"
    files = BadSector(path, offset_bytes % kept.file_bytes, short=short)
    found = run(files, kept.home)
    assert files.hits and not files.open_fds
    (reasons,) = failing(found).values()
    assert list(failing(found)) == [digest(2)] and list(reasons) == ["read failed (errno 5)"]
    assert 1 <= reasons["read failed (errno 5)"] <= (1 if short else 3), "no more than its turn"
    assert found.counts[Verdict(Outcome.GOOD)] == ALL - reasons["read failed (errno 5)"]


def test_a_record_that_cannot_be_read_costs_its_extent(kept: Kept) -> None:
    session, _, base, used = next(span for span in kept.extents if span[1] is Medium.SSD)
    files = BadSector(kept.home / f"pool-{base // kept.file_bytes:04d}.fc", base % kept.file_bytes)
    assert failing(run(files, kept.home)) == {session.hex(): {"read failed (errno 5)": used}} and files.hits


def test_short_reads_are_gone_on_with(kept: Kept) -> None:
    files = FaultyFiles()
    files.cap_bytes = 4096
    assert run(files, kept.home).is_good and files.calls["read"] > ALL


@pytest.mark.parametrize("name", ["pool-0000.fc", DUMP])
def test_a_missing_file_costs_what_was_in_it(kept: Kept, name: str) -> None:
    (kept.home / name).unlink()
    found = run(Files(), kept.home)
    wanted = Medium.DRAM if name == DUMP else Medium.SSD
    lost = sum(
        medium is wanted and (name == DUMP or offset_bytes < kept.file_bytes)
        for each in kept.places
        for medium, offset_bytes in each
    )
    assert found.counts == {Verdict(Outcome.GOOD): ALL - lost, NO_FILE: lost} and lost
    assert bool(found.problems) == (name != DUMP)
    assert run(Files(), kept.home, drop=True).dropped_blocks == lost
    if name == DUMP:
        with kept.open() as store:
            assert hits(store, kept.memory) == [BLOCKS, 0] * (SESSIONS // 2)
        assert run(Files(), kept.home).is_good


def test_a_file_that_was_cut_is_a_problem_and_unreadable_behind_the_cut(kept: Kept) -> None:
    os.truncate(kept.home / "pool-0000.fc", kept.file_bytes // 2 // 4096 * 4096)
    found = run(Files(), kept.home)
    assert "the next open finds nothing" in found.problems[0]
    assert {verdict.outcome for verdict in found.counts} == {Outcome.GOOD, Outcome.UNREADABLE}


def test_without_checksums_blocks_are_read_and_not_judged(memory: Memory, tmp_path: Path) -> None:
    kept = Kept(memory, tmp_path / "home", io={"verify": "off"})
    kept.flip(0, 0)
    found = run(Files(), kept.home)
    assert found.counts == {Verdict(Outcome.UNCHECKED): ALL} and found.is_good


def test_without_direct_io_it_goes_through_the_page_cache(kept: Kept) -> None:
    class Refusing(FaultyFiles):
        def open_reading(self, path: str, *, direct: bool) -> int:
            if direct:
                self.calls["refused"] += 1
                raise OSError(errno.EINVAL, "no O_DIRECT")
            return super().open_reading(path, direct=direct)

    files = Refusing()
    found = run(files, kept.home)
    assert found.is_good and found.is_direct is False and files.calls["refused"] > 1


def test_rows_that_the_next_open_leaves_out_are_skipped(kept: Kept) -> None:
    facts = read_store(Files(), group(Files(), [str(kept.home)])[0]).rows
    assert facts is not None and facts.origin is not None
    manifest = ManifestDB(Files(), f"{kept.home}/{MANIFEST}", facts.origin)
    parts, keys = np.array([[1 << 40, 2, 5, 0, 2]]), np.ones((2, 2), np.uint64)
    row = TurnRow(
        scope_id=900,
        session=b"x" * 16,
        medium=Medium.SSD,
        shared_blocks=0,
        parts=parts,
        keys=keys,
    )
    assert manifest.commit_turn(row, 5)
    manifest.close()
    found = run(Files(), kept.home)
    assert found.is_good and found.counts == {Verdict(Outcome.SKIPPED): 2, Verdict(Outcome.GOOD): ALL}
    assert "lie outside of the pool" in found.notes[0]


@pytest.mark.parametrize("seed", range(40 if NIGHTLY else 5))
def test_what_is_damaged_at_random_is_what_is_found_and_dropped(memory: Memory, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kept = Kept(memory, tmp_path / "home", layout={"growth_percent": rng.choice([0, 25, 200])})
    everything = [(number, block) for number in range(SESSIONS) for block in range(BLOCKS)]
    damaged = set(rng.sample(everything, rng.randrange(1, 12)))
    for number, block in damaged:
        kept.flip(number, block, rng.randrange(3))
    found = run(Files(), kept.home, drop=True)
    by_session = {number: sum(each == number for each, _ in damaged) for number, _ in damaged}
    assert failing(found) == {digest(number): {"checksum": count} for number, count in by_session.items()}
    assert found.dropped_blocks == len(damaged)
    again = run(Files(), kept.home)
    assert again.is_good and again.counts == {Verdict(Outcome.GOOD): ALL - len(damaged)}
    with kept.open() as store:
        prefix = [
            min([block for each, block in damaged if each == number], default=BLOCKS) for number in range(SESSIONS)
        ]
        assert hits(store, memory) == prefix and sum(prefix) > 0
        for number in range(SESSIONS):
            assert not save(store, memory, f"s{number}", make_tokens(number, BLOCKS)).reason
        assert hits(store, memory) == [BLOCKS] * SESSIONS
        store.catalog.check()
        store.keeper.check()
    assert run(Files(), kept.home).is_good


def test_batches_and_tiles_of_any_size_see_the_same(kept: Kept) -> None:
    kept.flip(0, 2)
    kept.flip(3, 4, layer=2)
    files = Files()
    found = read_store(files, group(files, [str(kept.home)])[0])
    rows, homes = found.rows, found.ranks[0].homes
    assert rows is not None and rows.about is not None and homes[0].header is not None
    runs = runs_of_rows(rows.stored, np.ones(len(rows.stored), np.bool_))
    seen = []
    for batch_pieces in (1, 7, 20, 1 << 17):
        sources = Sources(files, rows.about, homes, homes[0].header.files)
        engine = PosixEngine(files, sources.fds, threads=3, task_bytes=4096)
        verdicts, done = Verdicts(rows.stored), []
        checker = Checker(rows.about, sources, engine, verdicts, done.append, batch_pieces=batch_pieces)
        checker.check(runs, rows.stored)
        assert engine.close(SECOND)
        sources.close()
        assert sum(done) == ALL * kept.lanes.block_bytes
        seen.append(np.flatnonzero(verdicts.failed()).tolist())
    assert len(seen[0]) == 2 and all(each == seen[0] for each in seen)


def test_a_large_extent_is_read_in_large_reads(tmp_path: Path) -> None:
    memory = Memory(simple_layout(layers=3, page_tokens=8, block_tokens=8, page_count=64, dim=512))
    settings: dict[str, Any] = {"blocks": 100, "file_blocks": 25, "dram_blocks": 0, "io": {"slot_bytes": 1 * MiB}}
    settings["io"]["window_bytes_max"] = 5 * MiB
    home = tmp_path / "home"
    with opened(memory, home, **settings) as store:
        for number in range(3):
            assert not save(store, memory, f"s{number}", make_tokens(number, 24)).reason
        file_bytes = store.catalog.space.tables[Medium.SSD].ranges.file_bytes
        spots = [place for number in range(3) for place in places(store, number)]
    block_bytes = 3 * 32 * 1024

    class Sizes(FaultyFiles):
        def read(self, fd: int, into: Sequence[memoryview], offset_bytes: int) -> int:
            with self._lock:
                self.calls[f"{sum(map(len, into))} bytes"] += 1
            return super().read(fd, into, offset_bytes)

    files = Sizes()
    assert run(files, home).counts == {Verdict(Outcome.GOOD): 72}
    assert files.calls[f"{24 * block_bytes} bytes"] == 3, "all lanes of a full extent at once"
    flip(home, spots[2], file_bytes)
    assert run(Files(), home).counts == {Verdict(Outcome.GOOD): 71, CHECKSUM: 1}
    with opened(memory, home, **settings) as store:
        assert restore(store, memory, make_tokens(0, 24)).blocks == 2


@pytest.mark.parametrize("alone_min", [1, 3, 100])
def test_extents_apart_keeps_every_run_once(alone_min: int) -> None:
    rng = np.random.default_rng(alone_min)
    rows = [(1, base, 8, 5, slot, 2, 10 * base + slot) for base in range(9) for slot in range(0, rng.integers(2, 6), 2)]
    table = np.array(rows, np.int64)
    parts = list(_extents_apart(table, alone_min))
    assert sorted(np.concatenate(parts).tolist()) == sorted(table.tolist())
    for part in parts[:-1]:
        assert len(set(part[:, 1].tolist())) == 1 and part[:, 5].sum() >= alone_min
    assert not list(_extents_apart(table[:0], alone_min))


# -- several ---------------------------------------------------------------------------------------------


def test_several_directories_are_verified_by_the_first(memory: Memory, tmp_path: Path) -> None:
    homes = [tmp_path / "a", tmp_path / "b"]
    filled(memory, homes)
    with opened(memory, homes) as store:
        spots = [place for number in (0, 2) for place in places(store, number)]
        file_bytes = store.catalog.space.tables[Medium.SSD].ranges.file_bytes
    medium, offset_bytes = next(place for place in spots if place[1] // file_bytes % 2 == 0)
    flip(homes[0], (medium, offset_bytes), file_bytes)
    files = FaultyFiles()
    found = run(files, homes[0])
    assert found.directories == tuple(map(str, homes)) and found.counts[CHECKSUM] == 1 and not files.open_fds
    assert files.calls["lock"] == 2
    with pytest.raises(ConfigError, match="name the first one"):
        run(Files(), homes[1])
    with opened(memory, homes) as store, pytest.raises(OwnershipError, match="in use by"):
        run(Files(), homes[0])


def test_ranks_are_verified_one_after_another(
    memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = [Kept(memory, tmp_path / f"{rank}", rank=rank) for rank in range(2)]
    ranks[1].flip(4, 0)
    code, stores = called(capsys, "verify", *(str(rank.home) for rank in ranks))
    assert code == 1 and [store["good"] for store in stores] == [True, False]
    assert [store["outcomes"]["bad"] for store in stores] == [0, 1]


# -- who may, and what stays ------------------------------------------------------------------------------


def test_an_open_store_is_refused_and_its_owner_named(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    with kept.open() as store:
        before = snapshot(kept.home)
        for words in ([], ["--drop"]):
            assert main(["verify", str(kept.home), *words], environ={}) == 2
            said = capsys.readouterr()
            assert f"in use by flatcake-pool pid {os.getpid()} " in said.err and not said.out
        assert snapshot(kept.home) == before
        assert hits(store, kept.memory) == [BLOCKS] * SESSIONS


def test_no_store_can_be_opened_meanwhile(kept: Kept) -> None:
    with claimed(Files(), [str(kept.home)]), pytest.raises(OwnershipError, match=f"pid {os.getpid()}"):
        kept.open()
    with kept.open() as store:
        assert hits(store, kept.memory) == [BLOCKS] * SESSIONS


@pytest.mark.parametrize("drop", [False, True])
def test_an_interrupt_leaves_the_directory_as_it_was(kept: Kept, drop: bool) -> None:
    kept.flip(0, 0)
    before, files, clock = snapshot(kept.home, but=[LOCK]), FaultyFiles(), MonotonicClock()

    class Interrupted(Progress):
        def advance(self, size_bytes: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), claimed(files, [str(kept.home)]) as (store,):
        verify(files, clock, store, drop=drop, progress=lambda total: Interrupted(io.StringIO(), clock, total))
    assert snapshot(kept.home, but=[LOCK]) == before and not files.open_fds
    assert failing(run(Files(), kept.home)) == {digest(0): {"checksum": 1}}


def test_a_drop_that_cannot_be_written_changes_nothing_and_says_so(kept: Kept) -> None:
    kept.flip(0, 1)
    kept.flip(1, 1)
    files, fired = Steps(), []

    def broken(statement: str) -> None:
        if statement == "COMMIT":
            fired.append(statement)
        full(statement)

    files.broken = broken
    found = run(files, kept.home, drop=True)
    assert fired and found.dropped_blocks == 0 and "could not be dropped" in found.problems[0]
    assert sum(sum(each.values()) for each in failing(run(Files(), kept.home)).values()) == 2
    assert run(Files(), kept.home, drop=True).dropped_blocks == 2


def test_dropping_from_a_damaged_manifest_keeps_what_can_be_read(memory: Memory, tmp_path: Path) -> None:
    home = tmp_path / "home"
    with opened(memory, home, blocks=512) as store:
        for number in range(160):
            save(store, memory, f"s{number}", make_tokens(number, 2))
        spots = {number: places(store, number)[0] for number in range(160)}
        file_bytes = store.catalog.space.tables[Medium.SSD].ranges.file_bytes
    size_bytes = (home / MANIFEST).stat().st_size
    with (home / MANIFEST).open("r+b") as file:
        file.seek(size_bytes // 4096 // 2 * 4096)
        file.write(b"\xff" * 4096)
    for place in spots.values():
        flip(home, place, file_bytes)
    found = run(Files(), home, drop=True)
    turns = len(found.scopes)
    assert 0 < turns < 160 and found.counts == {Verdict(Outcome.GOOD): turns, CHECKSUM: turns}
    assert "the manifest is damaged" in found.problems[0] and found.dropped_blocks == turns
    again = run(Files(), home)
    assert again.is_good and again.counts == {Verdict(Outcome.GOOD): turns}, "and it says still whose it is"
    assert (home / f"{MANIFEST}.damaged").exists()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda home: (home / MANIFEST).unlink(), "no manifest"),
        (lambda home: (home / MANIFEST).write_bytes(b"garbage" * 999), "manifest is damaged"),
        (lambda home: (home / FORMAT).write_bytes(b""), "format is damaged"),
    ],
)
def test_what_cannot_be_verified_is_not_called_good(kept: Kept, damage: Any, expected: str) -> None:
    damage(kept.home)
    before = snapshot(kept.home, but=[LOCK])
    for drop in (False, True):
        found = run(Files(), kept.home, drop=drop)
        assert not found.is_good and expected in " ".join(found.problems)
        assert snapshot(kept.home, but=[LOCK]) == before


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_to_any_file_never_raises(kept: Kept, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    codes = set()
    for number in range(6):
        copy = kept.home.with_name(f"copy{number}")
        shutil.copytree(kept.home, copy)
        for _ in range(rng.randrange(1, 4)):
            path = rng.choice(sorted(entry for entry in copy.iterdir() if entry.is_file()))
            data = bytearray(path.read_bytes())
            for _ in range(rng.choice([1, 200])):
                data[rng.randrange(min(len(data), 50000))] ^= 1 << rng.randrange(8)
            path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        codes.add(main(["verify", str(copy), *rng.choice([[], ["--drop"]])], environ={}))
        said = capsys.readouterr()
        assert said.out or said.err
    assert codes <= {0, 1, 2} and 1 in codes


# -- small parts --------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_on_a_terminal_alone() -> None:
    for out in (Terminal(), io.StringIO()):
        clock = ManualClock()
        bar = Progress(out, clock, 100 * MiB)
        for _ in range(5):
            clock.advance(SECOND)
            bar.advance(10 * MiB)
        bar.close()
        if out.isatty():
            assert f"\r[{'#' * (WIDTH // 2):<{WIDTH}}]  50%  50 MiB of 100 MiB, 10 MiB/s" in out.getvalue()
            drawn = out.getvalue().split("\r")
            assert drawn[-1] == "" and not drawn[-2].strip() and len(drawn) == 8
        else:
            assert out.getvalue() == ""


def test_progress_draws_no_more_often_than_it_must() -> None:
    clock, out = ManualClock(), Terminal()
    bar = Progress(out, clock, 1000)
    for _ in range(1000):
        clock.advance(SECOND // 1000)
        bar.advance(1)
    assert out.getvalue().count("\r") == 10


def test_a_restore_and_a_verification_agree(kept: Kept) -> None:
    kept.flip(2, 2)
    with kept.open() as store:
        assert restore(store, kept.memory, make_tokens(2, BLOCKS)).reason == "checksum"
        assert store.stats().counts["blocks_failed_checksum"] == 1
    found = run(Files(), kept.home)
    assert found.counts[CHECKSUM] == 1 and list(failing(found)) == [digest(2)]
