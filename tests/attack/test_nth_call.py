"""The n-th call to the system fails, once or from then on, for every n that a whole life of a store reaches."""

import errno
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flatcake.errors import FlatCakeError
from flatcake.gva import Medium
from flatcake.io.seam import Files
from flatcake.store import Store
from tests.stores import (
    TURNS,
    Memory,
    check,
    make_config,
    make_store,
    make_tokens,
    restore,
    save,
    simple_layout,
)

CALLS = tuple(name for name in vars(Files) if not name.startswith("_") and name != "processors")
"""Everything that may fail."""
ERRORS = [errno.EIO, errno.ENOSPC, errno.ENOMEM] if "FLATCAKE_NIGHTLY" in os.environ else [errno.EIO]
STEP = 1 if "FLATCAKE_NIGHTLY" in os.environ else 2
CALLS_MAX = 400
"""Far beyond what the scenario makes."""


class NthFiles(Files):
    """Real files of which the n-th call fails, and maybe all after it; a failed close has closed."""

    def __init__(self, nth: int, *, sticky: bool, error: int = errno.EIO) -> None:
        self.nth, self.sticky, self.error = nth, sticky, error
        self.count = 0
        self.failed: list[str] = []
        self.fds: set[int] = set()
        self._lock = threading.Lock()
        for name in CALLS:
            setattr(self, name, partial(self._call, name, getattr(super(), name)))

    def _call(self, name: str, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self._lock:
            self.count += 1
            fails = self.count == self.nth or (self.sticky and self.count > self.nth)
            if fails:
                self.failed.append(name)
            if name == "close":
                self.fds.remove(arguments[0])
        if fails and name not in ("close", "close_database"):
            raise OSError(self.error, os.strerror(self.error))
        result = real(*arguments, **named)
        if name in ("lock", "open_file"):
            with self._lock:
                self.fds.add(result)
        if fails:
            raise OSError(self.error, os.strerror(self.error))
        return result


def live(store: Store, memory: Memory) -> list[int]:
    """Save and restore on both media, twice in one session, across a reset; what each restore delivered."""
    found = []
    for medium in Medium:
        tokens = make_tokens(f"a{int(medium)}", 8)
        save(store, memory, f"s{int(medium)}", tokens[:32], TURNS[medium])
        save(store, memory, f"s{int(medium)}", tokens, TURNS[medium])
        found.append(restore(store, memory, tokens).blocks)
    check(store)
    store.reset()
    tokens = make_tokens("c", 5)
    save(store, memory, "t", tokens)
    found.append(restore(store, memory, tokens).blocks)
    check(store)
    return found


def run(files: Files, memory: Memory, homes: list[Path]) -> list[int] | None:
    """One life of a store; None when it could not be opened."""
    try:
        store = make_store(memory, make_config(memory, homes), files=files)
    except (FlatCakeError, OSError) as error:
        assert str(error)
        return None
    with store:
        found = live(store, memory)
    assert store.close()
    return found


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_the_nth_call_fails(tmp_path: Path, sticky: bool, error: int) -> None:
    memory, whole, refused, missed, seen = Memory(simple_layout()), [8, 8, 5], 0, 0, set()
    for nth in range(1, CALLS_MAX, STEP):
        homes = [tmp_path / f"{nth}-{part}" for part in "ab"]
        files = NthFiles(nth, sticky=sticky, error=error)
        found = run(files, memory, homes)
        assert not files.fds, f"call {nth}, {files.failed}: descriptors are open"
        if not files.failed:
            assert found == whole
            break
        seen.add(files.failed[0])
        refused += found is None
        missed += found is not None and found != whole
        if nth % 4 == 1:  # What is left behind is as good as new.
            assert run(Files(), memory, homes) == whole, f"call {nth}, {files.failed}"
        for home in homes:
            for path in home.glob("*"):
                path.unlink()
    else:
        pytest.fail("the calls never ended")
    assert refused and missed and {"read", "write", "open_file", "allocate", "lock", "map_memory"} <= seen


@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from then on"])
def test_the_nth_call_of_a_reopen_fails(tmp_path: Path, sticky: bool) -> None:
    """Over a directory that has been used, with another size: files shrink, grow and go."""
    memory = Memory(simple_layout())
    refused = 0
    for nth in range(1, CALLS_MAX, STEP):
        homes = [tmp_path / f"{nth}-{part}" for part in "ab"]
        with make_store(memory, make_config(memory, homes, blocks=96, file_blocks=24)) as store:
            save(store, memory, "s", make_tokens("a", 4))
        files = NthFiles(nth, sticky=sticky)
        try:
            with make_store(memory, make_config(memory, homes, blocks=64, file_blocks=16), files=files) as store:
                pass
        except (FlatCakeError, OSError) as error:
            assert str(error)
            refused += 1
        assert not files.fds
        with make_store(memory, make_config(memory, homes)) as store:
            save(store, memory, "s", make_tokens("a", 4))
            assert restore(store, memory, make_tokens("a", 4)).blocks == 4
        for home in homes:
            for path in home.glob("*"):
                path.unlink()
        if not files.failed:
            break
    else:
        pytest.fail("the calls never ended")
    assert refused > 10 // STEP
