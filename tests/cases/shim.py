"""What the twenty cases share: one small geometry, a store opened by `flatcake.open`, and files that do as told.

Four layers, 16 tokens a block, one piece of 4096 bytes a layer and block; every piece says whose it is.  The SSD pool
has files of 64 blocks, 1 MiB of payload each.
"""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import flatcake
from flatcake.clock import Clock
from tests.fakes import FaultyFiles
from tests.opened import note
from tests.stores import WAIT_S, Memory, make_config, make_identity, make_tokens, simple_layout

LAYERS, BLOCK_TOKENS, PIECE_BYTES, FILE_BLOCKS = 4, 16, 4096, 64
PAGE_COUNT = 20

Span = tuple[int, int, int]
"""Descriptor, first byte, end."""


def make_memory(page_count: int = PAGE_COUNT) -> Memory:
    return Memory(
        simple_layout(layers=LAYERS, page_tokens=BLOCK_TOKENS, block_tokens=BLOCK_TOKENS, page_count=page_count, dim=32)
    )


def tokens_of(name: str | int, blocks: int, more: int = 0) -> Any:
    return make_tokens(name, blocks, BLOCK_TOKENS, more)


def open_case(
    memory: Memory,
    home: Path,
    *,
    files: Any = None,
    clock: Clock | None = None,
    identity: dict[str, Any] | None = None,
    blocks: int = 8 * FILE_BLOCKS,
    file_blocks: int = FILE_BLOCKS,
    dram_blocks: int = 16,
    **changes: Any,
) -> flatcake.Store:
    """The store of the cases, by the one public call."""
    config = make_config(memory, [home], blocks=blocks, file_blocks=file_blocks, dram_blocks=dram_blocks, **changes)
    kv_identity = make_identity(memory, **identity or {})
    return note(flatcake.open(config, kv_identity, memory.kv, clock=clock, files=files))


def piece_of(memory: Memory, keys: Any, block: int, layer: int) -> bytes:
    """The 4096 bytes of a piece, as they lie on the medium: K, then V."""
    memory.stamp(keys[block : block + 1], np.array([0]))
    return b"".join(view[0].cpu().contiguous().view(-1).numpy(force=True).tobytes() for view in memory.views[layer])


def find_piece(memory: Memory, home: Path, keys: Any, block: int, layer: int) -> tuple[Path, int]:
    """The pool file that holds a piece, and where; it is found by its content, and only once."""
    wanted = piece_of(memory, keys, block, layer)
    found = []
    for path in sorted(home.glob("pool-*.fc")):
        at = path.read_bytes().find(wanted)
        if at >= 0:
            found.append((path, at))
    assert len(found) == 1, f"the piece of block {block}, layer {layer} was found {len(found)} times"
    return found[0]


def flip(path: Path, at_bytes: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at_bytes)
        old = file.read(1)[0]
        file.seek(at_bytes)
        file.write(bytes([old ^ 1 << bit]))


class Shim(FaultyFiles):
    """Counts, records and checks every transfer of pool data; holds, shortens and fails those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Span] = []
        self.writes: list[Span] = []
        self.clashes: list[tuple[Span, Span]] = []
        """Writes to what was being read at the time."""
        self.unaligned: list[Span] = []
        """Direct transfers with an address, offset or length that is no multiple of 512."""
        self.fired = 0
        """Faults that came to pass."""
        self.fault: Callable[[str, Sequence[memoryview], int], OSError | int | None] = lambda verb, data, at: None
        """Asked for each transfer: an error to raise, most bytes to move, or None."""
        self._direct: set[int] = set()
        self._reading: list[Span] = []
        self._gate: threading.Semaphore | None = None
        self._guard = threading.Lock()

    def step(self) -> threading.Semaphore:
        """From now on every write waits for a permit."""
        self._gate = threading.Semaphore(0)
        return self._gate

    def open_file(self, path: str, *, create: bool, direct: bool) -> int:
        fd = super().open_file(path, create=create, direct=direct)
        (self._direct.add if direct else self._direct.discard)(fd)
        return fd

    def _look(self, verb: str, fd: int, views: Sequence[memoryview], at: int) -> Span:
        span = (fd, at, at + sum(len(view) for view in views))
        if fd in self._direct:
            numbers = [at, *(len(view) for view in views), *(address_of(view) for view in views)]
            if any(number % 512 for number in numbers):
                self.unaligned.append(span)
        return span

    def _told(self, verb: str, views: Sequence[memoryview], at: int) -> Sequence[memoryview]:
        answer = self.fault(verb, views, at)
        if answer is None:
            return views
        self.fired += 1
        if isinstance(answer, OSError):
            raise answer
        return [views[0][:answer]]

    def read(self, fd: int, into: Sequence[memoryview], offset_bytes: int) -> int:
        with self._guard:
            span = self._look("read", fd, into, offset_bytes)
            self.reads.append(span)
            self._reading.append(span)
        try:
            return super().read(fd, self._told("read", into, offset_bytes), offset_bytes)
        finally:
            with self._guard:
                self._reading.remove(span)

    def write(self, fd: int, data: Sequence[memoryview], offset_bytes: int) -> int:
        if self._gate is not None:
            self.arrived.release()
            assert self._gate.acquire(timeout=WAIT_S), "a write was never let through"
        with self._guard:
            span = self._look("write", fd, data, offset_bytes)
            self.writes.append(span)
            self.clashes += [(span, other) for other in self._reading if overlap(span, other)]
        return super().write(fd, self._told("write", data, offset_bytes), offset_bytes)


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def overlap(one: Span, other: Span) -> bool:
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def error(number: int = errno.EIO) -> OSError:
    return OSError(number, os.strerror(number))
