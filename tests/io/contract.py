"""What every engine must keep, whatever it moves bytes between.  Each test file runs `CHECKS` on its engine."""

import errno
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from flatcake.io.device import NOW, Event
from flatcake.io.engine import Buffer, Engine, Result, Transfer
from tests.fakes import WAIT_S, host_buffer

PAGE = 4096
CLOSE_NS = int(WAIT_S * 1e9)


@dataclass(kw_only=True)
class Bench:
    """An engine to be checked, over zeroed files."""

    engine: Engine
    file_count: int
    file_bytes: int
    """At least 64 pages."""
    buffer: Callable[[int], Buffer] = host_buffer


@dataclass
class Answer:
    """A `done` that counts its calls."""

    calls: list[list[Result]] = field(default_factory=list)
    called: threading.Event = field(default_factory=threading.Event)
    ready: Event = NOW

    def __call__(self, results: list[Result], ready: Event) -> None:
        self.calls.append(results)
        self.ready = ready
        self.called.set()

    def results(self) -> list[Result]:
        assert self.called.wait(WAIT_S), "done was never called"
        assert len(self.calls) == 1, "done was called more than once"
        return self.calls[0]


def read(bench: Bench, batch: Sequence[Transfer], buffer: Buffer) -> list[Result]:
    answer = Answer()
    bench.engine.read(batch, buffer, answer)
    results = answer.results()
    answer.ready.wait()
    return results


def write(bench: Bench, batch: Sequence[Transfer], buffer: Buffer) -> list[Result]:
    answer = Answer()
    bench.engine.write(batch, buffer, answer)
    return answer.results()


def whole(batch: Sequence[Transfer]) -> list[Result]:
    return [Result(transfer.size_bytes, 0) for transfer in batch]


def fill(buffer: Buffer, seed: int) -> torch.Tensor:
    """Random bytes in the buffer; a copy of them."""
    noise = torch.randint(0, 256, buffer.tensor.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    buffer.tensor.copy_(noise)
    return noise


def check_round_trip(bench: Bench) -> None:
    for pages in (1, 3, 4, 5, 7, 8, 9, 31, 64):
        for file in {0, bench.file_count - 1}:
            for first in {0, 64 - pages}:
                batch = [Transfer(file, first * PAGE, pages * PAGE, 0)]
                source, target = bench.buffer(pages * PAGE), bench.buffer(pages * PAGE)
                sent = fill(source, seed=pages)
                assert write(bench, batch, source) == whole(batch)
                assert torch.equal(source.tensor.cpu(), sent)
                assert read(bench, batch, target) == whole(batch)
                assert torch.equal(target.tensor.cpu(), sent)


def check_batch_touches_only_its_ranges(bench: Bench) -> None:
    file = bench.file_count - 1
    everything = [Transfer(file, 0, 64 * PAGE, 0)]
    source, target, around = bench.buffer(64 * PAGE), bench.buffer(64 * PAGE), bench.buffer(64 * PAGE)
    before = fill(around, seed=1)
    assert write(bench, everything, around) == whole(everything)
    sent = fill(source, seed=2)
    batch = [
        Transfer(file, 40 * PAGE, 9 * PAGE, 3 * PAGE),
        Transfer(0 if bench.file_count > 1 else file, 2 * PAGE, 0, 5 * PAGE),
        Transfer(file, 7 * PAGE, PAGE, 20 * PAGE),
        Transfer(file, 12 * PAGE, 5 * PAGE, 21 * PAGE),
    ]
    assert write(bench, batch, source) == whole(batch)
    want = before.clone()
    for _, offset_bytes, size_bytes, buffer_offset in batch:
        want[offset_bytes : offset_bytes + size_bytes] = sent[buffer_offset : buffer_offset + size_bytes]
    assert read(bench, everything, target) == whole(everything)
    assert torch.equal(target.tensor.cpu(), want)
    kept = fill(target, seed=3)
    assert read(bench, batch, target) == whole(batch)
    for _, _, size_bytes, buffer_offset in batch:
        kept[buffer_offset : buffer_offset + size_bytes] = sent[buffer_offset : buffer_offset + size_bytes]
    assert torch.equal(target.tensor.cpu(), kept)


def check_empty_batch_is_answered_at_once(bench: Bench) -> None:
    buffer = bench.buffer(PAGE)
    kept = fill(buffer, seed=4)
    for call in (bench.engine.read, bench.engine.write):
        for batch in ([], [Transfer(0, PAGE, 0, 0), Transfer(0, 0, 0, PAGE)]):
            answer = Answer()
            call(batch, buffer, answer)
            assert answer.calls == [whole(batch)]
    assert torch.equal(buffer.tensor.cpu(), kept)


def check_end_of_file_is_an_error(bench: Bench) -> None:
    file, last = bench.file_count - 1, bench.file_bytes - 2 * PAGE
    source, target = bench.buffer(8 * PAGE), bench.buffer(8 * PAGE)
    sent = fill(source, seed=5)
    tail = [Transfer(file, last, 2 * PAGE, 0)]
    assert write(bench, tail, source) == whole(tail)
    fill(target, seed=6)
    batch = [
        Transfer(file, last, PAGE, 5 * PAGE),
        Transfer(file, last, 4 * PAGE, 0),
        Transfer(file, bench.file_bytes, PAGE, 4 * PAGE),
    ]
    fine, crossing, beyond = read(bench, batch, target)
    assert fine == Result(PAGE, 0) and torch.equal(target.tensor[5 * PAGE : 6 * PAGE].cpu(), sent[:PAGE])
    assert crossing.error and crossing.moved_bytes <= 2 * PAGE
    assert torch.equal(target.tensor[: crossing.moved_bytes].cpu(), sent[: crossing.moved_bytes])
    assert beyond.error and beyond.moved_bytes == 0


def check_many_submitters(bench: Bench) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        source, target = bench.buffer(8 * PAGE), bench.buffer(8 * PAGE)
        for turn in range(6):
            sent = fill(source, seed=100 * number + turn)
            batch = [Transfer(0, (8 * number + step) * PAGE, PAGE, (7 - step) * PAGE) for step in range(8)]
            if write(bench, batch, source) != whole(batch) or read(bench, batch, target) != whole(batch):
                wrong.append(f"submitter {number} turn {turn}: not whole")
            if not torch.equal(target.tensor.cpu(), sent):
                wrong.append(f"submitter {number} turn {turn}: other bytes")

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads) and not wrong, wrong


