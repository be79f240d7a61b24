"""Whether the checksums of a plan's pieces are those that were recorded when they were written.

Pure.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from flatcake.io.pieces import Pieces
from flatcake.io.records import ExtentRef, Record
from flatcake.kernels.checksum import Sums, finish
from flatcake.messages import BASE, BLOCKS, FIRST_BLOCK, FIRST_SLOT, GENERATION, MEDIUM, ROOM, Int64Array, Plan


def expected_sums(plan: Plan, pieces: Pieces, records: Mapping[ExtentRef, Record], layers: int) -> Sums:
    """uint32 [pieces]: what each piece's finished checksum must be; 0 where the record is missing."""
    by_block = np.zeros((len(plan.keys), layers), np.uint64)
    for row in plan.runs.table.tolist():
        record = records.get(ExtentRef(row[MEDIUM], row[BASE], row[ROOM], row[GENERATION]))
        if record is not None:
            slots = slice(row[FIRST_SLOT], row[FIRST_SLOT] + row[BLOCKS])
            by_block[row[FIRST_BLOCK] : row[FIRST_BLOCK] + row[BLOCKS]] = record.sums[slots]
    return by_block[pieces.table[:, 1], pieces.table[:, 2]].astype(np.uint32)


def failed_blocks(
    sums: Sums, expected: Sums, seeds: Sums, table: Int64Array, payload_bytes: Sequence[int]
) -> Int64Array:
    """Blocks of the request whose pieces differ from what was recorded.

    Args:
        sums: uint32 [n], unfinished, as the copy computed them.
        expected: uint32 [n], as recorded.
        seeds: uint32 [n].
        table: int64 [n, 3], the pieces.
        payload_bytes: Per layer.
    """
    sizes = np.asarray(payload_bytes, np.int64)[table[:, 2]]
    return np.unique(table[finish(sums, sizes, seeds) != expected, 1])
