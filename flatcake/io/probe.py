"""Which engine serves the SSD medium: asked for, or found by writing, reading back and comparing.

The choice comes with its reason, which `stats` reports.  What cannot work is never chosen quietly: an engine
that was asked for by name works or is refused.
Read path:  index -> catalog -> plan -> ([probe] chose it) io.posix, io.staged or io.kvikio -> window
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatcake.config import IOConfig
from flatcake.errors import DeviceError
from flatcake.io.device import Device, Event, When
from flatcake.io.devices import load_kvikio
from flatcake.io.engine import Buffer, Done, Engine, Result, Transfer
from flatcake.io.filepool import FilePool
from flatcake.io.kvikio import KvikioEngine
from flatcake.io.memory import MemoryEngine
from flatcake.io.posix import PosixEngine
from flatcake.io.seam import ByteArray, Files
from flatcake.io.sizing import RingSize
from flatcake.io.staged import StagedEngine
from flatcake.units import DIRECT_BYTES, SECOND, MiB, format_bytes

log = logging.getLogger(__name__)

PROBE_BYTES = 4 * MiB
PROBE_WAIT_NS = 20 * SECOND
CLOSE_WAIT_NS = SECOND
_PATTERN_SEED = 0x5EED


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Around:
    """What an engine is built from."""

    files: Files
    device: Device
    when: When
    """How to hear that events and futures have been reached; called from any thread."""
    file_count: int
    file_bytes: int
    pool: FilePool | None
    """Needed by all but `memory`."""
    ring: RingSize
    """In front of a GPU."""
    load_kvikio: Callable[[], Any] = load_kvikio


def choose_engine(settings: IOConfig, around: Around) -> tuple[Engine, str]:
    """Build the engine for the SSD medium.

    Args:
        settings: Says which, or `auto`.
        around: Its surroundings.  No transfer of the pool may be under way; its content is left as it was.

    Returns:
        The engine, and why it is this one.

    Raises:
        DeviceError: An engine that was asked for by name cannot work; says why.
        CapacityError: No memory for staging.
    """
    asked = settings.engine
    if asked == "memory":
        return MemoryEngine(around.file_count, around.file_bytes), "memory: asked for; nothing outlives the process"
    if asked == "cufile":
        raise DeviceError("io.engine cufile: this build has no proven GPUDirect Storage path; use auto or kvikio")
    assert around.pool is not None, "an engine for files needs a pool"
    if asked == "posix":
        return _posix(settings, around, around.pool), "posix: asked for"
    if asked == "auto" and around.device.is_host:
        return _posix(settings, around, around.pool), "posix: there is no GPU"
    found = _try_kvikio(settings, around, around.pool)
    if not isinstance(found, str):
        compared = format_bytes(_probe_bytes(around, around.pool))
        return found, f"{found.name}: wrote, read back and compared {compared}"
    if asked == "kvikio":
        raise DeviceError(f"io.engine kvikio cannot be used: {found}; use auto or posix")
    log.warning("kvikio is not used, reads are staged in host memory: %s", found)
    engine = _posix(settings, around, around.pool)
    return engine, f"{engine.name}: kvikio is not used, as {found}"


def posix_threads(processors: int) -> int:
    """Threads of the posix engine: a disk wants several reads at once, however few the processors."""
    return min(12, max(8, processors * 3 // 4))


def kvikio_threads(processors: int) -> int:
    """Threads of kvikio's pool: all processors but two, since the pump needs one of its own."""
    return min(16, max(4, processors - 2))


def _posix(settings: IOConfig, around: Around, pool: FilePool) -> Engine:
    threads = settings.io_threads or posix_threads(around.files.processors())
    return _stage(PosixEngine(around.files, pool.fds, threads=threads, task_bytes=settings.task_bytes), around)


def _stage(engine: Engine, around: Around) -> Engine:
    """Put a ring in front of an engine that cannot reach the window's memory."""
    if around.device.is_host:
        return engine
    try:
        return StagedEngine(engine, around.device, around.files, around.ring, around.when)
    except BaseException:
        engine.close(CLOSE_WAIT_NS)
        raise


