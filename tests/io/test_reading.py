"""The start of a restore on the pump's thread: what the media wait for, and what is made while they are at work."""

from collections.abc import Sequence

import numpy as np
import pytest

from flatcake.catalog import Refused
from flatcake.gva import Medium
from flatcake.io.device import DoneEvent
from flatcake.io.engine import Buffer, Done, Engine, Transfer
from flatcake.io.pieces import SHARE, Work
from flatcake.io.plan import make_tiles
from flatcake.io.reading import Reading
from flatcake.io.restore import Restore
from flatcake.store import Store
from tests.stores import (
    TURNS,
    Memory,
    check,
    fence,
    make_config,
    make_store,
    make_tokens,
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
        made = set(vars(self._work)) & {"tile_layers", "layer_tiles"}
        self.made.append(made | ({"pieces"} if vars(self._work)["_pieces"] is not None else set()))
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
        reading = Reading(parts, handle, work, store.catalog.finish, parts.window.slots)
        pages = np.arange(12).reshape(6, 2)
        parts.pump.post(lambda: reading.start(pages, DoneEvent()))
        assert handle.result().blocks == 6 and handle.layer_verified == [True] * parts.lanes.layer_count
        fence(store)
        parts.media = {**parts.media, medium: io}
        lease.close()
        first = min(work.tiles.tiles, parts.window.slots)
        assert first > 1 and watched.made[:first] == [set()] * first, "the media had to wait"
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
        assert parts.copier.taken == min(failed.tiles, parts.window.slots) > 1, "no tile was early"
        fence(store)
        assert parts.window.free_slots == parts.window.slots and store.stats().plans == 0
        parts.copier = whole
        assert restore(store, memory, tokens).blocks == blocks
        check(store)
