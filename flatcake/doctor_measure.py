"""Measures a directory: O_DIRECT, bare transfers, and restores from a small store, all through the real parts.

Opens a store in a fresh directory of its own, so that the engine is the one that `open` chooses, and removes it
again.  Bare reads and restores take turns: a disk that others use too then slows both down alike.
"""

import errno
import os
import queue
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from flatcake.assemble import open_store
from flatcake.clock import Clock
from flatcake.config import CapacityConfig, StoreConfig
from flatcake.doctor_direct import probe_direct
from flatcake.doctor_facts import DirectFacts, DiskFacts, EngineFacts, Probes, RestoreFacts
from flatcake.errors import CapacityError
from flatcake.gva import Medium
from flatcake.io.device import Device, Stream, cuda_is_available
from flatcake.io.engine import Buffer, Done, Result, Transfer
from flatcake.io.paged import PagedKV
from flatcake.io.seam import Files
from flatcake.io.window import Window
from flatcake.keys import Identity
from flatcake.messages import Int64Array
from flatcake.store import Store
from flatcake.units import SECOND, KiB, MiB, align_up

SIZE_BYTES_MIN = 16 * MiB
"""Least that makes a figure."""
LAYERS, BLOCK_TOKENS, PAGE_TOKENS = 8, 256, 16
PAGE_SHAPE = (2, PAGE_TOKENS, 8, 128)
"""K and V of 8 heads of 128 values, 2 bytes each: 64 KiB a page, 1 MiB a piece, 8 MiB a block."""
ROUNDS_MAX = 5
SWEEP_NS_MAX, ROUNDS_NS_MAX = 2 * SECOND, 6 * SECOND
WAIT_NS = 10 * SECOND