def check_callback_that_raises(bench: Bench) -> None:
    buffer, batch = bench.buffer(PAGE), [Transfer(0, 0, PAGE, 0)]
    for _ in range(20):  # More than the engine has threads.
        called = threading.Event()

        def done(results: list[Result], ready: Event, called: threading.Event = called) -> None:
            called.set()
            raise ValueError("a mistake of the caller")

        bench.engine.read(batch, buffer, done)
        assert called.wait(WAIT_S)
    assert read(bench, batch, buffer) == whole(batch)


def check_close_answers_everything(bench: Bench) -> None:
    buffers = [bench.buffer(16 * PAGE) for _ in range(12)]
    answers = [Answer() for _ in buffers]
    batch = [Transfer(0, 0, 16 * PAGE, 0)]
    for buffer, answer in zip(buffers, answers, strict=True):
        bench.engine.read(batch, buffer, answer)
    assert bench.engine.close(CLOSE_NS)
    assert [answer.calls for answer in answers] == [[whole(batch)]] * len(answers)


def check_close_twice(bench: Bench) -> None:
    before = threading.active_count()
    assert bench.engine.close(CLOSE_NS)
    assert bench.engine.close(0)
    assert threading.active_count() <= before
    buffer = bench.buffer(2 * PAGE)
    kept = fill(buffer, seed=7)
    for call in (bench.engine.read, bench.engine.write):
        answer = Answer()
        call([Transfer(0, 0, PAGE, 0), Transfer(0, PAGE, PAGE, PAGE)], buffer, answer)
        assert answer.calls == [[Result(0, errno.ECANCELED)] * 2]
    assert torch.equal(buffer.tensor.cpu(), kept)


CHECKS = (
    check_round_trip,
    check_batch_touches_only_its_ranges,
    check_empty_batch_is_answered_at_once,
    check_end_of_file_is_an_error,
    check_many_submitters,
    check_callback_that_raises,
    check_close_answers_everything,
    check_close_twice,
)
