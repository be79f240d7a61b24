"""B01, B02, B20: damaged bytes, pieces and manifests cost what they hit, and are never delivered."""

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from tests.cases.shim import (
    LAYERS,
    PIECE_BYTES,
    Shim,
    error,
    find_piece,
    flip,
    make_memory,
    open_case,
    overlap,
    tokens_of,
)
from tests.stores import check, restore, save

BLOCKS = 8
BITS = 64


def counted(store: object, name: str) -> int:
    return int(store.stats().counts.get(name, 0))  # type: ignore[attr-defined]


def failed(store: object) -> int:
    return sum(counted(store, f"restores failed: {why}") for why in ("checksum", "no valid checksum record"))


def test_b01_one_flipped_bit_costs_its_block_and_is_noticed_once(tmp_path: Path) -> None:
    memory, home, tokens = make_memory(), tmp_path / "home", tokens_of("s", BLOCKS)
    with open_case(memory, home, blocks=64) as store:
        keys = store.keys(tokens)
        assert not save(store, memory, "s", tokens).reason
    pieces = {find_piece(memory, home, keys, b, layer): b for b in range(BLOCKS) for layer in range(LAYERS)}
    ((path,),) = [{place[0] for place in pieces}]
    first, last = min(at for _, at in pieces), max(at for _, at in pieces)
    shutil.copytree(home, tmp_path / "whole")
    dice, hits, losses = random.Random(1), 0, 0
    for number in range(BITS):
        shutil.copytree(tmp_path / "whole", home, dirs_exist_ok=True)
        in_manifest = number % 4 == 3
        place = home / "manifest.db" if in_manifest else path
        # The record of the extent lies in front of its pieces.
        span = (0, place.stat().st_size) if in_manifest else (first - PIECE_BYTES, last + PIECE_BYTES)
        at = dice.randrange(*span)
        flip(place, at, dice.randrange(8))
        with open_case(memory, home, blocks=64) as store:
            before = store.match(tokens).blocks
            found = restore(store, memory, tokens).blocks
            failures = failed(store)
            assert failures == (found < before)
            assert store.match(tokens).blocks == found, "a block that is bad is still said to be there"
            assert restore(store, memory, tokens).blocks == found
            assert failed(store) == failures, "one bad block was counted twice"
            owner = [b for (_, start), b in pieces.items() if start <= at < start + PIECE_BYTES]
            if not in_manifest and owner:
                assert found == owner[0] and before == BLOCKS
            check(store)
        hits, losses = hits + (found > 0), losses + (found < BLOCKS)
    assert hits > BITS // 4 and losses > BITS // 4


@pytest.mark.parametrize("damage", ["a", "a2", "b", "c"])
def test_b02_short_zeroed_and_swapped_pieces(tmp_path: Path, damage: str) -> None:
    memory, files, tokens = make_memory(), Shim(), tokens_of("s", BLOCKS)
    with open_case(memory, tmp_path, files=files) as store:
        keys = store.keys(tokens)
        assert not save(store, memory, "s", tokens).reason
        assert restore(store, memory, tokens).blocks == BLOCKS
        block, layer = {"a": (3, LAYERS - 1), "a2": (3, 1), "b": (2, 1), "c": (2, 0)}[damage]
        path, at = find_piece(memory, tmp_path, keys, block, layer)
        if damage in ("a", "a2"):
            os.truncate(path, at + PIECE_BYTES // 2)
        elif damage == "b":
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes(PIECE_BYTES))
        else:
            other, at_other = find_piece(memory, tmp_path, keys, 5, 0)
            assert other == path
            content = bytearray(path.read_bytes())
            one, two = slice(at, at + PIECE_BYTES), slice(at_other, at_other + PIECE_BYTES)
            content[one], content[two] = content[two], content[one]
            path.write_bytes(content)
        wanted = {"a": 3, "a2": 0, "b": 2, "c": 2}[damage]
        files.reads.clear()
        for turn in range(10):
            assert store.match(tokens).blocks == (BLOCKS if not turn else wanted)
            assert restore(store, memory, tokens).blocks == wanted
        fd = max(files.reads)[0]
        bad = (fd, at, at + PIECE_BYTES)
        of_it = [read for read in files.reads if overlap(read, bad) and read[1] <= at]  # A short one goes on behind.
        assert len(of_it) == 1, "a bad block was read again"
        check(store)
    with open_case(memory, tmp_path) as store:
        assert restore(store, memory, tokens).blocks in (0, wanted)


