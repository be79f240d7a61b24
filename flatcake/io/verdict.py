"""Whether the checksums of a plan's pieces are those that were recorded when they were written.

Pure.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from flatcake.io.pieces import SHARE, Pieces
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
    layers = len(payload_bytes)
    recorded, sizes = np.zeros((len(plan.keys), layers), np.uint32), np.array(payload_bytes, np.uint32)
    for row in plan.runs.table.tolist():
        record = records.get(ExtentRef(row[MEDIUM], row[BASE], row[ROOM], row[GENERATION]))
        if record is not None:
            slots = slice(row[FIRST_SLOT], row[FIRST_SLOT] + row[BLOCKS])
            recorded[row[FIRST_BLOCK] : row[FIRST_BLOCK] + row[BLOCKS]] = record.sums[slots]
    wanted, flat = np.empty(len(pieces.table), np.uint32), recorded.reshape(-1)
    for start in range(0, len(wanted), SHARE):
        rows = slice(start, start + SHARE)
        _, block, layer = pieces.table[rows].T
        wanted[rows] = unfinish(flat[block * layers + layer], sizes[layer], pieces.seeds[rows])
    return wanted
