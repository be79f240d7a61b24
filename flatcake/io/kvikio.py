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
from dataclasses import dataclass
from typing import Any

from flatcake.io.device import When
from flatcake.io.engine import Buffer, Done, Result, Transfer, answer, check_batch, refuse
from flatcake.units import MiB

log = logging.getLogger(__name__)

_LOOK_S = 0.001
_BOUNCE_BYTES_MIN = 16 * MiB
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
        self._pending: deque[_Pending] = deque()
        """Oldest first."""
        self._answering = 0
        self._is_watched = False
        self._news = _News(self._pending, self._lock)

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
        self._answer_ready()  # Whoever watched may be gone by now.
        while (is_busy := self._is_busy()) and time.monotonic_ns() < until_ns:
            time.sleep(_LOOK_S)
            self._answer_ready()
        if not is_busy:
            self._close_files()
        return not is_busy

    def check(self) -> None:
        """Assert that files are open as long as something is in flight."""
        assert self._files or not self._is_busy()

    def _is_busy(self) -> bool:
        with self._lock:
            return bool(self._pending or self._answering)

    def _submit(self, verb: str, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        check_batch(batch, buffer, self._count)
        if not any(transfer.size_bytes for transfer in batch):
            answer(done, [Result(0, 0) for _ in batch])
            return
        with self._lock:  # A transfer that has begun is known to `close`.
            closed, is_watched = self._closed, self._is_watched
            if not closed:
                self._pending.append(_Pending([self._start(verb, part, buffer) for part in batch], done))
                self._is_watched = True
        if closed:
            refuse(batch, errno.ECANCELED, done)
        elif not is_watched:
            self._when(self._news, self._reap)

    def _start(self, verb: str, transfer: Transfer, buffer: Buffer) -> "_Part":
        file, offset_bytes, size_bytes, buffer_offset = transfer
        assert buffer.host is not None, "a ring stands between kvikio and GPU memory"
        view = buffer.host[buffer_offset : buffer_offset + size_bytes]
        if size_bytes == 0:
            return _Part(view, None, 0)
        try:
            future = getattr(self._files[file], verb)(view, size=size_bytes, file_offset=offset_bytes)
        except Exception as error:  # kvikio raises RuntimeError, OSError, ValueError, OverflowError and more.
            log.debug("%s of file %d at %d could not be started: %s", verb, file, offset_bytes, error)
            future = None
        return _Part(view, future, size_bytes)

    def _reap(self) -> None:
        """Answer the batches that are done, and watch for the next."""
        self._answer_ready()
        with self._lock:
            more = self._is_watched = bool(self._pending)
        if more:
            self._when(self._news, self._reap)

    def _answer_ready(self) -> None:
        ready, pending = [], self._pending
        with self._lock:
            while pending and pending[0].is_done():
                ready.append(pending.popleft())
            if not ready:  # One behind it is: a sweep has found it.
                ready = [each for each in pending if each.is_done()]
                for each in ready:
                    pending.remove(each)
            self._answering += len(ready)
        for each in ready:
            results, done = [_result(part) for part in each.parts], each.done
            each.parts.clear()  # Lets go of the buffer before the caller has it back.
            answer(done, results)
        with self._lock:
            self._answering -= len(ready)

    def _close_files(self) -> None:
        files, self._files = self._files, []
        for file in files:
            try:
                file.close()
            except Exception as error:
                log.warning("kvikio could not close a file: %s", error)


@dataclass(slots=True)
class _Part:
    """One transfer under way; `view` keeps its memory alive, as kvikio's future does not."""

    view: Any
    future: Any
    size_bytes: int


@dataclass(eq=False, slots=True)
class _Pending:
    """One submission under way."""

    parts: list[_Part]
    done: Done

    def is_done(self) -> bool:
        for part in self.parts:  # noqa: SIM110 - a generator would cost as much as the question
            if part.future is not None and not _is_done(part.future):
                return False
        return True


class _News:
    """Reached when some batch is done, or none is left.

    They end roughly in order, so mostly the oldest alone is asked.
    """

    def __init__(self, pending: deque[_Pending], lock: threading.Lock) -> None:
        self._pending, self._lock = pending, lock
        self._asked = 0

    def done(self) -> bool:
        self._asked += 1
        with self._lock:  # A future may not be asked once it has been waited for.
            if self._asked % _SWEEP == 0:
                return not self._pending or any(each.is_done() for each in self._pending)
            return not self._pending or self._pending[0].is_done()


def _is_done(future: Any) -> bool:
    try:
        return bool(future.done())
    except Exception as error:  # `get` will say it again, and that counts.
        log.debug("a future of kvikio cannot be asked: %s", error)
        return True


def _result(part: _Part) -> Result:
    """Wait for a transfer.  Every future must be waited for, also after another has failed."""
    if part.size_bytes == 0:
        return Result(0, 0)
    if part.future is None:
        return Result(0, errno.EIO)
    try:
        moved_bytes = int(part.future.get())
    except Exception as error:
        log.debug("a transfer of %d bytes failed: %s", part.size_bytes, error)
        return Result(0, errno.EIO)
    return Result(min(moved_bytes, part.size_bytes), 0 if moved_bytes == part.size_bytes else errno.EIO)


def _set_defaults(defaults: Any, needed: Mapping[str, object], wished: Mapping[str, object]) -> None:
    """Set kvikio's defaults; `wished` are those that older versions do not have."""
    defaults.set(dict(needed))
    for name, value in wished.items():
        try:
            defaults.set({name: value})
        except (KeyError, ValueError, AttributeError) as error:
            log.info("this kvikio has no setting %s (%s); reads may go through the page cache", name, error)
