"""The kvikio engine over a stand-in: the contract, settings, faults as results, buffers kept alive, closing."""

import errno
import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch

from flatcake.errors import DeviceError
from flatcake.io.devices import cuda_is_available, load_kvikio
from flatcake.io.engine import Buffer, Result, Transfer
from flatcake.io.kvikio import KvikioEngine
from flatcake.io.seam import Files
from tests.fakes import FakeKvikio, host_buffer, when
from tests.io.contract import CHECKS, CLOSE_NS, PAGE, Answer, Bench, read, whole, write

FILE_BYTES = 72 * PAGE
BATCH = [Transfer(0, 0, 2 * PAGE, 0), Transfer(1, PAGE, 3 * PAGE, 2 * PAGE), Transfer(0, 0, 0, 0)]


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    files = [tmp_path / f"file-{number}" for number in range(3)]
    for path in files:
        path.write_bytes(bytes(FILE_BYTES))
    return [str(path) for path in files]


def open_engine(kvikio: FakeKvikio, paths: list[str]) -> KvikioEngine:
    return KvikioEngine(kvikio, paths, when, threads=5, task_bytes=32 << 20, direct=True)


@pytest.mark.parametrize("check", CHECKS)
def test_kvikio_keeps_contract(check, paths: list[str]) -> None:
    kvikio = FakeKvikio()
    engine = open_engine(kvikio, paths)
    check(Bench(engine=engine, file_count=3, file_bytes=FILE_BYTES, buffer=host_buffer))
    engine.check()
    assert engine.close(CLOSE_NS)
    assert [file.closes for file in kvikio.files] == [1, 1, 1]
    assert all(future.gets == 1 for future in kvikio.futures)


def test_defaults_are_set(paths: list[str]) -> None:
    kvikio = FakeKvikio()
    assert open_engine(kvikio, paths).close(CLOSE_NS)
    assert kvikio.defaults.values == {
        "num_threads": 5,
        "task_size": 32 << 20,
        "bounce_buffer_size": 32 << 20,
        "auto_direct_io_read": True,
        "auto_direct_io_write": True,
    }


def test_older_kvikio_without_direct_reads_is_taken(paths: list[str]) -> None:
    kvikio = FakeKvikio(defaults=("num_threads", "task_size", "bounce_buffer_size"))
    assert open_engine(kvikio, paths).close(CLOSE_NS)
    with pytest.raises(KeyError):
        open_engine(FakeKvikio(defaults=("num_threads",)), paths)


def test_short_count_is_an_error(paths: list[str]) -> None:
    kvikio = FakeKvikio()
    bench = Bench(engine=open_engine(kvikio, paths), file_count=3, file_bytes=FILE_BYTES, buffer=host_buffer)
    kvikio.outcomes = [None, PAGE]
    assert read(bench, BATCH, host_buffer(5 * PAGE)) == [Result(2 * PAGE, 0), Result(PAGE, errno.EIO), Result(0, 0)]
    kvikio.outcomes = [0]
    assert write(bench, BATCH[:1], host_buffer(5 * PAGE)) == [Result(0, errno.EIO)]
    assert bench.engine.close(CLOSE_NS)


@pytest.mark.parametrize("error", [RuntimeError("cuFile"), OSError(5, "x"), ValueError("y"), KeyError("z")])
def test_exceptions_are_results_and_all_futures_are_waited_for(paths: list[str], error: Exception) -> None:
    kvikio = FakeKvikio()
    bench = Bench(engine=open_engine(kvikio, paths), file_count=3, file_bytes=FILE_BYTES, buffer=host_buffer)
    kvikio.outcomes = [error]
    assert read(bench, BATCH, host_buffer(5 * PAGE)) == [Result(0, errno.EIO), Result(3 * PAGE, 0), Result(0, 0)]
    assert [future.gets for future in kvikio.futures] == [1, 1]
    kvikio.start_error = error
    assert write(bench, BATCH, host_buffer(5 * PAGE)) == [Result(0, errno.EIO), Result(0, errno.EIO), Result(0, 0)]
    kvikio.start_error = None
    assert read(bench, BATCH, host_buffer(5 * PAGE)) == whole(BATCH)
    assert bench.engine.close(CLOSE_NS)


def test_batches_are_answered_while_an_earlier_one_waits(paths: list[str]) -> None:
    kvikio, gate = FakeKvikio(), threading.Event()
    engine, slow, fast = open_engine(kvikio, paths), Answer(), Answer()
    kvikio.gate = gate
    engine.read(BATCH[:1], host_buffer(5 * PAGE), slow)
    kvikio.gate = None
    engine.read(BATCH[1:2], host_buffer(5 * PAGE), fast)
    assert fast.results() == whole(BATCH[1:2]) and not slow.calls
    gate.set()
    assert slow.results() == whole(BATCH[:1])
    assert engine.close(CLOSE_NS)


