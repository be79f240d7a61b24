"""Faults below the pipelines: a restore is a verified prefix with a reason, a save is a refusal, nothing hangs.

Every test says that its fault has fired, and that the store serves again afterwards.
"""

import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from flatcake.clock import ManualClock
from flatcake.gva import Medium, decode_array
from flatcake.io.device import CpuDevice, Event, Stream
from flatcake.io.memory import Fault
from flatcake.io.records import SUM_KIND_NONE, Record, RecordBook
from flatcake.io.restore import Restore
from flatcake.io.seam import Files
from flatcake.kernels.checksum import SUM_KIND
from flatcake.layout import RECORD_BYTES_PER_PIECE, RECORD_HEADER_BYTES
from flatcake.messages import GENERATION, Completion, Plan, Runs
from flatcake.placement import Turn
from flatcake.store import Store
from flatcake.units import SECOND
from tests.fakes import FaultyFiles
from tests.stores import (
    CHAT,
    MEDIA,
    TURNS,
    WAIT_NS,
    WAIT_S,
    Memory,
    Pages,
    branch,
    check,
    eventually,
    fence,
    flip,
    make_config,
    make_store,
    make_tokens,
    memory_engine,
    piece_at,
    restore,
    save,
    shuffled,
    simple_layout,
)

PIECE = 4096
AGENT = Turn(index=2, prior_reply_tokens=100_000)
"""Rule 2: SSD."""


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout())


@pytest.fixture
def store(memory: Memory):
    with make_store(memory) as opened:
        yield opened
        check(opened)


def record_at(store: Store, tokens: Pages, block: int, layer: int) -> int:
    """The offset of one checksum in the record of its extent."""
    media, _, offsets = decode_array(store.catalog.space.index.lookup(store.keys(tokens))[block : block + 1])
    table = store.catalog.space.tables[Medium(int(media[0]))]
    extent = table.at(int(offsets[0]))
    assert extent is not None
    piece = table.slot_of(extent, int(offsets[0])) * table.lanes.layer_count + layer
    return extent.base_bytes + RECORD_HEADER_BYTES + piece * RECORD_BYTES_PER_PIECE


def forget_records(store: Store) -> None:
    """As if all records had been pushed out of memory."""
    parts = store.plane.parts
    kind = SUM_KIND if parts.verify else SUM_KIND_NONE
    parts.book = RecordBook(parts.lanes, parts.layout, sum_kind=kind, bytes_max=1)


def used_bytes(store: Store) -> dict[str, int]:
    return {name: media.used_bytes for name, media in store.stats().media.items()}


# -- reads that fail ------------------------------------------------------------------------------------

READ_FAULTS = [
    pytest.param(Fault(kind="error", verb="read"), 0, "read failed (errno 5)", id="error in layer 0"),
    pytest.param(Fault(kind="error", verb="read", first=1), 4, "read failed (errno 5)", id="error in a later tile"),
    pytest.param(
        Fault(kind="short", verb="read", moved_bytes=2 * PIECE), 2, "read failed (errno 5)", id="short with an errno"
    ),
    pytest.param(
        Fault(kind="short", verb="read", moved_bytes=3 * PIECE, error=0), 3, "read failed (errno 0)", id="bare short"
    ),
    pytest.param(
        Fault(kind="short", verb="read", moved_bytes=3 * PIECE - 512), 2, "read failed (errno 5)", id="short in a piece"
    ),
    pytest.param(Fault(kind="error", verb="read", batches=None), 0, "read failed (errno 5)", id="all reads"),
    pytest.param(Fault(kind="torn", verb="read", first=2, moved_bytes=PIECE), 1, "checksum", id="a lie in layer 1"),
]


