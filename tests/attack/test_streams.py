"""Who waits for whom on a device's streams, without a device: each call is written down in its order."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flatcake.gva import Medium
from flatcake.io.device import CpuDevice, DoneEvent, Event, Stream
from flatcake.io.engine import Buffer, Done, Engine, Transfer
from flatcake.io.seam import Files
from flatcake.store import Store
from tests.stores import (
    MEDIA,
    TURNS,
    WAIT_S,
    Memory,
    check,
    fence,
    make_store,
    make_tokens,
    restore,
    save,
    simple_layout,
)


class Mark(DoneEvent):
    """An event that knows where it was recorded; not reached before `reach`."""

    def __init__(self, stream: object, reached: bool) -> None:
        self.stream, self.reached = stream, reached

    def done(self) -> bool:
        return self.reached


class Streams(CpuDevice):
    """Streams are names, and `slow` ones do not move until told."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        super().__init__(Files())
        self.log, self.made, self.slow = log, 0, set[str]()
        self.marks: list[Mark] = []

    def new_stream(self) -> Stream:
        self.made += 1
        return f"io {self.made}"

    def stream_of(self, stream: object) -> Stream:
        return stream or "current"

    def record(self, stream: Stream) -> Event:
        self.marks.append(Mark(stream, stream not in self.slow))
        return self.marks[-1]

    def wait(self, stream: Stream, event: Event) -> None:
        self.log.append(("wait", stream, getattr(event, "stream", None)))

    def run(self, stream: str) -> None:
        self.slow.discard(stream)
        for mark in self.marks:
            mark.reached |= mark.stream == stream


class Logged:
    """A copier, and copies, that write down what they do and on which stream."""

    def __init__(self, inner: Any, log: list[tuple[Any, ...]], stream: object = None) -> None:
        self._inner, self._log, self._stream = inner, log, stream

    def start(self, *arguments: Any, **named: Any) -> "Logged":
        return Logged(self._inner.start(*arguments, **named), self._log, arguments[3])

    def scatter(self, tile: int, slot: Buffer, skip: Sequence[int] = ()) -> None:
        self._log.append(("scatter", self._stream))
        self._inner.scatter(tile, slot, skip)

    def gather(self, tile: int, slot: Buffer) -> None:
        self._log.append(("gather", self._stream))
        self._inner.gather(tile, slot)

    def fetch_sums(self, tiles: Sequence[int]) -> None:
        self._log.append(("fetch", self._stream, tuple(tiles)))
        self._inner.fetch_sums(tiles)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def watched(store: Store) -> tuple[Streams, list[tuple[Any, ...]]]:
    log: list[tuple[Any, ...]] = []
    parts = store.plane.parts
    fence(store)
    device = parts.device = Streams(log)  # type: ignore[assignment]
    parts.streams.clear()
    parts.copier = Logged(parts.copier, log)  # type: ignore[assignment]
    return device, log


@MEDIA
def test_pages_are_read_after_their_producer_and_written_after_their_reader(medium: Medium) -> None:
    memory = Memory(simple_layout())
    with make_store(memory) as store:
        _, log = watched(store)
        tokens = make_tokens("a", 6)
        memory.stamp(store.keys(tokens), np.arange(12))
        assert store.save("s", tokens, np.arange(12), TURNS[medium], stream="producer").published(WAIT_S)
        gather = next(entry for entry in log if entry[0] == "gather")
        assert log.index(("wait", gather[1], "producer")) < log.index(gather)
        log.clear()
        with store.lease(store.match(tokens)) as lease:
            handle = store.restore(lease, np.arange(12, 24), stream="reader")
        assert handle.result().blocks == 6
        scatters = [entry for entry in log if entry[0] == "scatter"]
        assert log.index(("wait", scatters[0][1], "reader")) < log.index(scatters[0])
        log.clear()
        assert handle.wait_layer(2, "compute")
        assert log == [("wait", "compute", scatters[0][1])]
        check(store)


class Telling:
    """An engine whose n-th read is in its buffer at a point of its own, on a stream `read n`."""

    def __init__(self, inner: Engine) -> None:
        self._inner, self._reads = inner, 0

    def read(self, batch: Sequence[Transfer], buffer: Buffer, done: Done) -> None:
        mark = Mark(f"read {self._reads}", True)
        self._reads += 1
        self._inner.read(batch, buffer, lambda results, _: done(results, mark))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@MEDIA
def test_a_scatter_waits_for_its_own_tile_and_for_none_that_was_asked_for_later(medium: Medium) -> None:
    memory = Memory(simple_layout())
    with make_store(memory) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens, TURNS[medium])
        _, log = watched(store)
        parts = store.plane.parts
        io = parts.media[medium]
        parts.media = {**parts.media, medium: io._replace(engine=Telling(io.engine))}  # type: ignore[arg-type]
        assert restore(store, memory, tokens).blocks == 6
        parts.media = {**parts.media, medium: io}
        steps = [entry for entry in log if entry[0] == "scatter" or "read" in str(entry[2])]
        tiles = len(steps) // 2
        assert tiles > 1 and [entry[0] for entry in steps] == ["wait", "scatter"] * tiles
        assert sorted(entry[2] for entry in steps[::2]) == sorted(f"read {number}" for number in range(tiles))
        check(store)


@MEDIA
def test_a_slot_is_used_again_only_when_the_device_has_read_it(medium: Medium) -> None:
    memory = Memory(simple_layout())
    with make_store(memory) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens, TURNS[medium])
        device, log = watched(store)
        window = store.plane.parts.window
        device.slow = {"io 1"}
        with store.lease(store.match(tokens)) as lease:
            handle = store.restore(lease, np.arange(12))
        for _ in range(50):
            fence(store)
        busy = window.slots - window.free_slots
        assert busy == len([entry for entry in log if entry[0] == "scatter"]) > 0
        handle.cancel()
        fence(store)
        assert window.slots - window.free_slots == busy and store.stats().plans == 1
        device.run("io 1")
        check(store)
        assert restore(store, memory, tokens).blocks == 6


def test_a_save_writes_only_what_the_device_has_gathered() -> None:
    memory = Memory(simple_layout())
    with make_store(memory) as store:
        device, log = watched(store)
        device.slow = {"io 1"}
        engine = store.plane.parts.media[Medium.SSD].engine
        tokens = make_tokens("a", 6)
        memory.stamp(store.keys(tokens), np.arange(12))
        handle = store.save("s", tokens, np.arange(12), stream="producer")
        for _ in range(50):
            fence(store)
        assert [entry[0] for entry in log].count("gather") == store.plane.parts.save_window.slots
        assert not engine.calls, "a slot was written before it was gathered"  # type: ignore[attr-defined]
        assert handle.result(0) is None and not store.match(tokens).blocks
        device.run("io 1")
        assert handle.published(WAIT_S)
        assert restore(store, memory, tokens).blocks == 6
        check(store)


def test_the_checksums_of_each_tile_are_fetched_once_and_after_its_gather() -> None:
    memory = Memory(simple_layout())
    with make_store(memory) as store:
        _, log = watched(store)
        save(store, memory, "s", make_tokens("a", 6))
        found = [entry for entry in log if entry[0] in ("gather", "fetch")]
        fetches = [at for at, entry in enumerate(found) if entry[0] == "fetch"]
        gathered = [sum(entry[0] == "gather" for entry in found[:at]) for at in fetches]
        tiles = sum(entry[0] == "gather" for entry in found)
        assert tiles > 2 and gathered == [tiles - 1, tiles]
        assert [found[at][2] for at in fetches] == [tuple(range(tiles - 1)), (tiles - 1,)]
        check(store)