def test_buffer_lives_until_answered_and_no_longer(paths: list[str]) -> None:
    kvikio, gate = FakeKvikio(), threading.Event()
    kvikio.gate = gate
    engine, answer = open_engine(kvikio, paths), Answer()
    memory = Files().map_memory(5 * PAGE).array
    alive = weakref.ref(memory)
    buffer = Buffer.of(torch.from_numpy(memory))
    engine.read(BATCH[:2], buffer, answer)
    del memory, buffer
    gc.collect()
    assert alive() is not None
    gate.set()
    assert answer.results() == whole(BATCH[:2])
    gc.collect()
    assert alive() is None
    assert engine.close(CLOSE_NS)


def test_close_keeps_files_open_while_something_is_in_flight(paths: list[str]) -> None:
    kvikio, gate = FakeKvikio(), threading.Event()
    kvikio.gate = gate
    engine, answer = open_engine(kvikio, paths), Answer()
    engine.read(BATCH, host_buffer(5 * PAGE), answer)
    assert not engine.close(0)
    engine.check()
    assert not any(file.closes for file in kvikio.files)
    gate.set()
    assert engine.close(CLOSE_NS)
    assert answer.calls == [whole(BATCH)] and all(file.closes == 1 for file in kvikio.files)


def test_a_later_close_ends_what_hung_when_nobody_watches_any_more(paths: list[str]) -> None:
    kvikio, gate = FakeKvikio(), threading.Event()
    kvikio.gate, closed_pump = gate, list[object]()
    engine = KvikioEngine(
        kvikio, paths, lambda *call: closed_pump.append(call), threads=4, task_bytes=2 * PAGE, direct=True
    )
    answer = Answer()
    engine.read(BATCH, host_buffer(5 * PAGE), answer)
    assert not engine.close(0) and len(closed_pump) == 1
    gate.set()
    assert engine.close(CLOSE_NS)
    assert answer.calls == [whole(BATCH)] and all(file.closes == 1 for file in kvikio.files)


def test_a_close_answers_what_is_done_behind_something_that_hangs(paths: list[str]) -> None:
    kvikio, gate, hangs, ends = FakeKvikio(), threading.Event(), Answer(), Answer()
    engine = KvikioEngine(kvikio, paths, lambda *_: None, threads=4, task_bytes=2 * PAGE, direct=True)
    kvikio.gate = gate
    engine.read(BATCH[:1], host_buffer(5 * PAGE), hangs)
    kvikio.gate = None
    engine.read(BATCH[:1], host_buffer(5 * PAGE), ends)
    kvikio.futures[1].wait()
    assert not engine.close(0) and ends.calls == [whole(BATCH[:1])] and not hangs.calls
    gate.set()
    assert engine.close(CLOSE_NS) and hangs.calls == [whole(BATCH[:1])]


@pytest.mark.parametrize("batch", [[], [Transfer(0, 0, 0, 0), Transfer(1, PAGE, 0, PAGE)]], ids=["empty", "no bytes"])
def test_a_batch_that_moves_nothing_needs_nobody_who_watches(paths: list[str], batch: list[Transfer]) -> None:
    kvikio, answer = FakeKvikio(), Answer()
    engine = KvikioEngine(kvikio, paths, lambda *_: None, threads=4, task_bytes=2 * PAGE, direct=True)
    engine.read(batch, host_buffer(5 * PAGE), answer)
    assert answer.calls == [whole(batch)] and not kvikio.futures and engine.close(0)


def test_file_that_cannot_be_opened_closes_the_others(paths: list[str]) -> None:
    kvikio, before = FakeKvikio(), threading.active_count()
    with pytest.raises(FileNotFoundError):
        open_engine(kvikio, [paths[0], paths[1] + "-missing"])
    assert [file.closes for file in kvikio.files] == [1] and threading.active_count() == before


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_real_kvikio_keeps_contract(check, paths: list[str]) -> None:
    if not cuda_is_available():
        pytest.skip("there is no CUDA device")
    try:
        kvikio = load_kvikio()
    except DeviceError as error:
        pytest.skip(str(error))
    engine = KvikioEngine(kvikio, paths, when, threads=4, task_bytes=16 * PAGE, direct=True)
    check(Bench(engine=engine, file_count=3, file_bytes=FILE_BYTES, buffer=host_buffer))
    engine.check()
    assert engine.close(CLOSE_NS)