@MEDIA
@pytest.mark.parametrize(("fault", "good", "reason"), READ_FAULTS)
def test_a_bad_read_delivers_the_blocks_before_it(
    store: Store, memory: Memory, medium: Medium, fault: Fault, good: int, reason: str
) -> None:
    engine, tokens = memory_engine(store, medium), make_tokens("a", 6)
    save(store, memory, "s", tokens, TURNS[medium])
    calls = len(engine.calls)
    engine.inject(fault)
    result = restore(store, memory, tokens)
    assert len(engine.calls) > calls
    assert (result.blocks, result.tokens, result.reason) == (good, 8 * good, reason)
    assert store.match(tokens).blocks == good, "the bad block is still there"
    counts = store.stats().counts
    damaged = counts.get("blocks_failed_checksum", 1)  # All of these are known to be bad; of reads, the first only.
    assert counts[f"restores failed: {reason}"] == 1 and counts["blocks_dropped"] == damaged
    assert (damaged > 1) == (reason == "checksum")
    assert counts[f"blocks_delivered_{medium.name.lower()}"] == good
    engine.heal()
    saved = save(store, memory, "s", tokens, TURNS[medium])
    assert (saved.written_blocks, saved.reason) == (damaged, "")
    assert restore(store, memory, tokens).blocks == 6


def test_waits_for_layers_end_with_the_first_bad_block(store: Store, memory: Memory) -> None:
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 6)
    save(store, memory, "s", tokens)
    ssd.inject(Fault(kind="error", verb="read", first=1))
    with store.lease(store.match(tokens)) as lease:
        found = store.restore(lease, shuffled(memory, 6))
        assert not any(found.wait_layer(layer) for layer in range(3)) and found.result().blocks == 4


def test_a_fault_on_one_medium_keeps_the_blocks_before_it_on_the_other(store: Store, memory: Memory) -> None:
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 6)
    save(store, memory, "s", tokens[:24], CHAT)
    save(store, memory, "s", tokens, AGENT)
    match = store.match(tokens)
    assert (match.tokens_on(Medium.DRAM), match.tokens_on(Medium.SSD)) == (24, 24)
    ssd.inject(Fault(kind="error", verb="read"))
    result = restore(store, memory, tokens)
    assert (result.blocks, result.reason) == (3, "read failed (errno 5)")
    assert store.stats().counts["blocks_delivered_dram"] == 3


def test_reads_may_end_in_any_order(store: Store, memory: Memory) -> None:
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 6)
    save(store, memory, "s", tokens)
    ssd.inject(Fault(kind="reorder", verb="read", batches=3))
    assert restore(store, memory, tokens).blocks == 6


def test_errors_of_real_files_are_misses(memory: Memory, tmp_path: Path) -> None:
    files = FaultyFiles()
    with make_store(memory, make_config(memory, [tmp_path]), files=files) as store:
        tokens = make_tokens("a", 6)
        save(store, memory, "s", tokens)
        reads = files.calls["read"]
        files.fail("read", errno.EIO)
        result = restore(store, memory, tokens)
        assert files.calls["read"] > reads
        assert result.blocks < 6 and result.reason == "read failed (errno 5)"
        assert store.match(tokens).blocks == result.blocks
        files.fail("write", errno.ENOSPC)
        saved = save(store, memory, "s", tokens)
        assert (saved.written_blocks, saved.reason) == (0, "write failed (errno 28)")
        assert save(store, memory, "s", tokens).reason == ""
        assert restore(store, memory, tokens).blocks == 6
        check(store)
    assert not files.open_fds


# -- writes that fail -----------------------------------------------------------------------------------

WRITE_FAULTS = [
    pytest.param(Fault(kind="error", verb="write"), "write failed (errno 5)", id="first write"),
    pytest.param(Fault(kind="error", verb="write", error=errno.ENOSPC), "write failed (errno 28)", id="no space"),
    pytest.param(Fault(kind="short", verb="write", moved_bytes=PIECE, error=0), "write failed (errno 0)", id="short"),
    pytest.param(Fault(kind="error", verb="write", first=4), "write failed (errno 5)", id="last write"),
    pytest.param(Fault(kind="error", verb="write", first=5), "record write failed (errno 5)", id="record"),
    pytest.param(
        Fault(kind="short", verb="write", first=5, error=0), "record write failed (errno 0)", id="short record"
    ),
]


