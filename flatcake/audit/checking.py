"""Reads every stored block and compares it with its record: as a restore does, but in the order of the media.

Batches of runs become tiles by the restore path's own planning, records and verdicts are its own too; only the
pages are missing.  The threads of the engine read and sum; memory does not grow with the store.
"""

import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from flatcake.about import About
from flatcake.audit.sources import Sources
from flatcake.audit.verdicts import CHECKSUM, NO_FILE, NO_RECORD, Outcome, Verdict, Verdicts, unreadable
from flatcake.dataplane import layout_number
from flatcake.io.device import Event
from flatcake.io.engine import Buffer, Engine, Result, Transfer
from flatcake.io.pieces import Work
from flatcake.io.plan import PlanLimits, make_tiles
from flatcake.io.records import ExtentRef, Record, RecordBook, aligned_bytes, extents_of
from flatcake.io.tilebatch import bad_pieces
from flatcake.io.verdict import WantedSums
from flatcake.kernels.checksum import SUM_KIND, Sums, sum_parts
from flatcake.layout import LaneTable
from flatcake.manifest import BASE_BYTES, COUNT, EXTENT_GENERATION, ROOM_BLOCKS, SLOT, Stored
from flatcake.messages import (
    BASE,
    BLOCKS,
    FIRST_BLOCK,
    FIRST_SLOT,
    GENERATION,
    MEDIUM,
    ROOM,
    Flags,
    Int64Array,
    Plan,
    PlanKind,
    Runs,
)
from flatcake.units import DIRECT_BYTES, MiB, align_up

SLOT_BYTES = 8 * MiB
SLOTS = 8
BATCH_PIECES = 1 << 17
"""Pieces that are looked at together: about 10 MB of arrays."""
ALONE_BYTES = 1 * MiB
"""An extent with so many bytes of blocks is planned alone."""

Advance = Callable[[int], None]
"""Told of bytes that have been checked."""


@dataclass(frozen=True, eq=False, slots=True)
class _Batch:
    """Some blocks, planned as one request."""

    work: Work
    blocks: Int64Array
    """int64 [blocks of the request]: where they are in the manifest's order."""
    wanted: Sums
    """uint32 [pieces]: unfinished checksums."""


class _Answer(NamedTuple):
    """How a tile fared; blocks as in the manifest."""

    slot: Buffer
    size_bytes: int
    unread: Int64Array
    error: int
    failed: Int64Array


