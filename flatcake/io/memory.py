"""An engine over plain memory that records its calls and fails on purpose: tests, replays, and `engine = "memory"`.

It has no threads: a batch is answered before the call returns, unless a fault holds it back.  Never sleeps.
Read path:  index -> catalog -> plan -> [memory] -> window -> kernels.scatter
"""

import errno
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from flatcake.io.engine import Buffer, Done, Result, Transfer, answer, check_batch, refuse
from flatcake.io.seam import ByteArray

Verb = Literal["read", "write"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, and with which batches.  Those of `verb` are counted from 0 when the fault is injected."""

    kind: Literal["error", "short", "torn", "delay", "hang", "reorder"]
    """`error`: nothing of one transfer moves.  `short`: only `moved_bytes` of it.  `torn`: the same, but success is
    reported.  `delay`: the batch waits for `release`.  `hang`: it waits for `let_go`, as if stuck in the kernel.
    `reorder`: batches are held until there are `batches` of them, then done last to first."""
    verb: Verb | None = None
    """Reads, writes, or both."""
    first: int = 0
    """The first batch that it hits."""
    batches: int | None = 1
    """How many in a row; None is all from there on."""
    transfer: int = 0
    """Which transfer of the batch, for those that move less than asked; past the end is the last one."""
    error: int = errno.EIO
    """The errno of `error` and `short`, e.g. ENOSPC; with `short`, 0 is a bare short count."""
    moved_bytes: int = 0


class Call(NamedTuple):
    """One batch, as it was submitted."""

    verb: Verb
    batch: tuple[Transfer, ...]


class MemoryEngine:
    """Moves batches between memory that stands for files and buffers.  Safe to call from several threads."""

    name = "memory"

    def __init__(self, file_count: int, file_bytes: int) -> None:
        """Make `file_count` files of zeroed bytes, `file_bytes` each."""
        self.files: tuple[ByteArray, ...] = tuple(np.zeros(file_bytes, np.uint8) for _ in range(file_count))
        """Content, for anyone to look at or to damage."""
        self.calls: list[Call] = []
        """Every batch that was accepted, in order."""
        self._lock = threading.Lock()
        self._faults: list[_Active] = []
        self._held: deque[_Held] = deque()
        self._closed = False

    def inject(self, fault: Fault) -> None:
        """Arm a fault.  Of several that fit a batch, the first injected one hits it; all of them count it."""
        assert fault.kind != "reorder" or fault.batches, "reorder needs a number of batches"
        with self._lock:
            self._faults.append(_Active(fault))

    def heal(self) -> None:
        """Disarm all faults; what is held stays held."""
        with self._lock:
            self._faults.clear()

    @property
    def held(self) -> int:
        """Batches that wait for `release` or `let_go`."""
        with self._lock:
            return len(self._held)

    def release(self) -> None:
        """Do what was delayed, in order, and what waits to be reordered, last to first."""
        self._do(self._take("delay"))
        self._do(self._take("reorder")[::-1])

    def let_go(self) -> None:
        """Do what hangs: late, but it still moves its bytes, as a kernel would."""
        self._do(self._take("hang"))

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Read; see `Engine.read`."""
        self._submit("read", batch, buffer, done)

    def write(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        """Write; see `Engine.write`."""
        self._submit("write", batch, buffer, done)

    def close(self, wait_ns: int) -> bool:
        """Answer what is delayed with ECANCELED; False while something hangs.  Never waits."""
        with self._lock:
            self._closed = True
        for held in (*self._take("delay"), *self._take("reorder")):
            refuse(held.call.batch, errno.ECANCELED, held.done)
        return self.held == 0

    def check(self) -> None:
        """Assert that nothing but a hang outlives `close`."""
        with self._lock:
            assert not self._closed or all(held.fault.kind == "hang" for held in self._held)

    def _submit(self, verb: Verb, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        check_batch(batch, buffer, len(self.files))
        ready: list[_Held] = []
        with self._lock:
            closed = self._closed
            if not closed:
                call = Call(verb, tuple(batch))
                self.calls.append(call)
                held = _Held(call, buffer, done, self._hit(verb))
                if held.fault.kind not in ("delay", "hang", "reorder"):
                    ready = [held]
                else:
                    self._held.append(held)
                    same = [other for other in self._held if other.fault is held.fault]
                    if held.fault.kind == "reorder" and len(same) == held.fault.batches:
                        ready = same[::-1]
                        self._held = deque(other for other in self._held if other.fault is not held.fault)
        if closed:
            refuse(batch, errno.ECANCELED, done)
        self._do(ready)

    def _hit(self, verb: Verb) -> Fault:
        hits = [active.fault for active in self._faults if active.hits(verb)]
        return hits[0] if hits else _NONE

    def _take(self, kind: str) -> "list[_Held]":
        with self._lock:
            taken = [held for held in self._held if held.fault.kind == kind]
            self._held = deque(held for held in self._held if held.fault.kind != kind)
        return taken

    def _do(self, ready: "Sequence[_Held]") -> None:
        for held in ready:
            with self._lock:
                results = self._move(held)
            answer(held.done, results)

    def _move(self, held: "_Held") -> list[Result]:
        fault, results = held.fault, []
        hit = min(fault.transfer, len(held.call.batch) - 1) if fault.kind in ("error", "short", "torn") else -1
        for number, (file, offset_bytes, size_bytes, buffer_offset) in enumerate(held.call.batch):
            stored = torch.from_numpy(self.files[file])
            moved_bytes = max(0, min(size_bytes, len(stored) - offset_bytes))
            result = Result(moved_bytes, 0 if moved_bytes == size_bytes else errno.EIO)
            if number == hit:
                moved_bytes = min(moved_bytes, fault.moved_bytes if fault.kind != "error" else 0)
                result = result if fault.kind == "torn" else Result(moved_bytes, fault.error)
            if moved_bytes:
                there = stored[offset_bytes : offset_bytes + moved_bytes]
                here = held.buffer.tensor[buffer_offset : buffer_offset + moved_bytes]
                (here if held.call.verb == "read" else there).copy_(there if held.call.verb == "read" else here)
            results.append(result)
        return results


_NONE = Fault(kind="torn", moved_bytes=1 << 62)
"""Moves everything."""


class _Active:
    """A fault and how many batches it has seen."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.seen = 0

    def hits(self, verb: Verb) -> bool:
        if self.fault.verb not in (None, verb):
            return False
        number, self.seen = self.seen - self.fault.first, self.seen + 1
        return number >= 0 and (self.fault.batches is None or number < self.fault.batches)


class _Held(NamedTuple):
    """A batch that has not been done yet, and why."""

    call: Call
    buffer: Buffer
    done: Done
    fault: Fault