@MEDIA
@pytest.mark.parametrize(("fault", "reason"), WRITE_FAULTS)
def test_a_bad_write_refuses_the_turn_and_costs_no_space(
    store: Store, memory: Memory, medium: Medium, fault: Fault, reason: str
) -> None:
    engine, tokens = memory_engine(store, medium), make_tokens("a", 6)
    before = used_bytes(store)
    engine.inject(fault)
    saved = save(store, memory, "s", tokens, TURNS[medium])
    assert (saved.blocks, saved.written_blocks, saved.reason) == (6, 0, reason)
    assert store.stats().counts[f"saves failed: {reason}"] == 1
    assert store.match(tokens).blocks == 0 and used_bytes(store) == before
    check(store)
    assert save(store, memory, "s", tokens, TURNS[medium]).written_blocks == 6
    assert restore(store, memory, tokens).blocks == 6


@MEDIA
def test_a_bad_write_leaves_earlier_turns_alone(store: Store, memory: Memory, medium: Medium) -> None:
    engine, tokens = memory_engine(store, medium), make_tokens("a", 9)
    save(store, memory, "s", tokens[:48], TURNS[medium])
    engine.inject(Fault(kind="error", verb="write"))
    assert save(store, memory, "s", tokens, TURNS[medium]).reason == "write failed (errno 5)"
    assert store.match(tokens).blocks == restore(store, memory, tokens).blocks == 6
    assert save(store, memory, "s", tokens, TURNS[medium]).written_blocks == 3
    assert restore(store, memory, tokens).blocks == 9


def test_a_save_past_its_deadline_is_refused_and_keeps_its_space_until_the_write_returns(memory: Memory) -> None:
    clock, tokens = ManualClock(), make_tokens("a", 6)
    with make_store(memory, clock=clock) as store:
        ssd = memory_engine(store, Medium.SSD)
        ssd.inject(Fault(kind="hang", verb="write"))
        handle = store.save("s", tokens, np.arange(12), timeout_ns=SECOND)
        eventually(store, lambda: ssd.held == 1)
        clock.advance(2 * SECOND)
        found = handle.result(WAIT_S)
        assert found is not None and found.reason == "deadline" and handle.reusable(0)
        fence(store)
        assert store.stats().plans == 1 and used_bytes(store)["ssd"] > 0
        ssd.let_go()
        check(store)
        assert used_bytes(store)["ssd"] == 0 and store.match(tokens).blocks == 0


def test_a_save_whose_turn_comes_past_its_deadline_writes_nothing(memory: Memory) -> None:
    clock, gate = ManualClock(), threading.Event()
    with make_store(memory, clock=clock) as store:
        store.plane.parts.pump.post(lambda: gate.wait(WAIT_S) and None)
        handle = store.save("s", make_tokens("a", 6), np.arange(12), timeout_ns=SECOND)
        clock.advance(2 * SECOND)
        gate.set()
        found = handle.result(WAIT_S)
        assert found is not None and found.reason == "deadline" and handle.reusable(0)
        check(store)
        assert used_bytes(store)["ssd"] == 0 and not store.plane.parts.written_bytes


def test_a_save_that_cannot_be_started_gives_its_space_back(memory: Memory) -> None:
    """As where the producer's stream has been destroyed."""
    clock = ManualClock()
    with make_store(memory, clock=clock) as store:
        parts = store.plane.parts
        whole, parts.device = parts.device, Unrecorded(Files())
        with pytest.raises(RuntimeError, match="no such stream"):
            store.save("s", make_tokens("a", 6), np.arange(12))
        parts.device = whole
        fence(store)
        check(store)
        assert used_bytes(store)["ssd"] == 0 and len(store.plane.parts.streams) == 0
        assert save(store, memory, "s", make_tokens("a", 6)).written_blocks == 6


