"""The transfers of one tile, over all media, answered once.

Read path:  plan -> [tilebatch] -> engines -> slot
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from flatcake.gva import Medium
from flatcake.io.device import Event
from flatcake.io.engine import Buffer, Result, transfers_of
from flatcake.io.parts import Parts
from flatcake.io.pieces import Pieces
from flatcake.io.plan import TilePlan
from flatcake.layout import LaneTable
from flatcake.messages import Int64Array

Answer = Callable[[int, Buffer, list[Result], Sequence[Event]], None]
"""Told the tile, its slot, a result for each read or write, and the points after which what was read is in the slot."""
Move = Callable[[int, Buffer, Answer], None]
"""Starts all transfers of a tile between the media and a slot; the answer comes on the pump's thread."""


def tile_mover(parts: Parts, tiles: TilePlan, *, write: bool) -> Move:
    """What moves the tiles of one plan, all in one direction."""
    media = sorted(set(tiles.reads[:, 0].tolist()))
    shares = [_Share(parts, tiles, Medium(medium), write=write) for medium in media]
    return shares[0].move if len(shares) == 1 else _Joint(shares).move


class _Joint:
    """Moves tiles that several media have a share in."""

    def __init__(self, shares: "list[_Share]") -> None:
        self._shares = shares

    def move(self, tile: int, slot: Buffer, answer: Answer) -> None:
        shares = [share for share in self._shares if share.has(tile)]
        if len(shares) == 1:
            shares[0].move(tile, slot, answer)
            return
        results: dict[int, Result] = {}
        points: list[Event] = []

        def collect(share: _Share, _: int, __: Buffer, found: list[Result], ready: Sequence[Event]) -> None:
            results.update(zip(share.numbers(tile), found, strict=True))
            points.extend(ready)
            if len(points) == len(shares):
                answer(tile, slot, [results[number] for number in sorted(results)], points)

        for share in shares:
            share.move(tile, slot, partial(collect, share))


class _Share:
    """What one medium has to do with the tiles of a plan."""

    def __init__(self, parts: Parts, tiles: TilePlan, medium: Medium, *, write: bool) -> None:
        io, verb = parts.media[medium], "write" if write else "read"
        self._reads = (tiles.reads[:, 0] == medium).nonzero()[0]
        rows = tiles.reads[self._reads]  # medium and offset become file and offset
        rows[:, 0], rows[:, 1] = io.locate(rows[:, 1])
        self._transfers = transfers_of(rows.tolist())
        bounds = self._reads.searchsorted(tiles.tile_reads)
        self._bounds: list[int] = bounds.tolist()
        ends = np.zeros(len(rows) + 1, np.int64)
        rows[:, 2].cumsum(out=ends[1:])
        self._sizes: list[int] = (ends[bounds[1:]] - ends[bounds[:-1]]).tolist()
        """Bytes of each tile."""
        self._start = io.engine.write if write else io.engine.read
        self._post, self._counts = parts.pump.post, parts.counts
        self._medium, self._written = medium, parts.written_bytes if write else None
        self._bytes, self._commands = f"{verb}_bytes:{io.engine.name}", f"{verb}s:{io.engine.name}"

    def has(self, tile: int) -> bool:
        return self._bounds[tile] < self._bounds[tile + 1]

    def numbers(self, tile: int) -> list[int]:
        """Its reads in a tile, as rows of the plan."""
        numbers: list[int] = self._reads[self._bounds[tile] : self._bounds[tile + 1]].tolist()
        return numbers

    def move(self, tile: int, slot: Buffer, answer: Answer) -> None:
        batch = self._transfers[self._bounds[tile] : self._bounds[tile + 1]]
        self._counts[self._bytes] += self._sizes[tile]
        if self._written is not None:
            self._written[self._medium] += self._sizes[tile]
        self._counts[self._commands] += len(batch)
        self._start(batch, slot, lambda found, ready: self._post(partial(answer, tile, slot, found, (ready,))))


def bad_pieces(lanes: LaneTable, tiles: TilePlan, pieces: Pieces, tile: int, results: list[Result]) -> list[int]:
    """Pieces of a tile whose bytes did not all arrive, as rows of `pieces`; empty when all is well."""
    first = int(tiles.tile_reads[tile])
    begin, end = int(pieces.tile_pieces[tile]), int(pieces.tile_pieces[tile + 1])
    segments = slice(int(tiles.tile_segments[tile]), int(tiles.tile_segments[tile + 1]))
    read_of = np.repeat(tiles.segment_read[segments], tiles.segments[segments, 3]) - first
    moved: Int64Array = np.array([result.moved_bytes for result in results], np.int64)
    good_end = tiles.reads[first : first + len(results), 3] + moved
    piece_end = pieces.table[begin:end, 0] + lanes.piece_bytes[pieces.table[begin:end, 2]]
    rows: list[int] = (begin + np.flatnonzero(piece_end > good_end[read_of])).tolist()
    return rows
