"""The memory engine: the contract, and that each fault does what it says and nothing else."""

import errno

import pytest
import torch

from flatcake.io.engine import Result, Transfer
from flatcake.io.memory import Call, Fault, MemoryEngine
from tests.fakes import gpu_buffer, host_buffer
from tests.io.contract import CHECKS, PAGE, Answer, Bench, fill, read, whole, write

BATCH = [Transfer(0, 0, 2 * PAGE, 0), Transfer(1, PAGE, 3 * PAGE, 2 * PAGE)]


@pytest.mark.parametrize("buffer", [host_buffer, gpu_buffer], ids=["host", "device"])
@pytest.mark.parametrize("check", CHECKS)
def test_memory_keeps_contract(check, buffer) -> None:
    engine = MemoryEngine(3, 72 * PAGE)
    check(Bench(engine=engine, file_count=3, file_bytes=72 * PAGE, buffer=buffer))
    engine.check()
    assert engine.close(0)


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine(2, 16 * PAGE)


@pytest.fixture
def bench(engine: MemoryEngine) -> Bench:
    return Bench(engine=engine, file_count=2, file_bytes=16 * PAGE)


def stored(engine: MemoryEngine) -> list[torch.Tensor]:
    return [
        torch.from_numpy(file[start : start + size].copy())
        for file, start, size in ((engine.files[0], 0, 2 * PAGE), (engine.files[1], PAGE, 3 * PAGE))
    ]


def test_calls_are_recorded(bench: Bench, engine: MemoryEngine) -> None:
    write(bench, BATCH, host_buffer(5 * PAGE))
    read(bench, BATCH[1:], host_buffer(5 * PAGE))
    assert engine.calls == [Call("write", tuple(BATCH)), Call("read", tuple(BATCH[1:]))]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_error_moves_nothing_of_one_transfer(bench: Bench, engine: MemoryEngine, error: int) -> None:
    engine.inject(Fault(kind="error", verb="write", transfer=1, error=error))
    source = host_buffer(5 * PAGE)
    sent = fill(source, seed=1)
    assert write(bench, BATCH, source) == [Result(2 * PAGE, 0), Result(0, error)]
    first, second = stored(engine)
    assert torch.equal(first, sent[: 2 * PAGE]) and not second.any()
    assert write(bench, BATCH, source) == whole(BATCH)


@pytest.mark.parametrize(("error", "result"), [(errno.EIO, Result(100, errno.EIO)), (0, Result(100, 0))])
def test_short_moves_a_part_and_admits_it(bench: Bench, engine: MemoryEngine, error: int, result: Result) -> None:
    engine.inject(Fault(kind="short", moved_bytes=100, error=error, transfer=9))
    source = host_buffer(5 * PAGE)
    sent = fill(source, seed=2)
    assert write(bench, BATCH, source) == [Result(2 * PAGE, 0), result]
    assert torch.equal(stored(engine)[1][:100], sent[2 * PAGE : 2 * PAGE + 100]) and not stored(engine)[1][100:].any()


def test_torn_write_claims_success(bench: Bench, engine: MemoryEngine) -> None:
    engine.inject(Fault(kind="torn", verb="write", moved_bytes=PAGE))
    source = host_buffer(5 * PAGE)
    sent = fill(source, seed=3)
    assert write(bench, BATCH, source) == whole(BATCH)
    first, second = stored(engine)
    assert torch.equal(first[:PAGE], sent[:PAGE]) and not first[PAGE:].any()
    assert torch.equal(second, sent[2 * PAGE :])


def test_faults_count_batches_of_their_verb(bench: Bench, engine: MemoryEngine) -> None:
    engine.inject(Fault(kind="error", verb="read", first=1, batches=2))
    buffer = host_buffer(5 * PAGE)
    errors = []
    for _ in range(5):
        assert write(bench, BATCH, buffer) == whole(BATCH)
        errors.append(read(bench, BATCH, buffer)[0].error)
    assert errors == [0, errno.EIO, errno.EIO, 0, 0]


def test_fault_without_end_lasts_until_healed(bench: Bench, engine: MemoryEngine) -> None:
    engine.inject(Fault(kind="error", first=1, batches=None))
    buffer = host_buffer(5 * PAGE)
    assert [read(bench, BATCH, buffer)[0].error for _ in range(4)] == [0] + [errno.EIO] * 3
    engine.heal()
    assert read(bench, BATCH, buffer) == whole(BATCH)


def test_delay_waits_for_release_and_moves_then(engine: MemoryEngine) -> None:
    engine.inject(Fault(kind="delay", batches=2))
    buffers, answers = [host_buffer(5 * PAGE) for _ in range(3)], [Answer() for _ in range(3)]
    for buffer, answer in zip(buffers, answers, strict=True):
        engine.read(BATCH, buffer, answer)
    assert [bool(answer.calls) for answer in answers] == [False, False, True] and engine.held == 2
    engine.files[0][:] = 7
    engine.release()
    assert [answer.results() for answer in answers] == [whole(BATCH)] * 3 and engine.held == 0
    assert [int(buffer.tensor[0]) for buffer in buffers] == [7, 7, 0]


def test_reorder_answers_last_to_first(engine: MemoryEngine) -> None:
    engine.inject(Fault(kind="reorder", batches=3))
    order: list[int] = []
    for number in range(4):
        engine.read(BATCH, host_buffer(5 * PAGE), lambda results, ready, number=number: order.append(number))
        assert order == ([] if number < 2 else [2, 1, 0] if number == 2 else [2, 1, 0, 3])
    engine.check()


def test_hang_outlives_close_and_moves_late(engine: MemoryEngine) -> None:
    engine.inject(Fault(kind="hang", verb="read"))
    engine.inject(Fault(kind="delay", verb="read", first=1))
    hangs, delayed, buffer = Answer(), Answer(), host_buffer(5 * PAGE)
    engine.read(BATCH, buffer, hangs)
    engine.read(BATCH, host_buffer(5 * PAGE), delayed)
    engine.release()
    assert delayed.calls == [whole(BATCH)] and not hangs.calls
    assert not engine.close(0) and not hangs.calls
    engine.check()
    engine.files[0][:] = 9
    engine.let_go()
    assert hangs.results() == whole(BATCH) and int(buffer.tensor[0]) == 9
    assert engine.close(0)


def test_close_cancels_what_is_delayed(engine: MemoryEngine) -> None:
    engine.inject(Fault(kind="delay", batches=None))
    answer = Answer()
    engine.write(BATCH, host_buffer(5 * PAGE), answer)
    assert engine.close(0)
    assert answer.results() == [Result(0, errno.ECANCELED)] * 2
    engine.release()
    assert len(answer.calls) == 1