class Unrecorded(CpuDevice):
    """Streams of which no event can be made."""

    def record(self, stream: Stream) -> Event:
        raise RuntimeError("no such stream")


def test_a_save_past_its_deadline_waits_for_its_record_too(memory: Memory) -> None:
    clock, tokens = ManualClock(), make_tokens("a", 6)
    with make_store(memory, clock=clock) as store:
        ssd = memory_engine(store, Medium.SSD)
        ssd.inject(Fault(kind="hang", verb="write", first=5))
        handle = store.save("s", tokens, np.arange(12), timeout_ns=SECOND)
        eventually(store, lambda: ssd.held == 1)
        clock.advance(2 * SECOND)
        found = handle.result(WAIT_S)
        assert found is not None and found.reason == "deadline"
        fence(store)
        assert store.stats().plans == 1, "the extent may be given away while its record is being written"
        ssd.let_go()
        check(store)
        assert used_bytes(store)["ssd"] == 0 and store.match(tokens).blocks == 0


# -- reads that come late -------------------------------------------------------------------------------


def end_by_cancel(store: Store, found: Restore, clock: ManualClock) -> str:
    assert found.cancel().done()
    return "cancelled"


def end_by_deadline(store: Store, found: Restore, clock: ManualClock) -> str:
    clock.advance(61 * SECOND)
    return "deadline"


def end_by_reset(store: Store, found: Restore, clock: ManualClock) -> str:
    store.reset()
    return "reset"


@MEDIA
@pytest.mark.parametrize("end", [end_by_cancel, end_by_deadline, end_by_reset])
@pytest.mark.parametrize("done_tiles", [0, 1, 4])
def test_a_read_that_returns_late_never_reaches_the_pages(memory: Memory, medium: Medium, end, done_tiles: int) -> None:
    clock, tokens = ManualClock(), make_tokens("a", 6)
    with make_store(memory, clock=clock) as store:
        engine = memory_engine(store, medium)
        save(store, memory, "s", tokens, TURNS[medium])
        engine.inject(Fault(kind="hang", verb="read", first=done_tiles, batches=None))
        lease = store.lease(store.match(tokens))
        found = store.restore(lease, shuffled(memory, 6))
        eventually(store, lambda: engine.held == min(3, 5 - done_tiles))
        reason = end(store, found, clock)
        result = found.result()
        assert (result.blocks, result.reason) == (0, reason)
        memory.fill(seed=1)
        before = memory.snapshot()
        engine.heal()
        engine.let_go()
        lease.close()
        check(store)
        assert memory.is_equal(before)
        assert store.stats().counts[f"restores dropped: {reason}"] == 1


@MEDIA
def test_a_read_that_returns_late_arrives_when_nobody_gave_up(store: Store, memory: Memory, medium: Medium) -> None:
    """The twin of the test above, and: a wait that began long before the read returned."""
    engine, tokens = memory_engine(store, medium), make_tokens("a", 6)
    save(store, memory, "s", tokens, TURNS[medium])
    engine.inject(Fault(kind="hang", verb="read", batches=None))
    keys, pages = store.keys(tokens), shuffled(memory, 6)
    memory.fill(seed=1)
    with store.lease(store.match(tokens)) as lease:
        found = store.restore(lease, pages)
    seen: list[tuple[bool, int]] = []

    def wait() -> None:
        ready = all(found.wait_layer(layer) for layer in range(3))
        seen.append((ready, memory.stamped_blocks(keys, pages)))

    waiter = threading.Thread(target=wait)
    waiter.start()
    eventually(store, lambda: engine.held == 3)
    assert not seen and not found.done()
    engine.heal()
    engine.let_go()
    waiter.join(WAIT_S)
    assert seen == [(True, 6)] and found.result().blocks == 6


