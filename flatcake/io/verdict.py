"""Whether the checksums of a plan's pieces are those that were recorded when they were written.

Pure.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from flatcake.io.pieces import SHARE, Pieces
from flatcake.io.records import ExtentRef, Record
from flatcake.kernels.checksum import Sums, unfinish
from flatcake.messages import BASE, BLOCKS, FIRST_BLOCK, FIRST_SLOT, GENERATION, MEDIUM, ROOM, Plan


class WantedSums:
    """What the records of a plan's extents say, made when it is asked for."""

    def __init__(
        self, plan: Plan, pieces: Pieces, records: Mapping[ExtentRef, Record], payload_bytes: Sequence[int]
    ) -> None:
        """Look the sums of all blocks up.

        Args:
            plan, pieces: Of one restore.
            records: Of its extents.
            payload_bytes: Per layer.
        """
        self._pieces, self._layers = pieces, len(payload_bytes)
        self._sizes = np.array(payload_bytes, np.uint32)
        recorded = np.zeros((len(plan.keys), self._layers), np.uint32)
        for row in plan.runs.table.tolist():
            record = records.get(ExtentRef(row[MEDIUM], row[BASE], row[ROOM], row[GENERATION]))
            if record is not None:
                slots = slice(row[FIRST_SLOT], row[FIRST_SLOT] + row[BLOCKS])
                recorded[row[FIRST_BLOCK] : row[FIRST_BLOCK] + row[BLOCKS]] = record.sums[slots]
        self._recorded = recorded.reshape(-1)
        self._sums, self._made = np.empty(len(pieces), np.uint32), 0

    def of(self, rows: slice) -> Sums:
        """uint32 [rows]: what the copy's unfinished sums must be; of no meaning where a record is missing.

        Args:
            rows: Of pieces that are made.

        Cost: O(rows) array elements, a share at once: a verdict then only compares.
        """
        while self._made < rows.stop:
            share = slice(self._made, min(self._made + SHARE, self._pieces.made))
            _, block, layer = self._pieces.table[share].T
            recorded, sizes = self._recorded[block * self._layers + layer], self._sizes[layer]
            self._sums[share] = unfinish(recorded, sizes, self._pieces.seeds[share])
            self._made = share.stop
        return self._sums[rows]
