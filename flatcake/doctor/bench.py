"""The small store that the doctor measures with: bare transfers beside it, saves, and restores from either medium.

The engine is the one that `flatcake.open` chooses; bare transfers go through it too, to a pool file of their own.
"""

import errno
import os
import queue
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch

from flatcake.assemble import open_store
from flatcake.clock import Clock
from flatcake.config import CapacityConfig, PlacementConfig, StoreConfig
from flatcake.doctor.facts import EngineFacts
from flatcake.gva import Medium
from flatcake.hits import Match
from flatcake.io.device import Device, Event
from flatcake.io.devices import cuda_is_available
from flatcake.io.engine import Buffer, Done, Result, Transfer
from flatcake.io.paged import PagedKV
from flatcake.io.seam import Files
from flatcake.io.window import Window
from flatcake.keys import Identity
from flatcake.messages import Int64Array
from flatcake.placement import Turn
from flatcake.store import Store
from flatcake.units import SECOND, KiB, MiB, align_up

LAYERS, BLOCK_TOKENS, PAGE_TOKENS = 8, 256, 16
PAGE_SHAPE = (2, PAGE_TOKENS, 8, 128)
"""K and V of 8 heads of 128 values, 2 bytes each: 64 KiB a page, 1 MiB a piece, 8 MiB a block."""
MEMORY_BLOCKS = 64
"""At most so many, 512 MiB, are restored from memory."""
SWEEP_NS_MAX = 2 * SECOND
WAIT_NS = 10 * SECOND