def test_a_read_stuck_in_the_kernel_never_reaches_the_pages(memory: Memory, tmp_path: Path) -> None:
    files, tokens = FaultyFiles(), make_tokens("a", 6)
    with make_store(memory, make_config(memory, [tmp_path]), files=files) as store:
        save(store, memory, "s", tokens)
        gate = files.hold("read")
        with store.lease(store.match(tokens)) as lease:
            found = store.restore(lease, shuffled(memory, 6))
        assert files.arrived.acquire(timeout=WAIT_S)
        found.cancel()
        memory.fill(seed=1)
        before = memory.snapshot()
        assert store.stats().plans == 1
        gate.set()
        check(store)
        assert memory.is_equal(before)
        assert restore(store, memory, tokens).blocks == 6


def test_a_cancelled_restore_that_waits_for_a_slot_takes_none(store: Store, memory: Memory) -> None:
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 6)
    save(store, memory, "s", tokens)
    ssd.inject(Fault(kind="delay", verb="read", batches=None))
    with store.lease(store.match(tokens)) as lease:
        first, second = (store.restore(lease, np.arange(12 * n, 12 * n + 12)) for n in range(2))
    eventually(store, lambda: ssd.held == store.plane.parts.window.slots)
    second.cancel()
    memory.fill(seed=1)
    before = memory.snapshot()
    ssd.heal()
    ssd.release()
    assert first.result().blocks == 6
    check(store)
    assert memory.is_equal(memory.with_pages(before, np.arange(12), memory.take(np.arange(12))))


def test_cancelling_what_is_over_changes_nothing(store: Store, memory: Memory) -> None:
    tokens = make_tokens("a", 6)
    save(store, memory, "s", tokens)
    with store.lease(store.match(tokens)) as lease:
        found = store.restore(lease, np.arange(12))
    assert found.result().blocks == 6
    assert found.cancel().done() and found.result().blocks == 6 and found.wait_layer(0, verified=True)


# -- bytes that changed ---------------------------------------------------------------------------------


@MEDIA
@pytest.mark.parametrize(("block", "layer", "byte"), [(0, 0, 0), (2, 1, 1535), (5, 2, 768)])
def test_a_flipped_bit_fails_its_block(
    store: Store, memory: Memory, medium: Medium, block: int, layer: int, byte: int
) -> None:
    engine, tokens = memory_engine(store, medium), make_tokens("a", 6)
    save(store, memory, "s", tokens, TURNS[medium])
    found, offset = piece_at(store, tokens, block, layer)
    assert found is medium
    flip(engine, offset + byte)
    with store.lease(store.match(tokens)) as lease:
        reading = store.restore(lease, shuffled(memory, 6))
        assert not reading.wait_layer(layer, verified=True)
    result = reading.result()
    assert (result.blocks, result.reason) == (block, "checksum")
    assert store.stats().counts["blocks_failed_checksum"] == 1
    assert store.match(tokens).blocks == block
    assert save(store, memory, "s", tokens, TURNS[medium]).written_blocks == 1
    assert restore(store, memory, tokens).blocks == 6


@MEDIA
def test_a_flipped_bit_of_padding_is_nobodys(store: Store, memory: Memory, medium: Medium) -> None:
    engine, tokens = memory_engine(store, medium), make_tokens("a", 6)
    assert store.geometry.payload_bytes(0) == 1536 < store.geometry.piece_bytes(0) == PIECE
    save(store, memory, "s", tokens, TURNS[medium])
    for byte in (1536, PIECE - 1):
        flip(engine, piece_at(store, tokens, 1, 1)[1] + byte)
    assert restore(store, memory, tokens).blocks == 6


