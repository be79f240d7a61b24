"""The SSD medium: preallocated files of one size in directories that this process owns.  Paper §3.2.

Opening is all or nothing: what was made is removed again when a later step fails.  Content of a pool file is
trusted by nobody: checksums decide.  Never touches a file that it did not create.
Read path:  index -> catalog -> plan -> [filepool] -> io.posix or io.kvikio -> window
"""

import errno
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from flatcake.errors import CapacityError, ConfigError
from flatcake.io.pooldir import FORMAT, POOL_NAME, Header, attempt, claim, explained, let_go, write_header
from flatcake.io.seam import Files
from flatcake.units import DIRECT_BYTES, format_bytes

log = logging.getLogger(__name__)

FILES_MAX = 10_000
"""Names have four digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """What a pool should be."""

    directories: tuple[str, ...]
    size_bytes: int
    """Size over all directories; only whole files of it are used."""
    file_bytes: int
    direct: Literal["auto", "on", "off"]
    """O_DIRECT: `auto` goes without it where the filesystem refuses."""
    free_bytes_min: int
    """Space of each filesystem that the pool leaves to others."""
    version: int
    """Version of everything that is written; another one is refused."""
    geometry: str
    """Fingerprint of what shapes the stored bytes."""
    rank: int


class FilePool:
    """The open files of one pool, and the locks on its directories.

    File i lies in directory i modulo their number, so that neighbours in the address space use different disks.
    """

    homes: tuple[str, ...]
    """The directories, without symbolic links."""
    fds: tuple[int, ...]
    paths: tuple[str, ...]
    direct: bool
    """Whether all files are open with O_DIRECT."""
    kept: bool
    """Whether all files that the old pool and this one share have their place and size.

    Only then may anything written about the content before still be true.  Files may have been added or removed,
    and they may be of another geometry or rank: what was written says of which.
    """

    def __init__(self, files: Files, spec: PoolSpec) -> None:
        """Lock the directories, and make or reuse the files; all or nothing.

        Raises:
            ConfigError: A directory is named twice, the sizes do not fit, or O_DIRECT is refused where it must be.
            OwnershipError: Another process, or this one, has a directory; or it may not be written.
            FormatError: A directory holds another format, or foreign files under our names; nothing was changed.
            CapacityError: Not enough space or open files; what was created is gone again.  Lock files stay.
        """
        self._files = files
        self.file_bytes = spec.file_bytes
        self.count = _count(spec)
        self._locks: list[int] = []
        with ExitStack() as undo:
            self._undo = undo
            homes = _resolve(files, spec.directories)
            self.homes = tuple(homes)
            wanted = [_header(spec, self.count, place) for place in range(len(homes))]
            before = [self._claim(home, header) for home, header in zip(homes, wanted, strict=True)]
            self.paths = tuple(f"{homes[i % len(homes)]}/pool-{i:04d}.fc" for i in range(self.count))
            sizes = [self._size_bytes(path) for path in self.paths]
            self._require_space(sizes, spec)
            for home, old, new in zip(homes, before, wanted, strict=True):
                self._write_header(home, old, new)
            for path, size_bytes in sorted(zip(self.paths, sizes, strict=True), key=lambda pair: -(pair[1] or 0)):
                if size_bytes != spec.file_bytes:  # Those that shrink come first, and make room.
                    self._shape(path, size_bytes)
            opened = [self._open(path, spec.direct) for path in self.paths]
            self.fds = tuple(fd for fd, _ in opened)
            self.direct = all(is_direct for _, is_direct in opened)
            self.kept = all(_continues(old, new, sizes) for old, new in zip(before, wanted, strict=True))
            undo.pop_all()
        self._remove_surplus(homes)

    @property
    def size_bytes(self) -> int:
        return self.count * self.file_bytes

    def locate(self, offset_bytes: int) -> tuple[int, int]:
        """The file number and the offset in it of an offset in the medium."""
        assert 0 <= offset_bytes < self.size_bytes, (offset_bytes, self.size_bytes)
        return divmod(offset_bytes, self.file_bytes)

    def close(self) -> None:
        """Close the files and let go of the directories; a second call does nothing.

        Call it only when no transfer is in flight: a late one would hit whatever gets its descriptor next.
        """
        fds, self.fds = self.fds, ()
        locks, self._locks = self._locks, []
        for fd in fds:
            attempt(self._files.close, fd)
        for lock in locks:
            let_go(self._files, lock)

    def check(self) -> None:
        """Assert that every file is open and has its size."""
        if self.fds:
            assert len(self.fds) == len(self.paths) == self.count
            for fd in self.fds:
                assert self._files.size_bytes(fd) == self.file_bytes

    def _claim(self, home: str, header: Header) -> Header | None:
        lock, before = claim(self._files, home, header)
        self._undo.callback(let_go, self._files, lock)
        self._locks.append(lock)
        return before

    def _size_bytes(self, path: str) -> int | None:
        """Size of a pool file, or None if it is not there."""
        with self._explained(path):
            try:
                fd = self._files.open_file(path, create=False, direct=False)
            except FileNotFoundError:
                return None
            try:
                return self._files.size_bytes(fd)
            finally:
                self._files.close(fd)

    def _require_space(self, sizes: list[int | None], spec: PoolSpec) -> None:
        need: Counter[int] = Counter()
        sample: dict[int, str] = {}
        for path, size_bytes in zip(self.paths, sizes, strict=True):
            home = path.rpartition("/")[0]
            with self._explained(home):
                disk = self._files.filesystem(home)
            need[disk] += spec.file_bytes - (size_bytes or 0)
            sample[disk] = home
        for disk, home in sample.items():
            with self._explained(home):
                free_bytes = self._files.free_bytes(home)
            if need[disk] > max(0, free_bytes - spec.free_bytes_min) and need[disk] > 0:
                raise CapacityError(
                    f"{home}: the pool needs {need[disk]} bytes ({format_bytes(need[disk])}) more, {free_bytes} "
                    f"({format_bytes(free_bytes)}) are free and {spec.free_bytes_min} of them must stay so; "
                    "lower ssd_bytes_max or ssd_free_bytes_min, or free space"
                )

    def _write_header(self, home: str, old: Header | None, new: Header) -> None:
        if old == new:
            return
        if old is None:
            self._undo.callback(attempt, self._files.remove, f"{home}/{FORMAT}")
        else:
            self._undo.callback(attempt, write_header, self._files, home, old)
        write_header(self._files, home, new)

    def _shape(self, path: str, size_bytes: int | None) -> None:
        """Make a file, or bring it to the pool's size."""
        with self._explained(path):
            fd = self._files.open_file(path, create=size_bytes is None, direct=False)
            try:
                if size_bytes is None:
                    self._undo.callback(attempt, self._files.remove, path)
                elif size_bytes < self.file_bytes:
                    self._undo.callback(attempt, self._truncate, path, size_bytes)
                if (size_bytes or 0) < self.file_bytes:
                    self._files.allocate(fd, self.file_bytes)
                else:
                    self._files.truncate(fd, self.file_bytes)
            finally:
                self._files.close(fd)

    def _truncate(self, path: str, size_bytes: int) -> None:
        fd = self._files.open_file(path, create=False, direct=False)
        try:
            self._files.truncate(fd, size_bytes)
        finally:
            self._files.close(fd)

    def _open(self, path: str, direct: str) -> tuple[int, bool]:
        with self._explained(path):
            try:
                fd, is_direct = self._files.open_file(path, create=False, direct=direct != "off"), direct != "off"
            except OSError as error:
                if error.errno != errno.EINVAL or direct == "off":
                    raise
                if direct == "on":
                    raise ConfigError(
                        f"{path}: its filesystem refuses O_DIRECT; set io.direct to auto or off"
                    ) from error
                fd, is_direct = self._files.open_file(path, create=False, direct=False), False
            self._undo.callback(attempt, self._files.close, fd)
            return fd, is_direct

    def _remove_surplus(self, homes: list[str]) -> None:
        """Remove pool files of ours that this pool has no place for."""
        mine = set(self.paths)
        for home in homes:
            for name in attempt(self._files.list_directory, home) or ():
                if POOL_NAME.fullmatch(name) and f"{home}/{name}" not in mine:
                    log.info("%s/%s: removed, the pool has become smaller", home, name)
                    attempt(self._files.remove, f"{home}/{name}")

    @contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        with explained(self._files, path, f"the pool needs {self.count} files of {self.file_bytes} bytes"):
            yield


