"""What moves bytes between a medium and a window slot: the protocol that every engine keeps.

A batch is submitted as a whole and answered as a whole, once nothing of it is in flight any more; until then
its buffer belongs to the engine.  Faults are results, never exceptions.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple, Protocol

import torch

from flatcake.io.device import NOW, Event
from flatcake.io.seam import ByteArray

log = logging.getLogger(__name__)


class Transfer(NamedTuple):
    """One contiguous range to move between a file of a medium and a buffer; bytes, multiples of 4 KiB."""

    file: int
    offset_bytes: int
    size_bytes: int
    buffer_offset: int


def transfers_of(rows: Iterable[Iterable[int]]) -> list[Transfer]:
    """Rows of four numbers as transfers.

    Cost: no call of Python for each, which takes longer than all else that is done with it.
    """
    return list(map(tuple.__new__, repeat(Transfer), rows))


class Result(NamedTuple):
    """How one transfer ended."""

    moved_bytes: int
    """Bytes from the start of the range that are in place; all of them when `error` is 0."""
    error: int
    """An errno, or 0; a short read without an errno of its own is EIO."""


@lru_cache(maxsize=256)
def whole(size_bytes: int) -> Result:
    """That of a transfer of which all has moved; most have one of a few sizes."""
    return Result(size_bytes, 0)


@dataclass(frozen=True, eq=False, slots=True)
class Buffer:
    """Memory that an engine reads into or writes from: a window slot, or host memory."""

    tensor: torch.Tensor
    """uint8 [bytes], contiguous, on the device."""
    host: ByteArray | None
    """The same bytes as a numpy array where they are host memory, else None."""
    address: int = field(init=False)
    size_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Kept, since to ask a tensor costs as much as a copy."""
        object.__setattr__(self, "address", int(self.tensor.data_ptr()))
        object.__setattr__(self, "size_bytes", self.tensor.numel())

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Buffer":
        """Wrap a contiguous uint8 tensor."""
        assert tensor.dtype == torch.uint8 and tensor.is_contiguous(), (tensor.dtype, tensor.stride())
        return cls(tensor, None if tensor.is_cuda else tensor.numpy())


Done = Callable[[list[Result], Event], None]
"""Told how each transfer ended, and the point after which the bytes of a read are in their buffer."""


class Engine(Protocol):
    """Moves batches.  Safe to call from several threads; `done` comes from any thread, exactly once a batch."""

    name: str
    """What `stats().io_path` calls it, e.g. ``posix`` or ``kvikio-staged``."""

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Start reading; returns at once.

        What uses the bytes waits for the point that `done` is told, on the host or on the device.
        """

    def write(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Start writing bytes that are complete in `buffer` now; `done` comes when they are on the medium."""

    def close(self, wait_ns: int) -> bool:
        """Stop the engine's threads; True when nothing was left in flight.  A second call does nothing."""


def answer(done: Done, results: list[Result], ready: Event = NOW) -> None:
    """Call `done`; what it raises is logged, so that it cannot end the engine's thread."""
    try:
        done(results, ready)
    except Exception:
        log.exception("the callback of a batch of %d transfers raised", len(results))


def refuse(batch: Sequence[Transfer], error: int, done: Done) -> None:
    """Answer that nothing was moved, for the reason `error`, an errno."""
    answer(done, [Result(0, error) for _ in batch])


def check_batch(batch: Sequence[Transfer], buffer: Buffer, files: int) -> None:
    """Assert that all transfers lie in the buffer and name one of `files` files."""
    for transfer in batch:
        file, offset_bytes, size_bytes, buffer_offset = transfer
        assert 0 <= file < files, (transfer, files)
        assert offset_bytes >= 0 and size_bytes >= 0, transfer
        assert 0 <= buffer_offset <= buffer.size_bytes - size_bytes, (transfer, buffer.size_bytes)
