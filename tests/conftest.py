"""Without a CUDA device the kernels run in Triton's interpreter, which must be chosen before they are imported.

Every test must leave what it found: descriptors, threads, shared memory, and of each store that it opened the slots,
leases, plans and scopes.  `@pytest.mark.leaves("…")` is the way out: it names what stays, and why, and is meant for
tests that leave a call stuck on purpose.
"""

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.opened import OPENED

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)  # Tensors of tests are small: threads that wait for each other cost more than they bring.

LEAK_WAIT_S = 10.0
SHARED_MEMORY = Path("/dev/shm")
FOREIGN_THREADS = {"tqdm_monitor"}
"""Begun by other packages, once a process."""
FOREIGN_FILES = ("/proc/", "/dev/nvidia", "/dev/infiniband", "anon_inode:", "cufile.log")
"""What drivers and libraries keep open once they are in use, and /proc itself."""


def _open_files() -> set[tuple[str, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except OSError:
            continue  # The listing's own descriptor.
    return {(name, target) for name, target in found if not any(part in target for part in FOREIGN_FILES)}


@pytest.fixture(autouse=True, scope="session")
def driver_in_use() -> None:
    """A GPU's driver opens files and begins threads at its first use, which is no test's doing."""
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda").sum().item()


def _segments() -> set[str]:
    """Names in shared memory, of all processes."""
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()


def _mapped(names: set[str]) -> set[str]:
    """Which of them this process has in its memory."""
    return {name for name in names if f"{SHARED_MEMORY}/{name}" in Path("/proc/self/maps").read_text()}


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """After the test nothing is left that was not there before; threads get time to end.

    Cost: about half a millisecond a test.
    """
    files, threads, segments = _open_files(), set(threading.enumerate()), _segments()
    OPENED.clear()
    yield
    kept = {word for mark in request.node.iter_markers("leaves") for word in mark.args}
    end_s = time.monotonic() + LEAK_WAIT_S
    if "threads" not in kept:
        for thread in set(threading.enumerate()) - threads:
            if thread.name in FOREIGN_THREADS:
                continue
            thread.join(max(0.0, end_s - time.monotonic()))
            assert not thread.is_alive(), f"thread {thread.name} is left"
    if "stores" not in kept:
        for store in list(OPENED):
            left = store.left_open()
            assert not left, f"a store has {left} left"
    OPENED.clear()
    if "segments" not in kept and (new := _segments() - segments):
        left_segments = _mapped(new)
        assert not left_segments, f"shared memory is left: {left_segments}"
    if "files" not in kept and _open_files() - files:
        gc.collect()
        left_files = _open_files() - files
        assert not left_files, f"descriptors are left: {left_files}"
