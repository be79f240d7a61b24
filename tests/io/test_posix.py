"""The posix engine: the contract with and without O_DIRECT, short and failed calls, priorities, closing."""

import errno
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flatcake.io.engine import Result, Transfer
from flatcake.io.posix import PosixEngine
from tests.fakes import WAIT_S, FaultyFiles, host_buffer
from tests.io.contract import CHECKS, CLOSE_NS, PAGE, Answer, Bench, fill, read, whole, write

FILE_BYTES = 72 * PAGE


def open_files(files: FaultyFiles, folder: Path, *, direct: bool = False) -> list[int]:
    fds = []
    for number in range(3):
        path = str(folder / f"file-{number}")
        fd = files.open_file(path, create=True, direct=False)
        files.allocate(fd, FILE_BYTES)
        if direct:
            files.close(fd)
            try:
                fd = files.open_file(path, create=False, direct=True)
            except OSError:
                pytest.skip("this filesystem has no O_DIRECT")
        fds.append(fd)
    return fds


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def bench(files: FaultyFiles, tmp_path: Path) -> Iterator[Bench]:
    fds = open_files(files, tmp_path)
    engine = PosixEngine(files, fds, threads=1, task_bytes=2 * PAGE)
    yield Bench(engine=engine, file_count=3, file_bytes=FILE_BYTES)
    assert engine.close(CLOSE_NS)
    engine.check()
    for fd in fds:
        files.close(fd)


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@pytest.mark.parametrize(("threads", "pages"), [(1, 1000), (4, 3)])
@pytest.mark.parametrize("check", CHECKS)
def test_posix_keeps_contract(
    check, threads: int, pages: int, direct: bool, files: FaultyFiles, tmp_path: Path
) -> None:
    fds = open_files(files, tmp_path, direct=direct)
    engine = PosixEngine(files, fds, threads=threads, task_bytes=pages * PAGE)
    check(Bench(engine=engine, file_count=3, file_bytes=FILE_BYTES))
    engine.check()
    assert engine.close(CLOSE_NS)
    for fd in fds:
        files.close(fd)
    assert not files.open_fds


def test_short_transfers_are_continued(bench: Bench, files: FaultyFiles) -> None:
    source, target = host_buffer(9 * PAGE), host_buffer(9 * PAGE)
    sent, batch = fill(source, seed=1), [Transfer(1, PAGE, 9 * PAGE, 0)]
    files.cap_bytes = 1000
    assert write(bench, batch, source) == whole(batch)
    assert read(bench, batch, target) == whole(batch)
    assert torch.equal(target.tensor, sent)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_error_ends_good_prefix(bench: Bench, files: FaultyFiles, error: int) -> None:
    files.fail("write", None, None, error)  # Two tasks of two pages are written, the third one fails, the rest not.
    batch = [Transfer(0, 0, 10 * PAGE, 0), Transfer(1, 0, PAGE, 0)]
    assert write(bench, batch, host_buffer(10 * PAGE)) == [Result(4 * PAGE, error), Result(PAGE, 0)]


def test_error_in_middle_of_task_keeps_its_start(bench: Bench, files: FaultyFiles) -> None:
    files.cap_bytes = 512
    files.fail("read", None, None, None, errno.EIO)
    assert read(bench, [Transfer(0, 0, 2 * PAGE, 0)], host_buffer(2 * PAGE)) == [Result(3 * 512, errno.EIO)]


def test_reads_go_before_writes(bench: Bench, files: FaultyFiles) -> None:
    gate, order, ended = files.hold("write"), [], threading.Semaphore(0)
    buffer, batch = host_buffer(PAGE), [Transfer(0, 0, PAGE, 0)]

    def note(name: str):
        return lambda results, ready: (order.append(name), ended.release())

    bench.engine.write(batch, buffer, note("write 1"))
    assert files.arrived.acquire(timeout=WAIT_S)  # The only thread is busy with it.
    bench.engine.write(batch, buffer, note("write 2"))
    bench.engine.read(batch, host_buffer(PAGE), note("read 1"))
    bench.engine.read(batch, host_buffer(PAGE), note("read 2"))
    gate.set()
    for _ in range(4):
        assert ended.acquire(timeout=WAIT_S)
    assert order == ["write 1", "read 1", "read 2", "write 2"]


def test_close_in_time_cancels_what_waits_and_says_what_hangs(bench: Bench, files: FaultyFiles) -> None:
    gate, buffer = files.hold("read"), host_buffer(8 * PAGE)
    stuck, waiting = Answer(), Answer()
    bench.engine.read([Transfer(0, 0, 8 * PAGE, 0)], buffer, stuck)
    bench.engine.read([Transfer(1, 0, PAGE, 0)], buffer, waiting)
    assert files.arrived.acquire(timeout=WAIT_S)
    assert not bench.engine.close(0)
    assert waiting.calls == [[Result(0, errno.ECANCELED)]]
    assert not stuck.calls  # One of its tasks is in the kernel, so its buffer is not free yet.
    assert not bench.engine.close(0)
    gate.set()
    assert stuck.results() == [Result(2 * PAGE, errno.ECANCELED)]


def test_fault_outside_the_system_is_a_result(bench: Bench, files: FaultyFiles) -> None:
    files.cap_bytes = "nonsense"  # type: ignore[assignment]
    assert read(bench, [Transfer(0, 0, PAGE, 0)], host_buffer(PAGE)) == [Result(0, errno.EIO)]


@pytest.mark.parametrize(
    "transfer",
    [Transfer(3, 0, PAGE, 0), Transfer(-1, 0, PAGE, 0), Transfer(0, -PAGE, PAGE, 0), Transfer(0, 0, PAGE, PAGE)],
)
def test_transfer_outside_buffer_or_files_is_refused(bench: Bench, files: FaultyFiles, transfer: Transfer) -> None:
    answer = Answer()
    with pytest.raises(AssertionError):
        bench.engine.read([transfer], host_buffer(PAGE), answer)
    assert not answer.calls and not files.calls["read"]
