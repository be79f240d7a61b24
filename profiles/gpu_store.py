"""What the cases of `bench_gpu` share: models, a store on a GPU, ceilings, and single measurements."""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

import flatcake
from flatcake.io.devices import load_kvikio
from flatcake.io.seam import Files
from flatcake.units import GiB, MiB

DEVICE = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A geometry: bytes of one token in one layer, as `parts` components of a page."""

    name: str
    layers: int
    token_bytes: int
    parts: int
    page_tokens: int
    block_tokens: int

    def paged(
        self, tokens: int, memory: Callable[[int, int], torch.Tensor]
    ) -> tuple[flatcake.PagedKV, list[list[torch.Tensor]]]:
        """Room for so many tokens: `memory` makes one component of a layer, uint8 [pages, bytes of a page]."""
        pages = -(-tokens // self.page_tokens)
        row = self.page_tokens * self.token_bytes // self.parts
        layers = [[memory(pages, row) for _ in range(self.parts)] for _ in range(self.layers)]
        return flatcake.PagedKV.of_layers(layers, page_tokens=self.page_tokens), layers

    def settings(self, tokens: int, *, dram: bool, **others: object) -> flatcake.StoreConfig:
        """A store on one medium with room for so many tokens."""
        room = -(-int(tokens * self.token_bytes * self.layers * 1.2) // GiB) * GiB + GiB
        return flatcake.StoreConfig(
            capacity=flatcake.CapacityConfig(
                dram_bytes_max=room if dram else 0, ssd_bytes_max=0 if dram else room, ssd_free_bytes_min=0
            ),
            placement=flatcake.PlacementConfig(agent_tokens_min=10**9 if dram else 1, short_reply_tokens_limit=10**6),
            **others,  # type: ignore[arg-type]
        )

    def identity(self) -> flatcake.Identity:
        return flatcake.Identity(
            model=self.name, revision="0", kv_dtype="u8", layout="bench", block_tokens=self.block_tokens
        )


CHAT = flatcake.Turn(index=2, prior_reply_tokens=1)
"""With the settings of `opened`, a turn that goes to DRAM."""
GQA = Model(name="gqa", layers=32, token_bytes=8 * 128 * 2 * 2, parts=2, page_tokens=16, block_tokens=256)
MLA = Model(name="mla-fp8", layers=43, token_bytes=180, parts=1, page_tokens=64, block_tokens=256)
"""7.5 KiB a token: a block of a layer is 45 KiB, with padding 48."""
WIDE_MLA = Model(name="mla-656", layers=43, token_bytes=656, parts=1, page_tokens=64, block_tokens=256)


@contextmanager
def opened(
    root: str, model: Model, tokens: int, dram: bool = False, layout: str = "lanes", **io: object
) -> Iterator[tuple[flatcake.Store, object]]:
    """A store with room for so many tokens; yields it with the engine's tensors."""
    directory = tempfile.mkdtemp(dir=root)
    kv, layers = model.paged(tokens, lambda *shape: torch.randint(0, 255, shape, dtype=torch.uint8, device=DEVICE))
    settings = model.settings(
        tokens,
        dram=dram,
        directories=() if dram else (directory,),
        device=DEVICE,
        layout=flatcake.LayoutConfig(kind=layout),  # type: ignore[arg-type]
        io=flatcake.IOConfig(**io),  # type: ignore[arg-type]
    )
    store = flatcake.open(settings, model.identity(), kv)
    try:
        yield store, layers
    finally:
        store.close()
        del kv, layers
        torch.cuda.empty_cache()
        shutil.rmtree(directory)


def sequence(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).integers(0, 32_000, tokens)


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


