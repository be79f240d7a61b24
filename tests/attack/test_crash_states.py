"""Power failures, enumerated: every short history of a store, cut at every change of its files.

Histories are all sequences of at most three operations.  At every step of the last operation the directory is rebuilt
as it may then be on the disk: what was synced is there, and of the rest nothing is lost, or everything, or everything
with the names of files, or up to three writes of the latest ones; or the last write is torn at 512 or 4096 bytes.  A
store is opened there, and must hold its promises: it opens, no wrong bytes, whole blocks, nothing that was never
published or was forgotten for good, everything that a flush or a close has promised; and it takes a new turn.

Not enumerated: what SQLite writes within one statement, but for the order that `tests/journal.py` names (a page or a
frame is one write; a rollback journal is gone when its statement ends); writes that are lost though a later write to
the same sector survived; wrong bytes that a disk makes up, which `tests/attack/test_bytes.py` covers.  Names are lost
all together since the last sync of any file, as a filesystem with a journal loses them.

A merge opens all states of histories of one operation; of longer ones every n-th, and those right after a call has
returned of which nothing or everything is lost.  FLATCAKE_NIGHTLY opens all.
"""

import errno
import hashlib
import itertools
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flatcake.clock import ManualClock
from flatcake.gva import Medium
from flatcake.io.seam import Files
from flatcake.store import Store
from tests.journal import Content, JournalFiles, Loss, disk, kinds, lay_out, losses
from tests.stores import (
    ONE_SHOT,
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

NIGHTLY = "FLATCAKE_NIGHTLY" in os.environ
HISTORIES = 1 if NIGHTLY else 11
"""Of the histories of three operations, every n-th is lived."""
STRIDE = {} if NIGHTLY else {2: 5, 3: 16}
"""Of the states of histories of so many operations, every n-th is opened."""
WINDOW = 6 if NIGHTLY else 4
"""So many of the latest writes are lost in all combinations."""
POOL_BLOCKS, FILE_BLOCKS = 16, 8
BIG_BLOCKS = 13
"""A turn that leaves no room for what is there already."""
LATER_S = 60
NEVER = 1 << 60
OPERATIONS_MAX = 3


class Recovery(Files):
    """The files of the store that is opened after the failure; its own writes need not reach any disk."""

    def wall_s(self) -> int:
        return 1_900_000_000 + LATER_S

    def sync(self, fd: int) -> None:
        return None


@dataclass
class History:
    """A store, and what it has promised so far."""

    home: Path
    memory: Memory = field(default_factory=lambda: Memory(simple_layout(layers=2, page_count=64)))
    blocks: Counter[str] = field(default_factory=Counter)
    """Blocks that were ever saved of each session, or tried to be."""
    spans: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)
    """Between which steps so many blocks of a session may be seen."""
    kept: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Session and blocks that must be found, from which step on and up to which."""
    fillers: int = 0
    closes: set[int] = field(default_factory=set)
    """Steps at which a close had returned."""

    def __post_init__(self) -> None:
        self.files = JournalFiles(self.home)
        self.clock = ManualClock()
        self.store = self.open()

    @property
    def now(self) -> int:
        return len(self.files.steps)

    def open(self) -> Store:
        return open_at(self.memory, self.home, self.files, self.clock)

    def seen(self) -> dict[str, int]:
        return {name: self.store.match(make_tokens(name, count)).blocks for name, count in self.blocks.items()}

    def put(self, name: str, blocks: int, medium: Medium = Medium.SSD) -> None:
        before, start, commits = self.seen(), self.now, len(self.files.commits)
        self.blocks[name] = max(self.blocks[name], blocks)
        found = save(self.store, self.memory, name, make_tokens(name, blocks), TURNS[medium])
        if not found.reason:
            begun = self.files.commits[commits:]
            for count in range(before.get(name, 0) + 1, blocks + 1):
                self.spans.setdefault((name, count), []).append((begun[0] if begun else self.now, NEVER))
        self.forget_promises(start)

    def forget_promises(self, start: int) -> None:
        """What the operation that began at `start` has dropped is promised up to there only."""
        now = self.seen()
        self.kept = [
            (name, blocks, since, min(until, start) if now[name] < blocks else until)
            for name, blocks, since, until in self.kept
        ]

    # -- operations -------------------------------------------------------------------------------------

    def put_ssd(self) -> None:
        self.put("ssd", min(8, self.seen().get("ssd", 0) + 2))

    def put_dram(self) -> None:
        self.put("dram", min(8, self.seen().get("dram", 0) + 2), Medium.DRAM)

    def put_fails(self) -> None:
        self.files.write_error = OSError(errno.EIO, "told to fail")
        errors = self.files.errors
        self.put("bad", 2)
        assert self.files.errors == errors + 1 and not self.seen()["bad"]

    def flush(self) -> None:
        assert self.store.flush()
        self.kept += [
            (name, blocks, self.now, NEVER) for name, blocks in self.seen().items() if blocks and name != "dram"
        ]

    def remove(self) -> None:
        start = self.now
        self.store.delete_session("ssd")
        self.end_spans(start, {"ssd"})

    def reset(self) -> None:
        start = self.now
        self.store.reset()
        self.end_spans(start, set(self.blocks))

    def end_spans(self, start: int, names: set[str]) -> None:
        """What the operation that began at `start` has forgotten may not be seen from now on."""
        self.forget_promises(start)
        for (name, _), spans in self.spans.items():
            if name in names:
                spans[:] = [(since, min(until, self.now)) for since, until in spans]

    def reclaim(self) -> None:
        self.fillers += 1
        self.put(f"filler {self.fillers}", BIG_BLOCKS)

    def reopen(self) -> None:
        seen = self.seen()
        assert self.store.close()
        closed = self.now
        self.closes.add(closed)
        self.kept += [(n, b, closed, closed if n == "dram" else NEVER) for n, b in seen.items() if b]
        self.store = self.open()
        assert self.seen() == seen

    # -- what a failure at a step may show ----------------------------------------------------------------

    def limits(self, step: int) -> dict[str, tuple[int, int]]:
        """Fewest and most blocks of each session that a store may find after a failure at that step."""
        found = {}
        for name, blocks in self.blocks.items():
            least = max((b for n, b, since, until in self.kept if n == name and since <= step <= until), default=0)
            most = 0
            for count in range(1, blocks + 1):
                if not any(since <= step < until for since, until in self.spans.get((name, count), ())):
                    break
                most = count
            found[name] = (least, most)
        return found


OPERATIONS: dict[str, Callable[[History], None]] = {
    "put": History.put_ssd,
    "put in DRAM": History.put_dram,
    "put that fails": History.put_fails,
    "flush": History.flush,
    "remove": History.remove,
    "reset": History.reset,
    "reclaim": History.reclaim,
    "reopen": History.reopen,
}


def open_at(memory: Memory, home: Path, files: Files, clock: ManualClock | None = None) -> Store:
    config = make_config(
        memory,
        [home],
        blocks=POOL_BLOCKS,
        file_blocks=FILE_BLOCKS,
        dram_blocks=16,
        io={"io_threads": 1, "direct": "off"},
    )
    return make_store(memory, config, files=files, clock=clock or ManualClock())


def states(history: History, start: int, seed: str) -> Iterator[tuple[int, Loss, Content]]:
    """What may be on the disk at each step from `start` on; an operation without a step has returned there."""
    more = None if NIGHTLY else random.Random(seed)
    for step in range(start, history.now + 1):
        steps = history.files.steps[:step]
        for loss in losses(steps, window=WINDOW, more=more):
            yield step, loss, disk(steps, loss)


@dataclass
class Recovered:
    """Opens what is left, and counts what came of it."""

    home: Path
    memory: Memory = field(default_factory=lambda: Memory(simple_layout(layers=2, page_count=64)))
    known: set[bytes] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)

    def is_new(self, content: Content, limits: dict[str, tuple[int, int]]) -> bool:
        """Whether this directory, with these promises, has not been opened before."""
        state = hashlib.blake2b(repr(sorted(limits.items())).encode())
        for name in sorted(content):
            state.update(f"{name} {len(content[name])} ".encode())
            state.update(content[name] if name != "lock" else b"")
        is_new = state.digest() not in self.known
        self.known.add(state.digest())
        return is_new

    def hold(self, content: Content, limits: dict[str, tuple[int, int]], where: str) -> None:
        """Open a store there; it must keep its promises."""
        lay_out(content, self.home)
        self.counts["states"] += 1
        with open_at(self.memory, self.home, Recovery()) as store:
            store.catalog.check()
            for name, (least, most) in limits.items():
                tokens = make_tokens(name, BIG_BLOCKS)
                matched = store.match(tokens).blocks
                assert matched <= most, f"{where}: {matched} blocks of {name!r} are visible, {most} at most"
                found = restore(store, self.memory, tokens)
                assert found.blocks >= least, f"{where}: {found} of {name!r}, {least} blocks were promised"
                assert found.blocks == matched or found.reason
                self.counts["hits"] += found.blocks > 0
                self.counts["misses by checksum"] += found.blocks < matched
                self.counts["promises"] += least > 0
            tokens = make_tokens("after", 2)
            assert save(store, self.memory, "after", tokens, ONE_SHOT).reason == "", where
            assert restore(store, self.memory, tokens).blocks == 2, where
            check(store)


def content_of(home: Path) -> Content:
    return {path.name: path.read_bytes() for path in home.iterdir()}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: no test of this file waits for a disk to learn what a disk may lose."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="flatcake-crash-", dir="/dev/shm") as home:
        yield Path(home)


@pytest.mark.timeout(7200 if NIGHTLY else 300)
@pytest.mark.parametrize("length", range(OPERATIONS_MAX + 1))
def test_what_a_power_failure_leaves_holds_every_promise(place: Path, length: int) -> None:
    recovered = Recovered(place / "left")
    steps: set[str] = set()
    found = 0
    every = itertools.product(OPERATIONS, repeat=length)
    for number, names in enumerate(itertools.islice(every, 0, None, HISTORIES if length == OPERATIONS_MAX else 1)):
        history = History(place / f"{number}")
        try:
            start = 0
            for name in names:
                start = history.now
                OPERATIONS[name](history)
            assert disk(history.files.steps, Loss()) == content_of(history.home), "the journal is not what was written"
            steps |= kinds(history.files.steps)
            for step, loss, content in states(history, start, repr(names)):
                limits = history.limits(step)
                if recovered.is_new(content, limits):
                    found += 1
                    has_returned = loss.is_plain and step in (history.now, *history.closes)
                    if has_returned or found % STRIDE.get(length, 1) == 0:
                        recovered.hold(content, limits, f"{names}, step {step} of {history.now}, without {loss}")
        finally:
            history.store.close()
        shutil.rmtree(history.home)
    counts = recovered.counts
    assert counts["states"] > (20 if NIGHTLY else 10) and steps >= {"make", "size", "write", "sync"}
    if length > 1:
        assert min(counts[name] for name in ("hits", "promises", "misses by checksum")) > 4, counts
        assert "remove" in steps
