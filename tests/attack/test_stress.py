"""Many threads on a tiny pool that reclaims all the time, with content that says whose it is; checksums on and off."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from flatcake.placement import Turn
from flatcake.store import Store
from flatcake.units import MS
from tests.stores import (
    CHAT,
    ONE_SHOT,
    WAIT_S,
    Memory,
    Pages,
    branch,
    check,
    fence,
    make_config,
    make_store,
    make_tokens,
    simple_layout,
)

NIGHTLY = "FLATCAKE_NIGHTLY" in os.environ
CALLERS = 64
STEPS = 400 if NIGHTLY else 30
LONGEST = 5
SEED = int(os.environ.get("FLATCAKE_SEED", "11"))


class Caller:
    """One thread: saves, restores, cancels, forgets, with pages of its own."""

    def __init__(self, store: Store, memory: Memory, number: int) -> None:
        self.store, self.memory = store, memory
        self.rng = np.random.default_rng([SEED, number])
        self.per_block = memory.layout.pages_per_block
        self.pages = number * LONGEST * self.per_block + np.arange(LONGEST * self.per_block)
        self.delivered = self.written = 0
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, name=f"caller {number} of seed {SEED}")

    def run(self) -> None:
        try:
            for _ in range(STEPS):
                pick, tokens = self.rng.random(), self.tokens()
                if pick < 0.4:
                    self.save(tokens)
                elif pick < 0.97:
                    self.restore(tokens, self.rng.random())
                elif pick < 0.973:
                    self.store.reset()
                else:
                    self.store.catalog.expire(self.store._clock.now_ns())
        except BaseException as error:
            self.error = error

    def tokens(self) -> Pages:
        prompt = make_tokens(f"prompt {self.rng.integers(2)}", 1)
        return branch(prompt, f"tail {self.rng.integers(30)}", int(self.rng.integers(0, LONGEST)))

    def some_pages(self, blocks: int) -> Pages:
        return self.rng.permutation(self.pages)[: blocks * self.per_block]

    def save(self, tokens: Pages) -> None:
        keys = self.store.keys(tokens)
        pages = self.some_pages(len(keys))
        self.memory.stamp(keys, pages)
        turn = [ONE_SHOT, CHAT, Turn(index=3, prior_reply_tokens=5000, shared_tokens=8)][self.rng.integers(3)]
        timeout_ns = int(self.rng.integers(0, 2)) * MS if self.rng.random() < 0.1 else None
        handle = self.store.save(f"s{self.rng.integers(40)}", tokens, pages, turn, timeout_ns=timeout_ns)
        assert handle.reusable(WAIT_S)
        self.memory.stamp(keys ^ np.uint64(1), pages)  # From now on they are someone else's.
        if self.rng.random() < 0.7:
            found = handle.result(WAIT_S)
            assert found is not None
            self.written += found.written_blocks

    def restore(self, tokens: Pages, how: float) -> None:
        hold_ns = int(self.rng.integers(0, 2 * MS)) if how < 0.2 else None
        lease = self.store.lease(self.store.match(tokens), hold_ns=hold_ns)
        keys = lease.entry.keys
        pages = self.some_pages(len(keys))
        self.memory.stamp(keys ^ np.uint64(2), pages)
        timeout_ns = int(self.rng.integers(0, MS)) if how > 0.9 else None
        handle = self.store.restore(lease, pages, timeout_ns=timeout_ns)
        lease.close()
        if 0.5 < how < 0.6:
            handle.cancel().wait()
        result = handle.result()
        if result.reason:  # The pages are the caller's again, though reads may still be under way.
            assert result.blocks == 0, result
            self.memory.stamp(keys ^ np.uint64(3), pages)
            fence(self.store)
            assert self.memory.stamped_blocks(keys ^ np.uint64(3), pages) == len(keys), "a late scatter"
            return
        good = pages[: result.blocks * self.per_block]
        assert self.memory.stamped_blocks(keys[: result.blocks], good) == result.blocks, "wrong bytes"
        self.delivered += result.blocks


@pytest.mark.parametrize("verify", ["full", "off"])
@pytest.mark.parametrize("place", ["files", "memory"] if NIGHTLY else ["files"])
def test_callers_get_their_own_bytes_or_none(tmp_path: Path, verify: str, place: str) -> None:
    memory = Memory(simple_layout(layers=2, dim=8, page_count=CALLERS * LONGEST * 2))
    config = make_config(
        memory,
        [tmp_path] if place == "files" else (),
        blocks=72,
        file_blocks=24,
        dram_blocks=30,
        io={"verify": verify, "restores_max": 16},
        capacity={"dram_idle_ns_max": 0},
    )
    with make_store(memory, config) as store:
        callers = [Caller(store, memory, number) for number in range(CALLERS)]
        for caller in callers:
            caller.thread.start()
        for caller in callers:
            caller.thread.join(6 * WAIT_S)
            assert not caller.thread.is_alive(), f"{caller.thread.name} never came back"
        for caller in callers:
            if caller.error is not None:
                raise caller.error
        check(store)
        stats = store.stats()
        counts = stats.counts
        assert stats.counts["reclaimed_scopes"] > 20, "the pool was never full"
        assert counts.get("blocks_failed_checksum", 0) == 0 and not counts.get("restores failed: stale plan")
        assert counts["blocks_delivered_ssd"] > 0 and counts["blocks_delivered_dram"] > 0
        assert sum(caller.delivered for caller in callers) > 0
        assert sum(caller.written for caller in callers) > 0
        assert not store._saves and not store.plane._deadlines and not store.plane._restores
        store.reset()
        assert all(medium.used_bytes == 0 for medium in store.stats().media.values()), "lost space"
