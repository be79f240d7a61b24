"""Measures a directory: O_DIRECT, bare transfers, and restores from a small store, all through the real parts.

Opens a store in a fresh directory of its own, so that the engine is the one that `open` chooses, and removes it
again.  Bare reads and restores take turns: a disk that others use too then slows both down alike.  A restore
from memory shows what copies and checksums cost without the disk; the slower of the two is the prediction.
"""

import errno
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from flatcake.clock import Clock
from flatcake.config import StoreConfig
from flatcake.doctor.bench import BLOCK_BYTES, Bench, Try
from flatcake.doctor.direct import probe_direct
from flatcake.doctor.facts import DirectFacts, DiskFacts, EngineFacts, Probes, RestoreFacts
from flatcake.errors import CapacityError
from flatcake.gva import Medium
from flatcake.io.seam import Files
from flatcake.units import SECOND, MiB

SIZE_BYTES_MIN = 16 * MiB
"""Least that makes a figure."""
ROUNDS_MAX = 5
ROUNDS_NS_MAX = 6 * SECOND


class _Rounds(NamedTuple):
    """Bytes a second of bare reads, and restores from each medium."""

    reads: list[float]
    tries: dict[Medium, list[Try]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found out; None where it was not."""

    direct: DirectFacts | None = None
    engine: EngineFacts | None = None
    disk: DiskFacts | None = None
    restore: RestoreFacts | None = None


def measure(
    probes: Probes, files: Files, clock: Clock, *, config: StoreConfig, directory: str, size_bytes: int
) -> Measured:
    """Measure, in a fresh directory that is gone afterwards.

    Args:
        probes: Keeps what went wrong.
        files: System calls.
        clock: Monotonic time.
        config: Settings of the store; its sizes and directories are replaced by small ones.
        directory: Must be there, and writable.
        size_bytes: How much to write and to save at most; as much again is taken while restores run.

    Raises:
        OSError: The fresh directory cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=directory, ignore_cleanup_errors=True) as scratch:
        found = Measured(direct=probes.get("O_DIRECT", lambda: probe_direct(files, scratch)))
        fits_bytes = probes.get("free space to measure in", lambda: _fit(files, scratch, size_bytes))
        if fits_bytes is not None:
            make = partial(Bench, files, clock, config, f"{scratch}/pool", fits_bytes)
            found = _through_a_store(probes, make, found)
    probes.get("cleaning up", lambda: _require_gone(scratch))
    return found


def _through_a_store(probes: Probes, make: Callable[[], Bench], found: Measured) -> Measured:
    bench = probes.get("a store", make)
    if bench is None:
        return found
    try:
        found = replace(found, engine=bench.engine)
        written = probes.get("writes", bench.write)
        if written is None:
            return found
        rounds = _in_turn(probes, bench, written[0])
        if not rounds.reads:
            return found
        disk = DiskFacts(size_bytes=written[0], write_bytes_s=written[1], read_bytes_s=statistics.median(rounds.reads))
        return replace(found, disk=disk, restore=_compared(disk, rounds))
    finally:
        probes.get("closing", bench.close)


def _in_turn(probes: Probes, bench: Bench, size_bytes: int) -> _Rounds:
    """Bare reads, restores from the disk, and restores from memory, until the time or the rounds are up."""
    blocks = max(1, size_bytes // BLOCK_BYTES)
    saved = {medium: probes.get(f"save to {medium.name}", partial(bench.save, medium, blocks)) for medium in Medium}
    rounds = _Rounds([], {medium: [] for medium in Medium})
    until_ns = bench.clock.now_ns() + ROUNDS_NS_MAX
    while len(rounds.reads) < ROUNDS_MAX and bench.clock.now_ns() < until_ns:
        rate = probes.get("reads", partial(bench.read, size_bytes))
        if rate is None:
            break
        rounds.reads.append(rate)
        for medium, count in saved.items():
            if count is None:
                continue
            compare = not rounds.tries[medium]
            attempt = probes.get(f"restore from {medium.name}", partial(bench.restore, medium, count, compare=compare))
            if attempt is None:
                saved[medium] = None
            else:
                rounds.tries[medium].append(attempt)
    return rounds


def _compared(disk: DiskFacts, rounds: _Rounds) -> RestoreFacts | None:
    """What the slower of disk and processor predicts, beside what was measured."""
    tries, from_memory = rounds.tries[Medium.SSD], rounds.tries[Medium.DRAM]
    if not tries:
        return None
    rates = [attempt.read_bytes * 1e9 / attempt.total_ns for attempt in from_memory]
    memory_bytes_s = statistics.median(rates) if rates else None
    return RestoreFacts(
        size_bytes=tries[0].read_bytes,
        reads=tries[0].reads,
        rounds=len(tries),
        memory_bytes_s=memory_bytes_s,
        predicted_ns=int(tries[0].read_bytes * 1e9 / min(disk.read_bytes_s, memory_bytes_s or disk.read_bytes_s)),
        measured_ns=int(statistics.median(attempt.total_ns for attempt in tries)),
        right=all(attempt.right for attempt in (*tries, *from_memory)),
    )


def _require_gone(scratch: str) -> None:
    if os.path.exists(scratch):
        raise OSError(errno.ENOTEMPTY, "could not be removed; remove it by hand", scratch)


def _fit(files: Files, directory: str, size_bytes: int) -> int:
    """At most a quarter of the free space, so that even a small disk is measured and none is filled."""
    try:
        quarter = files.free_bytes(directory) // 4
    except OSError:
        return size_bytes  # Preallocation refuses what does not fit.
    if quarter < SIZE_BYTES_MIN:
        raise CapacityError(f"{directory}: {quarter * 4} bytes free, {SIZE_BYTES_MIN * 4} needed to measure")
    return min(size_bytes, quarter)