_BLOCK_BYTES = LAYERS * (BLOCK_TOKENS // PAGE_TOKENS) * 64 * KiB
_BARE_FILE = 1
Call = Callable[[Sequence[Transfer], Buffer, Stream, Done], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found out; None where it was not."""

    direct: DirectFacts | None = None
    engine: EngineFacts | None = None
    disk: DiskFacts | None = None
    restore: RestoreFacts | None = None


def measure(
    probes: Probes, files: Files, clock: Clock, *, config: StoreConfig, directory: str, size_bytes: int
) -> Measured:
    """Measure, in a fresh directory that is gone afterwards.

    Args:
        probes: Keeps what went wrong.
        files: System calls.
        clock: Monotonic time.
        config: Settings of the store; its sizes and directories are replaced by small ones.
        directory: Must be there, and writable.
        size_bytes: How much to write and to save at most; as much again is taken while restores run.

    Raises:
        OSError: The fresh directory cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory, ignore_cleanup_errors=True) as scratch:
        found = Measured(direct=probes.get("O_DIRECT", lambda: probe_direct(files, scratch)))
        fits_bytes = probes.get("free space to measure in", lambda: _fit(files, scratch, size_bytes))
        if fits_bytes is not None:
            make = partial(_Bench, files, clock, config, f"{scratch}/pool", fits_bytes)
            found = _through_a_store(probes, make, found)
    probes.get("cleaning up", lambda: _require_gone(scratch))
    return found


def _through_a_store(probes: Probes, make: "Callable[[], _Bench]", found: Measured) -> Measured:
    bench = probes.get("a store", make)
    if bench is None:
        return found
    try:
        found = replace(found, engine=bench.engine)
        written = probes.get("writes", bench.write)
        if written is None:
            return found
        disk, restore = bench.read(probes, written)
        return replace(found, disk=disk, restore=restore)
    finally:
        probes.get("closing", bench.close)


def _require_gone(scratch: str) -> None:
    if os.path.exists(scratch):
        raise OSError(errno.ENOTEMPTY, "could not be removed; remove it by hand", scratch)


def _fit(files: Files, directory: str, size_bytes: int) -> int:
    """At most a quarter of the free space, so that even a small disk is measured and none is filled."""
    try:
        quarter = files.free_bytes(directory) // 4
    except OSError:
        return size_bytes  # Preallocation refuses what does not fit.
    if quarter < SIZE_BYTES_MIN:
        raise CapacityError(f"{directory}: {quarter * 4} bytes free, {SIZE_BYTES_MIN * 4} needed to measure")
    return min(size_bytes, quarter)


class _Bench:
    """A small store whose second pool file is used for bare transfers."""

    def __init__(self, files: Files, clock: Clock, config: StoreConfig, directory: str, size_bytes: int) -> None:
        self._clock = clock
        self._blocks = max(1, size_bytes // _BLOCK_BYTES)
        size_bytes = self._blocks * _BLOCK_BYTES
        file_bytes = align_up(size_bytes * 5 // 4, MiB)
        device = config.device if config.device != "auto" else "cuda" if cuda_is_available() else "cpu"
        self._tensors = _random_tensors(self._blocks, device)
        kv = PagedKV.of_layers(self._tensors, page_tokens=PAGE_TOKENS)
        capacity = CapacityConfig(
            dram_bytes_max=0, ssd_bytes_max=2 * file_bytes, pool_file_bytes=file_bytes, ssd_free_bytes_min=0
        )
        small = replace(config, directories=(directory,), device=device, capacity=capacity)
        identity = Identity(model="doctor", revision="0", kv_dtype="opaque", layout="doctor", block_tokens=BLOCK_TOKENS)
        with ExitStack() as undo:
            self._store: Store = open_store(small, identity, kv, clock=clock, files=files)
            undo.callback(self._store.close)
            parts, stats = self._store.plane.parts, self._store.stats()
            self._device: Device = parts.device
            self._engine = parts.media[Medium.SSD].engine
            window = parts.window
            self.engine = EngineFacts(
                device=parts.device.name,
                name=stats.io_path,
                reason=stats.io_reason,
                slots=window.slots,
                save_slots=parts.save_window.slots,
                slot_bytes=window.slot_bytes,
            )
            self._buffers = _random_buffers(Window(parts.device, slots=window.slots, slot_bytes=window.slot_bytes))
            undo.pop_all()

    def write(self) -> tuple[int, float]:
        """Write the file for bare transfers twice; the bytes that are there, and the rate of the second pass.

        The first pass is slower on filesystems that mark preallocated blocks as written.
        """
        moved_bytes, _ = self._sweep(self._engine.write, self._blocks * _BLOCK_BYTES)
        again_bytes, took_ns = self._sweep(self._engine.write, moved_bytes)
        return moved_bytes, again_bytes * 1e9 / took_ns

    def read(self, probes: Probes, written: tuple[int, float]) -> tuple[DiskFacts | None, RestoreFacts | None]:
        """Read and restore in turn, until the time or the rounds are up."""
        span, write_rate = written
        blocks = max(1, span // _BLOCK_BYTES)
        pages = np.random.default_rng(1).permutation(self._blocks * BLOCK_TOKENS // PAGE_TOKENS)
        saved = probes.get("save", lambda: self._save(blocks, pages))
        rates, tries = list[float](), list[_Try]()
        until_ns = self._clock.now_ns() + ROUNDS_NS_MAX
        for _ in range(ROUNDS_MAX):
            rate = probes.get("reads", lambda: self._sweep(self._engine.read, span))
            attempt = saved and probes.get("restore", partial(self._restore, blocks, pages, compare=not tries))
            rates.extend([rate[0] * 1e9 / rate[1]] if rate else [])
            tries.extend([attempt] if attempt else [])
            if rate is None or (saved and attempt is None) or self._clock.now_ns() > until_ns:
                break
        if not rates:
            return None, None
        speed = statistics.median(rates)
        disk = DiskFacts(size_bytes=span, write_bytes_s=write_rate, read_bytes_s=speed)
        if not tries:
            return disk, None
        return disk, RestoreFacts(
            size_bytes=tries[0].read_bytes,
            reads=tries[0].reads,
            rounds=len(tries),
            predicted_ns=int(tries[0].read_bytes * 1e9 / speed),
            measured_ns=int(statistics.median(attempt.total_ns for attempt in tries)),
            right=all(attempt.right for attempt in tries),
        )

    def close(self) -> None:
        if not self._store.close():
            raise OSError(errno.EBUSY, "transfers are stuck in the kernel")

    def _sweep(self, call: Call, size_bytes: int) -> tuple[int, int]:
        """Move the start of the bare file through all buffers at once; bytes moved and nanoseconds taken."""
        answers: queue.SimpleQueue[tuple[Buffer, int, list[Result]]] = queue.SimpleQueue()
        stream, idle = self._device.new_stream(), list(self._buffers)
        start_ns, offset, pending = self._clock.now_ns(), 0, 0
        while True:
            while idle and offset < size_bytes and (self._clock.now_ns() - start_ns < SWEEP_NS_MAX or not offset):
                buffer = idle.pop()
                step = min(size_bytes - offset, buffer.tensor.numel())

                def done(results: list[Result], buffer: Buffer = buffer, step: int = step) -> None:
                    answers.put((buffer, step, results))

                call([Transfer(_BARE_FILE, offset, step, 0)], buffer, stream, done)
                offset, pending = offset + step, pending + 1
            if not pending:
                break
            buffer, step, results = _next(answers)
            idle, pending = [*idle, buffer], pending - 1
            if results != [Result(step, 0)]:
                code = results[0].error or errno.EIO
                raise OSError(code, os.strerror(code))
        self._device.record(stream).wait()
        return offset, max(1, self._clock.now_ns() - start_ns)

    def _save(self, blocks: int, pages: Int64Array) -> bool:
        tokens = np.arange(blocks * BLOCK_TOKENS)
        result = self._store.save("doctor", tokens, pages, timeout_ns=WAIT_NS).result(1.5 * WAIT_NS / 1e9)
        if result is None or result.reason or result.written_blocks != blocks:
            raise OSError(errno.EIO, f"nothing was published: {result.reason if result else 'no answer'}")
        return True

    def _restore(self, blocks: int, pages: Int64Array, *, compare: bool) -> "_Try":
        """Restore everything; `compare` spoils the first and last block of each layer before, and compares after."""
        per_block = BLOCK_TOKENS // PAGE_TOKENS
        used = torch.from_numpy(pages[: blocks * per_block]).to(self._tensors[0].device)
        sample = torch.cat([used[:per_block], used[-per_block:]])
        spoilt = self._tensors if compare else []
        before = [tensor[sample] for tensor in spoilt]
        for tensor in spoilt:
            tensor[sample] = 0
        match = self._store.match(np.arange(blocks * BLOCK_TOKENS))
        with self._store.lease(match) as lease:
            result = self._store.restore(lease, pages, timeout_ns=WAIT_NS).result()
        right = all(torch.equal(tensor[sample], old) for tensor, old in zip(spoilt, before, strict=True))
        if result.blocks != blocks:
            raise OSError(errno.EIO, f"{result.blocks} of {blocks} blocks came back: {result.reason or 'not matched'}")
        return _Try(result.read_bytes, result.reads, max(1, result.total_ns), right)


@dataclass(frozen=True, slots=True)
class _Try:
    read_bytes: int
    reads: int
    total_ns: int
    right: bool


def _next(answers: "queue.SimpleQueue[tuple[Buffer, int, list[Result]]]") -> tuple[Buffer, int, list[Result]]:
    try:
        return answers.get(timeout=WAIT_NS / 1e9)
    except queue.Empty:
        raise OSError(errno.ETIMEDOUT, "no answer from the engine") from None


def _random_tensors(blocks: int, device: str) -> list[torch.Tensor]:
    """Per layer the paged KV of so many blocks; random, so that no filesystem can compress it."""
    shape = (blocks * BLOCK_TOKENS // PAGE_TOKENS, *PAGE_SHAPE)
    words = blocks * _BLOCK_BYTES // LAYERS // 8
    return [
        torch.empty(words, dtype=torch.int64, device=device).random_().view(torch.int16).view(shape)
        for _ in range(LAYERS)
    ]


def _random_buffers(window: Window) -> list[Buffer]:
    """All slots of a window of our own, filled."""
    buffers = [buffer for _ in range(window.slots) if (buffer := window.take()) is not None]
    for buffer in buffers:
        buffer.tensor.view(torch.int64).random_()
    return buffers
