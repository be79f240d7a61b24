"""The files that hold a store's blocks, opened for reading alone: those of the pool, and the DRAM medium's.

Past the page cache where the filesystem allows it.  A file that is not there is no error: what should be in it
is unreadable.
"""

from collections.abc import Sequence

import numpy as np

from flatcake.about import About
from flatcake.audit.facts import HomeFacts
from flatcake.audit.home import NO_FILE, pool_name
from flatcake.gva import Medium
from flatcake.io.dramdump import DUMP
from flatcake.io.pooldir import attempt, explained
from flatcake.io.seam import Files
from flatcake.messages import BASE, MEDIUM, Flags, Int64Array

_NONE = -1


class Sources:
    """Open files by number: those of the pool, then the DRAM medium's."""

    fds: tuple[int, ...]
    is_direct: bool
    """Whether all files that are there are read past the page cache."""

    def __init__(self, files: Files, about: About, homes: Sequence[HomeFacts], pool_files: int) -> None:
        """Open them.

        Raises:
            OwnershipError: One may not be read.
            CapacityError: Too many files.
        """
        self._files, self._file_bytes, self._pool_files = files, about.pool_file_bytes, pool_files
        paths = [f"{homes[number % len(homes)].path}/{pool_name(number)}" for number in range(pool_files)]
        self.fds, self.is_direct = (), True
        try:
            for path in (*paths, f"{homes[0].path}/{DUMP}"):
                with explained(files, path, "verifying opens all files"):
                    self.fds += (self._open(path),)
        except BaseException:
            self.close()
            raise

    def locate(self, medium: int, offset_bytes: int) -> tuple[int, int]:
        """The number of the file and the offset in it of an offset in a medium."""
        if medium == Medium.DRAM:
            return self._pool_files, offset_bytes
        return divmod(offset_bytes, self._file_bytes)

    def is_missing(self, runs: Int64Array) -> Flags:
        """bool [runs]: whether the file that a run lies in is not there."""
        numbers = runs[:, BASE] // self._file_bytes
        numbers[runs[:, MEDIUM] == Medium.DRAM] = self._pool_files
        missing: Flags = np.array(self.fds)[numbers] == _NONE
        return missing

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        fds, self.fds = self.fds, ()
        for fd in fds:
            if fd != _NONE:
                attempt(self._files.close, fd)

    def _open(self, path: str) -> int:
        try:
            return self._files.open_reading(path, direct=True)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
        try:
            fd = self._files.open_reading(path, direct=False)
        except OSError as error:
            if error.errno not in NO_FILE:
                raise
            return _NONE
        self.is_direct = False
        return fd
