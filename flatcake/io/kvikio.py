"""The engine of kvikio: transfers between files and host memory, by its own threads.  Paper §3.4.

They are threads of C++, so a large read costs no Python but its start and its end.  kvikio can read into GPU memory,
too, but where GPUDirect Storage is not proven it does so by bounce buffers, a thread waiting for each copy; a ring in
front of it (`io.staged`) is quicker.  kvikio has one pool of threads a process, and no cancel.  Imports nothing: it is
handed the module.
Read path:  index -> catalog -> plan -> [kvikio] -> staged -> window -> kernels.scatter
"""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from flatcake.io.device import When
from flatcake.io.engine import Buffer, Done, Result, Transfer, answer, check_batch, refuse, whole
from flatcake.io.seam import ByteArray
from flatcake.units import MiB

log = logging.getLogger(__name__)

_LOOK_S = 0.001
_BOUNCE_BYTES_MIN = 16 * MiB
_SIZE = attrgetter("size_bytes")
_SWEEP = 16
"""Every so many times all batches are asked, so that one that hangs does not hide the others."""


class KvikioEngine:
    """Moves batches between files and host memory.  Safe to call from several threads."""

    name = "kvikio"

    def __init__(
        self, kvikio: Any, paths: Sequence[str], when: When, *, threads: int, task_bytes: int, direct: bool
    ) -> None:
        """Set kvikio's process-wide defaults, and open the files.

        Args:
            kvikio: The module, see `device.load_kvikio`.
            paths: One file for each file number of a transfer; opened again by kvikio.
            when: How to hear that futures are done; kvikio calls nobody back.
            threads: Threads of kvikio's pool.
            task_bytes: Largest part of a transfer that one of them takes.
            direct: Whether to go around the page cache.

        Raises:
            RuntimeError, OSError, ValueError, KeyError: As kvikio does; the caller turns them into a reason.
        """
        self._when = when
        self._files: list[Any] = []
        self._count = len(paths)
        _set_defaults(
            kvikio.defaults,
            {"num_threads": threads, "task_size": task_bytes, "bounce_buffer_size": max(task_bytes, _BOUNCE_BYTES_MIN)},
            {"auto_direct_io_read": direct, "auto_direct_io_write": direct},
        )
        try:
            for path in paths:
                self._files.append(kvikio.CuFile(path, "r+"))
        except BaseException:
            self._close_files()
            raise
        self._lock = threading.Lock()
        self._closed = False
        self._pending: deque[_Batch] = deque()
        """Oldest first."""
        self._ready: list[_Batch] = []
        """They are done, and nobody has been told."""
        self._answering = 0
        """Threads that tell of some that are in no list any more."""
        self._is_watched = False
        self._asked = 0

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Start reading; see `Engine.read`."""
        self._submit("pread", batch, buffer, done)

    def write(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Start writing; see `Engine.write`."""
        self._submit("pwrite", batch, buffer, done)

    def close(self, wait_ns: int) -> bool:
        """Finish what was submitted, close the files.

        Returns:
            Whether nothing is in flight; otherwise the files stay open.  Call again later, watched or not.
        """
        until_ns = time.monotonic_ns() + wait_ns
        with self._lock:
            self._closed = True
        while (is_busy := self._settle()) and time.monotonic_ns() < until_ns:
            time.sleep(_LOOK_S)
        if not is_busy:
            self._close_files()
        return not is_busy

    def check(self) -> None:
        """Assert that files are open as long as something is in flight."""
        assert self._files or not self._is_busy()

    def done(self) -> bool:
        """Whether some batch is done, or none is left: the point that is watched.

        They end roughly in order, so mostly the oldest alone is asked.
        """
        self._asked += 1
        return self._collect(sweep=self._asked % _SWEEP == 0)

    def _collect(self, *, sweep: bool) -> bool:
        with self._lock:  # A future may not be asked once it has been waited for.
            pending, ready = self._pending, self._ready
            while pending and pending[0].is_done():
                ready.append(pending.popleft())
            if not ready and sweep:
                ready += [each for each in pending if each.is_done()]
                for each in ready:
                    pending.remove(each)
            return bool(ready) or not pending

    def _settle(self) -> bool:
        """Answer what is done, since whoever watched may be gone by now; whether something is in flight still."""
        if self._collect(sweep=True):
            self._answer()
        return self._is_busy()

    def _is_busy(self) -> bool:
        with self._lock:
            return bool(self._pending or self._ready or self._answering)

    def _submit(self, verb: str, transfers: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        check_batch(transfers, buffer, self._count)
        if not any(map(_SIZE, transfers)):
            answer(done, [Result(0, 0) for _ in transfers])
            return
        with self._lock:  # A transfer that has begun is known to `close`.
            closed, is_watched = self._closed, self._is_watched
            if not closed:
                self._pending.append(self._start(verb, transfers, buffer, done))
                self._is_watched = True
        if closed:
            refuse(transfers, errno.ECANCELED, done)
        elif not is_watched:
            self._when(self, self._reap)

    def _start(self, verb: str, transfers: Sequence[Transfer], buffer: Buffer, done: Done) -> "_Batch":
        host, parts = buffer.host, []
        assert host is not None, "a ring stands between kvikio and GPU memory"
        for file, offset_bytes, size_bytes, start in transfers:
            view, future = host[start : start + size_bytes], None
            if size_bytes:
                try:
                    future = getattr(self._files[file], verb)(view, size_bytes, offset_bytes)
                except Exception as error:  # kvikio raises RuntimeError, OSError, ValueError, OverflowError and more.
                    log.debug("%s of file %d at %d could not be started: %s", verb, file, offset_bytes, error)
            parts.append((view, future, size_bytes))
        return _Batch(parts, done)

    def _reap(self) -> None:
        """Answer the batches that are done, and watch for the next."""
        if self._answer():
            self._when(self, self._reap)

    def _answer(self) -> bool:
        """Answer the batches that are done; whether others are under way."""
        with self._lock:
            ready, self._ready = self._ready, []
            self._answering += 1
        for batch in ready:
            answer(batch.done, batch.results())
        with self._lock:
            self._answering -= 1
            self._is_watched = bool(self._pending or self._ready)
            return self._is_watched

    def _close_files(self) -> None:
        files, self._files = self._files, []
        for file in files:
            try:
                file.close()
            except Exception as error:
                log.warning("kvikio could not close a file: %s", error)


class _Batch:
    """One submission under way."""

    def __init__(self, parts: list[tuple[ByteArray, Any, int]], done: Done) -> None:
        self.done = done
        self._parts = parts
        """For each transfer its memory, which kvikio's future does not keep, its future, if it has begun, its bytes."""

    def is_done(self) -> bool:
        """Whether `results` would return at once."""
        for _, future, _ in self._parts:
            try:
                if future is not None and not future.done():
                    return False
            except Exception as error:  # `get` will say it again, and that counts.
                log.debug("a future of kvikio cannot be asked: %s", error)
        return True

    def results(self) -> list[Result]:
        """Wait for all transfers, also after one has failed, and let go of the buffer; call it once."""
        found = []
        for _, future, size_bytes in self._parts:
            moved_bytes = 0
            if future is not None:
                try:
                    moved_bytes = int(future.get())
                except Exception as error:
                    log.debug("a transfer of %d bytes failed: %s", size_bytes, error)
            is_whole = moved_bytes == size_bytes
            found.append(whole(size_bytes) if is_whole else Result(min(moved_bytes, size_bytes), errno.EIO))
        self._parts.clear()
        return found


def _set_defaults(defaults: Any, needed: Mapping[str, object], wished: Mapping[str, object]) -> None:
    """Set kvikio's defaults; `wished` are those that older versions do not have."""
    defaults.set(dict(needed))
    for name, value in wished.items():
        try:
            defaults.set({name: value})
        except (KeyError, ValueError, AttributeError) as error:
            log.info("this kvikio has no setting %s (%s); reads may go through the page cache", name, error)
