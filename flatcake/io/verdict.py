"""Whether the checksums of a plan's pieces are those that were recorded when they were written.

Pure.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from flatcake.io.pieces import Pieces
from flatcake.io.records import ExtentRef, Record
from flatcake.kernels.checksum import Sums, unfinish
from flatcake.messages import BASE, BLOCKS, FIRST_BLOCK, FIRST_SLOT, GENERATION, MEDIUM, ROOM, Plan


def wanted_sums(plan: Plan, pieces: Pieces, records: Mapping[ExtentRef, Record], payload_bytes: Sequence[int]) -> Sums:
    """uint32 [pieces]: what the copy's unfinished sum of each piece must be; of no meaning where a record is missing.

    Args:
        plan, pieces: Of one restore.
        records: Of its extents.
        payload_bytes: Per layer.

    Cost: O(pieces) array elements, once a restore: a verdict then only compares.
    """
    by_block = np.zeros((len(plan.keys), len(payload_bytes)), np.uint64)
    for row in plan.runs.table.tolist():
        record = records.get(ExtentRef(row[MEDIUM], row[BASE], row[ROOM], row[GENERATION]))
        if record is not None:
            slots = slice(row[FIRST_SLOT], row[FIRST_SLOT] + row[BLOCKS])
            by_block[row[FIRST_BLOCK] : row[FIRST_BLOCK] + row[BLOCKS]] = record.sums[slots]
    blocks, layers = pieces.table[:, 1], pieces.table[:, 2]
    recorded = by_block[blocks, layers].astype(np.uint32)
    return unfinish(recorded, np.asarray(payload_bytes, np.int64)[layers], pieces.seeds)