BLOCK_BYTES = LAYERS * (BLOCK_TOKENS // PAGE_TOKENS) * 64 * KiB
_BARE_FILE = 1
Call = Callable[[Sequence[Transfer], Buffer, Done], None]


@dataclass(frozen=True, slots=True)
class Try:
    """One restore."""

    read_bytes: int
    reads: int
    total_ns: int
    right: bool
    """Whether the pages that were compared hold what was saved."""


class Bench:
    """A small store whose second pool file is used for bare transfers."""

    def __init__(self, files: Files, clock: Clock, config: StoreConfig, directory: str, size_bytes: int) -> None:
        """Open it.

        Args:
            files: System calls.
            clock: Monotonic time.
            config: Settings; sizes, directories and bounds of placement are replaced.
            directory: For the pool; the store makes it.
            size_bytes: Of the paged memory.

        Raises:
            FlatCakeError: As `flatcake.open` does.
        """
        self.clock = clock
        self._blocks = max(1, size_bytes // BLOCK_BYTES)
        size_bytes = self._blocks * BLOCK_BYTES
        file_bytes = align_up(size_bytes * 5 // 4, MiB)
        device = config.device if config.device != "auto" else "cuda" if cuda_is_available() else "cpu"
        self._tensors = _random_tensors(self._blocks, device)
        self._pages: Int64Array = np.random.default_rng(1).permutation(self._blocks * BLOCK_TOKENS // PAGE_TOKENS)
        kv = PagedKV.of_layers(self._tensors, page_tokens=PAGE_TOKENS)
        capacity = CapacityConfig(
            dram_bytes_max=align_up(min(self._blocks, MEMORY_BLOCKS) * BLOCK_BYTES * 5 // 4, MiB),
            ssd_bytes_max=2 * file_bytes,
            pool_file_bytes=file_bytes,
            ssd_free_bytes_min=0,
        )
        small = replace(config, directories=(directory,), device=device, capacity=capacity, placement=PlacementConfig())
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
            self._buffers = _random_buffers(parts.device, window)
            undo.pop_all()

    def write(self) -> tuple[int, float]:
        """Write the file for bare transfers twice; the bytes that are there, and the rate of the second pass.

        The first pass is slower on filesystems that mark preallocated blocks as written.
        """
        moved_bytes, _ = self._sweep(self._engine.write, self._blocks * BLOCK_BYTES)
        again_bytes, took_ns = self._sweep(self._engine.write, moved_bytes)
        return moved_bytes, again_bytes * 1e9 / took_ns

    def read(self, size_bytes: int) -> float:
        """Read the start of that file; bytes a second."""
        moved_bytes, took_ns = self._sweep(self._engine.read, size_bytes)
        return moved_bytes * 1e9 / took_ns

    def close(self) -> None:
        if not self._store.close():
            raise OSError(errno.EBUSY, "transfers are stuck in the kernel")

    def save(self, medium: Medium, blocks: int) -> int:
        """Save the first blocks of the paged memory to one medium; how many there are.

        Raises:
            OSError: They were not published, or went elsewhere.
        """
        blocks = min(blocks, MEMORY_BLOCKS) if medium is Medium.DRAM else blocks
        tokens = np.arange(blocks * BLOCK_TOKENS)
        turn = Turn(index=2, prior_reply_tokens=0) if medium is Medium.DRAM else Turn()
        saving = self._store.save(medium.name, tokens, self._pages, turn, salt=_salt(medium), timeout_ns=WAIT_NS)
        result = saving.result(1.5 * WAIT_NS / 1e9)
        if result is None or result.reason or result.written_blocks != blocks:
            raise OSError(errno.EIO, f"nothing was published: {result.reason if result else 'no answer'}")
        if self._match(medium, blocks).tokens_on(medium) != len(tokens):
            raise OSError(errno.EIO, f"the blocks were not placed on {medium.name}")
        return blocks

    def restore(self, medium: Medium, blocks: int, *, compare: bool = False) -> Try:
        """Restore what `save` saved; `compare` spoils the first and last block of each layer, and looks at them after.

        Raises:
            OSError: Not all of it came back.
        """
        per_block = BLOCK_TOKENS // PAGE_TOKENS
        used = torch.from_numpy(self._pages[: blocks * per_block]).to(self._tensors[0].device)
        sample = torch.cat([used[:per_block], used[-per_block:]])
        spoilt = self._tensors if compare else []
        before = [tensor[sample] for tensor in spoilt]
        for tensor in spoilt:
            tensor[sample] = 0
        with self._store.lease(self._match(medium, blocks)) as lease:
            result = self._store.restore(lease, self._pages, timeout_ns=WAIT_NS).result()
        right = all(torch.equal(tensor[sample], old) for tensor, old in zip(spoilt, before, strict=True))
        if result.blocks != blocks:
            raise OSError(errno.EIO, f"{result.blocks} of {blocks} blocks came back: {result.reason or 'not matched'}")
        return Try(result.read_bytes, result.reads, max(1, result.total_ns), right)

    def _match(self, medium: Medium, blocks: int) -> Match:
        return self._store.match(np.arange(blocks * BLOCK_TOKENS), salt=_salt(medium))

    def _sweep(self, call: Call, size_bytes: int) -> tuple[int, int]:
        """Move the start of the bare file through all buffers at once; bytes moved and nanoseconds taken."""
        answers: queue.SimpleQueue[tuple[Buffer, int, list[Result]]] = queue.SimpleQueue()
        idle, moved = list(self._buffers), list[Event]()
        start_ns, offset, pending = self.clock.now_ns(), 0, 0
        while True:
            while idle and offset < size_bytes and (self.clock.now_ns() - start_ns < SWEEP_NS_MAX or not offset):
                buffer = idle.pop()
                step = min(size_bytes - offset, buffer.size_bytes)

                def done(results: list[Result], ready: Event, buffer: Buffer = buffer, step: int = step) -> None:
                    moved.append(ready)
                    answers.put((buffer, step, results))

                call([Transfer(_BARE_FILE, offset, step, 0)], buffer, done)
                offset, pending = offset + step, pending + 1
            if not pending:
                break
            buffer, step, results = _next(answers)
            idle, pending = [*idle, buffer], pending - 1
            if results != [Result(step, 0)]:
                code = results[0].error or errno.EIO
                raise OSError(code, os.strerror(code))
        for ready in moved:
            ready.wait()
        return offset, max(1, self.clock.now_ns() - start_ns)


def _next(answers: "queue.SimpleQueue[tuple[Buffer, int, list[Result]]]") -> tuple[Buffer, int, list[Result]]:
    try:
        return answers.get(timeout=WAIT_NS / 1e9)
    except queue.Empty:
        raise OSError(errno.ETIMEDOUT, "no answer from the engine") from None


def _salt(medium: Medium) -> bytes:
    """Keeps the blocks of the media apart: the tokens are the same."""
    return medium.name.encode()


def _random_tensors(blocks: int, device: str) -> list[torch.Tensor]:
    """Per layer the paged KV of so many blocks; random, so that no filesystem can compress it."""
    shape = (blocks * BLOCK_TOKENS // PAGE_TOKENS, *PAGE_SHAPE)
    words = blocks * BLOCK_BYTES // LAYERS // 8
    return [
        torch.empty(words, dtype=torch.int64, device=device).random_().view(torch.int16).view(shape)
        for _ in range(LAYERS)
    ]


def _random_buffers(device: Device, window: Window) -> list[Buffer]:
    """Buffers like a window's slots, filled."""
    memory = device.window(window.slots * window.slot_bytes)
    memory.view(torch.int64).random_()
    return [Buffer.of(slot) for slot in memory.view(window.slots, window.slot_bytes)]
