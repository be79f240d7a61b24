"""The DRAM arena: the contract on a CPU and on a GPU that runs when told; pinning; memory that is not to be had."""

import errno
import logging

import pytest
import torch

from flatcake.clock import MonotonicClock
from flatcake.errors import CapacityError
from flatcake.io.arena import Arena, ArenaEngine
from flatcake.io.device import PIN_CHUNK_BYTES, CpuDevice, Device, Event, Stream
from flatcake.io.devices import cuda_is_available, open_device
from flatcake.io.engine import Buffer, Result, Transfer
from flatcake.io.pump import Pump
from flatcake.io.seam import Files
from tests.fakes import FakeCuda, FaultyFiles, gpu_buffer, host_buffer, when
from tests.io.contract import CHECKS, CLOSE_NS, PAGE, Answer, Bench, fill, whole

SIZE = 72 * PAGE
BATCH = [Transfer(0, PAGE, 2 * PAGE, 0), Transfer(0, 8 * PAGE, PAGE, 2 * PAGE)]


@pytest.mark.parametrize("device", [CpuDevice(Files()), FakeCuda()], ids=["cpu", "cuda"])
@pytest.mark.parametrize("check", CHECKS)
def test_arena_keeps_contract(check, device: Device) -> None:
    arena = Arena(Files(), device, SIZE)
    engine = ArenaEngine(arena, device, when)
    buffer = host_buffer if device.is_host else gpu_buffer
    check(Bench(engine=engine, file_count=1, file_bytes=SIZE, buffer=buffer))
    engine.check()
    assert engine.close(0)
    arena.close()


def test_arena_is_zeroed_and_not_pinned_on_a_cpu() -> None:
    arena = Arena(Files(), CpuDevice(Files()), SIZE)
    assert arena.array.nbytes == arena.size_bytes == SIZE and not arena.array.any()
    assert not arena.pinned and arena.pages in ("hugetlb", "thp", "small")
    arena.check()
    arena.close()
    arena.close()


def test_arena_is_pinned_once_and_unpinned_once() -> None:
    device = FakeCuda()
    arena = Arena(Files(), device, SIZE)
    assert arena.pinned and device.pinned == [arena.address]
    arena.close()
    arena.close()
    assert not arena.pinned and not device.pinned


def test_failing_pin_is_said_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeCuda()
    device.pin_error = RuntimeError("out of pinned memory")
    with caplog.at_level(logging.WARNING):
        arena = Arena(Files(), device, SIZE)
    assert not arena.pinned and "out of pinned memory" in caplog.text
    arena.close()


def test_missing_memory_is_refused_with_numbers() -> None:
    files = FaultyFiles()
    files.fail("map_memory", errno.ENOMEM)
    with pytest.raises(CapacityError, match=f"{SIZE} bytes.*dram_bytes_max"):
        Arena(files, CpuDevice(files), SIZE)
    with pytest.raises(CapacityError, match="available|memory"):
        Arena(Files(), CpuDevice(files), 1 << 46)


def test_read_is_answered_at_once_and_write_after_its_copies() -> None:
    device = FakeCuda(manual=True)
    arena = Arena(Files(), device, SIZE)
    engine = ArenaEngine(arena, device, when)
    source, target, wrote, done = gpu_buffer(3 * PAGE), gpu_buffer(3 * PAGE), Answer(), Answer()
    sent = fill(source, seed=1)
    engine.write(BATCH, source, wrote)
    assert not wrote.calls and not engine.close(0)
    device.run()
    assert wrote.results() == whole(BATCH)
    assert engine.close(0)
    engine = ArenaEngine(arena, device, when)
    engine.read(BATCH, target, done)
    assert done.calls == [whole(BATCH)] and not done.ready.done() and not target.tensor.any()
    assert not engine.close(0)  # The arena may not be unpinned yet.
    device.run()
    assert done.ready.done() and torch.equal(target.tensor, sent) and engine.close(0)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_failing_device_is_a_result(verb: str) -> None:
    device = FakeCuda()
    engine, answer = ArenaEngine(Arena(Files(), device, SIZE), device, when), Answer()
    device.copy_error = RuntimeError("an illegal memory access was encountered")
    getattr(engine, verb)(BATCH, gpu_buffer(3 * PAGE), answer)
    assert answer.calls == [[Result(0, errno.EIO)] * 2]
    assert engine.close(0)