SESSIONS, DAMAGED = 100, 12


def test_b20_damaged_rows_cost_their_sessions_and_nothing_else(tmp_path: Path) -> None:
    memory, home = make_memory(), tmp_path / "home"
    with open_case(memory, home) as store:
        for number in range(SESSIONS):
            assert not save(store, memory, f"s{number}", tokens_of(number, 1)).reason
    database = sqlite3.connect(home / "manifest.db")
    numbers = [number for (number,) in database.execute("SELECT number FROM turns ORDER BY number")]
    assert len(numbers) == SESSIONS
    bodies = dict(database.execute("SELECT number, body FROM turns"))
    whole = bodies[numbers[0]]
    odd = [
        whole[: len(whole) // 2],
        b"",
        random.Random(2).randbytes(len(whole)),
        whole[:40] + b"\xff" * 8 + whole[48:],  # A huge count.
        whole[:-1],
        whole + b"\0",
        bytes(len(whole)),
        whole[16:] + whole[:16],
        "text, not bytes",
        12345,
        bytes([whole[0] ^ 1]) + whole[1:],
        whole[:-1] + bytes([whole[-1] ^ 0x80]),
    ]
    assert len(odd) == DAMAGED
    for number, body in zip(numbers, odd, strict=False):
        database.execute("UPDATE turns SET body = ? WHERE number = ?", (body, number))
    # Two rows for one session: the later one is the same turn again, under a number of its own.
    database.execute("INSERT INTO turns VALUES (?, ?)", (numbers[50] + 1, bodies[numbers[50]]))
    database.commit()
    database.close()
    (home / "notes of somebody.txt").write_text("keep me")
    (home / "dram.fc").write_bytes(b"left over")
    answers, counts = [], []
    for _ in range(2):
        with open_case(memory, home) as store:
            hits = [restore(store, memory, tokens_of(number, 1)).blocks for number in range(SESSIONS)]
            counts.append(counted(store, "reopen: damaged rows"))
            check(store)
        answers.append(hits)
        assert (home / "notes of somebody.txt").read_text() == "keep me"
        assert not (home / "dram.fc").exists()
    assert sum(answers[0]) == SESSIONS - DAMAGED and answers[0][:DAMAGED] == [0] * DAMAGED
    assert answers[1] == answers[0] and counts == [DAMAGED, 0], "what was dropped once is dropped for good"


def test_b20_a_folder_with_the_manifests_name_is_set_aside(tmp_path: Path) -> None:
    memory, home = make_memory(), tmp_path / "home"
    with open_case(memory, home) as store:
        assert not save(store, memory, "s", tokens_of("s", 2)).reason
    (home / "manifest.db").unlink()
    (home / "manifest.db").mkdir()
    (home / "manifest.db" / "theirs").write_text("keep me")
    for wanted in (0, 2):
        with open_case(memory, home) as store:
            assert restore(store, memory, tokens_of("s", 2)).blocks == wanted
            assert not save(store, memory, "s", tokens_of("s", 2)).reason
    (aside,) = home.glob("manifest.db.damaged*/theirs")
    assert aside.read_text() == "keep me"


def test_b20_twin_an_unreadable_disk_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    memory = make_memory()
    with open_case(memory, tmp_path) as store:
        assert not save(store, memory, "s", tokens_of("s", 2)).reason
    files = Shim()
    files.fail("open_file", error())
    with pytest.raises(Exception, match="look at the disk"):
        open_case(memory, tmp_path, files=files)
    with open_case(memory, tmp_path) as store:
        assert restore(store, memory, tokens_of("s", 2)).blocks == 2
