"""Whether a directory takes O_DIRECT, and in which steps: found by doing it.

The kernel can be asked as well (`statx`), but only some filesystems answer, and only a read proves it.
"""

import errno

from flatcake.doctor.facts import DirectFacts
from flatcake.io.seam import Files

STEPS = [512 << power for power in range(8)]
"""Bytes: from a sector to 64 KiB."""


def probe_direct(files: Files, directory: str) -> DirectFacts:
    """Write a small file, and read it in ever larger steps until the kernel takes one.

    Args:
        files: System calls.
        directory: A fresh one; the file `direct` stays in it.

    Raises:
        OSError: Something else went wrong.
    """
    path = f"{directory}/direct"
    span = 2 * STEPS[-1]
    memory = files.map_memory(span).array
    fd = files.open_file(path, create=True, direct=False)
    try:
        files.write(fd, [memory.data], 0)
        files.sync(fd)
    finally:
        files.close(fd)
    try:
        fd = files.open_file(path, create=False, direct=True)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return DirectFacts(works=False, align_bytes=None)
        raise
    try:
        return DirectFacts(works=True, align_bytes=_smallest_step(files, fd, memory.data))
    finally:
        files.close(fd)


def _smallest_step(files: Files, fd: int, memory: memoryview) -> int | None:
    for step in STEPS:
        try:
            if files.read(fd, [memory[step : 2 * step]], step) == step:
                return step
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return None
