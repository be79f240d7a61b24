"""The file pool: what it makes, what it refuses, and that a refusal leaves nothing behind."""

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flatcake.errors import CapacityError, ConfigError, FlatCakeError, FormatError, OwnershipError
from flatcake.io.filepool import FilePool, PoolSpec
from flatcake.io.pooldir import FORMAT, LOCK
from tests.fakes import FaultyFiles

FILE = 64 * 4096


def spec(*homes: Path, files: int = 4, **changes: Any) -> PoolSpec:
    fields: dict[str, Any] = {
        "directories": tuple(str(home) for home in homes),
        "size_bytes": files * changes.get("file_bytes", FILE) + 4096,
        "file_bytes": FILE,
        "direct": "auto",
        "free_bytes_min": 0,
        "version": 1,
        "geometry": "g",
        "rank": 0,
    }
    return PoolSpec(**(fields | changes))


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder; lock files only by name."""
    found = {}
    for path in sorted(folder.rglob("*")):
        plain = path.is_file() and not path.is_symlink() and path.name != LOCK
        found[str(path.relative_to(folder))] = path.read_bytes() if plain else None
    return found


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


def refused(files: FaultyFiles, wanted: PoolSpec, error: type[FlatCakeError]) -> str:
    with pytest.raises(error) as caught:
        FilePool(files, wanted)
    assert not files.open_fds
    return str(caught.value)


def test_pool_makes_private_files_striped_over_directories(files: FaultyFiles, tmp_path: Path) -> None:
    pool = FilePool(files, spec(tmp_path / "new" / "a", tmp_path / "b", files=5))
    pool.check()
    assert pool.count == 5 and pool.size_bytes == 5 * FILE and not pool.kept
    assert [str(Path(path).relative_to(tmp_path)) for path in pool.paths] == [
        *("new/a/pool-0000.fc", "b/pool-0001.fc", "new/a/pool-0002.fc", "b/pool-0003.fc", "new/a/pool-0004.fc")
    ]
    for path in pool.paths:
        found = os.stat(path)
        assert found.st_size == FILE and stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_blocks * 512 >= FILE, "not preallocated"
    for home in (tmp_path / "new" / "a", tmp_path / "b"):
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / FORMAT).stat().st_mode) == stat.S_IMODE((home / LOCK).stat().st_mode) == 0o600
    header = json.loads((tmp_path / "b" / FORMAT).read_text())
    assert header["version"] == 1 and header["geometry"] == "g" and header["pool_file_bytes"] == FILE
    assert header["rank"] == 0 and header["files"] == 5 and header["directory"] == 1
    pool.close()
    pool.close()
    pool.check()
    assert not files.open_fds


def test_locate_divides(files: FaultyFiles, tmp_path: Path) -> None:
    pool = FilePool(files, spec(tmp_path))
    assert pool.locate(0) == (0, 0) and pool.locate(FILE - 1) == (0, FILE - 1)
    assert pool.locate(3 * FILE + 5) == (3, 5)
    for beyond in (-1, 4 * FILE):
        with pytest.raises(AssertionError):
            pool.locate(beyond)
    pool.close()


def test_reopening_keeps_content(files: FaultyFiles, tmp_path: Path) -> None:
    pool = FilePool(files, spec(tmp_path, direct="off"))
    files.write(pool.fds[2], [memoryview(b"x" * 4096)], 4096)
    pool.close()
    before = tree(tmp_path)
    pool = FilePool(files, spec(tmp_path))
    assert pool.kept and tree(tmp_path) == before
    pool.close()
    pool = FilePool(files, spec(tmp_path, files=6))  # More of the same files: what was there is still true.
    assert pool.kept and pool.count == 6 and Path(pool.paths[2]).read_bytes()[4096:8192] == b"x" * 4096
    pool.close()


@pytest.mark.parametrize("changes", [{"geometry": "h"}, {"rank": 1}, {"geometry": "h", "rank": 1, "files": 6}])
def test_files_of_another_geometry_or_rank_are_left_as_they_are(
    files: FaultyFiles, tmp_path: Path, changes: dict[str, Any]
) -> None:
    pool = FilePool(files, spec(tmp_path))
    pool.close()
    Path(pool.paths[1]).write_bytes(b"x" * FILE)
    pool = FilePool(files, spec(tmp_path, **changes))
    assert pool.kept and Path(pool.paths[1]).read_bytes() == b"x" * FILE
    pool.check()
    pool.close()


@pytest.mark.parametrize("changes", [{"file_bytes": 2 * FILE}, {"file_bytes": FILE // 2}])
def test_other_shape_reuses_files_and_says_so(files: FaultyFiles, tmp_path: Path, changes: dict[str, Any]) -> None:
    FilePool(files, spec(tmp_path)).close()
    wanted = spec(tmp_path, **changes)
    pool = FilePool(files, wanted)
    pool.check()
    assert not pool.kept
    assert sorted(path.name for path in tmp_path.glob("pool-*")) == [Path(path).name for path in pool.paths]
    pool.close()
    pool = FilePool(files, wanted)
    assert pool.kept
    pool.close()


def test_a_smaller_pool_keeps_the_files_that_are_left(files: FaultyFiles, tmp_path: Path) -> None:
    pool = FilePool(files, spec(tmp_path))
    pool.close()
    Path(pool.paths[1]).write_bytes(b"x" * FILE)
    before = [Path(path).read_bytes() for path in pool.paths]
    assert len(before) > 2
    pool = FilePool(files, spec(tmp_path, files=2))
    pool.check()
    assert pool.kept and [Path(path).read_bytes() for path in pool.paths] == before[:2]
    assert len(list(tmp_path.glob("pool-*"))) == 2
    pool.close()


def test_files_that_shrink_make_room_for_those_that_grow(files: FaultyFiles, tmp_path: Path) -> None:
    FilePool(files, spec(tmp_path, files=2, file_bytes=4 * FILE)).close()
    files.order.clear()
    pool = FilePool(files, spec(tmp_path, files=8, free_bytes_min=1 << 60))
    steps = [call for call in files.order if call in ("truncate", "allocate")]
    assert steps == ["truncate"] * 2 + ["allocate"] * 6
    pool.check()
    pool.close()


def test_swapped_directories_are_not_kept(files: FaultyFiles, tmp_path: Path) -> None:
    FilePool(files, spec(tmp_path / "a", tmp_path / "b")).close()
    pool = FilePool(files, spec(tmp_path / "b", tmp_path / "a"))
    pool.check()
    assert not pool.kept and len(list(tmp_path.rglob("pool-*"))) == 4
    pool.close()


def test_missing_file_is_made_again_and_not_kept(files: FaultyFiles, tmp_path: Path) -> None:
    pool = FilePool(files, spec(tmp_path))
    pool.close()
    os.unlink(pool.paths[1])
    pool = FilePool(files, spec(tmp_path))
    pool.check()
    assert not pool.kept
    pool.close()


def test_second_opening_names_the_holder(files: FaultyFiles, tmp_path: Path) -> None:
    pool = FilePool(files, spec(tmp_path))
    held = set(files.open_fds)
    with pytest.raises(OwnershipError, match=f"in use by .*pid {os.getpid()} "):
        FilePool(files, spec(tmp_path))
    assert files.open_fds == held
    pool.check()
    pool.close()


def test_other_process_is_named_and_its_death_frees_the_directory(files: FaultyFiles, tmp_path: Path) -> None:
    script = (
        "import sys; from flatcake.io.filepool import FilePool, PoolSpec; from flatcake.io.seam import Files\n"
        f"pool = FilePool(Files(), {spec(tmp_path)!r}); print('open', flush=True); sys.stdin.read()"
    )
    root = str(Path(__file__).resolve().parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": root},
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"open\n"
        assert f"pid {child.pid} " in refused(files, spec(tmp_path), OwnershipError)
        child.kill()
        child.wait()
    pool = FilePool(files, spec(tmp_path))
    assert pool.kept
    pool.close()


def test_same_directory_twice_is_refused(files: FaultyFiles, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = tree(tmp_path)
    for other in (tmp_path / "link", tmp_path / "a" / ".." / "a", Path(os.path.relpath(tmp_path / "a"))):
        assert "same as" in refused(files, spec(tmp_path / "a", other), ConfigError)
    assert tree(tmp_path) == before
    pool = FilePool(files, spec(tmp_path / "link"))
    assert pool.paths[0] == str(tmp_path / "a" / "pool-0000.fc")
    pool.close()


@pytest.mark.parametrize(
    "changes", [{"size_bytes": FILE - 1}, {"file_bytes": 0}, {"file_bytes": 5000}, {"size_bytes": 10_001 * FILE}]
)
def test_sizes_that_do_not_fit(files: FaultyFiles, tmp_path: Path, changes: dict[str, Any]) -> None:
    refused(files, spec(tmp_path / "a", **changes), ConfigError)
    refused(files, spec(), ConfigError)
    assert not list(tmp_path.iterdir())


def test_foreign_pool_file_is_not_touched(files: FaultyFiles, tmp_path: Path) -> None:
    (tmp_path / "pool-0000.fc").write_bytes(b"mine")
    before = tree(tmp_path)
    assert "pool-0000.fc" in refused(files, spec(tmp_path), FormatError)
    assert tree(tmp_path) == before


def test_foreign_neighbours_are_not_touched(files: FaultyFiles, tmp_path: Path) -> None:
    names = ("pool-00000.fc", "pool-12.fc", "pool-0001.fc.old", "notes", "Format", "pool-abcd.fc")
    for name in names:
        (tmp_path / name).write_text(name)
    for wanted in (spec(tmp_path), spec(tmp_path, files=1), spec(tmp_path, geometry="h", file_bytes=2 * FILE)):
        FilePool(files, wanted).close()
    assert all((tmp_path / name).read_text() == name for name in names)


@pytest.mark.parametrize(
    "content",
    [
        *(b"hello", b"{}", b"[]", b"null", b"\xff\xfe\x00", b"[" * 60_000, b"7" * 5000, b'{"magic": "flatcake-pool"}'),
        *(b'{"magic": "other", "version": 1}', b'{"magic": "flatcake-pool", "version": 1, "geometry": 5}'),
        *(b'{"magic": "flatcake-pool", "version": true}', b'{"magic": "flatcake-pool", "version": 2}'),
        b" " * 70_000 + b'{"magic": "flatcake-pool"}',
        b'{"magic": "flatcake-pool", "version": "' + b"x" * 10_000 + b'"}',
    ],
)
def test_junk_header_is_refused_and_kept(files: FaultyFiles, tmp_path: Path, content: bytes) -> None:
    (tmp_path / FORMAT).write_bytes(content)
    before = tree(tmp_path)
    assert len(refused(files, spec(tmp_path), FormatError)) < 1000
    assert tree(tmp_path) == before


@pytest.mark.parametrize("content", [None, b"", b"hello", b"[" * 60_000, b'{"magic": "flatcake-pool", "version": 1}'])
def test_a_damaged_header_of_ours_is_written_anew(files: FaultyFiles, tmp_path: Path, content: bytes | None) -> None:
    FilePool(files, spec(tmp_path)).close()
    (tmp_path / FORMAT).unlink()
    if content is not None:
        (tmp_path / FORMAT).write_bytes(content)
    pool = FilePool(files, spec(tmp_path))
    assert not pool.kept
    pool.close()
    (tmp_path / LOCK).write_bytes(b"garbage")
    pool = FilePool(files, spec(tmp_path))
    assert pool.kept
    pool.close()
    for name in (FORMAT, LOCK):
        (tmp_path / name).write_bytes(b"garbage")
    refused(files, spec(tmp_path), FormatError)


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"  \n"])
def test_header_that_a_crash_cut_short_is_written_again(files: FaultyFiles, tmp_path: Path, content: bytes) -> None:
    (tmp_path / FORMAT).write_bytes(content)
    FilePool(files, spec(tmp_path)).close()
    pool = FilePool(files, spec(tmp_path))
    assert pool.kept
    pool.close()


def test_newer_format_is_refused_without_change(files: FaultyFiles, tmp_path: Path) -> None:
    FilePool(files, spec(tmp_path, version=9)).close()
    before = tree(tmp_path)
    said = refused(files, spec(tmp_path), FormatError)
    assert "format 9" in said and "writes 1" in said and tree(tmp_path) == before


def test_foreign_lock_is_not_overwritten(files: FaultyFiles, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("of another program")
    refused(files, spec(tmp_path), FormatError)
    assert (tmp_path / LOCK).read_text() == "of another program" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", [FORMAT, LOCK, "pool-0000.fc"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_odd_files_under_our_names_are_refused(files: FaultyFiles, tmp_path: Path, name: str, kind: str) -> None:
    home, target = tmp_path / "home", tmp_path / "target"
    FilePool(files, spec(home)).close()
    target.write_text("precious")
    (home / name).unlink()
    if kind == "link":
        (home / name).symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(home / name)
    else:
        (home / name).mkdir()
    before = tree(home)
    refused(files, spec(home), FormatError)
    assert target.read_text() == "precious" and tree(home) == before


def test_file_in_place_of_directory(files: FaultyFiles, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at" / "all")
    refused(files, spec(tmp_path / "file"), FormatError)
    refused(files, spec(tmp_path / "file" / "below"), FormatError)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("call", ["make_directory", "lock", "create_file", "open_file", "open_direct", "write_text"])
@pytest.mark.parametrize("error", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_no_permission_says_what_to_change(files: FaultyFiles, tmp_path: Path, call: str, error: int) -> None:
    FilePool(files, spec(tmp_path / "a")).close()
    before = tree(tmp_path / "a")
    files.fail(call, error)
    said = refused(files, spec(tmp_path / "a", tmp_path / "b", geometry="h"), OwnershipError)
    assert "another directory" in said
    assert tree(tmp_path / "a") == before
    assert {path.name for path in tmp_path.rglob("b/*")} <= {LOCK}


def test_free_space_is_left_to_others(files: FaultyFiles, tmp_path: Path) -> None:
    said = refused(files, spec(tmp_path / "a", tmp_path / "b", free_bytes_min=1 << 60), CapacityError)
    assert str(4 * FILE) in said and str(1 << 60) in said and "ssd_bytes_max" in said
    assert {path.name for path in tmp_path.rglob("*/*")} == {LOCK}
    FilePool(files, spec(tmp_path)).close()
    FilePool(files, spec(tmp_path, free_bytes_min=1 << 60)).close()  # It takes nothing more.
    FilePool(files, spec(tmp_path, free_bytes_min=1 << 60, geometry="h", files=8, file_bytes=FILE // 2)).close()
    refused(files, spec(tmp_path, free_bytes_min=1 << 60, files=5), CapacityError)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("good", [0, 1, 3])
def test_full_disk_leaves_nothing_behind(files: FaultyFiles, tmp_path: Path, error: int, good: int) -> None:
    files.fail("allocate", *[None] * good, error)
    said = refused(files, spec(tmp_path / "a", tmp_path / "b"), CapacityError)
    assert "bytes are free" in said and f"4 files of {FILE} bytes" in said
    assert {path.name for path in tmp_path.rglob("*/*")} == {LOCK}


def test_full_disk_while_growing_takes_growth_back(files: FaultyFiles, tmp_path: Path) -> None:
    pool = FilePool(files, spec(tmp_path, direct="off"))
    files.write(pool.fds[1], [memoryview(b"y" * 4096)], 0)
    pool.close()
    before = tree(tmp_path)
    files.fail("allocate", None, None, errno.ENOSPC)
    refused(files, spec(tmp_path, file_bytes=2 * FILE), CapacityError)
    assert tree(tmp_path) == before
    pool = FilePool(files, spec(tmp_path))
    assert pool.kept
    pool.close()


def test_too_many_open_files_leaves_nothing_behind(files: FaultyFiles, tmp_path: Path) -> None:
    files.fail("open_direct", None, None, errno.EMFILE)
    assert "ulimit" in refused(files, spec(tmp_path / "a"), CapacityError)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {LOCK}


def test_failing_disk_is_a_refusal(files: FaultyFiles, tmp_path: Path) -> None:
    for call in ("allocate", "sync", "create_file", "lock", "free_bytes"):
        files.fail(call, errno.EIO)
        refused(files, spec(tmp_path / "a"), OwnershipError)
        assert {path.name for path in tmp_path.rglob("*/*")} <= {LOCK}


def test_direct_auto_falls_back_and_says_so(files: FaultyFiles, tmp_path: Path) -> None:
    files.fail("open_direct", errno.EINVAL, errno.EINVAL, errno.EINVAL, errno.EINVAL)
    pool = FilePool(files, spec(tmp_path))
    pool.check()
    assert not pool.direct
    pool.close()


def test_direct_on_refuses_to_fall_back(files: FaultyFiles, tmp_path: Path) -> None:
    files.fail("open_direct", errno.EINVAL)
    assert "O_DIRECT" in refused(files, spec(tmp_path / "a", direct="on"), ConfigError)
    assert {path.name for path in (tmp_path / "a").iterdir()} == {LOCK}


def test_direct_off_never_asks(files: FaultyFiles, tmp_path: Path) -> None:
    pool = FilePool(files, spec(tmp_path, direct="off"))
    assert not pool.direct and not files.calls["open_direct"]
    pool.close()