@MEDIA
def test_pieces_in_each_others_place_fail(store: Store, memory: Memory, medium: Medium) -> None:
    engine, tokens = memory_engine(store, medium), make_tokens("a", 6)
    save(store, memory, "s", tokens, TURNS[medium])
    size_bytes = len(engine.files[0])
    places = [piece_at(store, tokens, block, 1)[1] for block in (2, 4)]
    views = [engine.files[at // size_bytes][at % size_bytes :][:PIECE] for at in places]
    views[0][:], views[1][:] = views[1].copy(), views[0].copy()
    result = restore(store, memory, tokens)
    assert (result.blocks, result.reason) == (2, "checksum")


@MEDIA
def test_records_are_read_back_from_their_medium(store: Store, memory: Memory, medium: Medium) -> None:
    tokens = make_tokens("a", 9)
    save(store, memory, "s", tokens[:48], TURNS[medium])
    forget_records(store)
    assert restore(store, memory, tokens).blocks == 6
    assert store.stats().counts["record_read_bytes"] > 0
    forget_records(store)
    assert save(store, memory, "s", tokens, TURNS[medium]).written_blocks == 3
    forget_records(store)
    assert restore(store, memory, tokens).blocks == 9


@MEDIA
def test_records_of_new_extents_are_not_read(store: Store, memory: Memory, medium: Medium) -> None:
    assert save(store, memory, "s", make_tokens("a", 9), TURNS[medium]).written_blocks == 9
    assert not store.stats().counts.get("record_read_bytes")


@MEDIA
@pytest.mark.parametrize("byte", [0, 8, 12, 16, 24, 32, 40])
def test_a_damaged_header_of_a_record_is_a_miss(store: Store, memory: Memory, medium: Medium, byte: int) -> None:
    engine, tokens = memory_engine(store, medium), make_tokens("a", 6)
    save(store, memory, "s", tokens, TURNS[medium])
    forget_records(store)
    flip(engine, record_at(store, tokens, 0, 0) - RECORD_HEADER_BYTES + byte)
    result = restore(store, memory, tokens)
    assert (result.blocks, result.reason) == (0, "no valid checksum record")
    assert store.match(tokens).blocks == 0


@MEDIA
def test_a_damaged_sum_of_a_record_fails_its_block(store: Store, memory: Memory, medium: Medium) -> None:
    engine, tokens = memory_engine(store, medium), make_tokens("a", 6)
    save(store, memory, "s", tokens, TURNS[medium])
    forget_records(store)
    flip(engine, record_at(store, tokens, 3, 2))
    result = restore(store, memory, tokens)
    assert (result.blocks, result.reason) == (3, "checksum")


def test_a_record_that_cannot_be_read_is_a_miss(store: Store, memory: Memory) -> None:
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 6)
    save(store, memory, "s", tokens)
    forget_records(store)
    ssd.inject(Fault(kind="error", verb="read"))  # The record comes first.
    result = restore(store, memory, tokens)
    assert (result.blocks, result.reason) == (0, "no valid checksum record")


def test_a_record_that_comes_last_is_waited_for(store: Store, memory: Memory) -> None:
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 6)
    save(store, memory, "s", tokens)
    forget_records(store)
    ssd.inject(Fault(kind="delay", verb="read"))
    with store.lease(store.match(tokens)) as lease:
        found = store.restore(lease, shuffled(memory, 6))
    assert all(found.wait_layer(layer) for layer in range(3))
    fence(store)
    assert ssd.held == 1 and not found.done() and not any(found.layer_verified)
    ssd.release()
    assert found.wait_layer(2, verified=True) and found.result().blocks == 6


class Unreadable:
    """Sums of a record for which there is no memory."""

    def __getitem__(self, _: object) -> NoReturn:
        raise MemoryError


class Bare(RecordBook):
    """Keeps records that cannot be read any more."""

    def hold(self, record: Record) -> Record:
        record.sums = Unreadable()  # type: ignore[assignment]
        return super().hold(record)


