"""The transfers of one tile, over all media, answered once.

Read path:  plan -> [tilebatch] -> engines -> slot
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from flatcake.gva import Medium
from flatcake.io.device import Stream
from flatcake.io.engine import Buffer, Result, Transfer
from flatcake.io.parts import Parts
from flatcake.io.pieces import Pieces
from flatcake.io.plan import TilePlan
from flatcake.layout import LaneTable
from flatcake.messages import Int64Array

Answer = Callable[[list[Result]], None]


class TileMover:
    """Moves the tiles of one plan between the media and slots, all in one direction."""

    def __init__(self, parts: Parts, tiles: TilePlan, stream: Stream, *, write: bool) -> None:
        self._parts, self._stream = parts, stream
        self._rows: list[list[int]] = tiles.reads.tolist()
        self._bounds: list[int] = tiles.tile_reads.tolist()
        self._write = write
        self._verb = "write" if write else "read"

    def move(self, tile: int, slot: Buffer, answer: Answer) -> None:
        """Start all transfers of a tile; `answer` comes on the pump's thread with a result for each read."""
        rows = self._rows[self._bounds[tile] : self._bounds[tile + 1]]
        results = [Result(0, 0)] * len(rows)
        media = sorted({row[0] for row in rows})
        waiting = len(media)

        def collect(numbers: list[int], found: list[Result]) -> None:
            nonlocal waiting
            for number, result in zip(numbers, found, strict=True):
                results[number] = result
            waiting -= 1
            if not waiting:
                answer(results)

        for medium in media:
            numbers = [number for number, row in enumerate(rows) if row[0] == medium]
            batch = [self._parts.transfer(*rows[number]) for number in numbers]
            self._submit(Medium(medium), batch, slot, partial(collect, numbers))

    def _submit(self, medium: Medium, batch: list[Transfer], slot: Buffer, collect: Answer) -> None:
        parts, engine = self._parts, self._parts.media[medium].engine
        parts.counts[f"{self._verb}_bytes:{engine.name}"] += sum(transfer.size_bytes for transfer in batch)
        parts.counts[f"{self._verb}s:{engine.name}"] += len(batch)
        move = engine.write if self._write else engine.read
        move(batch, slot, self._stream, lambda found: parts.pump.post(partial(collect, found)))


def bad_pieces(lanes: LaneTable, tiles: TilePlan, pieces: Pieces, tile: int, results: list[Result]) -> list[int]:
    """Pieces of a tile whose bytes did not all arrive, as rows of `pieces`; empty when all is well."""
    first = int(tiles.tile_reads[tile])
    sizes = tiles.reads[first : first + len(results), 2].tolist()
    if all(not r.error and r.moved_bytes == size for r, size in zip(results, sizes, strict=True)):
        return []
    begin, end = int(pieces.tile_pieces[tile]), int(pieces.tile_pieces[tile + 1])
    segments = slice(int(tiles.tile_segments[tile]), int(tiles.tile_segments[tile + 1]))
    read_of = np.repeat(tiles.segment_read[segments], tiles.segments[segments, 3]) - first
    moved: Int64Array = np.array([result.moved_bytes for result in results], np.int64)
    good_end = tiles.reads[first : first + len(results), 3] + moved
    piece_end = pieces.table[begin:end, 0] + lanes.piece_bytes[pieces.table[begin:end, 2]]
    rows: list[int] = (begin + np.flatnonzero(piece_end > good_end[read_of])).tolist()
    return rows
