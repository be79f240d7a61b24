"""Without a CUDA device the kernels run in Triton's interpreter, which must be chosen before they are imported."""

import gc
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

LEAK_WAIT_S = 10.0


def _open_files() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue  # The listing's own descriptor.
    return {(name, target) for name, target in found if "/proc/" not in target}


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """After the test no descriptor and no thread is left that was not there before; threads get time to end."""
    files, threads = _open_files(), set(threading.enumerate())
    yield
    end_s = time.monotonic() + LEAK_WAIT_S
    for thread in set(threading.enumerate()) - threads:
        thread.join(max(0.0, end_s - time.monotonic()))
        assert not thread.is_alive(), f"thread {thread.name} is left"
    if _open_files() - files:
        gc.collect()
    assert not _open_files() - files, "descriptors are left"