def test_a_restore_ends_when_a_verdict_fails_that_others_wait_behind(
    store: Store, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 6)
    save(store, memory, "s", tokens)
    parts = store.plane.parts
    parts.book = Bare(parts.lanes, parts.layout, sum_kind=SUM_KIND, bytes_max=1)
    ssd.inject(Fault(kind="delay", verb="read"))  # Of the record, which is asked for first.
    with store.lease(store.match(tokens)) as lease:
        found = store.restore(lease, np.arange(12))
    assert all(found.wait_layer(layer) for layer in range(3))
    fence(store)
    ssd.release()
    assert found.result().reason == "internal error" and "MemoryError" in caplog.text
    check(store)


def test_a_lost_record_of_one_medium_leaves_the_other_alone(store: Store, memory: Memory) -> None:
    """Both extents begin at offset 0 of their medium."""
    ssd, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 5)
    save(store, memory, "s", tokens[:24], CHAT)
    save(store, memory, "s", tokens, AGENT)
    places = [record_at(store, tokens, block, 0) for block in (0, 3)]
    assert places == [RECORD_HEADER_BYTES] * 2
    forget_records(store)
    flip(ssd, 0)
    result = restore(store, memory, tokens)
    assert (result.blocks, result.reason) == (3, "no valid checksum record")


@pytest.mark.parametrize("lost", ["pieces", "record"])
def test_a_lost_write_over_an_older_tenant_is_a_miss(memory: Memory, lost: str) -> None:
    """What lies there is a valid piece, or a valid record, of the session that had the place before."""
    with make_store(memory, make_config(memory, blocks=16, dram_blocks=0)) as store:
        ssd, before, tokens = memory_engine(store, Medium.SSD), make_tokens("a", 13), make_tokens("b", 13)
        save(store, memory, "s", before)
        old = piece_at(store, before, 0, 0)
        store.reset()
        writes = sum(call.verb == "write" for call in ssd.calls)
        first, count = (0, writes - 1) if lost == "pieces" else (writes - 1, 1)
        ssd.inject(Fault(kind="torn", verb="write", first=first, batches=count))
        assert save(store, memory, "s", tokens).written_blocks == 13, "a lost write is reported as done"
        assert piece_at(store, tokens, 0, 0) == old
        forget_records(store)
        result = restore(store, memory, tokens)
        assert result.blocks == 0
        assert result.reason == ("checksum" if lost == "pieces" else "no valid checksum record")
        check(store)


@MEDIA
def test_without_verifying_bytes_are_taken_as_they_are(memory: Memory, medium: Medium) -> None:
    tokens = make_tokens("a", 6)
    with make_store(memory, make_config(memory, io={"verify": "off"})) as store:
        engine = memory_engine(store, medium)
        save(store, memory, "s", tokens, TURNS[medium])
        assert restore(store, memory, tokens).blocks == 6
        flip(engine, piece_at(store, tokens, 2, 1)[1])
        with store.lease(store.match(tokens)) as lease:
            found = store.restore(lease, np.arange(12))
            assert found.wait_layer(1, verified=True) and found.result().blocks == 6
        assert memory.stamped_blocks(store.keys(tokens), np.arange(12)) == 2
        engine.inject(Fault(kind="error", verb="read"))
        assert restore(store, memory, tokens).reason == "read failed (errno 5)"
        check(store)


# -- plans that are out of date -------------------------------------------------------------------------


def older(plan: Plan) -> Plan:
    table = plan.runs.table.copy()
    table[:, GENERATION] -= 1
    return replace(plan, runs=Runs(table))


def newer(plan: Plan) -> Plan:
    table = plan.runs.table.copy()
    table[:, GENERATION] += 1
    return replace(plan, runs=Runs(table))


