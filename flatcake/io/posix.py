"""The engine of plain system calls: positioned reads and writes on threads of its own.  Paper §3.4, on a CPU.

A batch is cut into tasks, so that several threads share one large transfer; reads go before writes.  It never
opens or closes a file, and never touches a device: its buffers are host memory.
Read path:  index -> catalog -> plan -> [posix] -> window -> kernels.scatter
"""

import errno
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from flatcake.io.engine import Buffer, Done, Result, Transfer, answer, check_batch, refuse
from flatcake.io.seam import Files

log = logging.getLogger(__name__)


class PosixEngine:
    """Moves batches between open files and host memory.  Safe to call from several threads.

    The files belong to the caller, and stay open until `close` has said that nothing is in flight.
    """

    name = "posix"

    def __init__(self, files: Files, fds: Sequence[int], *, threads: int, task_bytes: int) -> None:
        """Start the threads.

        Args:
            files: The seam to the system.
            fds: One open file for each file number of a transfer.
            threads: How many tasks may be in the kernel at once.
            task_bytes: Largest part of a transfer that one thread takes at a time; a multiple of 4 KiB.
        """
        assert threads >= 1 and task_bytes >= 1, (threads, task_bytes)
        self._files = files
        self._fds = tuple(fds)
        self._task_bytes = task_bytes
        self._changed = threading.Condition()
        self._reads: deque[_Task] = deque()
        self._writes: deque[_Task] = deque()
        self._closed = False
        self._alive = threads
        self._threads = [
            threading.Thread(target=self._work, name=f"flatcake-posix-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Start reading into host memory; see `Engine.read`."""
        self._submit(_Batch(batch, buffer, done, is_read=True))

    def write(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Start writing from host memory; see `Engine.write`."""
        self._submit(_Batch(batch, buffer, done, is_read=False))

    def close(self, wait_ns: int) -> bool:
        """Finish what was submitted, then end the threads.

        Args:
            wait_ns: After so long, what has not been started is answered with ECANCELED.

        Returns:
            Whether nothing is in flight; otherwise threads are stuck in the kernel, and the files must stay open.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._alive == 0, wait_ns / 1e9)
            cancelled = [*self._reads, *self._writes]
            self._reads.clear()
            self._writes.clear()
            idle = self._alive == 0
        for task in cancelled:
            self._finish(task, 0, errno.ECANCELED)
        if idle:
            for thread in self._threads:
                thread.join()
        return idle

    def check(self) -> None:
        """Assert that queued tasks wait for threads that are there."""
        with self._changed:
            assert 0 <= self._alive <= len(self._threads), self._alive
            assert self._alive or not (self._reads or self._writes)
            for task in (*self._reads, *self._writes):
                assert 0 < task.size_bytes <= self._task_bytes, task
                assert task.batch.pending > 0, task

    def _submit(self, batch: "_Batch") -> None:
        check_batch(batch.transfers, batch.buffer, len(self._fds))
        tasks = batch.cut(self._task_bytes)
        with self._changed:
            refused = self._closed
            if tasks and not refused:
                (self._reads if batch.is_read else self._writes).extend(tasks)
                self._changed.notify(len(tasks))
        if refused:
            refuse(batch.transfers, errno.ECANCELED, batch.done)
        elif not tasks:
            answer(batch.done, batch.results())

    def _work(self) -> None:
        while (task := self._next()) is not None:
            self._finish(task, *self._move(task))
            del task  # Else its batch, and who waits for that, would live until the next one.

    def _next(self) -> "_Task | None":
        with self._changed:
            while not self._reads and not self._writes:
                if self._closed:
                    self._alive -= 1
                    self._changed.notify_all()
                    return None
                self._changed.wait()
            return (self._reads or self._writes).popleft()

    def _move(self, task: "_Task") -> tuple[int, int]:
        """Bytes moved from the start of the task, and an errno."""
        call = self._files.read if task.batch.is_read else self._files.write
        view = task.batch.view[task.buffer_offset : task.buffer_offset + task.size_bytes]
        moved_bytes = 0
        try:
            while moved_bytes < task.size_bytes:
                step = call(self._fds[task.file], [view[moved_bytes:]], task.offset_bytes + moved_bytes)
                if step <= 0:  # The end of the file.
                    return moved_bytes, errno.EIO
                moved_bytes += step
        except OSError as error:
            return moved_bytes, error.errno or errno.EIO
        except Exception:
            log.exception("a transfer of file %d failed outside the system", task.file)
            return moved_bytes, errno.EIO
        return moved_bytes, 0

    def _finish(self, task: "_Task", moved_bytes: int, error: int) -> None:
        batch = task.batch
        with self._changed:
            batch.outcomes[task.number] = Result(moved_bytes, error)
            batch.pending -= 1
            last = batch.pending == 0
        if last:
            answer(batch.done, batch.results())


class _Batch:
    """One submission: its tasks' outcomes, until the last one is in."""

    def __init__(self, transfers: Sequence[Transfer], buffer: Buffer, done: Done, *, is_read: bool) -> None:
        assert buffer.host is not None, "posix moves host memory; stage device memory through io.staged"
        self.transfers = tuple(transfers)
        self.buffer = buffer
        self.view = buffer.host.data
        self.done = done
        self.is_read = is_read
        self.pending = 0
        self.outcomes: list[Result] = []
        self._firsts: list[int] = []

    def cut(self, task_bytes: int) -> "list[_Task]":
        """Tasks of at most `task_bytes`, in the order of the transfers."""
        tasks: list[_Task] = []
        for file, offset_bytes, size_bytes, buffer_offset in self.transfers:
            self._firsts.append(len(tasks))
            for start in range(0, size_bytes, task_bytes):
                step = min(task_bytes, size_bytes - start)
                tasks.append(_Task(self, len(tasks), file, offset_bytes + start, step, buffer_offset + start))
        self._firsts.append(len(tasks))
        self.pending = len(tasks)
        self.outcomes = [Result(0, errno.ECANCELED)] * len(tasks)
        return tasks

    def results(self) -> list[Result]:
        """Per transfer, the good bytes from its start, and the first task's error after them."""
        results = []
        for number in range(len(self.transfers)):
            moved_bytes = error = 0
            for part in self.outcomes[self._firsts[number] : self._firsts[number + 1]]:
                moved_bytes, error = moved_bytes + part.moved_bytes, part.error
                if error:
                    break
            results.append(Result(moved_bytes, error))
        return results


class _Task(NamedTuple):
    """A part of a transfer, moved by one thread."""

    batch: _Batch
    number: int
    file: int
    offset_bytes: int
    size_bytes: int
    buffer_offset: int
