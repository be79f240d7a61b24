"""What order a GPU's streams keep: saves after their producer, scatters after the last reader, compute after scatters.

Each test makes one side slow on purpose.  A kernel that only waits stands in front of the work that must come
first; without the store's events the other side would run long before it, and read or write the wrong bytes.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from flatcake.gva import Medium
from flatcake.io.engine import Buffer, Done, Engine, Transfer
from flatcake.store import Store
from tests.stores import (
    TURNS,
    WAIT_S,
    Memory,
    check,
    fence,
    make_config,
    make_store,
    make_tokens,
    shuffled,
    simple_layout,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SLOW_CYCLES = 400_000_000
"""About a fifth of a second on a GPU at 2 GHz; a restore of these sizes takes a hundredth of it."""
BLOCKS = 6
BOTH = pytest.mark.parametrize("medium", [Medium.SSD, Medium.DRAM])


class Gate:
    """An engine whose reads begin only when it is opened."""

    def __init__(self, inner: Engine) -> None:
        self.name = inner.name
        self.waiting: list[Callable[[], None]] = []
        self.is_open = False
        self._inner = inner
        self._lock = threading.Lock()

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        with self._lock:
            if not self.is_open:
                self.waiting.append(lambda: self._inner.read(batch, buffer, done))
                return
        self._inner.read(batch, buffer, done)

    def write(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        self._inner.write(batch, buffer, done)

    def close(self, wait_ns: int) -> bool:
        return self._inner.close(wait_ns)

    def open(self) -> None:
        with self._lock:
            self.is_open = True
        for read in self.waiting:
            read()


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout(layers=4, page_count=128), "cuda")


@pytest.fixture
def store(memory: Memory, tmp_path: Path) -> Iterator[Store]:
    with make_store(memory, make_config(memory, [tmp_path])) as opened:
        yield opened
        check(opened)


def gate(store: Store, medium: Medium) -> Gate:
    parts = store.plane.parts
    closed = Gate(parts.media[medium].engine)
    parts.media = {**parts.media, medium: parts.media[medium]._replace(engine=closed)}
    return closed


def saved(store: Store, memory: Memory, medium: Medium) -> None:
    keys = store.keys(make_tokens("a", BLOCKS))
    pages = shuffled(memory, BLOCKS, seed=1)
    memory.stamp(keys, pages)
    torch.cuda.synchronize()
    assert store.save("s", keys, pages, TURNS[medium]).published(WAIT_S)
    memory.fill(seed=2)
    torch.cuda.synchronize()


@BOTH
def test_save_waits_for_a_slow_producer(store: Store, memory: Memory, medium: Medium) -> None:
    keys, pages = store.keys(make_tokens("a", BLOCKS)), shuffled(memory, BLOCKS, seed=1)
    memory.fill(seed=2)
    content = Memory(memory.layout, "cuda")
    content.stamp(keys, pages)
    torch.cuda.synchronize()
    producer = torch.cuda.Stream()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(SLOW_CYCLES)
        for raw, want in zip(memory.raws, content.raws, strict=True):
            raw.copy_(want)
    save = store.save("s", keys, pages, TURNS[medium], stream=producer)
    assert not producer.query(), "the producer was to be slower than the call"
    assert save.published(WAIT_S) and save.reusable(WAIT_S)
    memory.fill(seed=3)
    with store.lease(store.match(keys)) as lease:
        assert lease.blocks == BLOCKS
        assert store.restore(lease, pages).result().blocks == BLOCKS
    assert memory.stamped_blocks(keys, pages) == BLOCKS


@BOTH
def test_scatter_waits_for_a_slow_reader_of_the_old_pages(store: Store, memory: Memory, medium: Medium) -> None:
    saved(store, memory, medium)
    before = memory.snapshot()
    reader = torch.cuda.Stream()
    with torch.cuda.stream(reader):
        torch.cuda._sleep(SLOW_CYCLES)
        seen = memory.snapshot()
    keys, pages = store.keys(make_tokens("a", BLOCKS)), shuffled(memory, BLOCKS, seed=4)
    with store.lease(store.match(keys)) as lease:
        found = store.restore(lease, pages, stream=reader)
        assert not reader.query(), "the reader was to be slower than the call"
        assert found.result().blocks == BLOCKS
    torch.cuda.synchronize()
    assert all(torch.equal(was, old) for was, old in zip(seen, before, strict=True)), "the reader saw the new tenant"
    assert memory.stamped_blocks(keys, pages) == BLOCKS


@BOTH
def test_compute_waits_for_the_scatter_of_its_layer(store: Store, memory: Memory, medium: Medium) -> None:
    saved(store, memory, medium)
    blocker, compute = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(blocker):
        torch.cuda._sleep(SLOW_CYCLES)
    keys, pages = store.keys(make_tokens("a", BLOCKS)), shuffled(memory, BLOCKS, seed=4)
    with store.lease(store.match(keys)) as lease:
        found = store.restore(lease, pages, stream=blocker)  # its scatters are held up on the device
        copies = []
        for layer in range(4):
            assert found.wait_layer(layer, compute)
            with torch.cuda.stream(compute):
                copies.append([view.clone() for view in memory.views[layer]])
            if layer == 0:  # Later layers need slots that only the held-up scatters give back.
                assert not compute.query(), "the scatters were to be later than the compute that waits for them"
        assert found.result().blocks == BLOCKS
    torch.cuda.synchronize()
    for layer, parts in enumerate(copies):
        for copy, view in zip(parts, memory.views[layer], strict=True):
            assert torch.equal(copy, view), f"layer {layer} was computed from before its scatter"
    assert memory.stamped_blocks(keys, pages) == BLOCKS


@BOTH
def test_compute_waits_for_a_read_that_returns_long_after(store: Store, memory: Memory, medium: Medium) -> None:
    saved(store, memory, medium)
    held = gate(store, medium)
    compute = torch.cuda.Stream()
    keys, pages = store.keys(make_tokens("a", BLOCKS)), shuffled(memory, BLOCKS, seed=4)
    seen: list[torch.Tensor] = []
    with store.lease(store.match(keys)) as lease:
        found = store.restore(lease, pages)

    def work() -> None:
        assert found.wait_layer(0, compute)
        with torch.cuda.stream(compute):
            seen.extend(view.clone() for view in memory.views[0])

    waiter = threading.Thread(target=work)
    waiter.start()
    fence(store)
    assert held.waiting and not seen, "no read has begun, so nothing may have been computed"
    held.open()
    waiter.join(WAIT_S)
    assert not waiter.is_alive() and found.result().blocks == BLOCKS
    torch.cuda.synchronize()
    assert all(torch.equal(copy, view) for copy, view in zip(seen, memory.views[0], strict=True))
    assert memory.stamped_blocks(keys, pages) == BLOCKS


@BOTH
def test_a_cancelled_restore_never_touches_pages_that_are_in_use_again(
    store: Store, memory: Memory, medium: Medium
) -> None:
    saved(store, memory, medium)
    held = gate(store, medium)
    keys, pages = store.keys(make_tokens("a", BLOCKS)), shuffled(memory, BLOCKS, seed=4)
    with store.lease(store.match(keys)) as lease:
        found = store.restore(lease, pages)
    fence(store)
    found.cancel().wait()
    memory.fill(seed=5)
    before = memory.snapshot()
    held.open()
    result = found.result()
    assert (result.blocks, result.reason) == (0, "cancelled")
    fence(store)
    torch.cuda.synchronize()
    assert held.waiting and memory.is_equal(before)
    check(store)
    with store.lease(store.match(keys)) as lease:  # the twin: the same restore, not cancelled
        assert store.restore(lease, pages).result().blocks == BLOCKS
    assert memory.stamped_blocks(keys, pages) == BLOCKS


@BOTH
def test_a_cancel_while_scatters_wait_gives_an_event_after_which_the_pages_are_free(
    store: Store, memory: Memory, medium: Medium
) -> None:
    saved(store, memory, medium)
    blocker = torch.cuda.Stream()
    with torch.cuda.stream(blocker):
        torch.cuda._sleep(SLOW_CYCLES)
    keys, pages = store.keys(make_tokens("a", BLOCKS)), shuffled(memory, BLOCKS, seed=4)
    with store.lease(store.match(keys)) as lease:
        found = store.restore(lease, pages, stream=blocker)
        assert found.wait_layer(0)
    free = found.cancel()
    assert not free.done(), "a scatter of layer 0 was to be queued behind the blocker"
    free.wait()
    memory.fill(seed=5)
    before = memory.snapshot()
    fence(store)
    torch.cuda.synchronize()
    assert memory.is_equal(before)


def test_flipped_bytes_are_caught_by_the_kernel(store: Store, memory: Memory, tmp_path: Path) -> None:
    saved(store, memory, Medium.SSD)
    keys = store.keys(make_tokens("a", BLOCKS))
    table = store.catalog.space.tables[Medium.SSD]
    extent = next(iter(store.catalog.space.scopes)).extents[0]
    at = table.piece_offset(extent, 3)
    for path in tmp_path.glob("pool-0000.fc"):
        with path.open("r+b") as file:
            file.seek(at + 17)
            byte = file.read(1)
            file.seek(at + 17)
            file.write(bytes([byte[0] ^ 0x80]))
    pages = shuffled(memory, BLOCKS, seed=4)
    with store.lease(store.match(keys)) as lease:
        result = store.restore(lease, pages).result()
    assert (result.blocks, result.reason) == (3, "checksum")
    assert memory.stamped_blocks(keys[:3], pages[: 3 * memory.layout.pages_per_block]) == 3
    assert store.match(keys).blocks == 3
