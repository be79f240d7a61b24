"""The DRAM medium on disk between a clean close and the next open: a file with every extent at its own offset.

Records lie in the extents, so a damaged dump is a miss like any other damage.  The file is as long as the
arena and sparse; it is removed once it has been read.  Never decides what is worth keeping.
"""

from collections.abc import Callable, Sequence

from flatcake.io.pooldir import attempt
from flatcake.io.seam import ByteArray, Files
from flatcake.units import MiB

DUMP = "dram.fc"
_STEP_BYTES = 8 * MiB

Range = tuple[int, int]
"""Offset in the arena and size, in bytes."""


def write_dump(
    files: Files,
    path: str,
    arena: ByteArray,
    groups: Sequence[Sequence[Range]],
    go_on: Callable[[int], bool],
) -> int:
    """Write extents to a new file, and see them to the disk.

    Args:
        files: The seam to the system.
        path: Where; nothing may be there.
        arena: The whole medium.
        groups: What belongs together: all ranges of a group count, or none of them.
        go_on: Asked before each write of so many bytes whether there is time and space for it.

    Returns:
        How many groups are on the disk, from the first on.

    Raises:
        OSError: Nothing can be relied upon.
    """
    fd = files.open_file(path, create=True, direct=False)
    try:
        files.make_private(fd)
        done = 0
        for group in groups:
            if not all(_write(files, fd, arena, span, go_on) for span in group):
                break
            done += 1
        files.sync(fd)
        return done
    finally:
        files.close(fd)


def read_dump(files: Files, path: str, arena: ByteArray, ranges: Sequence[Range]) -> list[bool]:
    """Read extents into their places; for each of them whether all of its bytes came."""
    fd = attempt(lambda: files.open_file(path, create=False, direct=False))
    if fd is None:
        return [False] * len(ranges)
    try:
        return [bool(attempt(_read, files, fd, arena, span)) for span in ranges]
    finally:
        attempt(files.close, fd)


def _write(files: Files, fd: int, arena: ByteArray, span: Range, go_on: Callable[[int], bool]) -> bool:
    at, end = span[0], span[0] + span[1]
    while at < end:
        step_bytes = min(_STEP_BYTES, end - at)
        if not go_on(step_bytes):
            return False
        moved_bytes = files.write(fd, [arena[at : at + step_bytes].data], at)
        if not moved_bytes:
            return False
        at += moved_bytes
    return True


def _read(files: Files, fd: int, arena: ByteArray, span: Range) -> bool:
    at, end = span[0], span[0] + span[1]
    while at < end:
        moved_bytes = files.read(fd, [arena[at : min(end, at + _STEP_BYTES)].data], at)
        if not moved_bytes:
            return False
        at += moved_bytes
    return True
