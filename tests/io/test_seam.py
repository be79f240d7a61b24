"""The seam to files and memory: what each call promises above the system's own."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from flatcake.io.seam import HUGE_PAGE_BYTES, Files, view_memory


@pytest.fixture
def files() -> Files:
    return Files()


def test_new_files_and_directories_are_private(files: Files, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        files.make_directory(str(tmp_path / "a" / "b"))
        fd = files.open_file(str(tmp_path / "a" / "b" / "f"), create=True, direct=False)
        lock = files.lock(str(tmp_path / "a" / "b" / "l"))
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a" / "b").iterdir()} == {0o600}
    assert not os.get_inheritable(fd) and not os.get_inheritable(lock)
    files.close(fd)
    files.close(lock)
    files.make_directory(str(tmp_path / "a" / "b"))


def test_create_never_opens_what_is_there(files: Files, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        files.open_file(str(tmp_path / "f"), create=True, direct=False)
    with pytest.raises(FileNotFoundError):
        files.open_file(str(tmp_path / "g"), create=False, direct=False)
    assert (tmp_path / "f").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_only_regular_files_are_opened(files: Files, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "odd"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "target")
        if kind == "link":
            (tmp_path / "target").write_text("mine")
    before = len(os.listdir("/proc/self/fd"))
    for call in (
        lambda: files.open_file(str(path), create=False, direct=False),
        lambda: files.lock(str(path)),
        lambda: files.read_text(str(path), 10),
    ):
        with pytest.raises(OSError):
            call()
    assert len(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "target").exists() == (kind == "link")


def test_lock_is_exclusive_also_within_a_process(files: Files, tmp_path: Path) -> None:
    lock = files.lock(str(tmp_path / "l"))
    files.write_text(lock, "a long text")
    files.write_text(lock, "me")
    with pytest.raises(BlockingIOError):
        files.lock(str(tmp_path / "l"))
    assert files.read_text(str(tmp_path / "l"), 100) == "me"
    files.close(lock)
    files.close(files.lock(str(tmp_path / "l")))


def test_read_text_is_bounded_and_takes_any_bytes(files: Files, tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff" * 1000)
    assert files.read_text(str(tmp_path / "t"), 10) == "\ufffd" * 10


def test_allocate_takes_blocks_and_truncate_returns_them(files: Files, tmp_path: Path) -> None:
    fd = files.open_file(str(tmp_path / "f"), create=True, direct=False)
    files.allocate(fd, 1 << 20)
    assert files.size_bytes(fd) == 1 << 20 and os.fstat(fd).st_blocks * 512 >= 1 << 20
    files.truncate(fd, 4096)
    assert files.size_bytes(fd) == 4096 and os.fstat(fd).st_blocks * 512 < 1 << 20
    files.close(fd)


def test_read_and_write_fill_views_in_order(files: Files, tmp_path: Path) -> None:
    fd = files.open_file(str(tmp_path / "f"), create=True, direct=False)
    assert files.write(fd, [memoryview(b"abc"), memoryview(b"defg")], 3) == 7
    first, second = bytearray(4), bytearray(10)
    assert files.read(fd, [memoryview(first), memoryview(second)], 2) == 8
    assert first == b"\0abc" and second == b"defg" + bytes(6)
    files.sync(fd)
    files.close(fd)
    files.remove(str(tmp_path / "f"))
    assert files.list_directory(str(tmp_path)) == []


def test_paths_and_filesystems(files: Files, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert files.real_path(str(tmp_path / "link" / "b" / "..")) == str(tmp_path / "a")
    assert files.filesystem(str(tmp_path)) == files.filesystem(str(tmp_path / ".."))
    assert files.filesystem("/proc") != files.filesystem(str(tmp_path))
    assert files.free_bytes(str(tmp_path)) > 0


@pytest.mark.parametrize("size_bytes", [1, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
def test_memory_is_zeroed_aligned_and_its_own(files: Files, size_bytes: int) -> None:
    one, other = files.map_memory(size_bytes), files.map_memory(size_bytes)
    assert one.array.nbytes == size_bytes and one.address % HUGE_PAGE_BYTES == 0
    assert not one.array.any()
    one.array[:] = 7
    assert not other.array.any() and one.pages in ("hugetlb", "thp", "small")


def test_memory_outlives_its_handle(files: Files) -> None:
    part = files.map_memory(1 << 20).array[5:10]
    part[:] = 3
    assert part.tolist() == [3] * 5


@pytest.mark.parametrize("size_bytes", [1 << 46, 1 << 62])
def test_more_memory_than_there_is(files: Files, size_bytes: int) -> None:
    with pytest.raises(OSError):
        files.map_memory(size_bytes)


def test_view_memory_is_the_same_memory(files: Files) -> None:
    memory = files.map_memory(4096)
    view_memory(memory.address + 8, 16)[:] = np.arange(16)
    assert memory.array[:26].tolist() == [0] * 8 + list(range(16)) + [0, 0]


def test_calls_from_many_threads(files: Files, tmp_path: Path) -> None:
    fd = files.open_file(str(tmp_path / "f"), create=True, direct=False)
    files.allocate(fd, 64 * 4096)
    threads = [
        threading.Thread(target=lambda i=i: files.write(fd, [memoryview(bytes([i]) * 4096)], i * 4096))
        for i in range(64)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "f").read_bytes() == b"".join(bytes([i]) * 4096 for i in range(64))
    files.close(fd)


def test_opening_to_read_follows_no_link_and_waits_for_no_pipe(files: Files, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "f")
    os.mkfifo(tmp_path / "pipe")
    fd = files.open_reading(str(tmp_path / "f"), direct=False)
    data = bytearray(9)
    assert files.read(fd, [memoryview(data)], 0) == 7 and files.modified_ns(fd) == (tmp_path / "f").stat().st_mtime_ns
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.write(fd, [memoryview(data)], 0)
    assert not os.get_inheritable(fd)
    files.close(fd)
    for name in ("link", "pipe", ".", "gone"):
        with pytest.raises(OSError):
            files.open_reading(str(tmp_path / name), direct=False)


def test_a_lock_of_another_process_is_seen_and_not_taken(files: Files, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    program = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True)"
    program += "; input()"
    fd = files.open_reading(str(tmp_path / "f"), direct=False)
    assert not files.is_locked(fd)
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "f")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"1\n"
    assert files.is_locked(fd) and files.is_locked(fd)
    child.communicate(b"\n")
    assert not files.is_locked(fd)
    files.close(fd)
