"""Stand-ins for the system: files that fail on purpose, a GPU that runs when told, and a kvikio without a GPU."""

import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from flatcake.io.device import CpuDevice, Event, Point, Stream
from flatcake.io.engine import Buffer
from flatcake.io.seam import Files, HostMemory, view_memory

WAIT_S = 30.0
"""Far beyond what anything takes; reaching it is a failure."""


class FaultyFiles(Files):
    """Real files whose calls fail, stall or fall short as told.  Counts calls and descriptors."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self.open_fds: set[int] = set()
        self.cap_bytes = 1 << 62
        """Most that one read or write moves."""
        self._lock = threading.Lock()
        self._faults: dict[str, list[int | OSError | None]] = {}
        self._gates: dict[str, threading.Event] = {}
        self.arrived = threading.Semaphore(0)
        """Released by each call that stops at a gate."""

    def fail(self, call: str, *outcomes: int | OSError | None) -> None:
        """The next calls raise these errors or errnos, one each; None lets one through."""
        self._faults.setdefault(call, []).extend(outcomes)

    def hold(self, call: str) -> threading.Event:
        """Calls wait until the event that this returns is set."""
        return self._gates.setdefault(call, threading.Event())

    def _enter(self, call: str) -> None:
        with self._lock:
            self.calls[call] += 1
            self.order.append(call)
            waiting = self._faults.get(call)
            outcome = waiting.pop(0) if waiting else None
            gate = self._gates.get(call)
        if gate is not None:
            self.arrived.release()
            assert gate.wait(WAIT_S), f"{call} was never let through"
        if outcome is not None:
            raise outcome if isinstance(outcome, OSError) else OSError(outcome, os.strerror(outcome))

    def _opened(self, fd: int) -> int:
        with self._lock:
            assert fd not in self.open_fds
            self.open_fds.add(fd)
        return fd

    def make_directory(self, path: str) -> None:
        self._enter("make_directory")
        super().make_directory(path)

    def lock(self, path: str) -> int:
        self._enter("lock")
        return self._opened(super().lock(path))

    def write_text(self, fd: int, text: str) -> None:
        self._enter("write_text")
        super().write_text(fd, text)

    def open_file(self, path: str, *, create: bool, direct: bool) -> int:
        self._enter("open_direct" if direct else "create_file" if create else "open_file")
        return self._opened(super().open_file(path, create=create, direct=direct))

    def open_reading(self, path: str, *, direct: bool) -> int:
        self._enter("open_reading")
        return self._opened(super().open_reading(path, direct=direct))

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._enter("allocate")
        super().allocate(fd, size_bytes)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._enter("truncate")
        super().truncate(fd, size_bytes)

    def read(self, fd: int, into: Sequence[memoryview], offset_bytes: int) -> int:
        self._enter("read")
        return super().read(fd, [view[: self.cap_bytes] for view in into][:1], offset_bytes)

    def write(self, fd: int, data: Sequence[memoryview], offset_bytes: int) -> int:
        self._enter("write")
        return super().write(fd, [view[: self.cap_bytes] for view in data][:1], offset_bytes)

    def sync(self, fd: int) -> None:
        self._enter("sync")
        super().sync(fd)

    def close(self, fd: int) -> None:
        with self._lock:
            assert fd in self.open_fds, f"descriptor {fd} is closed twice"
            self.open_fds.remove(fd)
        super().close(fd)

    def remove(self, path: str) -> None:
        self._enter("remove")
        super().remove(path)

    def free_bytes(self, path: str) -> int:
        self._enter("free_bytes")
        return super().free_bytes(path)

    def map_memory(self, size_bytes: int) -> HostMemory:
        self._enter("map_memory")
        return super().map_memory(size_bytes)


class FakeEvent:
    """Reached when its stream gets there."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] = []

    def done(self) -> bool:
        return self._set.is_set()

    def wait(self) -> None:
        assert self._set.wait(WAIT_S), "the stream never got there"

    def reach(self) -> None:
        with self._lock:
            self._set.set()
            then, self._then = self._then, []
        for call in then:
            call()

    def then(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._set.is_set():
                self._then.append(call)
                return
        call()


class FakeStream:
    """Work in order; done at once, or when `run` is called.  A wait holds up what comes after it."""

    def __init__(self, *, manual: bool) -> None:
        self.manual = manual
        self._lock = threading.RLock()
        self._work: deque[Callable[[], None] | Event] = deque()

    def put(self, work: Callable[[], None] | Event) -> None:
        with self._lock:
            self._work.append(work)
            if not self.manual:
                self.run()

    def run(self) -> bool:
        """Do what can be done; whether it was anything."""
        ran = False
        with self._lock:
            while self._work:
                step = self._work[0]
                if callable(step):
                    self._work.popleft()
                    step()
                elif step.done():
                    self._work.popleft()
                else:
                    break
                ran = True
        return ran


class FakeCuda(CpuDevice):
    """A GPU made of host memory, whose copies happen in stream order."""

    name = "cuda:0"
    is_host = False
    multiprocessors = 4

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__(Files())
        self.manual = manual
        self.pinned: list[int] = []
        self.copies = 0
        self.pin_error: Exception | None = None
        self.copy_error: Exception | None = None
        self.entered: set[int] = set()
        self.streams: list[FakeStream] = []

    def run(self) -> None:
        """Let all streams run as far as they get."""
        ran = True
        while ran:
            ran = False
            for stream in self.streams:
                ran |= stream.run()

    def enter_thread(self) -> None:
        self.entered.add(threading.get_ident())

    def new_stream(self) -> Stream:
        self.streams.append(FakeStream(manual=self.manual))
        return self.streams[-1]

    def wait(self, stream: Stream, event: Event) -> None:
        stream.put(event)

    def record(self, stream: Stream) -> Event:
        event = FakeEvent()
        stream.put(event.reach)
        return event

    def copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        if self.copy_error is not None:
            raise self.copy_error
        self.copies += 1
        copy = super().copy
        stream.put(lambda: copy(target, source, size_bytes, stream))

    def pin(self, memory: HostMemory) -> None:
        if self.pin_error is not None:
            raise self.pin_error
        self.pinned.append(memory.address)

    def unpin(self, memory: HostMemory) -> None:
        self.pinned.remove(memory.address)


def when(event: Point, then: Callable[[], None]) -> None:
    """What a pump does, without one: a stream calls back itself, and for a future a thread waits."""
    if isinstance(event, FakeEvent):
        event.then(then)
        return

    def watch() -> None:
        pause = threading.Event()
        while not event.done():
            pause.wait(0.001)
        then()

    threading.Thread(target=watch, daemon=True).start()


def host_buffer(size_bytes: int) -> Buffer:
    """Zeroed host memory that O_DIRECT takes."""
    return Buffer.of(torch.from_numpy(Files().map_memory(size_bytes).array))


def gpu_buffer(size_bytes: int) -> Buffer:
    """Memory of a `FakeCuda`: engines must not see that it is host memory."""
    return Buffer(torch.from_numpy(Files().map_memory(size_bytes).array), None)


class FakeKvikio:
    """The part of kvikio's Python interface that is used, over plain files; with kvikio's own manners.

    A future is done on one of its threads, does not keep its buffer alive, and may be asked once.
    """

    def __init__(self, *, defaults: Sequence[str] | None = None) -> None:
        self.defaults = FakeDefaults(defaults)
        self.files: list[FakeCuFile] = []
        self.futures: list[FakeFuture] = []
        self.outcomes: list[int | Exception | None] = []
        """For the next transfers: a number of bytes to claim, an error of the future, or None."""
        self.start_error: Exception | None = None
        self.open_error: Exception | None = None
        self.gate: threading.Event | None = None
        """Transfers that start now end after this event."""
        self.damage = False
        """Whether a byte of every transfer is wrong."""
        self.lose_writes = False
        """Whether writes claim success and change nothing."""

    def CuFile(self, path: str, flags: str) -> "FakeCuFile":
        if self.open_error is not None:
            raise self.open_error
        self.files.append(FakeCuFile(self, path, flags))
        return self.files[-1]


class FakeDefaults:
    def __init__(self, names: Sequence[str] | None) -> None:
        self._names = names
        self.values: dict[str, Any] = {}

    def set(self, values: dict[str, Any]) -> None:
        for name in values:
            if self._names is not None and name not in self._names:
                raise KeyError(name)
        self.values |= values


class FakeCuFile:
    def __init__(self, kvikio: FakeKvikio, path: str, flags: str) -> None:
        assert flags == "r+", "a file is neither made nor emptied"
        self._kvikio = kvikio
        self._fd = os.open(path, os.O_RDWR)
        self.closes = 0

    def close(self) -> None:
        self.closes += 1
        if self.closes == 1:
            os.close(self._fd)

    def pread(self, buffer: Any, size: int, file_offset: int) -> "FakeFuture":
        return self._start(buffer, size, file_offset, is_read=True)

    def pwrite(self, buffer: Any, size: int, file_offset: int) -> "FakeFuture":
        return self._start(buffer, size, file_offset, is_read=False)

    def _start(self, buffer: Any, size: int, file_offset: int, *, is_read: bool) -> "FakeFuture":
        kvikio = self._kvikio
        if kvikio.start_error is not None:
            raise kvikio.start_error
        assert isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8 and buffer.nbytes == size
        address = int(buffer.ctypes.data)
        outcome = kvikio.outcomes.pop(0) if kvikio.outcomes else None
        gate = kvikio.gate

        def move() -> int:
            if gate is not None:
                assert gate.wait(WAIT_S)
            if isinstance(outcome, Exception):
                raise outcome
            if is_read and file_offset + size > os.fstat(self._fd).st_size:
                raise RuntimeError("EOF")
            if kvikio.lose_writes and not is_read:
                return size
            memory = view_memory(address, size)
            moved = (os.preadv if is_read else os.pwritev)(self._fd, [memory.data], file_offset)
            if kvikio.damage:
                memory[0] ^= 1
            return moved if outcome is None else outcome

        future = FakeFuture(move)
        kvikio.futures.append(future)
        return future


class FakeFuture:
    def __init__(self, move: Callable[[], int]) -> None:
        self.gets = 0
        self._outcome: int | Exception = 0
        self._thread = threading.Thread(target=self._run, args=(move,), daemon=True)
        self._thread.start()

    def done(self) -> bool:
        assert not self.gets, "kvikio's futures may be asked once"
        return not self._thread.is_alive()

    def get(self) -> int:
        self.gets += 1
        assert self.gets == 1, "kvikio's futures may be asked once"
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def _run(self, move: Callable[[], int]) -> None:
        try:
            self._outcome = move()
        except Exception as error:
            self._outcome = error
