"""One directory of the SSD pool: its lock, and the header that says what its files are.

Reads of a header are bounded, and what it says is checked before it is believed.  Never touches a file by
another name than `FORMAT` and `LOCK`.
Read path:  index -> catalog -> plan -> [pooldir] io.filepool -> io.posix or io.kvikio -> window
"""

import errno
import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import TypeVar

from flatcake.errors import CapacityError, FlatCakeError, FormatError, OwnershipError
from flatcake.io.seam import Files
from flatcake.units import KiB

log = logging.getLogger(__name__)
T = TypeVar("T")

FORMAT, LOCK = "format", "lock"
POOL_NAME = re.compile(r"pool-[0-9]{4}\.fc")
_MAGIC = "flatcake-pool"
_HEADER_BYTES = 4 * KiB
_TEXT_BYTES_MAX = 64 * KiB
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
_FOREIGN = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG, errno.ENXIO}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Content of a `FORMAT` file."""

    version: int
    geometry: str
    rank: int
    pool_file_bytes: int
    files: int
    """Over all directories."""
    directory: int
    """Place of this directory among `directories`."""
    directories: int

    def text(self) -> str:
        return json.dumps({"magic": _MAGIC, **asdict(self)}, indent=1) + "\n"


def claim(files: Files, home: str, header: Header) -> tuple[int, Header | None]:
    """Lock a directory for this process.

    Args:
        files: The seam to the system.
        home: The directory, without symbolic links.
        header: What will be written there; only its version matters here.

    Returns:
        The descriptor that holds the lock until it is closed, and the header that is there; None if it is new.

    Raises:
        OwnershipError: Another process, or this one, holds it.
        FormatError: It holds another format, or foreign files under our names.  Nothing was changed.
    """
    with explained(files, home, "the pool needs a lock"):
        found = find_header(files, home, header.version)  # Before anything is written there.
        lock = _lock(files, f"{home}/{LOCK}", is_ours=found is not None)
        try:
            before = find_header(files, home, header.version)
            pid, host, now = os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
            files.write_text(lock, f"{_MAGIC} pid {pid} on {host} since {now}\n")
        except BaseException:
            attempt(files.close, lock)
            raise
        return lock, before


def find_header(files: Files, home: str, version: int) -> Header | None:
    """The header of a directory, or None if it is new or damaged; refuses what is not ours.

    Either of two files says that a directory is ours, so that damage to one of them costs what is stored at most.
    """
    names = files.list_directory(home)
    is_ours = LOCK in names and _first_line(files, f"{home}/{LOCK}").startswith(_MAGIC)
    header = _read_header(files, f"{home}/{FORMAT}", version, is_ours=is_ours) if FORMAT in names else None
    foreign = [name for name in names if POOL_NAME.fullmatch(name)]
    if header is None and foreign and not is_ours:
        raise FormatError(f"{home}/{foreign[0]}: no readable {FORMAT} file says whose it is; use another directory")
    return header


def let_go(files: Files, lock: int) -> None:
    """End a claim, whoever else has its descriptor by fork."""
    attempt(files.unlock, lock)
    attempt(files.close, lock)


def write_header(files: Files, home: str, header: Header) -> None:
    """Write one page in place, so that a crash leaves the old header, the new one, or an empty file."""
    path = f"{home}/{FORMAT}"
    with explained(files, path, "the pool needs a header"):
        try:
            fd = files.open_file(path, create=False, direct=False)
        except FileNotFoundError:
            fd = files.open_file(path, create=True, direct=False)
        try:
            page = header.text().encode().ljust(_HEADER_BYTES)
            assert len(page) == _HEADER_BYTES, len(page)
            if files.size_bytes(fd) > _HEADER_BYTES:
                files.truncate(fd, _HEADER_BYTES)
            moved_bytes = files.write(fd, [memoryview(page)], 0)
            if moved_bytes != _HEADER_BYTES:
                raise OSError(errno.ENOSPC, "the header was cut short", path)
            files.sync(fd)
        finally:
            files.close(fd)


@contextmanager
def explained(files: Files, path: str, need: str) -> Iterator[None]:
    """Turn the system's errors into ours: what failed and what to change."""
    try:
        yield
    except FlatCakeError:
        raise
    except OSError as error:
        named = error.filename if isinstance(error.filename, str) else path
        said = f"{named}: {error.strerror or error}"
        if error.errno in _FULL:
            free_bytes = attempt(files.free_bytes, path.rpartition("/")[0] or "/")
            raise CapacityError(f"{said}; {need}, {free_bytes} bytes are free; lower ssd_bytes_max") from error
        if error.errno in _TOO_MANY:
            raise CapacityError(f"{said}; {need}; raise `ulimit -n` or pool_file_bytes") from error
        if error.errno in _FOREIGN:
            raise FormatError(f"{said}; move it away, or use another directory") from error
        change = "let this user read and write it" if error.errno in _DENIED else "look at the disk"
        raise OwnershipError(f"{said}; {change}, or use another directory") from error


def attempt(call: Callable[..., T], *arguments: object) -> T | None:
    """Call; a failure is logged, as there is nothing better to do about it."""
    try:
        return call(*arguments)
    except (OSError, FlatCakeError) as error:
        log.warning("%s", error)
        return None


def _lock(files: Files, path: str, *, is_ours: bool) -> int:
    try:
        lock = files.lock(path)
    except BlockingIOError as error:
        holder = _first_line(files, path) or "another process"
        raise OwnershipError(f"{path}: in use by {holder}; close that store or use another directory") from error
    holder = _first_line(files, path)
    if holder and not holder.startswith(_MAGIC) and not is_ours:
        attempt(files.close, lock)
        raise FormatError(f"{path}: not written by FlatCake; use another directory")
    return lock


def _read_header(files: Files, path: str, version: int, *, is_ours: bool) -> Header | None:
    text = files.read_text(path, _TEXT_BYTES_MAX + 1)
    if len(text) <= _HEADER_BYTES and not text.strip("\0 \n"):
        return None  # A crash came before the first header; nothing else was written then.
    try:
        found = json.loads(text) if len(text) <= _TEXT_BYTES_MAX else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("magic") != _MAGIC:
        if is_ours:
            log.warning("%s: damaged; an open writes it anew, and forgets what is stored", path)
            return None
        raise FormatError(f"{path}: not the header of a FlatCake pool; use another directory, or empty this one")
    if found.get("version") != version:
        raise FormatError(
            f"{path}: format {found.get('version')!r:.40}, this program writes {version}; "
            "use another directory, or empty this one"
        )
    for entry in fields(Header):
        if type(found.get(entry.name)) is not entry.type:
            if is_ours:
                return None
            raise FormatError(f"{path}: {entry.name} is missing or of another type; empty the directory")
    return Header(**{entry.name: found[entry.name] for entry in fields(Header)})


def _first_line(files: Files, path: str) -> str:
    """Who holds a lock, as that process wrote it."""
    text = attempt(files.read_text, path, _HEADER_BYTES) or ""
    return "".join(letter for letter in text.partition("\n")[0][:200] if letter.isprintable())
