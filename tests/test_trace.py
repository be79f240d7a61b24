"""NVTX ranges cost nothing without a profiler and hide nothing."""

import threading

import pytest

from flatcake.trace import span


def test_span_runs_its_body_once() -> None:
    ran = []
    with span("test.body", size_bytes=4096):
        ran.append(1)
    assert ran == [1]


def test_span_lets_exceptions_through() -> None:
    with pytest.raises(ZeroDivisionError), span("test.fails"):
        _ = 1 // 0


def test_spans_nest_and_run_in_threads() -> None:
    seen: list[int] = []

    def work(number: int) -> None:
        with span("test.outer", size_bytes=number), span("test.inner"):
            seen.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.parametrize("size_bytes", [0, 1, 1 << 31, 1 << 48])
def test_span_takes_any_size(size_bytes: int) -> None:
    with span("test.size", size_bytes=size_bytes):
        pass
