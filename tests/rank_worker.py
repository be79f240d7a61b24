"""One rank of a store, in a process of its own: a data plane that is driven over a pipe.

Every request gets one answer.  The content of a rank's pages depends on its number, as under tensor parallelism.
"""

import queue
from multiprocessing.connection import Connection

import numpy as np

from flatcake.assemble import open_dataplane
from flatcake.clock import MonotonicClock
from flatcake.dataplane import DataPlane
from flatcake.io.seam import Files
from flatcake.messages import Completion, KeyArray, Plan, PlanKind
from tests.stores import WAIT_NS, WAIT_S, Memory, Pages, make_config, simple_layout

BLOCKS, FILE_BLOCKS, DRAM_BLOCKS = 32, 16, 16


class Rank:
    """Answers requests until it is told to close."""

    def __init__(self, pipe: Connection, rank: int, epoch: int, directory: str) -> None:
        self.pipe = pipe
        self.memory = Memory(simple_layout())
        self.salt = np.uint64(rank + 1)
        self.clock = MonotonicClock()
        config = make_config(
            self.memory, [directory], blocks=BLOCKS, file_blocks=FILE_BLOCKS, dram_blocks=DRAM_BLOCKS, rank=rank
        )
        geometry = self.memory.kv.geometry(self.memory.layout.block_tokens)
        self.plane: DataPlane = open_dataplane(
            config, geometry, self.memory.kv, clock=self.clock, files=Files(), epoch=epoch
        )

    def serve(self) -> None:
        self.pipe.send("ready")
        while True:
            name, *arguments = self.pipe.recv()
            if name == "close":
                self.pipe.send(self.plane.close(WAIT_NS))
                return
            self.pipe.send(getattr(self, name)(*arguments))

    def stamp(self, keys: KeyArray, pages: Pages) -> None:
        """Give pages the content that this rank has for some keys."""
        self.memory.stamp(keys ^ self.salt, pages)

    def run(self, plan: Plan, pages: Pages) -> Completion:
        """Carry a plan out; its report is the answer."""
        reports: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        deadline_ns = self.clock.now_ns() + WAIT_NS
        if plan.kind is PlanKind.SAVE:
            self.plane.save(plan, pages, deadline_ns=deadline_ns, report=reports.put).start()
        else:
            self.memory.fill(seed=plan.plan_id)
            self.before = self.memory.snapshot()
            self.plane.restore(plan, pages, deadline_ns=deadline_ns, report=reports.put)
        return reports.get(timeout=WAIT_S)

    def run_without_report(self, plan: Plan, pages: Pages) -> str:
        """Carry a plan out and keep the report."""
        assert self.run(plan, pages).first_bad_block is None
        return "written"

    def good_blocks(self, keys: KeyArray, pages: Pages) -> tuple[int, bool]:
        """Leading blocks that hold this rank's bytes, and whether all other pages are as they were."""
        good = self.memory.stamped_blocks(keys ^ self.salt, pages)
        others = self.memory.with_pages(self.before, pages, self.memory.take(pages))
        return good, self.memory.is_equal(others)


def main(pipe: Connection, rank: int, epoch: int, directory: str) -> None:
    Rank(pipe, rank, epoch, directory).serve()
