"""The sums that a restore must find, from the records of its extents."""

import numpy as np

from flatcake.io.pieces import Work
from flatcake.io.plan import make_tiles
from flatcake.io.records import ExtentRef, Record, RecordBook
from flatcake.io.verdict import WantedSums
from flatcake.kernels.checksum import SUM_KIND, finish
from flatcake.layout import LaneTable
from flatcake.messages import Plan, PlanKind, Runs
from tests.builders import make_geometry, make_keys, make_limits

LAYERS = 3
LANES = LaneTable.of(make_geometry(*[4096] * LAYERS))
REFS = [ExtentRef(1, 0, 8, 5), ExtentRef(0, 0, 4, 6)]
ROWS = [(1, 0, 8, 5, 2, 3, 0), (0, 0, 4, 6, 1, 2, 3)]
"""Blocks 0 … 2 in slots 2 … 4 of the first extent, blocks 3 and 4 in slots 1 and 2 of the second."""


def setup() -> tuple[Plan, dict[ExtentRef, Record]]:
    plan = Plan(kind=PlanKind.RESTORE, plan_id=1, runs=Runs(np.array(ROWS, np.int64)), keys=make_keys("a", 6))
    book, records = RecordBook(LANES, 1, sum_kind=SUM_KIND, bytes_max=1 << 20), {}
    for number, ref in enumerate(REFS):
        records[ref] = book.blank(ref)
        shape = records[ref].sums.shape
        records[ref].sums[:] = 1000 * (number + 1) + 10 * np.arange(shape[0])[:, None] + np.arange(shape[1])
    return plan, records


def test_wanted_sums_come_from_the_slot_and_layer_of_each_piece() -> None:
    plan, records = setup()
    pieces = Work(plan, make_tiles(plan.runs, LANES, make_limits()), LANES, 1).pieces.complete()
    wanted = {}
    for (*_, slot, count, first), base in zip(ROWS, (1000, 2000), strict=True):
        for nth in range(count):
            for layer in range(LAYERS):
                wanted[first + nth, layer] = base + 10 * (slot + nth) + layer
    payload = [100, 200, 300]
    sizes = np.array(payload)[pieces.table[:, 2]]
    everything, wanted_sums = slice(len(pieces)), WantedSums(plan, pieces, records, payload)
    found = finish(wanted_sums.of(everything), sizes, pieces.seeds)
    assert found.dtype == np.uint32 and len(found) == 5 * LAYERS
    assert {(b, layer): int(s) for (_, b, layer), s in zip(pieces.table.tolist(), found, strict=True)} == wanted
    some = slice(4, 11)
    assert (wanted_sums.of(some) == wanted_sums.of(everything)[some]).all()
    fewer = WantedSums(plan, pieces, {REFS[0]: records[REFS[0]]}, payload)
    without = finish(fewer.of(everything), sizes, pieces.seeds)
    assert (without[pieces.table[:, 1] >= 3] == 0).all() and (without[pieces.table[:, 1] < 3] > 0).all()
