"""A seam that writes down every change of a store's files, and the directories that a power failure may leave of them.

`JournalFiles` works on real files and keeps each change as a step.  SQLite writes its files itself: after every
statement the database, its log and its rollback journal are compared with what they were, and the difference is
taken as the steps of that statement, a page or a frame of the log each.  Of a checkpoint, and of the close, which
makes one, the order is SQLite's: the log is synced, pages are written, the database is synced, the log is cut or
removed.  `disks` makes of a prefix of the steps what may be on the disk.
"""

import itertools
import random
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatcake.io.seam import Files

PAGE_BYTES = 4096
TORN_BYTES = (512, 4096)
"""Where the last write may be torn: a sector, and a page."""
LOST_MAX = 3
"""Most writes that are lost one by one; all of them at once besides."""
_LOG_HEADER_BYTES, _FRAME_BYTES = 32, PAGE_BYTES + 24
_WALL_S = 1_900_000_000


@dataclass(frozen=True, slots=True)
class Step:
    """One change: of a file's bytes or size, of a name, or that all of a file so far is on the disk."""

    kind: Literal["make", "size", "write", "sync", "rename", "remove"]
    file: int
    name: str = ""
    to: str = ""
    at_bytes: int = 0
    data: bytes = b""


class JournalFiles(Files):
    """Real files under one directory.  Safe to call from several threads."""

    def __init__(self, home: Path) -> None:
        self.steps: list[Step] = []
        self.commits: list[int] = []
        """Where in `steps` a transaction began to be written."""
        self.write_error: OSError | None = None
        """What the next write of data raises."""
        self.errors = 0
        self._home = str(home)
        self._files: dict[str, int] = {}
        self._names = itertools.count()
        self._fds: dict[int, int] = {}
        self._seen: dict[str, bytes] = {}
        self._lock = threading.RLock()

    def _name(self, path: str) -> str:
        assert path.startswith(self._home), path
        return path[len(self._home) + 1 :]

    def _note(self, kind: Any, file: int, **facts: Any) -> None:
        self.steps.append(Step(kind, file, **facts))

    def _made(self, name: str) -> int:
        """The number of a file, new if nobody has it yet."""
        if name not in self._files:
            self._files[name] = next(self._names)
            self._note("make", self._files[name], name=name)
        return self._files[name]

    def lock(self, path: str) -> int:
        fd = super().lock(path)
        with self._lock:
            self._fds[fd] = self._made(self._name(path))
        return fd

    def write_text(self, fd: int, text: str) -> None:
        super().write_text(fd, text)
        with self._lock:
            self._note("size", self._fds[fd])
            self._note("write", self._fds[fd], data=text.encode())

    def open_file(self, path: str, *, create: bool, direct: bool) -> int:
        fd = super().open_file(path, create=create, direct=direct)
        with self._lock:
            self._fds[fd] = self._made(self._name(path))
        return fd

    def allocate(self, fd: int, size_bytes: int) -> None:
        super().allocate(fd, size_bytes)
        with self._lock:
            self._note("size", self._fds[fd], at_bytes=size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        super().truncate(fd, size_bytes)
        with self._lock:
            self._note("size", self._fds[fd], at_bytes=size_bytes)

    def write(self, fd: int, data: Sequence[memoryview], offset_bytes: int) -> int:
        with self._lock:
            error, self.write_error = self.write_error, None
            if error is not None:
                self.errors += 1
                raise error
            moved_bytes = super().write(fd, data, offset_bytes)
            written = b"".join(bytes(view) for view in data)[:moved_bytes]
            self._note("write", self._fds[fd], at_bytes=offset_bytes, data=written)
        return moved_bytes

    def sync(self, fd: int) -> None:
        with self._lock:  # The disk of the test is not waited for.
            self._note("sync", self._fds[fd])

    def rename(self, path: str, to: str) -> None:
        super().rename(path, to)
        with self._lock:
            old, new = self._name(path), self._name(to)
            self._note("rename", self._files[old], name=old, to=new)
            self._files[new] = self._files.pop(old)

    def remove(self, path: str) -> None:
        super().remove(path)
        with self._lock:
            name = self._name(path)
            self._note("remove", self._files.pop(name), name=name)

    def wall_s(self) -> int:
        return _WALL_S

    # -- the manifest -----------------------------------------------------------------------------------

    def open_database(self, path: str, *, blob_bytes_max: int) -> sqlite3.Connection:
        inner = super().open_database(path, blob_bytes_max=blob_bytes_max)
        self._look(path, is_checkpoint=False)
        return JournalDatabase(inner, self, path)  # type: ignore[return-value]

    def close_database(self, database: sqlite3.Connection) -> None:
        assert isinstance(database, JournalDatabase)
        super().close_database(database.inner)
        self._look(database.path, is_checkpoint=True)

    def after(self, statement: str, path: str) -> None:
        """Note what a statement has done to the files."""
        with self._lock:
            if statement == "COMMIT":
                self.commits.append(len(self.steps))
            self._look(path, is_checkpoint="wal_checkpoint" in statement)

    def _look(self, path: str, *, is_checkpoint: bool) -> None:
        with self._lock:
            before = dict(self._seen)
            base, log, journal = (self._read(f"{path}{tail}") for tail in ("", "-wal", "-journal"))
            names = [self._name(f"{path}{tail}") for tail in ("", "-wal", "-journal")]
            if is_checkpoint and base != before.get(path):
                if before.get(f"{path}-wal"):
                    self._note("sync", self._made(names[1]))
                self._differ(names[0], before.get(path, b""), base or b"", PAGE_BYTES, 0)
                self._note("sync", self._made(names[0]))
            elif base != before.get(path):
                self._differ(names[0], before.get(path, b""), base or b"", PAGE_BYTES, 0)
                self._note("sync", self._made(names[0]))  # Through a rollback journal, which syncs.
            for name, new, head_bytes, unit_bytes in (
                (names[1], log, _LOG_HEADER_BYTES, _FRAME_BYTES),
                (names[2], journal, 0, PAGE_BYTES),
            ):
                old = before.get(f"{self._home}/{name}")
                if new is None and old is not None:
                    self._note("remove", self._files.pop(name), name=name)
                elif new is not None:
                    self._made(name)
                    self._differ(name, old or b"", new, unit_bytes, head_bytes)

    def _read(self, path: str) -> bytes | None:
        try:
            found = Path(path).read_bytes()
        except FileNotFoundError:
            self._seen.pop(path, None)
            return None
        self._seen[path] = found
        return found

    def _differ(self, name: str, old: bytes, new: bytes, unit_bytes: int, head_bytes: int) -> None:
        """Note how one content became the other, a unit at a time."""
        file = self._made(name)
        if len(new) < len(old):
            self._note("size", file, at_bytes=len(new))
        cuts = [0, *range(head_bytes or unit_bytes, len(new), unit_bytes), len(new)]
        for start, end in itertools.pairwise(cuts):
            if new[start:end] != old[start:end]:
                self._note("write", file, at_bytes=start, data=new[start:end])


class JournalDatabase:
    """A connection after each of whose statements the files are looked at."""

    def __init__(self, inner: sqlite3.Connection, files: JournalFiles, path: str) -> None:
        self.inner, self.path, self._files = inner, path, files

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        try:
            return self.inner.execute(statement, *values)
        finally:
            self._files.after(statement, self.path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


Content = dict[str, bytes]
"""A directory: names and what they hold."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What of a prefix of the steps did not come to the disk."""

    steps: frozenset[int] = frozenset()
    torn_bytes: int | None = None
    """How much of the last write did."""
    is_plain: bool = False
    """Whether that is nothing, or everything that was not synced."""


def disk(steps: Sequence[Step], loss: Loss) -> Content:
    """The directory after some steps, without what was lost."""
    names: dict[str, int] = {}
    content: dict[int, bytearray] = {}
    for number, step in enumerate(steps):
        if number in loss.steps:
            continue
        held = content.setdefault(step.file, bytearray())
        if step.kind == "make":
            names[step.name] = step.file
        elif step.kind == "size":
            del held[step.at_bytes :]
            held.extend(bytes(step.at_bytes - len(held)))
        elif step.kind == "write":
            data = step.data
            if loss.torn_bytes is not None and number == len(steps) - 1:
                data = data[: loss.torn_bytes]
            held.extend(bytes(max(0, step.at_bytes - len(held))))
            held[step.at_bytes : step.at_bytes + len(data)] = data
        elif step.kind == "rename" and names.get(step.name) == step.file:
            names[step.to] = names.pop(step.name)
        elif step.kind == "remove" and names.get(step.name) == step.file:
            del names[step.name]
    return {name: bytes(content[file]) for name, file in names.items()}


def losses(steps: Sequence[Step], *, window: int, more: random.Random | None) -> Iterator[Loss]:
    """What may have been lost when the power went after the last of these steps.

    Args:
        steps: All so far.
        window: So many of the latest writes are lost in all combinations of at most `LOST_MAX`; the older ones only
            all together.
        more: Takes three of the combinations of two and three by chance; None takes them all.
    """
    synced: dict[int, int] = {step.file: number for number, step in enumerate(steps) if step.kind == "sync"}
    last_sync = max(synced.values(), default=-1)
    writes = [n for n, s in enumerate(steps) if s.kind in ("write", "size") and n > synced.get(s.file, -1)]
    named = [n for n, s in enumerate(steps) if s.kind in ("make", "rename", "remove") and n > last_sync]
    yield Loss(is_plain=True)
    if steps and steps[-1].kind == "write":
        yield from (Loss(torn_bytes=torn) for torn in TORN_BYTES if torn < len(steps[-1].data))
    if writes:
        yield Loss(frozenset(writes), is_plain=True)
    if named:
        yield Loss(frozenset((*writes, *named)), is_plain=True)
    recent = writes[-window:]
    yield from (Loss(frozenset([one])) for one in recent)
    several = [
        Loss(frozenset(lost)) for count in range(2, LOST_MAX + 1) for lost in itertools.combinations(recent, count)
    ]
    yield from several if more is None else more.sample(several, min(3, len(several)))


def lay_out(content: Content, home: Path) -> None:
    """Write a directory, in place of what was there."""
    home.mkdir(exist_ok=True)
    for name in {path.name for path in home.iterdir()} - set(content):
        (home / name).unlink()
    for name, data in content.items():
        (home / name).write_bytes(data)


def kinds(steps: Iterable[Step]) -> set[str]:
    return {step.kind for step in steps}
