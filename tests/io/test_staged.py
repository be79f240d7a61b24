"""The staged engine: the contract over posix and memory, the ring, stream order, faults, closing."""

import contextlib
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from flatcake.clock import MonotonicClock
from flatcake.errors import CapacityError
from flatcake.io.devices import cuda_is_available, open_device
from flatcake.io.engine import Buffer, Result, Transfer
from flatcake.io.kvikio import KvikioEngine
from flatcake.io.memory import Fault, MemoryEngine
from flatcake.io.posix import PosixEngine
from flatcake.io.pump import Pump
from flatcake.io.seam import Files
from flatcake.io.sizing import RingSize
from flatcake.io.staged import StagedEngine, spans
from tests.fakes import FakeCuda, FakeKvikio, FaultyFiles, gpu_buffer, when
from tests.io.contract import CHECKS, CLOSE_NS, PAGE, Answer, Bench, fill, read, whole, write

FILE_BYTES = 72 * PAGE
BATCH = [Transfer(0, PAGE, 2 * PAGE, 0), Transfer(1, 8 * PAGE, PAGE, 2 * PAGE), Transfer(0, 0, PAGE, 5 * PAGE)]


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_staged_posix_keeps_contract(check, buffers: int, tmp_path: Path) -> None:
    files, device = FaultyFiles(), FakeCuda()
    fds = [files.open_file(str(tmp_path / name), create=True, direct=False) for name in "abc"]
    for fd in fds:
        files.allocate(fd, FILE_BYTES)
    inner = PosixEngine(files, fds, threads=3, task_bytes=3 * PAGE)
    engine = StagedEngine(inner, device, files, RingSize(FILE_BYTES, buffers, buffers), when)
    assert engine.name == "posix-staged" and engine.pinned
    check(Bench(engine=engine, file_count=3, file_bytes=FILE_BYTES, buffer=gpu_buffer))
    engine.check()
    assert engine.close(CLOSE_NS)
    assert not device.pinned
    for fd in fds:
        files.close(fd)


class Setup:
    """A staged engine over memory, and a GPU that runs when told."""

    def __init__(self, *, manual: bool = True, buffers: int = 1) -> None:
        self.inner = MemoryEngine(2, FILE_BYTES)
        self.device = FakeCuda(manual=manual)
        self.engine = StagedEngine(self.inner, self.device, Files(), RingSize(8 * PAGE, buffers, buffers), when)
        self.bench = Bench(engine=self.engine, file_count=2, file_bytes=FILE_BYTES)


def test_read_is_answered_when_its_copies_are_queued() -> None:
    at = Setup()
    at.inner.files[0][:], at.inner.files[1][:] = 3, 4
    answer, buffer = Answer(), gpu_buffer(8 * PAGE)
    at.engine.read(BATCH, buffer, answer)
    assert answer.calls == [whole(BATCH)] and not answer.ready.done() and not buffer.tensor.any()
    assert at.device.copies == 2  # Neighbours in the slot travel together.
    at.device.run()
    assert answer.ready.done()
    want = torch.zeros(8 * PAGE, dtype=torch.uint8)
    want[: 2 * PAGE], want[2 * PAGE : 3 * PAGE], want[5 * PAGE : 6 * PAGE] = 3, 4, 3
    assert torch.equal(buffer.tensor, want)
    at.engine.check()
    assert at.engine.close(0)


def test_write_waits_for_its_copies() -> None:
    at = Setup()
    answer, buffer = Answer(), gpu_buffer(8 * PAGE)
    sent = fill(buffer, seed=1)
    at.engine.write(BATCH, buffer, answer)
    assert not answer.calls and not at.inner.calls
    at.device.run()
    assert answer.calls == [whole(BATCH)]
    assert torch.equal(torch.from_numpy(at.inner.files[0][PAGE : 3 * PAGE]), sent[: 2 * PAGE])
    assert not at.inner.files[0][3 * PAGE :].any()
    assert at.engine.close(0)


def test_a_batch_without_a_buffer_waits_in_a_queue() -> None:
    at = Setup(buffers=2)
    at.inner.files[0][:] = 5
    buffers, answers = [gpu_buffer(8 * PAGE) for _ in range(5)], [Answer() for _ in range(5)]
    for buffer, answer in zip(buffers, answers, strict=True):
        at.engine.read(BATCH, buffer, answer)
    assert [len(answer.calls) for answer in answers] == [1, 1, 0, 0, 0]
    at.engine.check()
    for answer in answers[2:]:
        at.device.run()
        assert answer.results() == whole(BATCH)
    at.device.run()
    assert all(answer.results() == whole(BATCH) for answer in answers)
    assert all(int(buffer.tensor[0]) == 5 for buffer in buffers)
    assert at.engine.close(CLOSE_NS)


