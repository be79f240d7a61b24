"""B14, B15, B16, B17: readers, leases, windows and cancels beside each other."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import flatcake
from flatcake.clock import ManualClock
from flatcake.units import SECOND
from tests.cases.shim import PIECE_BYTES, Shim, find_piece, flip, make_memory, open_case, tokens_of
from tests.stores import WAIT_S, Memory, check, eventually, restore, save

NIGHTLY = bool(os.environ.get("FLATCAKE_NIGHTLY"))
ROUNDS = 2000 if NIGHTLY else 40
CANCELS = 2000 if NIGHTLY else 200


def hold_one_read(files: Shim) -> tuple[threading.Event, threading.Event]:
    """The next read of data stops until the second event is set; the first says that it has begun."""
    begun, let_go = threading.Event(), threading.Event()

    def fault(verb: str, views: Sequence[memoryview], at: int) -> None:
        if verb == "read" and not begun.is_set():
            begun.set()
            assert let_go.wait(WAIT_S)

    files.fault = fault
    return begun, let_go


def test_b14_reclaim_waits_for_a_read_under_way(tmp_path: Path) -> None:
    """One read is held while the pool is filled over and over."""
    memory, files = make_memory(), Shim()
    tokens = tokens_of("s", 8)
    with open_case(memory, tmp_path, files=files, blocks=64, dram_blocks=0) as store:
        assert save(store, memory, "s", tokens).written_blocks == 8
        begun, let_go = hold_one_read(files)
        with store.lease(store.match(tokens)) as lease:
            handle = store.restore(lease, np.arange(8))
        assert begun.wait(WAIT_S)
        for number in range(24):
            pages = np.arange(8, 16)
            memory.stamp(store.keys(tokens_of(number, 8)), pages)
            assert store.save(f"t{number}", tokens_of(number, 8), pages).published(WAIT_S)
        assert store.stats().counts["reclaimed_scopes"] > 8, "nothing was reclaimed under the read"
        let_go.set()
        assert handle.result().blocks == memory.stamped_blocks(store.keys(tokens), np.arange(8)) == 8
        for number in range(24, 48):  # Now it may go.
            assert save(store, memory, f"t{number}", tokens_of(number, 8)).written_blocks == 8
        assert store.match(tokens).blocks == 0
        assert not files.clashes, "bytes were written while they were read"
        check(store)


def test_b14_readers_writers_and_reclaim_side_by_side(tmp_path: Path) -> None:
    memory, files = make_memory(), Shim()
    failures, hits = list[BaseException](), [0, 0]
    with open_case(memory, tmp_path, files=files, blocks=64, dram_blocks=0) as store:
        kv_pages = [np.arange(6), np.arange(6, 12), np.arange(12, 18)]

        def write(name: str, pages: np.ndarray) -> None:
            tokens = tokens_of(name, 6)
            memory.stamp(store.keys(tokens), pages)
            found = store.save(name, tokens, pages).result(WAIT_S)
            assert found is not None and found.reason in ("", "no room")

        def read() -> None:
            for turn in range(ROUNDS):
                with store.lease(store.match(tokens_of("s", 6))) as lease:
                    found = store.restore(lease, kv_pages[0]).result()
                keys = store.keys(tokens_of("s", 6))[: found.blocks]
                assert memory.stamped_blocks(keys, kv_pages[0][: found.blocks]) == found.blocks
                hits[found.blocks == 6] += 1
                if not found.blocks or turn % 8 == 0:
                    write("s", kv_pages[0])

        def fill(part: int) -> None:
            for turn in range(ROUNDS):
                write(f"filler {part} {turn}", kv_pages[part])

        def guarded(work: object, *arguments: int) -> None:
            try:
                work(*arguments)  # type: ignore[operator]
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=guarded, args=(read,))]
        threads += [threading.Thread(target=guarded, args=(fill, part)) for part in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S * 4)
            assert not thread.is_alive()
        assert not failures and hits[1] > 0 and store.stats().counts["reclaimed_scopes"] > ROUNDS // 4
        assert not files.clashes, "bytes were written while they were read"
        check(store)


def test_b15_promise_loss_fetch(tmp_path: Path) -> None:
    memory, tokens = make_memory(), tokens_of("s", 8)
    with open_case(memory, tmp_path) as store:
        # (a) What a match has promised is looked up again under the lease.
        assert save(store, memory, "s", tokens).written_blocks == 8
        match = store.match(tokens)
        assert match.blocks == 8 and store.delete_session("s") == 8
        assert save(store, memory, "t", tokens_of("t", 8)).written_blocks == 8  # In the same place.
        with store.lease(match) as lease:
            assert lease.blocks == 0 and store.restore(lease, np.arange(0)).result().blocks == 0
        # (b) With a lease the blocks stay readable, and the space goes with it.
        used = store.stats().media["ssd"].used_bytes
        assert save(store, memory, "s", tokens).written_blocks == 8
        lease = store.lease(store.match(tokens))
        assert store.delete_session("s") == 8 and store.match(tokens).blocks == 0
        assert store.stats().media["ssd"].used_bytes > used and store.stats().draining_scopes == 1
        memory.fill(seed=1)
        assert store.restore(lease, np.arange(8)).result().blocks == 8
        assert memory.stamped_blocks(store.keys(tokens), np.arange(8)) == 8
        lease.close()
        check(store)
        assert store.stats().media["ssd"].used_bytes == used
        lease.close()  # (e) Twice.
        check(store)


def test_b15_a_leaked_lease_ends_and_reclaim_goes_on(tmp_path: Path) -> None:
    memory, clock = make_memory(), ManualClock()
    tokens = tokens_of("s", 16)
    with open_case(memory, tmp_path, clock=clock, blocks=32, file_blocks=32, dram_blocks=0) as store:
        assert save(store, memory, "s", tokens).written_blocks == 16
        leaked = store.lease(store.match(tokens), hold_ns=SECOND)
        for number in range(4):
            save(store, memory, f"t{number}", tokens_of(number, 12))
        assert store.match(tokens).blocks == 16, "it was reclaimed under its lease"
        clock.advance(2 * SECOND)
        store.match(tokens)
        eventually(store, lambda: store.stats().leases == 0)
        for number in range(4, 8):
            assert save(store, memory, f"t{number}", tokens_of(number, 12)).written_blocks == 12
        assert store.match(tokens).blocks == 0
        assert store.restore(leaked, np.arange(16)).result().reason == "lease expired"
        leaked.close()
        leaked.close()
        check(store)


def test_b15_blocks_behind_a_hole_are_not_reported(tmp_path: Path) -> None:
    memory, tokens = make_memory(), tokens_of("s", 7)
    with open_case(memory, tmp_path) as store:
        keys = store.keys(tokens)
        assert save(store, memory, "s", tokens).written_blocks == 7
        flip(*find_piece(memory, tmp_path, keys, 3, 0))
        assert restore(store, memory, tokens).blocks == 3
        assert store.match(tokens).blocks == 3 and store.stats().blocks == 6
        assert save(store, memory, "s", tokens).written_blocks == 1, "only the hole is written"
        assert restore(store, memory, tokens).blocks == 7


LAYER_BYTES = 8 * PIECE_BYTES
SMALL = {"slot_bytes": LAYER_BYTES, "slots_min": 2, "save_slots": 1, "window_bytes_max": 3 * LAYER_BYTES}
RESTORES = 6


def stored(store: flatcake.Store, memory: Memory) -> None:
    for number in range(RESTORES):
        assert save(store, memory, f"s{number}", tokens_of(number, 8)).written_blocks == 8


def test_b16_a_small_window_serves_many_restores(tmp_path: Path) -> None:
    memory = make_memory(page_count=RESTORES * 8)
    with open_case(memory, tmp_path, io=SMALL) as store:
        stored(store, memory)
        memory.fill(seed=2)
        handles = []
        for number in range(RESTORES):
            with store.lease(store.match(tokens_of(number, 8))) as lease:
                handles.append(store.restore(lease, np.arange(8) + 8 * number))
        for layer in range(4):  # Consumers that go layer by layer, all at the same pace.
            assert all(handle.wait_layer(layer, verified=True) for handle in handles)
        for number, handle in enumerate(handles):
            assert handle.result().blocks == 8 and not handle.result().reason
            assert memory.stamped_blocks(store.keys(tokens_of(number, 8)), np.arange(8) + 8 * number) == 8
        assert store.stats().window_bytes == 3 * LAYER_BYTES, "two slots for restores, one for saves"
        check(store)


def test_b16_one_restore_that_stops_costs_only_itself(tmp_path: Path) -> None:
    memory, clock, files = make_memory(page_count=RESTORES * 8), ManualClock(), Shim()
    with open_case(memory, tmp_path, io=SMALL, clock=clock, files=files) as store:
        stored(store, memory)
        begun, let_go = hold_one_read(files)
        memory.fill(seed=2)
        with store.lease(store.match(tokens_of(0, 8))) as lease:
            stopped = store.restore(lease, np.arange(8), timeout_ns=SECOND, slots_max=1)
        assert begun.wait(WAIT_S)
        for number in range(1, RESTORES):
            pages = np.arange(8) + 8 * number
            with store.lease(store.match(tokens_of(number, 8))) as lease:
                assert store.restore(lease, pages).result().blocks == 8
            assert memory.stamped_blocks(store.keys(tokens_of(number, 8)), pages) == 8
        assert not stopped.done()
        clock.advance(2 * SECOND)
        eventually(store, stopped.done)
        assert (stopped.result().reason, stopped.result().blocks) == ("deadline", 0)
        assert not stopped.wait_layer(0)
        let_go.set()
        check(store)


def test_b17_a_storm_of_cancels_then_silence(tmp_path: Path) -> None:
    memory, tokens = make_memory(), tokens_of("s", 8)
    with open_case(memory, tmp_path) as store:
        assert save(store, memory, "s", tokens).written_blocks == 8
        before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
        memory.fill(seed=3)
        poison = memory.snapshot()
        late = 0
        for number in range(CANCELS):
            with store.lease(store.match(tokens)) as lease:
                handle = store.restore(lease, np.arange(8))
            if number % 3 == 1:
                handle.wait_layer(0)
            elif number % 3 == 2:
                handle.result()
            event = handle.cancel()
            handle.cancel()  # Twice.
            event.wait()
            done = handle.result()  # The finish after the cancel.
            assert done.reason in ("", "cancelled") and done.blocks in (0, 8)
            late += done.reason == "cancelled"
            # The pages are ours again: nothing may land in them any more.
            for raw, old in zip(memory.raws, poison, strict=True):
                raw.copy_(old)
        assert late and late < CANCELS
        check(store)
        assert memory.is_equal(poison), "a read landed in pages that had been given back"
        assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
        assert (store.stats().leases, store.stats().plans) == (0, 0)
        assert restore(store, memory, tokens).blocks == 8


@pytest.mark.parametrize("layer", [0, 3])
def test_b17_a_read_that_is_cancelled_lands_in_its_slot_alone(tmp_path: Path, layer: int) -> None:
    """Its twin with the read held: the slot is nobody else's until the read has returned."""
    memory, files, tokens = make_memory(), Shim(), tokens_of("s", 8)
    with open_case(memory, tmp_path, files=files) as store:
        assert save(store, memory, "s", tokens).written_blocks == 8
        begun, let_go = hold_one_read(files)
        memory.fill(seed=5)
        with store.lease(store.match(tokens)) as lease:
            handle = store.restore(lease, np.arange(8))
        assert begun.wait(WAIT_S)
        handle.cancel().wait()
        poison = memory.snapshot()
        assert not handle.wait_layer(layer)
        assert store.stats().plans == 1, "a plan ended before its reads"
        let_go.set()
        check(store)
        assert memory.is_equal(poison)
        assert restore(store, memory, tokens).blocks == 8
