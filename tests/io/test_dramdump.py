"""The dump of DRAM: whole groups or none, at their offsets, through short transfers, faults and damage."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from flatcake.io.dramdump import DUMP, read_dump, write_dump
from tests.fakes import FaultyFiles

ARENA_BYTES = 1 << 16
GROUPS = [[(0, 4096), (8192, 4096)], [(16384, 8192)], [(40960, 4096), (61440, 4096)]]
SPANS = [span for group in GROUPS for span in group]


def arena(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, ARENA_BYTES, dtype=np.uint8)


def test_ranges_come_back_and_nothing_else(tmp_path: Path) -> None:
    files, path = FaultyFiles(), f"{tmp_path}/{DUMP}"
    files.cap_bytes = 3000  # Transfers that fall short.
    before = arena()
    assert write_dump(files, path, before, GROUPS, lambda size: True) == 3
    assert os.stat(path).st_mode & 0o777 == 0o600 and files.calls["sync"] == 1
    after = arena(2)
    wanted = after.copy()
    for at, size in SPANS:
        wanted[at : at + size] = before[at : at + size]
    assert read_dump(files, path, after, SPANS) == [True] * 5 and (after == wanted).all()
    assert not files.open_fds


def test_a_group_counts_as_a_whole(tmp_path: Path) -> None:
    for allowed in range(6):
        files, left = FaultyFiles(), [allowed]

        def go_on(size_bytes: int, left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] >= 0

        done = write_dump(files, f"{tmp_path}/{allowed}", arena(), GROUPS, go_on)
        assert done == [0, 0, 1, 2, 2, 3][allowed]


@pytest.mark.parametrize("call", ["create_file", "write", "sync"])
def test_a_fault_is_raised_and_nothing_stays_open(tmp_path: Path, call: str) -> None:
    files = FaultyFiles()
    files.fail(call, 28)
    with pytest.raises(OSError, match="No space left"):
        write_dump(files, f"{tmp_path}/{DUMP}", arena(), GROUPS, lambda size: True)
    assert not files.open_fds and files.calls[call] == 1


def test_nothing_that_is_there_is_overwritten_or_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / DUMP).symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        write_dump(FaultyFiles(), f"{tmp_path}/{DUMP}", arena(), GROUPS, lambda size: True)
    assert read_dump(FaultyFiles(), f"{tmp_path}/{DUMP}", arena(), SPANS) == [False] * 5
    assert (tmp_path / "target").read_bytes() == b"mine"


def test_what_cannot_be_read_is_not_there(tmp_path: Path) -> None:
    files, path = FaultyFiles(), f"{tmp_path}/{DUMP}"
    assert read_dump(files, path, arena(), SPANS) == [False] * 5
    write_dump(files, path, arena(), GROUPS, lambda size: True)
    files.fail("read", None, 5)
    assert read_dump(files, path, arena(2), SPANS) == [True, False, True, True, True]
    dice = random.Random(3)
    for size in (0, 1, 4096, 9000, dice.randrange(ARENA_BYTES)):
        os.truncate(path, size)
        found = read_dump(files, path, arena(2), SPANS)
        assert found == [at + length <= size for at, length in SPANS]
        write_dump(files, f"{path}.{size}", arena(), GROUPS, lambda size: True)
        os.replace(f"{path}.{size}", path)
    assert not files.open_fds