class Failing(FakeCuda):
    """A GPU that refuses a copy after others were queued, and knows its own events only."""

    def copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        if self.copies:
            raise RuntimeError("invalid argument")
        super().copy(target, source, size_bytes, stream)


def test_what_was_queued_before_a_failure_still_holds_the_buffer() -> None:
    device = Failing(manual=True)
    engine, came = ArenaEngine(Arena(Files(), device, SIZE), device, when), Answer()
    engine.read(BATCH, gpu_buffer(3 * PAGE), came)
    assert came.calls == [[Result(0, errno.EIO)] * 2]
    assert not came.ready.done() and not engine.close(0), "a copy to the buffer is under way"
    device.run()
    assert came.ready.done() and engine.close(0)
    device, wrote = Failing(manual=True), Answer()
    engine = ArenaEngine(Arena(Files(), device, SIZE), device, when)
    engine.write(BATCH, gpu_buffer(3 * PAGE), wrote)
    assert not wrote.calls and not engine.close(0), "a copy from the buffer is under way"
    device.run()
    assert wrote.calls == [[Result(0, errno.EIO)] * 2] and engine.close(0)


class Dead(Failing):
    """A GPU that does nothing any more."""

    def record(self, stream: Stream) -> Event:
        raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_dead_device_is_a_result(verb: str) -> None:
    device, answer = Dead(), Answer()
    device.copies = 1
    engine = ArenaEngine(Arena(Files(), device, SIZE), device, when)
    getattr(engine, verb)(BATCH, gpu_buffer(3 * PAGE), answer)
    assert answer.calls == [[Result(0, errno.EIO)] * 2] and engine.close(0)


def test_write_beyond_the_end_changes_nothing_there() -> None:
    device = CpuDevice(Files())
    arena, answer, source = Arena(Files(), device, SIZE), Answer(), host_buffer(4 * PAGE)
    sent = fill(source, seed=2)
    ArenaEngine(arena, device, when).write([Transfer(0, SIZE - PAGE, 4 * PAGE, 0)], source, answer)
    assert answer.calls == [[Result(PAGE, errno.EIO)]]
    assert torch.equal(torch.from_numpy(arena.array)[SIZE - PAGE :], sent[:PAGE])
    assert not arena.array[: SIZE - PAGE].any()


@pytest.mark.gpu
def test_copies_cross_the_chunks_in_which_the_arena_is_pinned() -> None:
    if not cuda_is_available():
        pytest.skip("there is no CUDA device")
    device = open_device("cuda", Files())
    arena = Arena(Files(), device, PIN_CHUNK_BYTES + 64 * PAGE)
    assert arena.pinned
    pump = Pump(device, MonotonicClock())
    engine = ArenaEngine(arena, device, lambda event, then: pump.post(lambda: pump.when(event, then)))
    source, target = (Buffer.of(device.window(128 * PAGE)) for _ in range(2))
    sent, wrote, came = fill(source, seed=3), Answer(), Answer()
    batch = [Transfer(0, PIN_CHUNK_BYTES - 64 * PAGE, 128 * PAGE, 0)]
    engine.write(batch, source, wrote)
    assert wrote.results() == whole(batch)
    engine.read(batch, target, came)
    assert came.results() == whole(batch)
    came.ready.wait()
    assert torch.equal(target.tensor.cpu(), sent)
    assert engine.close(CLOSE_NS) and pump.close(CLOSE_NS)
    arena.close()