def start_plan(store: Store, tokens: Pages) -> Plan:
    with store.lease(store.match(tokens)) as lease:
        plan = store.catalog.start_restore(lease.entry.lease_id, 0)
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("verify", ["full", "off"])
def test_a_plan_for_an_earlier_tenant_is_refused(memory: Memory, verify: str) -> None:
    tokens, reports = make_tokens("a", 4), list[Completion]()
    with make_store(memory, make_config(memory, io={"verify": verify})) as store:
        save(store, memory, "s", tokens)
        plan, pages = start_plan(store, tokens), np.arange(8)
        stale = store.plane.restore(older(plan), pages, deadline_ns=2 * WAIT_NS << 20, report=reports.append)
        assert (stale.result().blocks, stale.result().reason) == (0, "stale plan")
        again = store.plane.save(older(plan), pages, deadline_ns=2 * WAIT_NS << 20, report=reports.append)
        ssd = memory_engine(store, Medium.SSD)
        writes = sum(call.verb == "write" for call in ssd.calls)
        again.start()
        eventually(store, lambda: len(reports) == 2)
        assert [(report.first_bad_block, report.reason) for report in reports] == [(0, "stale plan")] * 2
        assert sum(call.verb == "write" for call in ssd.calls) == writes
        later = store.plane.restore(older(plan), pages, deadline_ns=2 * WAIT_NS << 20, report=reports.append)
        assert later.result().reason == "stale plan", "a stale save has made an earlier generation current"
        right = store.plane.restore(plan, pages, deadline_ns=2 * WAIT_NS << 20, report=store.catalog.finish)
        assert right.result().blocks == 4
        check(store)


def test_a_plan_for_a_tenant_whose_save_never_came_is_a_miss(store: Store, memory: Memory) -> None:
    tokens, reports = make_tokens("a", 4), list[Completion]()
    save(store, memory, "s", tokens)
    plan = start_plan(store, tokens)
    found = store.plane.restore(newer(plan), np.arange(8), deadline_ns=2 * WAIT_NS << 20, report=reports.append)
    assert (found.result().blocks, found.result().reason) == (0, "no valid checksum record")
    assert reports[0].first_bad_block == 0
    found = store.plane.restore(plan, np.arange(8), deadline_ns=2 * WAIT_NS << 20, report=store.catalog.finish)
    assert found.result().blocks == 4


# -- faults of our own ----------------------------------------------------------------------------------


class BrokenCopier:
    """Stands for a kernel that cannot be launched."""

    def __init__(self, inner, *, at: str) -> None:
        self.inner, self.at, self.calls = inner, at, 0

    def start(self, *args, **kwargs):
        if self.at == "start":
            self._raise()
        copy = self.inner.start(*args, **kwargs)
        setattr(copy, self.at, lambda *_: self._raise())
        return copy

    def _raise(self) -> None:
        self.calls += 1
        raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("at", ["start", "scatter", "fetch_sums"])
def test_a_handler_that_fails_ends_every_wait(memory: Memory, at: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens = make_tokens("a", 6)
    with make_store(memory) as store:
        save(store, memory, "s", tokens)
        parts = store.plane.parts
        whole, parts.copier = parts.copier, BrokenCopier(parts.copier, at=at)
        with store.lease(store.match(tokens)) as lease:
            found = store.restore(lease, np.arange(12))
        assert (found.result().blocks, found.result().reason) == (0, "internal error")
        assert parts.copier.calls and "a handler of the data plane failed" in caplog.text
        parts.copier = whole
        if at == "start":
            assert restore(store, memory, tokens).blocks == 6


@pytest.mark.parametrize("at", ["start", "gather", "fetch_sums"])
def test_a_handler_that_fails_refuses_the_save(memory: Memory, at: str, caplog: pytest.LogCaptureFixture) -> None:
    tokens = make_tokens("a", 6)
    with make_store(memory) as store:
        parts = store.plane.parts
        whole, parts.copier = parts.copier, BrokenCopier(parts.copier, at=at)
        found = store.save("s", tokens, np.arange(12)).result(WAIT_S)
        assert found is not None and (found.written_blocks, found.reason) == (0, "internal error")
        assert parts.copier.calls and store.match(tokens).blocks == 0
        parts.copier = whole
        assert save(store, memory, "t", tokens).written_blocks == 6
        assert restore(store, memory, branch(tokens, "x", 1)).blocks == 6
