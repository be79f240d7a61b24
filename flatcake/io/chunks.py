"""Cuts a batch in chunks that fit in one buffer each, and puts their results together again.

Pure, but for the call at the end.  A transfer may lie in several chunks, a chunk may hold several transfers.
"""

import errno
import threading
from collections.abc import Sequence

from flatcake.io.device import NOW, Event
from flatcake.io.engine import Buffer, Done, Result, Transfer, answer, moved_whole

Copy = tuple[int, int, int]

NOTHING = Result(0, errno.EIO)


class Batch:
    """One submission: answered when all its chunks have ended, from the thread of the last."""

    def __init__(self, transfers: Sequence[Transfer], slot: Buffer, done: Done) -> None:
        self.slot = slot
        self.ready: Event = NOW
        """After it, all is in the slot that has been copied there until now; whoever copies moves it on."""
        self._transfers, self._done = tuple(transfers), done
        self._lock = threading.Lock()
        self._left = self._size_bytes = 0
        self._parts: list[tuple[int, int]] = []
        """In order: the transfer of each part, and how many of its bytes lie before it."""
        self._results: list[Result] = []
        """Of the parts."""

    def chunks(self, size_bytes_max: int) -> list["Chunk"]:
        """Cut it; one that moves nothing is answered at once."""
        chunks: list[Chunk] = []
        parts, room_bytes = self._parts, 0
        for number, (file, offset, size_bytes, slot_offset) in enumerate(self._transfers):
            start = 0
            while start < size_bytes:
                if not room_bytes:
                    chunk = Chunk(self, len(parts))
                    chunks.append(chunk)
                    room_bytes = size_bytes_max
                step = min(size_bytes - start, room_bytes)
                parts.append((number, start))
                chunk.transfers.append(Transfer(file, offset + start, step, size_bytes_max - room_bytes))
                chunk.slot_offsets.append(slot_offset + start)
                start, room_bytes = start + step, room_bytes - step
            self._size_bytes += size_bytes
        self._left = len(chunks)
        self._results = [NOTHING] * len(parts)
        if not chunks:
            answer(self._done, [Result(0, 0) for _ in self._transfers])
        return chunks

    def end(self, first: int, results: Sequence[Result]) -> None:
        """Keep the results of the parts from `first` on, which one chunk held."""
        with self._lock:
            self._results[first : first + len(results)] = results
            self._left -= 1
            is_last = not self._left
        if is_last:
            answer(self._done, self._joined(), self.ready)

    def _joined(self) -> list[Result]:
        """A result for each transfer: what has come of it without a hole, and the error that ended it."""
        if moved_whole(self._results, self._size_bytes):
            return [Result(transfer.size_bytes, 0) for transfer in self._transfers]
        moved, errors = [0] * len(self._transfers), [0] * len(self._transfers)
        for (number, start), (moved_bytes, error) in zip(self._parts, self._results, strict=True):
            if moved[number] == start and not errors[number]:  # Nothing is missing before it.
                moved[number], errors[number] = start + moved_bytes, error
        return [
            Result(moved_bytes, error if moved_bytes == transfer.size_bytes else error or errno.EIO)
            for transfer, moved_bytes, error in zip(self._transfers, moved, errors, strict=True)
        ]


class Chunk:
    """What goes through one buffer at once."""

    def __init__(self, batch: Batch, first: int) -> None:
        self.transfers: list[Transfer] = []
        """Their `buffer_offset` is one in the ring buffer."""
        self.slot_offsets: list[int] = []
        """Where each lies in the slot."""
        self.batch, self._first = batch, first

    def copies(self, results: Sequence[Result] | None = None) -> list[Copy]:
        """Offset in the slot, offset in the ring buffer, bytes; neighbours are one copy.

        `results` of a read say how much there is to copy.
        """
        copies: list[Copy] = []
        slot_end = ring_end = -1
        for number, at in enumerate(self.slot_offsets):
            _, _, size_bytes, start = self.transfers[number]
            if results is not None:
                size_bytes = results[number].moved_bytes
            if (at, start) == (slot_end, ring_end):
                copies[-1] = (*copies[-1][:2], copies[-1][2] + size_bytes)
            elif size_bytes:
                copies.append((at, start, size_bytes))
            else:
                continue
            slot_end, ring_end = at + size_bytes, start + size_bytes
        return copies

    def failed(self) -> list[Result]:
        """Nothing of it was moved."""
        return [NOTHING] * len(self.transfers)

    def end(self, results: Sequence[Result]) -> None:
        """It is over; call it once."""
        self.batch.end(self._first, results)
