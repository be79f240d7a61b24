"""Small stores, and the engine's side of them: paged pools of many layouts, and pages that say whose they are."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from flatcake.assemble import open_store
from flatcake.clock import Clock
from flatcake.config import CapacityConfig, IOConfig, LayoutConfig, RetentionConfig, StoreConfig, TimeoutConfig
from flatcake.gva import Medium, decode_array
from flatcake.io.memory import MemoryEngine
from flatcake.io.paged import PagedKV
from flatcake.io.parts import MediumIO
from flatcake.io.restore import RestoreResult
from flatcake.io.save import SaveResult
from flatcake.io.seam import Files
from flatcake.io.window import Window
from flatcake.keys import Identity
from flatcake.layout import LaneTable
from flatcake.messages import KeyArray
from flatcake.placement import Turn
from flatcake.store import Store
from flatcake.units import DIRECT_BYTES, SECOND, align_up
from tests.opened import note

WAIT_S = 30.0
"""Far beyond what anything takes; reaching it is a failure."""
WAIT_NS = int(WAIT_S * SECOND)

ONE_SHOT = Turn()
"""Rule 4: SSD."""
CHAT = Turn(index=2, prior_reply_tokens=1)
"""Rule 3: DRAM."""
MEDIA = pytest.mark.parametrize("medium", list(Medium), ids=lambda medium: medium.name.lower())
"""For tests of either medium."""
TURNS = {Medium.SSD: ONE_SHOT, Medium.DRAM: CHAT}

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Pages = npt.NDArray[np.int64]
Describe = Callable[[list[Tensor]], PagedKV]
Views = Callable[[list[Tensor]], list[list[Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How an engine lays out its paged memory."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    """One pool each."""
    dtypes: tuple[torch.dtype, ...]
    page_tokens: int
    block_tokens: int
    page_count: int
    describe: Describe
    """The pools as the store is told of them."""
    views: Views
    """The same by torch alone: per layer and component, [pages, ...]."""

    @property
    def pages_per_block(self) -> int:
        return self.block_tokens // self.page_tokens


class Memory:
    """The paged memory of one engine on one device, and what it should hold."""

    def __init__(self, layout: Layout, device: str = "cpu") -> None:
        self.layout = layout
        sizes = [
            int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
        ]
        self.raws = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        self.kv = layout.describe(
            [raw.view(dtype).view(shape) for raw, dtype, shape in self._each(self.raws, layout.dtypes)]
        )
        self.views = self._views(self.raws)

    def fill(self, seed: int) -> None:
        """Other random bytes everywhere."""
        rng = np.random.default_rng(seed)
        for raw in self.raws:
            raw.copy_(torch.from_numpy(rng.integers(0, 256, len(raw), dtype=np.uint8)))

    def take(self, pages: Pages) -> list[list[Tensor]]:
        """A copy of some pages, per layer and component."""
        return [[view[self._index(pages)].clone() for view in layer] for layer in self.views]

    def snapshot(self) -> list[Tensor]:
        """A copy of every byte."""
        return [raw.clone() for raw in self.raws]

    def with_pages(self, before: list[Tensor], pages: Pages, content: list[list[Tensor]]) -> list[Tensor]:
        """What every byte must be when `content` has come into `pages` of `before`; pages of -1 are left alone."""
        wanted = [raw.clone() for raw in before]
        kept = torch.from_numpy(np.flatnonzero(pages >= 0)).to(self.raws[0].device)
        for views, layer in zip(self._views(wanted), content, strict=True):
            for view, part in zip(views, layer, strict=True):
                view[self._index(pages[pages >= 0])] = part[kept]
        return wanted

    def is_equal(self, wanted: list[Tensor]) -> bool:
        return all(torch.equal(raw, want) for raw, want in zip(self.raws, wanted, strict=True))

    def stamp(self, keys: KeyArray, pages: Pages) -> None:
        """Give blocks the content that their keys stand for."""
        for layer, views in enumerate(self.views):
            for part, view in enumerate(views):
                view[self._index(pages)] = self._stamps(keys, layer, part, view).reshape(-1, *view.shape[1:])

    def stamped_blocks(self, keys: KeyArray, pages: Pages) -> int:
        """How many leading blocks hold, in every layer, what their keys stand for."""
        good = len(keys)
        for layer, views in enumerate(self.views):
            for part, view in enumerate(views):
                found = view[self._index(pages)].flatten().view(len(keys), self._elements(view))
                same = (found == self._stamps(keys, layer, part, view)).all(dim=1)
                good = min(good, int(same.long().cumprod(0).sum()))
        return good

    def _stamps(self, keys: KeyArray, layer: int, part: int, view: Tensor) -> Tensor:
        words = self._elements(view) * view.element_size() // 4
        salt = np.uint64((layer * 31 + part + 1) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
        each = ((keys[:, :1] ^ salt) * np.uint64(0xD1342543DE82EF95)) ^ keys[:, 1:]
        mixed = (each + np.arange(words, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)) >> np.uint64(29)
        content = torch.from_numpy(mixed.astype(np.uint32).view(np.uint8))
        return content.view(_INTEGERS[view.element_size()]).to(view.device)

    def _elements(self, view: Tensor) -> int:
        """Elements of one block."""
        return self.layout.pages_per_block * view[0].numel()

    def _views(self, raws: list[Tensor]) -> list[list[Tensor]]:
        integers = [_INTEGERS[dtype.itemsize] for dtype in self.layout.dtypes]
        return self.layout.views([raw.view(dtype).view(shape) for raw, dtype, shape in self._each(raws, integers)])

    def _each(self, raws: list[Tensor], dtypes: Sequence[torch.dtype]) -> list[tuple[Tensor, torch.dtype, Any]]:
        return list(zip(raws, dtypes, self.layout.shapes, strict=True))

    def _index(self, pages: Pages) -> Tensor:
        return torch.from_numpy(np.asarray(pages, np.int64)).to(self.raws[0].device)


def simple_layout(
    *, layers: int = 3, page_tokens: int = 4, block_tokens: int = 8, page_count: int = 64, dim: int = 24
) -> Layout:
    """K and V apart, bf16: small pieces with some padding."""
    shape = (page_count, page_tokens, 2, dim)
    return Layout(
        name="simple",
        shapes=(shape,) * (2 * layers),
        dtypes=(torch.bfloat16,) * (2 * layers),
        page_tokens=page_tokens,
        block_tokens=block_tokens,
        page_count=page_count,
        describe=lambda pools: PagedKV.of_layers(
            list(zip(pools[::2], pools[1::2], strict=True)), page_tokens=page_tokens
        ),
        views=lambda pools: [[k, v] for k, v in zip(pools[::2], pools[1::2], strict=True)],
    )


def make_config(
    memory: Memory,
    directories: Sequence[Path | str] = (),
    *,
    blocks: int = 64,
    file_blocks: int = 16,
    dram_blocks: int = 32,
    capacity: dict[str, Any] | None = None,
    io: dict[str, Any] | None = None,
    timeouts: dict[str, Any] | None = None,
    layout: dict[str, Any] | None = None,
    retention: dict[str, Any] | None = None,
    rank: int = 0,
) -> StoreConfig:
    """A store with room for so many blocks on each medium; without directories its SSD is the memory engine."""
    lanes = LaneTable.of(memory.kv.geometry(memory.layout.block_tokens))
    file_bytes = align_up(lanes.extent_bytes(file_blocks), DIRECT_BYTES)
    slot_bytes = align_up(4 * int(lanes.piece_bytes.max()), DIRECT_BYTES)
    settings = {"engine": "auto" if directories else "memory", "io_threads": 2, "slots_min": 3, "save_slots": 2}
    settings |= {"slot_bytes": slot_bytes, "window_bytes_max": 5 * slot_bytes} | (io or {})
    room = {
        "ssd_bytes_max": -(-blocks // file_blocks) * file_bytes,
        "pool_file_bytes": file_bytes,
        "dram_bytes_max": lanes.extent_bytes(dram_blocks) if dram_blocks else 0,
        "ssd_free_bytes_min": 0,
    }
    return StoreConfig(
        directories=tuple(map(str, directories)),
        rank=rank,
        capacity=CapacityConfig(**room | (capacity or {})),  # type: ignore[arg-type]
        io=IOConfig(**settings),  # type: ignore[arg-type]
        timeouts=TimeoutConfig(**timeouts or {}),
        layout=LayoutConfig(**layout or {}),
        retention=RetentionConfig(**retention or {}),
    )


def make_identity(memory: Memory, **changes: Any) -> Identity:
    fields = {"model": "m", "revision": "r", "kv_dtype": "bf16", "layout": "x"} | changes
    return Identity(block_tokens=memory.layout.block_tokens, **fields)


def make_store(
    memory: Memory,
    config: StoreConfig | None = None,
    *,
    identity: Identity | None = None,
    clock: Clock | None = None,
    files: Files | None = None,
) -> Store:
    """Open a store over a memory; by default both media are in memory and take faults."""
    config = config or make_config(memory)
    return note(open_store(config, identity or make_identity(memory), memory.kv, clock=clock, files=files))


def memory_engine(store: Store, medium: Medium) -> MemoryEngine:
    """The memory engine behind a medium.  DRAM gets one in place of its arena; nothing may be stored there yet."""
    parts = store.plane.parts
    engine = parts.media[medium].engine
    if not isinstance(engine, MemoryEngine):
        assert medium is Medium.DRAM and not len(store.catalog.space.tables[medium])
        engine = MemoryEngine(1, store.catalog.space.tables[medium].ranges.size_bytes)
        parts.media = {**parts.media, medium: MediumIO(engine, engine, lambda offset: (0, offset))}
    return engine


def piece_at(store: Store, tokens: Pages, block: int, layer: int) -> tuple[Medium, int]:
    """The medium and the offset of one piece."""
    gva = store.catalog.space.index.lookup(store.keys(tokens))[block : block + 1]
    media, _, offsets = decode_array(gva)
    table = store.catalog.space.tables[Medium(int(media[0]))]
    extent = table.at(int(offsets[0]))
    assert extent is not None
    lanes = table.lanes.lane_offsets(np.array([extent.room_blocks]))[:, 0]
    slot = table.slot_of(extent, int(offsets[0]))
    return Medium(int(media[0])), extent.base_bytes + int(lanes[layer]) + slot * int(table.lanes.piece_bytes[layer])


def flip(engine: MemoryEngine, offset_bytes: int) -> None:
    """Invert one bit on the medium."""
    size_bytes = len(engine.files[0])
    engine.files[offset_bytes // size_bytes][offset_bytes % size_bytes] ^= 1


def make_tokens(name: str | int, blocks: int, block_tokens: int = 8, more: int = 0) -> Pages:
    """Tokens of a sequence with so many full blocks and `more` tokens; a longer call extends it."""
    seed = [*str(name).encode()]
    return np.random.default_rng(seed).integers(0, 1 << 31, blocks * block_tokens + more)


def branch(tokens: Pages, name: str | int, blocks: int, block_tokens: int = 8) -> Pages:
    """`tokens`, then so many blocks that belong to `name` alone."""
    return np.concatenate([tokens, make_tokens(name, blocks, block_tokens)])


def save(
    store: Store, memory: Memory, session: str, tokens: Pages, turn: Turn = ONE_SHOT, first_page: int = 0
) -> SaveResult:
    """Stamp the pages of a sequence, from page `first_page` on, and save them."""
    keys = store.keys(tokens)
    pages = np.arange(first_page, first_page + len(keys) * memory.layout.pages_per_block)
    memory.stamp(keys, pages)
    found = store.save(session, tokens, pages, turn).result(WAIT_S)
    assert found is not None, "the save never ended"
    return found


def restore(store: Store, memory: Memory, tokens: Pages, *, seed: int = 7) -> RestoreResult:
    """Restore what is stored of a sequence into random pages of wiped memory; every byte is compared.

    The pages of the blocks that are reported must hold what their keys stand for, and pages that are not named
    must be as they were.
    """
    match = store.match(tokens)
    with store.lease(match) as lease:
        keys, pages = match.keys[: lease.blocks], shuffled(memory, lease.blocks, seed=seed)
        memory.fill(seed)
        before = memory.snapshot()
        assert memory.stamped_blocks(keys, pages) == 0
        found = store.restore(lease, pages).result()
    good = keys[: found.blocks]
    assert memory.stamped_blocks(good, pages[: len(good) * memory.layout.pages_per_block]) == found.blocks
    assert memory.is_equal(memory.with_pages(before, pages, memory.take(pages))), "a page that was not named changed"
    return found


def shuffled(memory: Memory, blocks: int, *, seed: int = 7) -> Pages:
    """A page table of distinct pages in no order."""
    order = np.random.default_rng(seed).permutation(memory.layout.page_count)
    return order[: blocks * memory.layout.pages_per_block].astype(np.int64)


def fence(store: Store) -> None:
    """Wait until the pump has run everything that was posted before."""
    reached = threading.Event()
    store.plane.parts.pump.post(reached.set)
    assert reached.wait(WAIT_S), "the pump does not move"


def eventually(store: Store, what: Callable[[], bool]) -> None:
    """Let the pump run until something holds."""
    end_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end_s, "it never came to hold"
        fence(store)


def is_whole(store: Store, window: Window) -> bool:
    """Whether all slots are free, once those that came back have been looked at."""
    store.plane.parts.pump.post(window.collect)
    return window.free_slots == window.slots


def check(store: Store, *, leases: int = 0, plans: int = 0) -> None:
    """Nothing is open apart from what is named, and all invariants hold."""
    eventually(store, lambda: store.stats().plans == plans)
    stats, parts = store.stats(), store.plane.parts
    assert (stats.leases, stats.plans) == (leases, plans)
    store.catalog.check()
    parts.book.check()
    if not plans:
        for window in (parts.window, parts.save_window):
            eventually(store, lambda window=window: is_whole(store, window))  # type: ignore[misc]
        assert parts.restores_active == 0 and stats.draining_scopes == 0
