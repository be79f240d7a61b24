"""What `stats` says is true: after blocks were dropped, superseded, reclaimed and given back."""

import numpy as np

from flatcake.gva import Medium
from flatcake.io.memory import Fault
from flatcake.placement import Turn
from flatcake.store import Store
from tests.stores import (
    TURNS,
    Memory,
    branch,
    check,
    make_store,
    make_tokens,
    memory_engine,
    restore,
    save,
    simple_layout,
)


def visible(store: Store) -> dict[str, int]:
    """Bytes of the blocks that a lookup finds, by medium: a recount."""
    found = store.catalog.space.index._gvas
    media = (found[found < np.uint64(1 << 63)] >> np.uint64(60)).tolist()
    return {medium.name.lower(): media.count(medium) * store.geometry.block_bytes for medium in Medium}


def agree(store: Store) -> None:
    stats = store.stats()
    assert {name: medium.payload_bytes for name, medium in stats.media.items()} == visible(store)
    assert sum(visible(store).values()) == stats.blocks * store.geometry.block_bytes
    store.catalog.check()


def test_payload_is_what_is_visible() -> None:
    memory = Memory(simple_layout())
    with make_store(memory) as store:
        engines = {medium: memory_engine(store, medium) for medium in Medium}
        prompt = make_tokens("prompt", 2)
        save(store, memory, "a", branch(prompt, "a", 2))
        agree(store)
        save(store, memory, "b", branch(prompt, "b", 2), Turn(index=2, prior_reply_tokens=1, shared_tokens=16))
        agree(store)
        assert store.stats().counts["blocks_superseded"] == 2
        for medium, engine in engines.items():  # A block that cannot be read is dropped, and comes back.
            tokens = make_tokens(f"c{medium}", 4)
            save(store, memory, f"c{medium}", tokens, TURNS[medium])
            engine.inject(Fault(kind="error", verb="read"))
            assert restore(store, memory, tokens).blocks == 0
            agree(store)
            save(store, memory, f"c{medium}", tokens, TURNS[medium])
            agree(store)
            engine.inject(Fault(kind="error", verb="write"))
            assert save(store, memory, f"d{medium}", make_tokens(f"d{medium}", 2), TURNS[medium]).reason
            agree(store)
        for turn in range(30):
            save(store, memory, f"e{turn}", make_tokens(turn, 5), TURNS[Medium(turn % 2)])
            agree(store)
        assert store.stats().counts["reclaimed_scopes"] > 0
        assert all(medium.payload_bytes <= medium.used_bytes for medium in store.stats().media.values())
        store.reset()
        agree(store)
        check(store)
