"""Lets an engine that moves host memory serve the window of a GPU, through a small ring of pinned buffers.

A buffer is as large as a slot, and a batch lies in it as it does in the slot.  A read fills a buffer, and copies it to
the slot on a stream of the engine's own, so that copies never wait for scatters; a write takes the way back.  The ring
is small on purpose: while it stays in the processor's cache, a byte is written to memory never and a copy to the GPU
runs at the bus's rate.  A batch that finds no buffer waits in a queue, and no caller is ever held up.
Never touches a file.
Read path:  index -> catalog -> plan -> io.kvikio or io.posix -> [staged] -> window -> kernels.scatter
"""

import errno
import logging
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial

import torch

from flatcake.errors import CapacityError
from flatcake.io.device import NOW, Device, Event, Stream, When, end_of
from flatcake.io.engine import Buffer, Done, Engine, Result, Transfer, check_batch, refuse
from flatcake.io.ring import Ring
from flatcake.io.seam import Files
from flatcake.io.sizing import RingSize

log = logging.getLogger(__name__)

_LOOK_S = 0.001
_ANY_FILE = sys.maxsize
"""The inner engine knows which there are."""

Span = tuple[int, int]
Staged = tuple[Sequence[Transfer], Buffer, Done]
"""One submission: transfers, the slot, and who is told."""


class StagedEngine:
    """Serves device buffers with an engine for host buffers.  Safe to call from several threads."""

    def __init__(self, inner: Engine, device: Device, files: Files, size: RingSize, when: When) -> None:
        """Take and pin the rings.

        Args:
            inner: The engine that moves host memory; closed with this one.
            device: Whose memory the slots are.
            files: The seam to the system.
            size: Of the rings, whose buffers are as large as the largest slot.
            when: How to hear that an event has been reached; called from any thread.

        Raises:
            CapacityError: The system has not that much memory to give.
        """
        assert size.reads >= 1 and size.writes >= 1 and size.buffer_bytes >= 1, size
        self.name = f"{inner.name}-staged"
        self._inner, self._device, self._when = inner, device, when
        try:
            self._memory = files.map_memory(size.size_bytes)
        except OSError as error:
            raise CapacityError(f"{size.size_bytes} bytes to stage transfers in: {error}") from error
        self.pinned = self._pin()
        self._buffer_bytes = size.buffer_bytes
        self._upwards, self._downwards = device.new_stream(), device.new_stream()
        memory = torch.from_numpy(self._memory.array)
        starts = range(0, size.size_bytes, size.buffer_bytes)
        buffers = [Buffer.of(memory[start : start + size.buffer_bytes]) for start in starts]
        self._reads: Ring[Staged] = Ring(buffers[: size.reads], self._read, when)
        self._writes: Ring[Staged] = Ring(buffers[size.reads :], self._write, when)
        self._entered = threading.local()
        self._lock = threading.Lock()
        self._closed = False

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Start reading; see `Engine.read`."""
        self._submit(self._reads, batch, buffer, done)

    def write(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Start writing; see `Engine.write`."""
        self._submit(self._writes, batch, buffer, done)

    def close(self, wait_ns: int) -> bool:
        """Finish what was submitted, then close the inner engine and unpin.

        Args:
            wait_ns: After so long, what has not been started is answered with ECANCELED.

        Returns:
            Whether nothing is in flight; otherwise the rings stay pinned.
        """
        until_ns, rings = time.monotonic_ns() + wait_ns, (self._reads, self._writes)
        with self._lock:
            is_later, self._closed = self._closed, True
        if is_later:  # What hung ends there, though whoever watched it may be gone by now.
            self._inner.close(wait_ns)
        while not all(ring.is_idle() for ring in rings) and time.monotonic_ns() < until_ns:
            time.sleep(_LOOK_S)
        for ring in rings:
            for transfers, _, done in ring.drop():
                refuse(transfers, errno.ECANCELED, done)
        is_idle = self._inner.close(max(0, until_ns - time.monotonic_ns()))
        is_idle = all(ring.is_idle() for ring in rings) and is_idle
        with self._lock:
            unpin, self.pinned = is_idle and self.pinned, self.pinned and not is_idle
        if unpin:
            try:
                self._device.unpin(self._memory)
            except (RuntimeError, OSError) as error:
                log.warning("staging memory could not be unpinned: %s", error)
        return is_idle

    def check(self) -> None:
        """Assert that no batch waits while a buffer is free."""
        self._reads.check()
        self._writes.check()

    def _pin(self) -> bool:
        try:
            self._device.pin(self._memory)
        except (RuntimeError, OSError) as error:
            log.warning("staging memory is not pinned, so copies are slower: %s", error)
            return False
        return True

    def _submit(self, ring: Ring[Staged], transfers: Sequence[Transfer], slot: Buffer, done: Done) -> None:
        check_batch(transfers, slot, _ANY_FILE)
        assert slot.size_bytes <= self._buffer_bytes, (slot.size_bytes, self._buffer_bytes)
        if self._closed:
            refuse(transfers, errno.ECANCELED, done)
        else:
            ring.put((transfers, slot, done))

    def _read(self, batch: Staged, buffer: Buffer) -> None:
        transfers, _, _ = batch
        self._inner.read(transfers, buffer, partial(self._on_read, batch, buffer))

    def _on_read(self, batch: Staged, buffer: Buffer, results: list[Result], _: Event) -> None:
        transfers, slot, done = batch
        is_queued, event = self._copy(slot.address, buffer.address, spans(transfers, results), self._upwards)
        if not is_queued:  # What was queued before is on its way to the slot all the same.
            results = [Result(0, errno.EIO)] * len(transfers)
        try:
            done(results, event)
        finally:  # Not before: `close` believes that what has a buffer has not been answered.
            self._reads.give_back(buffer, event)

    def _write(self, batch: Staged, buffer: Buffer) -> None:
        transfers, slot, done = batch
        is_queued, event = self._copy(buffer.address, slot.address, spans(transfers), self._downwards)
        if not is_queued:
            refuse(transfers, errno.EIO, done)
            self._writes.give_back(buffer, event)
        elif event.done():
            self._put(batch, buffer)
        else:
            self._when(event, partial(self._put, batch, buffer))

    def _put(self, batch: Staged, buffer: Buffer) -> None:
        transfers, _, done = batch
        self._inner.write(transfers, buffer, partial(self._on_written, done, buffer))

    def _on_written(self, done: Done, buffer: Buffer, results: list[Result], _: Event) -> None:
        try:
            done(results, NOW)
        finally:
            self._writes.give_back(buffer)

    def _copy(self, target: int, source: int, moved: Sequence[Span], stream: Stream) -> tuple[bool, Event]:
        """Queue copies of spans from one address to another: whether the device took all, and the end of those."""
        try:
            if not hasattr(self._entered, "yes"):  # The inner engine's threads need not know of the device.
                self._device.enter_thread()
                self._entered.yes = True
            for start, end in moved:
                self._device.copy(target + start, source + start, end - start, stream)
            return True, self._device.record(stream)
        except RuntimeError as error:
            log.error("copies between a slot and the ring failed: %s", error)
            return False, end_of(self._device, stream)


def spans(transfers: Sequence[Transfer], results: Sequence[Result] | None = None) -> list[Span]:
    """Start and end in the buffer of what is to be copied, `results` of a read say how much; neighbours are one."""
    found: list[Span] = []
    for number, (_, _, size_bytes, start) in enumerate(transfers):
        end = start + (size_bytes if results is None else results[number].moved_bytes)
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        elif start < end:
            found.append((start, end))
    return found
