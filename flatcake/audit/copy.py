"""A private copy of a manifest that its store may be writing just now.

SQLite itself may not look: a store holds its manifest exclusively, and whoever opens one with a log writes to
the directory.  So file and log are read, and nothing there is changed.  A copy is whole when the log was not
begun anew between the start of the one and the end of the other: then the log holds all that has changed.
"""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from flatcake.errors import CapacityError
from flatcake.io.manifestdb import MANIFEST
from flatcake.io.pooldir import explained
from flatcake.io.seam import Files
from flatcake.units import MiB

LOG = "-wal"
ATTEMPTS = 5

_LOG_HEAD_BYTES = 32
"""Salts in it change whenever a log is begun anew."""
_STEP_BYTES = 4 * MiB
_Mark = tuple[int, int, bytes]


@contextmanager
def copied(files: Files, path: str) -> Iterator[tuple[str, bool]]:
    """Copy a manifest and its log to a temporary directory, and remove them in the end.

    Args:
        files: The seam to the system.
        path: The manifest, a regular file.

    Returns:
        The copy's path, and whether it is of one moment; else rows may be missing or come twice, never be wrong.

    Raises:
        OwnershipError: It may not be read.
        CapacityError: The temporary directory has no room for it.
    """
    with explained(files, path, "its copy needs room"):
        home = tempfile.TemporaryDirectory(prefix="flatcake-")
    with home:
        copy, is_whole = f"{home.name}/{MANIFEST}", False
        with explained(files, path, "its copy needs room"):
            for _ in range(ATTEMPTS):
                before = _mark(files, path)
                _copy(files, path, copy)
                _copy(files, path + LOG, copy + LOG)
                is_whole = _mark(files, path) == before
                if is_whole:
                    break
        yield copy, is_whole


def _mark(files: Files, path: str) -> _Mark:
    """What changes when the file is written, or its log begun anew."""
    fd = files.open_reading(path, direct=False)
    try:
        size_bytes, modified_ns = files.size_bytes(fd), files.modified_ns(fd)
    finally:
        files.close(fd)
    head = bytearray(_LOG_HEAD_BYTES)
    try:
        fd = files.open_reading(path + LOG, direct=False)
    except FileNotFoundError:
        return size_bytes, modified_ns, b""
    try:
        moved_bytes = files.read(fd, [memoryview(head)], 0)
    finally:
        files.close(fd)
    # With frames in the log, a checkpoint may write what is in them to the file: the copy of the log has it too.
    return (0, 0, bytes(head)) if moved_bytes else (size_bytes, modified_ns, b"")


def _copy(files: Files, path: str, to: str) -> None:
    """Make `to` as `path` is now; a file that is not there leaves an empty one."""
    try:
        source = files.open_reading(path, direct=False)
    except FileNotFoundError:
        source = None
    try:
        target = _blank(files, to)
        try:
            data, at = bytearray(_STEP_BYTES), 0
            while source is not None and (moved_bytes := files.read(source, [memoryview(data)], at)):
                _write(files, target, memoryview(data)[:moved_bytes], at, to)
                at += moved_bytes
        finally:
            files.close(target)
    finally:
        if source is not None:
            files.close(source)


def _blank(files: Files, path: str) -> int:
    """Open an empty file, new or emptied."""
    try:
        return files.open_file(path, create=True, direct=False)
    except FileExistsError:
        fd = files.open_file(path, create=False, direct=False)
    try:
        files.truncate(fd, 0)
    except OSError:
        files.close(fd)
        raise
    return fd


def _write(files: Files, fd: int, data: memoryview, at: int, path: str) -> None:
    try:
        while data:
            moved_bytes = files.write(fd, [data], at)
            data, at = data[moved_bytes:], at + moved_bytes
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CapacityError(f"{path}: {error.strerror}; set TMPDIR to a directory with room for a copy") from error