def _count(spec: PoolSpec) -> int:
    if spec.file_bytes <= 0 or spec.file_bytes % DIRECT_BYTES:
        raise ConfigError(f"pool_file_bytes={spec.file_bytes}: expected a multiple of {DIRECT_BYTES} bytes")
    count = spec.size_bytes // spec.file_bytes
    if not 1 <= count <= FILES_MAX:
        raise ConfigError(
            f"{spec.size_bytes} bytes are {count} pool files of {spec.file_bytes} bytes: expected 1 to {FILES_MAX}; "
            "change pool_file_bytes"
        )
    return count


def _header(spec: PoolSpec, count: int, place: int) -> Header:
    return Header(
        version=spec.version,
        geometry=spec.geometry,
        rank=spec.rank,
        pool_file_bytes=spec.file_bytes,
        files=count,
        directory=place,
        directories=len(spec.directories),
    )


def _continues(old: Header | None, new: Header, sizes: list[int | None]) -> bool:
    """Whether the files that `old` tells of are there, unchanged, in the pool that `new` tells of."""
    if old is None or replace(old, files=new.files, geometry=new.geometry, rank=new.rank) != new:
        return False
    return all(size_bytes == new.pool_file_bytes for size_bytes in sizes[: old.files])


def _resolve(files: Files, directories: tuple[str, ...]) -> list[str]:
    """The directories without symbolic links, made if they were not there."""
    homes: list[str] = []
    for given in directories:
        home = files.real_path(given)
        if home in homes:
            raise ConfigError(f"directories: {given} is the same as {directories[homes.index(home)]}; name it once")
        homes.append(home)
    if not homes:
        raise ConfigError("directories: expected one or more, as there is an SSD pool")
    for home in homes:
        with explained(files, home, "the pool needs a directory"):
            files.make_directory(home)
    return homes