class Checker:
    """Checks the blocks of one store."""

    def __init__(
        self,
        about: About,
        sources: Sources,
        engine: Engine,
        verdicts: Verdicts,
        advance: Advance,
        batch_pieces: int = BATCH_PIECES,
    ) -> None:
        self._sources, self._engine, self._verdicts, self._advance = sources, engine, verdicts, advance
        self._lanes, self._layout = LaneTable.of(about.geometry), layout_number(about.geometry.fingerprint())
        layers = range(about.geometry.layer_count)
        self._payload_bytes = [about.geometry.payload_bytes(layer) for layer in layers]
        self._parts = [component_parts(about, layer) for layer in layers]
        self._has_sums = about.verify
        slot_bytes = max(SLOT_BYTES, align_up(self._lanes.piece_bytes_max, DIRECT_BYTES))
        self._limits = PlanLimits(
            gap_bytes_limit=0,
            read_bytes_max=slot_bytes,
            slot_bytes=slot_bytes,
            file_bytes=about.pool_file_bytes,
            first_tile_bytes=slot_bytes,
        )
        self._book = RecordBook(self._lanes, self._layout, sum_kind=SUM_KIND, bytes_max=0)
        self._slots = [Buffer.of(torch.from_numpy(aligned_bytes(slot_bytes))) for _ in range(SLOTS)]
        self._answers: queue.SimpleQueue[_Answer | BaseException] = queue.SimpleQueue()
        self._batch_pieces = batch_pieces
        self.buffer_bytes = SLOTS * slot_bytes
        self.read_bytes = 0

    def check(self, runs: Int64Array, stored: Stored) -> None:
        """Check blocks: those are good in the end of which nothing else was said.

        Args:
            runs: As in `Runs`, disjoint and in the order of the media; their blocks are those of `stored`.
            stored: Keys.
        """
        is_missing = self._sources.is_missing(runs)
        self._fail(runs[is_missing], NO_FILE)
        runs = runs[~is_missing]
        self._verdicts.give(_blocks_of(runs), Verdict(Outcome.GOOD if self._has_sums else Outcome.UNCHECKED))
        for table in _batches(runs, max(1, self._batch_pieces // self._lanes.layer_count)):
            table, records = self._load(table) if self._has_sums else (table, {})
            for part in _extents_apart(table, max(1, ALONE_BYTES // self._lanes.block_bytes)):
                self._start(part, records, stored)
        while len(self._slots) < SLOTS:
            self._settle()

    def _fail(self, table: Int64Array, verdict: Verdict) -> None:
        """All blocks of some runs have failed, unread."""
        blocks = _blocks_of(table)
        self._verdicts.give(blocks, verdict)
        self._advance(len(blocks) * self._lanes.block_bytes)

    def _load(self, table: Int64Array) -> tuple[Int64Array, dict[ExtentRef, Record]]:
        """The records of the extents, and the runs that have one; the blocks of the others have failed."""
        refs = extents_of(Runs(table))
        answers: queue.SimpleQueue[tuple[Record, Result]] = queue.SimpleQueue()
        for ref in refs:
            self._read_record(self._book.empty(ref), answers)
        found: dict[ExtentRef, Record] = {}
        errors: dict[ExtentRef, int] = {}
        for _ in refs:
            record, result = answers.get()
            self.read_bytes += result.moved_bytes
            accepted = self._book.accept(record) if not result.error else None
            if accepted is not None:
                found[record.ref] = accepted
            else:
                errors[record.ref] = result.error
        of_rows = [ExtentRef(*row) for row in table[:, [MEDIUM, BASE, ROOM, GENERATION]].tolist()]
        for error in set(errors.values()):
            mine = np.array([errors.get(ref) == error for ref in of_rows], np.bool_)
            self._fail(table[mine], unreadable(error) if error else NO_RECORD)
        return table[np.array([ref in found for ref in of_rows], np.bool_)], found

    def _read_record(self, record: Record, answers: "queue.SimpleQueue[tuple[Record, Result]]") -> None:
        batch = [self._transfer(record.ref.medium, record.ref.base_bytes, record.raw.nbytes, 0)]
        buffer = record.buffer
        self._engine.read(batch, buffer, lambda results, _: answers.put((record, results[0])))

    def _start(self, table: Int64Array, records: Mapping[ExtentRef, Record], stored: Stored) -> None:
        """Start reading some runs, a slot each tile; what has come back meanwhile is noted."""
        blocks = _blocks_of(table)
        table = table.copy()
        table[:, FIRST_BLOCK] = np.cumsum(table[:, BLOCKS]) - table[:, BLOCKS]
        plan = Plan(kind=PlanKind.RESTORE, plan_id=0, runs=Runs(table), keys=stored.keys[blocks])
        work = Work(plan, make_tiles(plan.runs, self._lanes, self._limits), self._lanes, self._layout)
        pieces = work.pieces.complete()
        batch = _Batch(work, blocks, WantedSums(plan, pieces, records, self._payload_bytes).of(slice(len(pieces))))
        for tile in range(work.tiles.tiles):
            if not self._slots:
                self._settle()
            self._read(batch, tile, self._slots.pop())

    def _settle(self) -> None:
        """Wait for a tile, and note what the threads make of it."""
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        self._slots.append(answer.slot)
        self._verdicts.give(answer.unread, unreadable(answer.error))
        self._verdicts.give(answer.failed, CHECKSUM)
        self._advance(answer.size_bytes)

    def _read(self, batch: _Batch, tile: int, slot: Buffer) -> None:
        tiles = batch.work.tiles
        rows = tiles.reads[int(tiles.tile_reads[tile]) : int(tiles.tile_reads[tile + 1])].tolist()
        self.read_bytes += sum(row[2] for row in rows)

        def finish(results: list[Result], _: Event) -> None:
            try:
                self._answers.put(self._judge(batch, tile, slot, results))
            except BaseException as error:  # A thread's top; the checker raises it.
                self._answers.put(error)

        self._engine.read([self._transfer(*row) for row in rows], slot, finish)

    def _judge(self, batch: _Batch, tile: int, slot: Buffer, results: list[Result]) -> _Answer:
        """Compare a tile's pieces with their records; on a thread of the engine."""
        tiles, pieces = batch.work.tiles, batch.work.pieces
        rows = np.arange(int(pieces.tile_pieces[tile]), int(pieces.tile_pieces[tile + 1]))
        size_bytes = int(self._lanes.piece_bytes[pieces.table[rows, 2]].sum())
        unread = bad_pieces(self._lanes, tiles, pieces, tile, results)
        failed = np.empty(0, np.int64)
        if self._has_sums:
            segments = slice(int(tiles.tile_segments[tile]), int(tiles.tile_segments[tile + 1]))
            sums = self._sum(slot, tiles.segments[segments], pieces.seeds[rows])
            # What did not come fails here as well; that it could not be read is said first.
            failed = np.unique(pieces.table[rows][sums != batch.wanted[rows], 1])
        error = next((result.error for result in results if result.error), 0)
        unread_blocks = np.unique(pieces.table[unread, 1])
        return _Answer(slot, size_bytes, batch.blocks[unread_blocks], error, batch.blocks[failed])

    def _sum(self, slot: Buffer, segments: Int64Array, seeds: Sums) -> Sums:
        """Unfinished checksums, uint32 [pieces], of the segments of a tile."""
        assert slot.host is not None
        sums, at = np.empty(len(seeds), np.uint32), 0
        for offset, layer, _, blocks in segments.tolist():
            size_bytes = int(self._lanes.piece_bytes[layer])
            lane = slot.host[offset : offset + blocks * size_bytes].reshape(blocks, size_bytes)
            sums[at : at + blocks] = sum_parts(lane, self._parts[layer], seeds[at : at + blocks])
            at += blocks
        return sums

    def _transfer(self, medium: int, offset_bytes: int, size_bytes: int, buffer_offset: int) -> Transfer:
        file, at = self._sources.locate(medium, offset_bytes)
        return Transfer(file, at, size_bytes, buffer_offset)


def runs_of_rows(stored: Stored, is_kept: Flags) -> Int64Array:
    """The runs of some rows, as in `Runs`, in the order of the media; their blocks are those of `stored`."""
    row = np.repeat(np.arange(len(stored)), stored.part_counts)
    counts = stored.parts[:, COUNT]
    first = np.cumsum(counts) - counts
    columns = [stored.parts[:, name] for name in (BASE_BYTES, ROOM_BLOCKS, EXTENT_GENERATION, SLOT, COUNT)]
    table = np.column_stack([stored.media[row], *columns, first])[is_kept[row]]
    order = np.lexsort((table[:, FIRST_SLOT], table[:, BASE], table[:, MEDIUM]))
    return np.ascontiguousarray(table[order])


def component_parts(about: About, layer: int) -> list[tuple[int, int]]:
    """Offset and size in a piece of each component's share, in bytes."""
    shape = about.geometry
    sizes = (component.page_bytes * shape.pages_per_block for component in shape.layers[layer])
    return list(zip(shape.component_offsets(layer), sizes, strict=True))


def _blocks_of(table: Int64Array) -> Int64Array:
    """The blocks of some runs, one after another."""
    counts = table[:, BLOCKS]
    firsts = np.cumsum(counts) - counts
    blocks: Int64Array = np.arange(int(counts.sum())) + np.repeat(table[:, FIRST_BLOCK] - firsts, counts)
    return blocks


def _extents_apart(table: Int64Array, alone_min: int) -> Iterator[Int64Array]:
    """Cut runs, in the order of the media, so that each extent of at least so many blocks is alone.

    Then its lanes come one after another, and touch where it is full: few large reads.
    """
    cuts = np.flatnonzero((np.diff(table[:, MEDIUM]) != 0) | (np.diff(table[:, BASE]) != 0)) + 1
    small: list[Int64Array] = []
    for extent in np.split(table, cuts) if len(table) else ():
        if int(extent[:, BLOCKS].sum()) >= alone_min:
            yield extent
        else:
            small.append(extent)
    if small:
        yield np.concatenate(small)


def _batches(runs: Int64Array, blocks_max: int) -> Iterator[Int64Array]:
    """Cut runs into groups of at most so many blocks."""
    rows: list[list[int]] = []
    room = blocks_max
    for row in runs.tolist():
        while row[BLOCKS]:
            taken = min(room, row[BLOCKS])
            rows.append([*row[:BLOCKS], taken, row[FIRST_BLOCK]])
            row[FIRST_SLOT] += taken
            row[BLOCKS] -= taken
            row[FIRST_BLOCK] += taken
            room -= taken
            if not room:
                yield np.array(rows, np.int64)
                rows, room = [], blocks_max
    if rows:
        yield np.array(rows, np.int64)
