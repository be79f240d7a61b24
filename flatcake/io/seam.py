"""The one place that calls the operating system's files and memory.

Everything above is handed a `Files`; tests hand in one that fails, stalls or tears on purpose.  Errors are
the system's own `OSError`s: callers decide whether one is a refusal, a miss or a mistake.
`io.device` and `io.cuda` are the same for GPUs.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sqlite3
import stat
import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatcake.units import KiB, MiB, align_up

HUGE_PAGE_BYTES = 2 * MiB
_MAP_HUGETLB = 0x40000  # Python 3.11 has no names for these.
_MAP_HUGE_2MB = 21 << 26
_MAP_POPULATE = 0x8000
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_PATH_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False, slots=True)
class HostMemory:
    """Anonymous host memory, aligned to 2 MiB, all of it faulted in."""

    array: ByteArray
    pages: str
    """What backs it: ``hugetlb``, ``thp`` (asked for, granted by the kernel as it can) or ``small``."""

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


class Files:
    """System calls on files, directories and host memory.  Safe to call from several threads."""

    def make_directory(self, path: str) -> None:
        """Make a directory for the owner alone, with its parents; one that exists is left as it is."""
        if os.path.isdir(path):
            return
        parent = os.path.dirname(path)
        if parent and parent != path:
            self.make_directory(parent)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):  # Else another has just made it.
                raise
        _give_owner(path, 0o700)

    def real_path(self, path: str) -> str:
        """The path without symbolic links; it need not exist."""
        return os.path.realpath(path)

    def filesystem(self, path: str) -> int:
        """A number that is the same for all paths of one filesystem."""
        return os.stat(path).st_dev

    def list_directory(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def lock(self, path: str) -> int:
        """Create and lock a file for this process; raises `BlockingIOError` when another holds it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | _PATH_FLAGS, 0o600)
        try:
            _require_regular(fd, path)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _give_owner(fd, 0o600)
        except OSError:
            os.close(fd)
            raise
        return fd

    def unlock(self, fd: int) -> None:
        """Let go of a lock, also for children of fork, which hold the same open file."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def read_text(self, path: str, bytes_max: int) -> str:
        """The start of a small regular file; never waits for a writer, as a pipe would."""
        fd = os.open(path, os.O_RDONLY | _PATH_FLAGS | os.O_NONBLOCK)
        try:
            _require_regular(fd, path)
            return os.read(fd, bytes_max).decode(errors="replace")
        finally:
            os.close(fd)

    def write_text(self, fd: int, text: str) -> None:
        """Replace the content of a small open file."""
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(), 0)

    def open_file(self, path: str, *, create: bool, direct: bool) -> int:
        """Open a regular file for reading and writing, never through a symbolic link.

        Raises:
            FileExistsError: `create` and the file is there already.
            OSError: Anything else; `EINVAL` where the filesystem refuses O_DIRECT.
        """
        flags = os.O_RDWR | _PATH_FLAGS | os.O_NONBLOCK
        fd = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0) | (os.O_DIRECT if direct else 0), 0o600)
        try:
            _require_regular(fd, path)
            if create:
                _give_owner(fd, 0o600)
        except OSError:
            os.close(fd)
            raise
        return fd

    def open_reading(self, path: str, *, direct: bool) -> int:
        """Open a regular file for reading alone, never through a symbolic link; errors as for `open_file`."""
        fd = os.open(path, os.O_RDONLY | _PATH_FLAGS | os.O_NONBLOCK | (os.O_DIRECT if direct else 0))
        try:
            _require_regular(fd, path)
        except OSError:
            os.close(fd)
            raise
        return fd

    def is_locked(self, fd: int) -> bool:
        """Whether another process has locked some of an open file, as SQLite does; asks, and takes no lock.

        Not in the process that holds the lock: there, closing `fd` would let go of it.
        """
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # The whole file.
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, wanted)
        return bool(struct.unpack("hhqqi4x", answer)[0] != fcntl.F_UNLCK)

    def modified_ns(self, fd: int) -> int:
        """When a file was written last, in nanoseconds since 1970."""
        return os.fstat(fd).st_mtime_ns

    def open_database(self, path: str, *, blob_bytes_max: int) -> sqlite3.Connection:
        """Open a SQLite database that is there; transactions are the caller's.

        It stays open until `close_database`: a child of fork that ends must not write to it.

        Raises:
            sqlite3.Error: Whatever SQLite says; it has looked at nothing of the content yet.
        """
        database = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
        database.text_factory = _lenient  # Damage may make text of a blob.
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, blob_bytes_max)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))
        return database

    def close_database(self, database: sqlite3.Connection) -> None:
        """Close what `open_database` returned, once."""
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(database))
        database.close()

    def make_private(self, fd: int) -> None:
        """Let nobody but the owner read or write a file, whoever made it and under whatever umask."""
        os.fchmod(fd, 0o600)

    def rename(self, path: str, to: str) -> None:
        """Give a file or link another name; what had that name before is replaced."""
        os.replace(path, to)

    def wall_s(self) -> int:
        """Seconds since 1970."""
        return int(time.time())

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Give a file its blocks on the disk, so that later writes cannot run out of space."""
        os.posix_fallocate(fd, 0, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Cut a file off, so that its blocks after `size_bytes` are free again."""
        os.ftruncate(fd, size_bytes)

    def size_bytes(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def read(self, fd: int, into: Sequence[memoryview], offset_bytes: int) -> int:
        """Bytes read into the views, in order; fewer than asked at the end of the file."""
        return os.preadv(fd, into, offset_bytes)

    def write(self, fd: int, data: Sequence[memoryview], offset_bytes: int) -> int:
        """Bytes written from the views, in order."""
        return os.pwritev(fd, data, offset_bytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def free_bytes(self, path: str) -> int:
        """Bytes of the filesystem that this process may still use."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def processors(self) -> int:
        """Processors that this process may run on."""
        return len(os.sched_getaffinity(0))

    def map_memory(self, size_bytes: int) -> HostMemory:
        """Take zeroed host memory on huge pages where there are any; says what it got.

        Raises:
            OSError: The system has not that much memory to give.
        """
        length = align_up(size_bytes, HUGE_PAGE_BYTES)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            mapped = mmap.mmap(-1, length, private | _MAP_HUGETLB | _MAP_HUGE_2MB | _MAP_POPULATE)
            return HostMemory(np.frombuffer(mapped, np.uint8)[:size_bytes], "hugetlb")
        except OSError:
            pass
        available_bytes = _available_bytes()
        if available_bytes is not None and available_bytes < length:  # Else the kernel might kill the process.
            raise OSError(errno.ENOMEM, f"{size_bytes} bytes of memory wanted, {available_bytes} available")
        mapped = mmap.mmap(-1, length + HUGE_PAGE_BYTES, private)
        pages = "thp"
        try:
            mapped.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            pages = "small"
        whole = np.frombuffer(mapped, np.uint8)
        skip = -int(whole.ctypes.data) % HUGE_PAGE_BYTES
        _populate(mapped, skip, length)
        return HostMemory(whole[skip : skip + size_bytes], pages)


def view_memory(address: int, size_bytes: int) -> ByteArray:
    """Host memory at an address, as bytes; the caller keeps its owner alive."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))


def _lenient(text: bytes) -> str:
    return text.decode(errors="replace")


def _require_regular(fd: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def _give_owner(target: str | int, mode: int) -> None:
    """Give the owner the permissions that an odd umask has kept back."""
    if os.stat(target).st_mode & mode != mode:
        os.chmod(target, mode)


def _available_bytes() -> int | None:
    """Memory that the system and the control group can still give, or None where neither tells."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        found.append(_counters("/proc/meminfo")["MemAvailable:"] * KiB)
    with contextlib.suppress(OSError, ValueError):
        group = "/sys/fs/cgroup/memory"
        most, used, kinds = _number(f"{group}.max"), _number(f"{group}.current"), _counters(f"{group}.stat")
        found.append(most - used + kinds["active_file"] + kinds["inactive_file"])
    return min(found, default=None)


def _number(path: str) -> int:
    with open(path, encoding="ascii") as file:
        return int(file.read())


def _counters(path: str) -> defaultdict[str, int]:
    with open(path, encoding="ascii") as file:
        return defaultdict(int, {words[0]: int(words[1]) for words in map(str.split, file)})


def _populate(mapped: mmap.mmap, start: int, length: int) -> None:
    try:
        mapped.madvise(_MADV_POPULATE_WRITE, start, length)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        np.frombuffer(mapped, np.uint8)[start : start + length : 4096] = 0  # An older kernel: touch every page.
    with contextlib.suppress(OSError):  # Pages that cannot be joined just stay small.
        mapped.madvise(_MADV_COLLAPSE, start, length)
