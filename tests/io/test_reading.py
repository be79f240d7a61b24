"""The start of a restore on the pump's thread: what the media wait for, and what is made while they are at work."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np
import pytest

from flatcake.assemble import RECORD_CACHE_BYTES
from flatcake.catalog import Refused
from flatcake.gva import Medium
from flatcake.io.device import CpuDevice, DoneEvent, Event, Stream
from flatcake.io.engine import Buffer, Done, Engine, Result, Transfer
from flatcake.io.pieces import SHARE, Pieces, Work
from flatcake.io.plan import make_tiles
from flatcake.io.reading import Reading
from flatcake.io.records import RecordBook
from flatcake.io.restore import Restore
from flatcake.io.seam import Files
from flatcake.kernels.checksum import SUM_KIND
from flatcake.store import Store
from tests.stores import (
    TURNS,
    WAIT_NS,
    WAIT_S,
    Memory,
    Pages,
    check,
    eventually,
    fence,
    make_config,
    make_store,
    make_tokens,
    memory_engine,
    restore,
    save,
    simple_layout,
)


class Watched:
    """An engine that writes down, at each read, what is made of a restore by then."""

    def __init__(self, inner: Engine, work: Work) -> None:
        self._inner, self._work = inner, work
        self.made: list[set[str]] = []

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        self.made.append(set(vars(self._work)) & {"tile_layers", "layer_tiles", "pieces"})
        self._inner.read(batch, buffer, done)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.mark.parametrize("medium", list(Medium), ids=lambda medium: medium.name.lower())
def test_the_first_reads_wait_for_no_table_of_pieces(medium: Medium) -> None:
    memory = Memory(simple_layout())
    with make_store(memory) as store:
        tokens, parts = make_tokens("a", 6), store.plane.parts
        save(store, memory, "s", tokens, TURNS[medium])
        fence(store)
        lease = store.lease(store.match(tokens))
        plan = store.catalog.start_restore(lease.entry.lease_id, 0)
        assert not isinstance(plan, Refused)
        work = Work(plan, make_tiles(plan.runs, parts.lanes, parts.limits), parts.lanes, parts.layout)
        io, handle = (
            parts.media[medium],
            Restore(parts.device, parts.clock, work.tiles, blocks=6, block_tokens=8, layers=parts.lanes.layer_count),
        )
        watched = Watched(io.engine, work)
        parts.media = {**parts.media, medium: io._replace(engine=watched)}  # type: ignore[arg-type]
        reading = Reading(parts, handle, work, lambda _, done: store.catalog.finish(done), parts.window.slots)
        pages = np.arange(12).reshape(6, 2)
        parts.pump.post(lambda: reading.start(pages, DoneEvent()))
        assert handle.result().blocks == 6 and handle.layer_verified == [True] * parts.lanes.layer_count
        fence(store)
        parts.media = {**parts.media, medium: io}
        lease.close()
        first = min(work.tiles.tiles, parts.window.slots)
        assert first > 1 and watched.made[:2] == [set(), set()], "the media had to wait"
        check(store)


class Breaks:
    """A copier that cannot begin; it notes how many slots were taken by then."""

    def __init__(self, store: Store) -> None:
        self._window, self.taken = store.plane.parts.window, 0

    def start(self, *_: object, **__: object) -> None:
        self.taken = self._window.slots - self._window.free_slots
        raise RuntimeError("no kernel image is available")


def test_tiles_that_come_before_all_pieces_are_made_wait_and_are_not_lost() -> None:
    layers, blocks = 64, SHARE // 64 + 2
    memory = Memory(simple_layout(layers=layers, dim=4, page_count=2 * blocks))
    with make_store(memory, make_config(memory, blocks=256, file_blocks=256)) as store:
        tokens, pages = make_tokens("a", blocks), np.random.default_rng(1).permutation(2 * blocks)
        save(store, memory, "s", tokens)
        parts = store.plane.parts
        whole, parts.copier = parts.copier, Breaks(store)  # type: ignore[assignment]
        with store.lease(store.match(tokens)) as lease:
            failed = store.restore(lease, pages).result()
        assert (failed.blocks, failed.reason) == (0, "internal error")
        assert parts.copier.taken > 1, "no tile was early"
        fence(store)
        assert parts.window.free_slots == parts.window.slots and store.stats().plans == 0
        parts.copier = whole
        assert restore(store, memory, tokens).blocks == blocks
        check(store)


LAYERS = 64


def many(store: Store, memory: Memory, blocks: int) -> tuple[Pages, Pages]:
    """A stored sequence of so many blocks, and pages for them."""
    tokens = make_tokens("a", blocks)
    save(store, memory, "s", tokens)
    fence(store)
    return tokens, np.random.default_rng(1).permutation(2 * blocks)


class Odd(Work):
    """A plan with pieces of another kind."""

    kind: type[Pieces]

    @cached_property
    def pieces(self) -> Pieces:
        return self.kind(self.plan, self.tiles, self._lanes, self._layout)


def begin(store: Store, tokens: Pages, pages: Pages, kind: type[Pieces]) -> tuple[Restore, Work]:
    """Start a restore of a lease of its own, whose plan has pieces of a `kind`."""
    parts = store.plane.parts
    lease = store.lease(store.match(tokens))
    plan = store.catalog.start_restore(lease.entry.lease_id, 0)
    assert not isinstance(plan, Refused)
    lease.close()
    work, layers = Odd(plan, make_tiles(plan.runs, parts.lanes, parts.limits), parts.lanes, parts.layout), LAYERS
    work.kind = kind
    handle = Restore(parts.device, parts.clock, work.tiles, blocks=len(plan.keys), block_tokens=8, layers=layers)
    reading = Reading(parts, handle, work, lambda _, done: store.catalog.finish(done), parts.window.slots)
    handle.on_drop = lambda: parts.pump.post(reading.on_dropped)
    table = pages.reshape(-1, 2)
    parts.pump.post(lambda: reading.start(table, DoneEvent()))
    return handle, work


def test_a_restore_that_is_dropped_before_its_turn_asks_the_media_for_nothing() -> None:
    memory, ended = Memory(simple_layout()), list[str]()
    with make_store(memory) as store:
        tokens, parts = make_tokens("a", 6), store.plane.parts
        save(store, memory, "s", tokens)
        fence(store)
        parts.book = RecordBook(parts.lanes, parts.layout, sum_kind=SUM_KIND, bytes_max=RECORD_CACHE_BYTES)
        before = len(memory_engine(store, Medium.SSD).calls)

        def begin_and_drop() -> None:  # In one turn of the pump, so that the start comes after it.
            with store.lease(store.match(tokens)) as lease:
                handle = store.restore(lease, np.arange(12))
            handle.on_end(lambda: ended.append(handle.result().reason))
            handle.cancel()

        parts.pump.post(begin_and_drop)
        eventually(store, lambda: bool(ended))
        assert ended == ["cancelled"]
        assert len(memory_engine(store, Medium.SSD).calls) == before
        check(store)


class Closing:
    """An engine in whose store the last turn of the pump comes soon after its first read is answered."""

    def __init__(self, inner: Engine, store: Store) -> None:
        self._inner, self._store, self.closed = inner, store, threading.Event()

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        self._inner.read(batch, buffer, done)
        self._store.plane.parts.pump.post(self._close)

    def _close(self) -> None:
        self._store.plane.cancel_all("closed")
        self._store.plane.parts.pump.close(0)
        self.closed.set()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def test_a_store_that_closes_while_pieces_are_expanded_leaves_no_restore_behind() -> None:
    blocks, ended = 3 * SHARE // LAYERS, list[str]()
    memory = Memory(simple_layout(layers=LAYERS, dim=4, page_count=2 * blocks))
    with make_store(memory, make_config(memory, blocks=512, file_blocks=512)) as store:
        tokens, pages = many(store, memory, blocks)
        parts = store.plane.parts
        io = parts.media[Medium.SSD]
        closing = Closing(io.engine, store)
        parts.media = {**parts.media, Medium.SSD: io._replace(engine=closing)}  # type: ignore[arg-type]
        with store.lease(store.match(tokens)) as lease:
            handle = store.restore(lease, pages)
        handle.on_end(lambda: ended.append(handle.result().reason))
        assert closing.closed.wait(WAIT_S) and parts.pump.close(WAIT_NS)
        assert ended == ["closed"], "who waits for the end of a restore never hears of it"
        assert parts.window.free_slots == parts.window.slots and store.stats().plans == 0
        parts.book.check()


class Refuses(CpuDevice):
    """A device on which no stream waits for anything."""

    def wait(self, stream: Stream, event: Event) -> None:
        raise RuntimeError("an illegal memory access was encountered")


def test_tiles_come_back_when_the_stream_cannot_wait_for_the_pages() -> None:
    memory = Memory(simple_layout())
    with make_store(memory) as store:
        tokens, parts = make_tokens("a", 6), store.plane.parts
        save(store, memory, "s", tokens)
        fence(store)
        good, parts.device = parts.device, Refuses(Files())
        with store.lease(store.match(tokens)) as lease:
            assert store.restore(lease, np.arange(12)).result().reason == "internal error"
        eventually(store, lambda: store.stats().plans == 0)
        parts.device = good
        assert restore(store, memory, tokens).blocks == 6
        check(store)


class NoMemory(Pieces):
    """Pieces for whose rows there is no memory."""

    def _make(self, first: int, last: int) -> slice:
        raise MemoryError


def test_tiles_come_back_when_there_is_no_memory_for_the_pieces() -> None:
    memory = Memory(simple_layout(layers=LAYERS, dim=4, page_count=64))
    with make_store(memory) as store:
        tokens, pages = many(store, memory, 6)
        handle, _ = begin(store, tokens, pages[:12], NoMemory)
        handle.on_layer(0, lambda: pytest.fail("a layer came"))
        eventually(store, lambda: store.stats().plans == 0)
        assert handle.result().reason == "internal error"
        check(store)


class Turns(Pieces):
    """Pieces that count, share by share, the turns which others had of the pump since the first."""

    post: Callable[[Callable[[], None]], None]

    def _make(self, first: int, last: int) -> slice:
        turns, seen = vars(self).setdefault("turns", []), vars(self).setdefault("seen", [])
        seen.append(len(turns))
        self.post(lambda: turns.append(None))
        return super()._make(first, last)


@pytest.mark.parametrize("is_cached", [False, True], ids=["records_are_read", "records_are_there"])
def test_pieces_are_expanded_a_share_a_turn_wherever_records_come_from(is_cached: bool) -> None:
    blocks = 2 * SHARE // LAYERS
    memory = Memory(simple_layout(layers=LAYERS, dim=4, page_count=2 * blocks))
    with make_store(memory, make_config(memory, blocks=512, file_blocks=512)) as store:
        tokens, pages = many(store, memory, blocks)
        parts = store.plane.parts
        if not is_cached:
            parts.book = RecordBook(parts.lanes, parts.layout, sum_kind=SUM_KIND, bytes_max=RECORD_CACHE_BYTES)
        Turns.post = staticmethod(parts.pump.post)
        handle, work = begin(store, tokens, pages, Turns)
        assert (handle.result().blocks, handle.result().reason) == (blocks, "")
        seen = vars(work.pieces)["seen"]
        assert seen == list(range(len(seen))) and len(seen) > 1, "all were expanded in one turn"
        check(store)


class Answers:
    """An engine that counts the reads that it has answered."""

    def __init__(self, inner: Engine) -> None:
        self._inner, self.count = inner, 0

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        def count(results: list[Result], ready: Event) -> None:
            done(results, ready)
            self.count += 1

        self._inner.read(batch, buffer, count)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class Late(Pieces):
    """Pieces of which the first segment is made, and the others when all slots have been read."""

    answers: Answers
    slots: int

    def shares(self) -> Iterator[slice]:
        yield self._make(0, 1)
        while self.answers.count < self.slots:
            yield slice(self.made, self.made)
        for _ in range(10):  # Turns in which what has been read would be scattered.
            yield slice(self.made, self.made)
        yield self._make(1, len(self._segments))


def test_a_tile_is_not_scattered_before_its_pieces_are_made() -> None:
    memory = Memory(simple_layout(layers=LAYERS, dim=4, page_count=64))
    with make_store(memory) as store:
        tokens, pages = many(store, memory, 6)
        parts = store.plane.parts
        io = parts.media[Medium.SSD]
        Late.answers, Late.slots = Answers(io.engine), parts.window.slots
        parts.media = {**parts.media, Medium.SSD: io._replace(engine=Late.answers)}  # type: ignore[arg-type]
        handle, work = begin(store, tokens, pages[:12], Late)
        assert work.tiles.tile_segments[1] == 1, "the first tile needs more than is made at first"
        assert (handle.result().blocks, handle.result().reason) == (6, "")
        fence(store)
        parts.media = {**parts.media, Medium.SSD: io}
        check(store)
