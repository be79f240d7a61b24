"""The DRAM medium: one piece of host memory, pinned once, and the engine that copies to and from it.  Paper §3.2.

Copies are queued on streams of the engine's own, one for each direction, so that they never wait for scatters.  A
read is answered at once, with the point at which its copies have been made; a write is answered at that point.
Never merges, moves or frees anything.
Read path:  index -> catalog -> plan -> [arena] -> window -> kernels.scatter
"""

import errno
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from flatcake.errors import CapacityError
from flatcake.io.device import NOW, PIN_CHUNK_BYTES, Device, Event, Stream, When, end_of
from flatcake.io.engine import Buffer, Done, Result, Transfer, answer, check_batch, refuse, whole
from flatcake.io.seam import ByteArray, Files
from flatcake.units import format_bytes

log = logging.getLogger(__name__)

_LOOK_S = 0.001


class Arena:
    """Host memory of a fixed size; zeroed."""

    pages: str
    """What backs it: ``hugetlb``, ``thp`` or ``small``."""
    pinned: bool
    """Whether a GPU copies from it without a detour; False on a CPU, and where pinning failed."""

    def __init__(self, files: Files, device: Device, size_bytes: int) -> None:
        """Take the memory and fault all of it in.

        Raises:
            CapacityError: The system has not that much to give.
        """
        assert size_bytes > 0, size_bytes
        try:
            self._memory = files.map_memory(size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(
                f"DRAM arena of {size_bytes} bytes ({format_bytes(size_bytes)}): {error}; lower dram_bytes_max"
            ) from error
        self._device = device
        self.address = self._memory.address
        self.size_bytes = size_bytes
        self.pages = self._memory.pages
        self.pinned = not device.is_host and self._pin()

    @property
    def array(self) -> ByteArray:
        """The memory as bytes."""
        return self._memory.array

    def close(self) -> None:
        """Unpin the memory; a second call does nothing.  No copy may be under way."""
        if self.pinned:
            self.pinned = False
            try:
                self._device.unpin(self._memory)
            except (RuntimeError, OSError) as error:
                log.warning("the DRAM arena could not be unpinned: %s", error)

    def check(self) -> None:
        """Assert that the memory has the size it should have."""
        assert self.array.nbytes == self.size_bytes and not (self.pinned and self._device.is_host)

    def _pin(self) -> bool:
        try:
            self._device.pin(self._memory)
        except (RuntimeError, OSError) as error:  # CuPy's errors are RuntimeErrors.
            log.warning("the DRAM arena of %d bytes is not pinned, so copies are slower: %s", self.size_bytes, error)
            return False
        return True


class ArenaEngine:
    """Copies between the arena, which is file 0, and buffers.  Safe to call from several threads."""

    name = "dram"

    def __init__(self, arena: Arena, device: Device, when: When) -> None:
        """Serve an arena.

        Args:
            arena: Stays open until `close` has said that nothing is in flight.
            device: Does the copies.
            when: How to hear that a write's event has been reached; not used for one that is reached already.
        """
        self._arena = arena
        self._device = device
        self._when = when
        self._upwards, self._downwards = device.new_stream(), device.new_stream()
        self._changed = threading.Condition()
        self._writing = 0
        self._last_read: Event = NOW
        self._closed = False

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Queue copies to the buffer; `done` comes before this returns."""
        check_batch(batch, buffer, files=1)
        with self._changed:  # The last event is that of the last copies.
            copied = None if self._closed else self._copy(batch, buffer, self._upwards, is_read=True)
            if copied is not None:
                self._last_read = copied[1]
        if copied is None:
            refuse(batch, errno.ECANCELED, done)
            return
        answer(done, *copied)

    def write(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Queue copies to the arena; `done` comes when they have been made."""
        check_batch(batch, buffer, files=1)
        with self._changed:
            copied = None if self._closed else self._copy(batch, buffer, self._downwards, is_read=False)
            self._writing += copied is not None
        if copied is None:
            refuse(batch, errno.ECANCELED, done)
            return
        results, event = copied

        def settled() -> None:
            answer(done, results)
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

        if event.done():
            settled()
        else:
            self._when(event, settled)

    def close(self, wait_ns: int) -> bool:
        """Refuse further batches, and wait for copies under way, `wait_ns` at most; whether none are left."""
        until_ns = time.monotonic_ns() + wait_ns
        with self._changed:
            self._closed = True
            while not (is_idle := self._writing == 0 and self._last_read.done()) and time.monotonic_ns() < until_ns:
                self._changed.wait(_LOOK_S)
            return is_idle

    def check(self) -> None:
        """Assert that the count of batches makes sense."""
        self._arena.check()
        with self._changed:
            assert self._writing >= 0, self._writing

    def _copy(
        self, batch: Sequence[Transfer], buffer: Buffer, stream: Stream, *, is_read: bool
    ) -> tuple[list[Result], Event]:
        """Queue all copies; what lies beyond the arena is an error, as at the end of a file."""
        results: list[Result] = []
        base, arena = buffer.address, self._arena.address
        try:
            for _, offset_bytes, size_bytes, buffer_offset in batch:
                fits_bytes = max(0, min(size_bytes, self._arena.size_bytes - offset_bytes))
                for start, end in _pinned_spans(offset_bytes, offset_bytes + fits_bytes):
                    here, there = base + buffer_offset + start - offset_bytes, arena + start
                    target, source = (here, there) if is_read else (there, here)
                    self._device.copy(target, source, end - start, stream)
                results.append(whole(size_bytes) if fits_bytes == size_bytes else Result(fits_bytes, errno.EIO))
            return results, self._device.record(stream)
        except RuntimeError as error:  # A device that has failed; its error stays until the process ends.
            log.error("copies of %d ranges of the DRAM arena failed: %s", len(batch), error)
            return [Result(0, errno.EIO) for _ in batch], end_of(self._device, stream)


def _pinned_spans(start: int, end: int) -> Iterable[tuple[int, int]]:
    """Cut a range where one pinned chunk ends and the next begins: no copy may cross that."""
    inside = start < end <= (start // PIN_CHUNK_BYTES + 1) * PIN_CHUNK_BYTES
    return ((start, end),) if inside else _cut(start, end)


def _cut(start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        stop = min(end, (start // PIN_CHUNK_BYTES + 1) * PIN_CHUNK_BYTES)
        yield start, stop
        start = stop
