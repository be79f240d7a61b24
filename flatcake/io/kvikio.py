"""The engine of kvikio: straight into GPU memory, by its own threads and bounce buffers.  Paper §3.4.

Where GPUDirect Storage is not proven this is POSIX underneath, so it is called ``kvikio-compat``.  kvikio has
one pool of threads a process, and no cancel.  Imports nothing: it is handed the module.
Read path:  index -> catalog -> plan -> [kvikio] -> window -> kernels.scatter
"""

import errno
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flatcake.io.device import Device, Stream
from flatcake.io.engine import Buffer, Done, Result, Transfer, answer, check_batch, refuse
from flatcake.units import MiB

log = logging.getLogger(__name__)

_REAPERS = 4
_BOUNCE_BYTES_MIN = 16 * MiB


class KvikioEngine:
    """Moves batches between files and GPU memory, or host memory.  Safe to call from several threads."""

    name = "kvikio-compat"

    def __init__(
        self, kvikio: Any, paths: Sequence[str], device: Device, *, threads: int, task_bytes: int, direct: bool
    ) -> None:
        """Set kvikio's process-wide defaults, open the files, and start the threads that wait for futures.

        Args:
            kvikio: The module, see `device.load_kvikio`.
            paths: One file for each file number of a transfer; opened again by kvikio.
            device: Whose memory the buffers are.
            threads: Threads of kvikio's pool.
            task_bytes: Largest part of a transfer that one of them takes.
            direct: Whether to go around the page cache.

        Raises:
            RuntimeError, OSError, ValueError, KeyError: As kvikio does; the caller turns them into a reason.
        """
        self._device = device
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
        self._changed = threading.Condition()
        self._in_flight = 0
        self._closed = False
        self._pending: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._reap, name=f"flatcake-kvikio-{number}", daemon=True)
            for number in range(_REAPERS)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, batch: Sequence[Transfer], buffer: Buffer, stream: Stream, done: Done) -> None:
        """Start reading; see `Engine.read`.  Transfers below kvikio's 16 KiB threshold are done before it returns."""
        self._submit("pread", batch, buffer, done)

    def write(self, batch: Sequence[Transfer], buffer: Buffer, stream: Stream, done: Done) -> None:
        """Start writing; see `Engine.write`."""
        self._submit("pwrite", batch, buffer, done)

    def close(self, wait_ns: int) -> bool:
        """Finish what was submitted, end the threads, close the files.

        Returns:
            Whether nothing is in flight; otherwise the files stay open; call again later.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._in_flight == 0, wait_ns / 1e9)
            is_idle = self._in_flight == 0
            threads, self._threads = (self._threads, []) if is_idle else ([], self._threads)
        for _ in threads:
            self._pending.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
        if is_idle:
            self._close_files()
        return is_idle

    def check(self) -> None:
        """Assert that files are open as long as something is in flight."""
        with self._changed:
            assert self._in_flight >= 0, self._in_flight
            assert self._files or not self._in_flight

    def _submit(self, verb: str, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        check_batch(batch, buffer, self._count)
        if not any(transfer.size_bytes for transfer in batch):
            answer(done, [Result(0, 0) for _ in batch])
            return
        with self._changed:
            closed = self._closed
            self._in_flight += not closed
        if closed:
            refuse(batch, errno.ECANCELED, done)
            return
        parts = [self._start(verb, transfer, buffer) for transfer in batch]
        self._pending.put(_Pending(parts, done))

    def _start(self, verb: str, transfer: Transfer, buffer: Buffer) -> "_Part":
        file, offset_bytes, size_bytes, buffer_offset = transfer
        # kvikio takes GPU tensors by their array interface, but refuses torch's host tensors.
        memory = buffer.tensor if buffer.host is None else buffer.host
        view = memory[buffer_offset : buffer_offset + size_bytes]
        if size_bytes == 0:
            return _Part(view, None, 0)
        try:
            future = getattr(self._files[file], verb)(view, size=size_bytes, file_offset=offset_bytes)
        except Exception as error:  # kvikio raises RuntimeError, OSError, ValueError, OverflowError and more.
            log.debug("%s of file %d at %d could not be started: %s", verb, file, offset_bytes, error)
            future = None
        return _Part(view, future, size_bytes)

    def _reap(self) -> None:
        self._device.enter_thread()
        while (pending := self._pending.get()) is not None:
            results = [_result(part) for part in pending.parts]
            done, pending = pending.done, None  # Lets go of the buffer before the caller has it back.
            answer(done, results)
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    def _close_files(self) -> None:
        files, self._files = self._files, []
        for file in files:
            try:
                file.close()
            except Exception as error:
                log.warning("kvikio could not close a file: %s", error)


class _Part(NamedTuple):
    """One transfer under way; `view` keeps its memory alive, as kvikio's future does not."""

    view: Any
    future: Any
    size_bytes: int


class _Pending(NamedTuple):
    """One submission under way."""

    parts: list[_Part]
    done: Done


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