def _try_kvikio(settings: IOConfig, around: Around, pool: FilePool) -> Engine | str:
    """The engine, if its probe passes; else the reason."""
    try:
        kvikio = KvikioEngine(
            around.load_kvikio(),
            pool.paths,
            around.when,
            threads=settings.kvikio_threads or kvikio_threads(around.files.processors()),
            task_bytes=settings.kvikio_task_bytes,
            direct=pool.direct,
        )
    except Exception as error:  # kvikio and its libraries raise whatever they like.
        return f"it cannot be set up ({error})"
    engine = _stage(kvikio, around)
    try:
        fault = _compare(engine, around, pool)
    except (OSError, RuntimeError) as error:
        fault = f"its probe failed ({error})"
    if fault is None:
        return engine
    engine.close(CLOSE_WAIT_NS)
    return fault


def _compare(engine: Engine, around: Around, pool: FilePool) -> str | None:
    """Move a pattern through the engine and compare; the reason when it does not come back."""
    size_bytes = _probe_bytes(around, pool)
    pattern = np.random.default_rng(_PATTERN_SEED).integers(0, 256, size_bytes, dtype=np.uint8)
    before = _whole(around.files, pool.fds[0], size_bytes)
    source, target = (Buffer.of(around.device.window(size_bytes)) for _ in range(2))
    stream = around.device.new_stream()

    def across(to: int, of: int) -> None:
        around.device.copy(to, of, size_bytes, stream)
        around.device.record(stream).wait()

    across(source.address, int(pattern.ctypes.data))
    try:
        fault = _run(engine.write, source, size_bytes)
        if fault is None and not np.array_equal(_whole(around.files, pool.fds[0], size_bytes), pattern):
            fault = "what it wrote is not what the file holds"
        fault = fault or _run(engine.read, target, size_bytes)
        back = np.empty_like(pattern)
        across(int(back.ctypes.data), target.address)
        if fault is None and not np.array_equal(back, pattern):
            fault = "what it read is not what the file holds"
        return fault
    finally:
        if pool.kept:
            _put_back(around.files, pool.fds[0], before)


def _probe_bytes(around: Around, pool: FilePool) -> int:
    return min(PROBE_BYTES, pool.file_bytes, around.ring.buffer_bytes)


def _run(call: Callable[[Sequence[Transfer], Buffer, Done], None], buffer: Buffer, size_bytes: int) -> str | None:
    """One batch of two transfers, the first a small one; what was wrong with it."""
    small_bytes = min(3 * DIRECT_BYTES, size_bytes - DIRECT_BYTES)
    cuts = [(0, small_bytes), (small_bytes, size_bytes - small_bytes)]
    batch = [Transfer(0, start, step, start) for start, step in cuts if step > 0]
    ended, results, points = threading.Event(), list[Result](), list[Event]()

    def done(given: list[Result], ready: Event) -> None:
        results.extend(given)
        points.append(ready)
        ended.set()

    call(batch, buffer, done)
    if not ended.wait(PROBE_WAIT_NS / 1e9):
        return "it did not answer in time"
    points[0].wait()
    wrong = [result for result, sent in zip(results, batch, strict=True) if result != Result(sent.size_bytes, 0)]
    return f"it answered {wrong[0]}" if wrong else None


def _whole(files: Files, fd: int, size_bytes: int) -> ByteArray:
    """The first bytes of a pool file, by plain system calls into aligned memory."""
    memory = files.map_memory(size_bytes).array
    moved_bytes = 0
    while moved_bytes < size_bytes:
        step = files.read(fd, [memory.data[moved_bytes:]], moved_bytes)
        if step <= 0:
            raise OSError(f"a pool file ends after {moved_bytes} bytes")
        moved_bytes += step
    return memory


def _put_back(files: Files, fd: int, content: ByteArray) -> None:
    moved_bytes = 0
    while moved_bytes < content.nbytes:
        step = files.write(fd, [content.data[moved_bytes:]], moved_bytes)
        if step <= 0:
            raise OSError(f"a pool file takes no more than {moved_bytes} bytes")
        moved_bytes += step