class LargeRead:
    """One kvikio read of many bytes straight into GPU memory, with the settings that suit it best: a ceiling."""

    SETTINGS = {"num_threads": 16, "task_size": 8 * MiB}  # noqa: RUF012
    """kvikio has one set for the whole process: set before each read, and the store's put back after it.

    Each time kvikio starts new threads, and they are slow at first: 82 ms become 86 to 92 for 4 GiB.  So whoever comes
    after a change, the read and the store alike, works once before it is timed, but on a disk, where it does not show.
    """

    def __init__(self, root: str, size_bytes: int) -> None:
        self.directory = tempfile.mkdtemp(dir=root)
        path = os.path.join(self.directory, "large")
        with open(path, "wb") as file:
            block = np.random.default_rng(0).bytes(64 * MiB)
            for _ in range(-(-size_bytes // len(block))):
                file.write(block)
        self.file = load_kvikio().CuFile(path, "r")
        self.buffer = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)
        self.size_bytes = size_bytes

    def seconds(self, *, warm: bool) -> float:
        with load_kvikio().defaults.set(self.SETTINGS):
            self._read(self.size_bytes if warm else 16 * MiB)
            took_s = seconds(lambda: self._read(self.size_bytes))
        self._read(16 * MiB)  # The store's threads are there again.
        return took_s

    def each_seconds(self, part_bytes: int) -> float:
        """The same bytes by one read of `part_bytes` after another, all of them begun at once."""
        with load_kvikio().defaults.set(self.SETTINGS):
            self._read_each(part_bytes)
            return seconds(lambda: self._read_each(part_bytes))

    def close(self) -> None:
        self.file.close()
        shutil.rmtree(self.directory)

    def _read(self, size_bytes: int) -> None:
        size_bytes = min(size_bytes, self.size_bytes)
        assert self.file.pread(self.buffer, size=size_bytes).get() == size_bytes

    def _read_each(self, part_bytes: int) -> None:
        starts = range(0, self.size_bytes, part_bytes)
        parts = [self.buffer[start : start + part_bytes] for start in starts]
        reads = [self.file.pread(part, file_offset=start) for part, start in zip(parts, starts, strict=True)]
        assert sum(read.get() for read in reads) == self.size_bytes


class BareWrite:
    """What a save is held against: a copy from the device into pinned memory, and a write of a file of its own.

    The file is preallocated, as the store's are, and has `parts` of `size_bytes`: each write is the first to its part.
    """

    def __init__(self, root: str, size_bytes: int, parts: int) -> None:
        self.directory, self.size_bytes = tempfile.mkdtemp(dir=root), size_bytes
        self.parts, self.next_part = parts, 0
        path, files = os.path.join(self.directory, "bare"), Files()
        descriptor = files.open_file(path, create=True, direct=False)
        files.allocate(descriptor, size_bytes * parts)
        files.close(descriptor)
        self.file = load_kvikio().CuFile(path, "r+")
        self.host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        self.device = torch.randint(0, 255, (size_bytes,), dtype=torch.uint8, device=DEVICE)

    def copy(self) -> None:
        self.host.copy_(self.device, non_blocking=True)

    def write(self) -> None:
        assert self.next_part < self.parts, "this would write a part again"
        offset, size_bytes = self.next_part * self.size_bytes, self.size_bytes
        self.next_part += 1
        assert self.file.pwrite(self.host.numpy(), size=size_bytes, file_offset=offset).get() == size_bytes

    def close(self) -> None:
        self.file.close()
        shutil.rmtree(self.directory)


def pinned_copy() -> Callable[[], object]:
    host = torch.empty(GiB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(GiB, dtype=torch.uint8, device=DEVICE)
    return lambda: device.copy_(host, non_blocking=True)


def pump_cpu_s() -> float:
    """Processor time of the store's thread until now: all of the Python and driver calls that tiles cost."""
    [pump] = [thread for thread in threading.enumerate() if thread.name == "flatcake-pump"]
    assert pump.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(pump.ident))


def restore_once(store: flatcake.Store, match: flatcake.Match, pages: int, took: dict[str, list[float]]) -> None:
    """One restore into other pages each time; notes its seconds, those of its first layer, and the pump's a tile."""
    table = np.random.default_rng(len(took["restore"])).permutation(pages)
    found: list[flatcake.RestoreResult] = []
    before_s = pump_cpu_s()
    with store.lease(match) as lease:
        took["restore"].append(seconds(lambda: found.append(store.restore(lease, table).result())))
    assert found[0].tokens == match.tokens, found
    took["reads"].append(found[0].reads)
    took["first_layer"].append((found[0].first_layer_ns or 0) / 1e9)
    took["pump_tile"].append((pump_cpu_s() - before_s) / found[0].tiles)