def test_a_ring_buffer_is_not_reused_before_its_copies_are_made() -> None:
    at = Setup()
    first, second, answer = gpu_buffer(8 * PAGE), gpu_buffer(8 * PAGE), Answer()
    at.inner.files[0][:] = 6
    at.engine.read(BATCH, first, Answer())
    at.engine.read(BATCH, second, answer)
    at.inner.files[0][:] = 7
    at.device.run()
    assert answer.results() == whole(BATCH)
    at.device.run()
    assert int(first.tensor[0]) == 6 and int(second.tensor[0]) == 7


@pytest.mark.parametrize(
    ("transfers", "expected"),
    [
        ([], []),
        ([(0, 3), (3, 4), (7, 0), (9, 2)], [(0, 7), (9, 11)]),
        ([(5, 1), (0, 2), (2, 2)], [(5, 6), (0, 4)]),
        ([(0, 0), (4, 0)], []),
    ],
    ids=str,
)
def test_neighbours_are_copied_at_once(transfers: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    batch = [Transfer(0, 0, size, start) for start, size in transfers]
    assert spans(batch) == expected == spans(batch, [Result(size, 0) for _, size in transfers])


def test_what_came_of_a_read_is_copied_and_no_more() -> None:
    batch = [Transfer(0, 0, 3, 0), Transfer(0, 9, 4, 3), Transfer(1, 0, 2, 7)]
    assert spans(batch, [Result(1, 5), Result(4, 0), Result(2, 0)]) == [(0, 1), (3, 9)]
    assert spans(batch, [Result(3, 0), Result(1, 5), Result(0, 5)]) == [(0, 4)]
    assert spans(batch, [Result(0, 5)] * 3) == []


def test_a_slot_that_is_larger_than_the_buffers_is_refused_at_once() -> None:
    at = Setup()
    with pytest.raises(AssertionError):
        at.engine.read(BATCH, gpu_buffer(9 * PAGE), Answer())
    assert not at.inner.calls and at.engine.close(0)


def test_errors_and_good_bytes_come_through() -> None:
    at = Setup(manual=False)
    buffer = gpu_buffer(8 * PAGE)
    at.inner.files[0][:] = 8
    at.inner.inject(Fault(kind="short", verb="read", moved_bytes=PAGE, error=errno.EIO))
    at.inner.inject(Fault(kind="error", verb="write", error=errno.ENOSPC, transfer=2))
    assert read(at.bench, BATCH, buffer) == [Result(PAGE, errno.EIO), Result(PAGE, 0), Result(PAGE, 0)]
    assert buffer.tensor[:PAGE].eq(8).all() and not buffer.tensor[PAGE : 2 * PAGE].any()
    assert write(at.bench, BATCH, buffer) == [*whole(BATCH[:2]), Result(0, errno.ENOSPC)]
    assert read(at.bench, BATCH, buffer) == whole(BATCH)
    at.inner.inject(Fault(kind="error", verb="read"))
    copies = at.device.copies
    assert read(at.bench, BATCH[:1], buffer) == [Result(0, errno.EIO)]
    assert at.device.copies == copies  # Nothing came, so nothing is copied.


@pytest.mark.parametrize("verb", ["read", "write"])
def test_failing_device_is_a_result_and_buffer_comes_back(verb: str) -> None:
    at = Setup(manual=False)
    at.device.copy_error = RuntimeError("an illegal memory access was encountered")
    for _ in range(3):
        answer = Answer()
        getattr(at.engine, verb)(BATCH, gpu_buffer(8 * PAGE), answer)
        assert answer.calls == [[Result(0, errno.EIO)] * 3]
    at.engine.check()
    assert at.engine.close(0)


def test_a_read_whose_copies_fail_half_way_is_ready_when_those_before_are_made() -> None:
    class Once(FakeCuda):
        def copy(self, target: int, source: int, size_bytes: int, stream: Any) -> None:
            if self.copies == 1:
                raise RuntimeError("an illegal memory access was encountered")
            super().copy(target, source, size_bytes, stream)

    device, inner, answer, slot = Once(manual=True), MemoryEngine(2, FILE_BYTES), Answer(), gpu_buffer(8 * PAGE)
    inner.files[0][:] = 3
    engine = StagedEngine(inner, device, Files(), RingSize(8 * PAGE, 1, 1), when)
    engine.read(BATCH, slot, answer)
    assert answer.calls == [[Result(0, errno.EIO)] * 3]
    assert not answer.ready.done() and not slot.tensor.any(), "its slot would be used again too early"
    device.run()
    assert answer.ready.done() and slot.tensor[0] == 3 and engine.close(0)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_device_that_lets_no_thread_in_is_a_result(verb: str) -> None:
    class Shut(FakeCuda):
        def enter_thread(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    device, answer = Shut(), Answer()
    engine = StagedEngine(MemoryEngine(2, FILE_BYTES), device, Files(), RingSize(8 * PAGE, 1, 1), when)
    getattr(engine, verb)(BATCH, gpu_buffer(8 * PAGE), answer)
    assert answer.calls == [[Result(0, errno.EIO)] * 3]
    assert engine.close(0)


def test_close_cancels_what_waits_and_keeps_buffers_that_are_in_use() -> None:
    at = Setup()
    hangs, waits = Answer(), Answer()
    at.inner.inject(Fault(kind="hang"))
    buffer = gpu_buffer(8 * PAGE)
    at.engine.read(BATCH, buffer, hangs)
    at.engine.read(BATCH, buffer, waits)
    assert not at.engine.close(0)
    assert waits.calls == [[Result(0, errno.ECANCELED)] * 3] and not hangs.calls
    assert at.device.pinned
    at.inner.let_go()
    assert hangs.results() == whole(BATCH)
    assert not at.engine.close(0)  # Its copy is not made yet.
    at.device.run()
    assert at.engine.close(0) and not at.device.pinned


def test_a_later_close_ends_what_hung_when_nobody_watches_any_more(tmp_path: Path) -> None:
    kvikio, gate, device, hangs, waits = FakeKvikio(), threading.Event(), FakeCuda(), Answer(), Answer()
    path, closed_pump = tmp_path / "file", list[object]()
    path.write_bytes(bytes(FILE_BYTES))

    def watch(*call: object) -> None:
        closed_pump.append(call)

    inner = KvikioEngine(kvikio, [str(path)], watch, threads=4, task_bytes=PAGE, direct=True)
    engine = StagedEngine(inner, device, Files(), RingSize(2 * PAGE, 1, 1), when)
    kvikio.gate, batch, buffer = gate, [Transfer(0, 0, 2 * PAGE, 0)], gpu_buffer(2 * PAGE)
    engine.read(batch, buffer, hangs)
    engine.read(batch, buffer, waits)
    assert not engine.close(0) and not hangs.calls
    assert waits.calls == [[Result(0, errno.ECANCELED)]] and device.pinned and closed_pump
    gate.set()
    assert engine.close(CLOSE_NS) and hangs.calls == [whole(batch)] and not device.pinned


def test_memory_that_is_not_to_be_had_or_pinned() -> None:
    files, device = FaultyFiles(), FakeCuda()
    files.fail("map_memory", errno.ENOMEM)
    with pytest.raises(CapacityError, match=str(5 * PAGE)):
        StagedEngine(MemoryEngine(1, PAGE), device, files, RingSize(PAGE, 3, 2), when)
    device.pin_error = RuntimeError("no")
    engine = StagedEngine(MemoryEngine(1, PAGE), device, files, RingSize(PAGE, 3, 2), when)
    assert not engine.pinned and engine.close(0)


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_staged_posix_keeps_contract_on_a_gpu(check, tmp_path: Path) -> None:
    if not cuda_is_available():
        pytest.skip("there is no CUDA device")
    files, device = FaultyFiles(), open_device("cuda", Files())
    pump = Pump(device, MonotonicClock())
    fds = [files.open_file(str(tmp_path / name), create=True, direct=False) for name in "abc"]
    for fd in fds:
        files.allocate(fd, FILE_BYTES)
    inner = PosixEngine(files, fds, threads=3, task_bytes=3 * PAGE)
    engine = StagedEngine(
        inner, device, files, RingSize(FILE_BYTES, 3, 1), lambda event, then: pump.post(lambda: pump.when(event, then))
    )
    assert engine.pinned
    check(
        Bench(
            engine=engine,
            file_count=3,
            file_bytes=FILE_BYTES,
            buffer=lambda size_bytes: Buffer.of(device.window(size_bytes)),
        )
    )
    engine.check()
    assert engine.close(CLOSE_NS) and pump.close(CLOSE_NS)
    for fd in fds:
        files.close(fd)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_no_close_is_clean_while_somebody_is_being_answered(verb: str) -> None:
    at, closed = Setup(manual=False), list[bool]()
    answer = Answer()

    def done(results: list[Result], ready: Any) -> None:
        closed.append(at.engine.close(0))
        answer(results, ready)

    getattr(at.engine, verb)(BATCH, gpu_buffer(8 * PAGE), done)
    assert closed == [False] and answer.calls == [whole(BATCH)]
    assert at.engine.close(CLOSE_NS)


def test_a_batch_is_answered_though_the_next_one_cannot_be_started() -> None:
    at, answer = Setup(manual=False), Answer()
    at.inner.inject(Fault(kind="delay"))
    at.engine.read(BATCH, gpu_buffer(8 * PAGE), answer)
    at.engine.read([Transfer(5, 0, PAGE, 0)], gpu_buffer(8 * PAGE), Answer())  # There is no such file.
    with contextlib.suppress(AssertionError):
        at.inner.release()
    assert answer.calls == [whole(BATCH)]
