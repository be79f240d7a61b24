"""Lets an engine that moves host memory serve the window of a GPU, by way of pinned twins of its slots.

A read goes to a twin and is copied to the slot on the caller's stream; a write takes the way back.  Twins are
few and fixed: a batch that finds none waits in a queue, and no caller is ever held up.  Never touches a file.
Read path:  index -> catalog -> plan -> io.posix -> [staged] -> window -> kernels.scatter
"""

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from flatcake.errors import CapacityError
from flatcake.io.device import Device, Event, Stream, When
from flatcake.io.engine import Buffer, Done, Engine, Result, Transfer, answer, check_batch, refuse
from flatcake.io.seam import Files

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Twins:
    """How much host memory a staged engine may hold."""

    count: int
    """Batches under way at once; more wait."""
    size_bytes: int
    """At least the size of a window slot."""


class StagedEngine:
    """Serves device buffers with an engine for host buffers.  Safe to call from several threads."""

    def __init__(self, inner: Engine, device: Device, files: Files, twins: Twins, when: When) -> None:
        """Take and pin the twins.

        Args:
            inner: The engine that moves host memory; closed with this one.
            device: Whose memory the buffers are.
            files: The seam to the system.
            twins: Their number and size.
            when: How to hear that an event has been reached; called from any thread.

        Raises:
            CapacityError: The system has not that much memory to give.
        """
        assert twins.count >= 1 and twins.size_bytes >= 1, twins
        self.name = f"{inner.name}-staged"
        self._inner = inner
        self._device = device
        self._when = when
        self._count = twins.count
        try:
            self._memory = files.map_memory(twins.count * twins.size_bytes)
        except OSError as error:
            need_bytes = twins.count * twins.size_bytes
            raise CapacityError(f"{need_bytes} bytes to stage reads in: {error}; lower slot_bytes") from error
        self.pinned = self._pin()
        whole = torch.from_numpy(self._memory.array)
        self._free = [Buffer.of(whole[i * twins.size_bytes :][: twins.size_bytes]) for i in range(twins.count)]
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._closed = False

    def read(self, batch: Sequence[Transfer], buffer: Buffer, stream: Stream, done: Done) -> None:
        """Start reading; see `Engine.read`."""
        self._submit(_Job(tuple(batch), buffer, stream, done, is_read=True))

    def write(self, batch: Sequence[Transfer], buffer: Buffer, stream: Stream, done: Done) -> None:
        """Start writing; see `Engine.write`."""
        self._submit(_Job(tuple(batch), buffer, stream, done, is_read=False))

    def close(self, wait_ns: int) -> bool:
        """Finish what was submitted, then close the inner engine and unpin.

        Args:
            wait_ns: After so long, what has not been started is answered with ECANCELED.

        Returns:
            Whether nothing is in flight; otherwise the twins stay pinned.
        """
        until_ns = time.monotonic_ns() + wait_ns
        with self._changed:
            self._closed = True
            self._changed.wait_for(self._is_idle, wait_ns / 1e9)
            cancelled = [*self._queue]
            self._queue.clear()
        for job in cancelled:
            refuse(job.batch, errno.ECANCELED, job.done)
        is_idle = self._inner.close(max(0, until_ns - time.monotonic_ns()))
        with self._changed:
            is_idle = is_idle and self._is_idle()
            unpin, self.pinned = is_idle and self.pinned, self.pinned and not is_idle
        if unpin:
            try:
                self._device.unpin(self._memory)
            except (RuntimeError, OSError) as error:
                log.warning("staging memory could not be unpinned: %s", error)
        return is_idle

    def check(self) -> None:
        """Assert that no batch waits while a twin is free."""
        with self._changed:
            assert len(self._free) <= self._count
            assert not (self._queue and self._free)
            assert len({twin.address for twin in self._free}) == len(self._free)

    def _is_idle(self) -> bool:
        return not self._queue and len(self._free) == self._count

    def _pin(self) -> bool:
        try:
            self._device.pin(self._memory)
        except (RuntimeError, OSError) as error:
            log.warning("staging memory is not pinned, so copies are slower: %s", error)
            return False
        return True

    def _submit(self, job: "_Job") -> None:
        size_bytes = self._memory.array.nbytes // self._count
        assert job.buffer.tensor.numel() <= size_bytes, (job.buffer.tensor.numel(), size_bytes)
        check_batch(job.batch, job.buffer, 1 + max((transfer.file for transfer in job.batch), default=0))
        if not any(transfer.size_bytes for transfer in job.batch):
            answer(job.done, [Result(0, 0) for _ in job.batch])
            return
        with self._changed:
            closed, twin = self._closed, None
            if not closed and self._free:
                twin = self._free.pop()
            elif not closed:
                self._queue.append(job)
        if closed:
            refuse(job.batch, errno.ECANCELED, job.done)
        elif twin is not None:
            self._start(job, twin)

    def _start(self, job: "_Job", twin: Buffer) -> None:
        if job.is_read:
            self._inner.read(job.batch, twin, None, partial(self._on_read, job, twin))
            return
        event = self._copy(job, twin, [transfer.size_bytes for transfer in job.batch])
        if event is None:
            refuse(job.batch, errno.EIO, job.done)
            self._give_back(twin)
        else:
            self._after(event, partial(self._inner.write, job.batch, twin, None, partial(self._on_written, job, twin)))

    def _on_read(self, job: "_Job", twin: Buffer, results: list[Result]) -> None:
        self._device.enter_thread()  # The inner engine's thread need not know of the device.
        event = self._copy(job, twin, [result.moved_bytes for result in results])
        if event is None:
            refuse(job.batch, errno.EIO, job.done)
            self._give_back(twin)
        else:
            answer(job.done, results)
            self._after(event, partial(self._give_back, twin))

    def _on_written(self, job: "_Job", twin: Buffer, results: list[Result]) -> None:
        answer(job.done, results)
        self._give_back(twin)

    def _copy(self, job: "_Job", twin: Buffer, sizes: Sequence[int]) -> Event | None:
        """Queue the copies of each transfer's first bytes; None when the device refuses."""
        here, there = (job.buffer, twin) if job.is_read else (twin, job.buffer)
        target, source = here.address, there.address
        try:
            for start, size_bytes in _joined(job.batch, sizes):
                self._device.copy(target + start, source + start, size_bytes, job.stream)
            return self._device.record(job.stream)
        except RuntimeError as error:
            log.error("copies between a slot and its twin failed: %s", error)
            return None

    def _after(self, event: Event, then: "partial[None]") -> None:
        if event.done():
            then()
        else:
            self._when(event, then)

    def _give_back(self, twin: Buffer) -> None:
        """Start the next batch on a twin that has become free."""
        with self._changed:
            job = self._queue.popleft() if self._queue else None
            if job is None:
                self._free.append(twin)
                self._changed.notify_all()
        if job is not None:
            self._device.enter_thread()
            self._start(job, twin)


class _Job(NamedTuple):
    """One submission."""

    batch: tuple[Transfer, ...]
    buffer: Buffer
    stream: Stream
    done: Done
    is_read: bool


def _joined(batch: Sequence[Transfer], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of the buffer that hold the first `sizes` bytes of each transfer; neighbours are one range."""
    ranges: list[tuple[int, int]] = []
    for transfer, size_bytes in zip(batch, sizes, strict=True):
        if ranges and sum(ranges[-1]) == transfer.buffer_offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + size_bytes)
        elif size_bytes:
            ranges.append((transfer.buffer_offset, size_bytes))
    return ranges
