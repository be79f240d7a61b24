"""An engine as vLLM makes it, without vLLM: a coordinator and the data planes of its ranks, in one process."""

import pickle
import queue
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from flatcake.assemble import open_dataplane
from flatcake.clock import MonotonicClock
from flatcake.config import StoreConfig
from flatcake.coordinator import Coordinator, open_coordinator
from flatcake.dataplane import DataPlane
from flatcake.engines.vllm.options import Place, VllmConfig, catalog_home, rank_config
from flatcake.gva import Medium, decode
from flatcake.io.seam import Files
from flatcake.keys import chain
from flatcake.messages import Completion, KeyArray, Plan, PlanKind
from flatcake.placement import Turn
from tests.audits import LENGTHS
from tests.stores import (
    CHAT,
    ONE_SHOT,
    WAIT_NS,
    WAIT_S,
    Memory,
    make_config,
    make_identity,
    make_tokens,
    shuffled,
    simple_layout,
)

SESSIONS = 4
"""On SSD; one more is in DRAM."""
BLOCKS = LENGTHS[-1]


def engine_config(memory: Memory, directories: Sequence[Path], share: int, **settings: Any) -> VllmConfig:
    """The settings of all ranks together, in directories that the user names."""
    own = make_config(memory, directories, **{"blocks": 64, "dram_blocks": 32} | settings)
    whole = replace(
        own.capacity,
        ssd_bytes_max=own.capacity.ssd_bytes_max * share,
        dram_bytes_max=own.capacity.dram_bytes_max * share,
    )
    names = ("io", "timeouts", "layout", "retention", "placement", "directories")
    return VllmConfig(capacity=whole, **{name: getattr(own, name) for name in names})


class Engine:
    """Coordinator and ranks; every rank has bytes of its own."""

    def __init__(
        self, directories: Path | Sequence[Path], ranks: int = 2, replica: tuple[int, int] = (0, 1), **settings: Any
    ) -> None:
        directories = [directories] if isinstance(directories, Path) else list(directories)
        self.memories = [Memory(simple_layout()) for _ in range(ranks)]
        geometry = self.memories[0].kv.geometry(self.memories[0].layout.block_tokens)
        whole = engine_config(self.memories[0], directories, ranks * replica[1], **settings)
        self.clock = MonotonicClock()
        self.planes: list[DataPlane] = []
        self.configs: list[StoreConfig] = []
        for rank, memory in enumerate(self.memories):
            own = rank_config(whole, Place(rank, ranks, *replica))
            epoch = self.clock.now_ns() + rank
            self.planes.append(open_dataplane(own, geometry, memory.kv, clock=self.clock, files=Files(), epoch=epoch))
            self.configs.append(own)
        self.identity = make_identity(self.memories[0])
        self.starts = [pickle.loads(pickle.dumps(plane.start_report())) for plane in self.planes]
        self.home = catalog_home(whole, Place(0, ranks, *replica))
        self.coordinator: Coordinator = open_coordinator(self.configs[0], self.identity, self.starts, self.home)
        self.file_bytes = self.configs[0].capacity.pool_file_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.close_ranks()
        assert self.coordinator.close()

    def close_ranks(self) -> None:
        assert all(plane.close(WAIT_NS) for plane in self.planes)

    def keys(self, name: str | int, blocks: int) -> KeyArray:
        return chain(self.coordinator.identity, make_tokens(name, blocks))

    def save(self, name: str | int, blocks: int, turn: Turn = ONE_SHOT) -> int:
        """Save a sequence; how many blocks were written."""
        keys = self.keys(name, blocks)
        plan = self.coordinator.begin_save(f"s{name}", keys, turn)
        assert isinstance(plan, Plan)
        for rank in range(len(self.planes)) if len(plan.runs) else ():
            self.coordinator.take(self.run(rank, plan))
        self.settle()
        assert self.coordinator.match(keys).blocks == blocks
        return plan.runs.blocks

    def fill(self) -> None:
        """Sessions of two turns on SSD, and one in DRAM."""
        for number in range(SESSIONS):
            for length in LENGTHS:
                self.save(number, length)
        self.save("dram", 3, CHAT)

    def hits(self) -> list[int]:
        """Blocks of each session that are delivered; every byte is compared on every rank."""
        return [self.restore(number, BLOCKS) for number in range(SESSIONS)]

    def restore(self, name: str | int, blocks: int) -> int:
        match = self.coordinator.match(self.keys(name, blocks))
        if not match.blocks:
            return 0
        with self.coordinator.lease(match) as lease:
            plan = self.coordinator.start_restore(lease)
        assert isinstance(plan, Plan)
        good = len(plan.keys)
        for rank, memory in enumerate(self.memories):
            completion = self.run(rank, plan)
            pages = shuffled(memory, len(plan.keys), seed=plan.plan_id)
            delivered = len(plan.keys) if completion.first_bad_block is None else completion.first_bad_block
            assert memory.stamped_blocks(plan.keys ^ np.uint64(rank + 1), pages) >= delivered
            self.coordinator.take(completion)
            good = min(good, delivered)
        return good

    def run(self, rank: int, plan: Plan) -> Completion:
        """One rank carries a plan out."""
        memory, plane = self.memories[rank], self.planes[rank]
        pages = shuffled(memory, len(plan.keys), seed=plan.plan_id)
        reports: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        deadline_ns = self.clock.now_ns() + WAIT_NS
        if plan.kind is PlanKind.SAVE:
            memory.stamp(plan.keys ^ np.uint64(rank + 1), pages)
            plane.save(plan, pages, deadline_ns=deadline_ns, report=reports.put).start()
        else:
            memory.fill(seed=plan.plan_id)
            plane.restore(plan, pages, deadline_ns=deadline_ns, report=reports.put)
        return reports.get(timeout=WAIT_S)

    def settle(self) -> None:
        done = threading.Event()
        self.coordinator.fence(done.set)
        assert done.wait(WAIT_S)
        self.coordinator.catalog.check()

    def places(self, number: int) -> list[tuple[Medium, int]]:
        """Medium and offset of the first piece of each block of a session; the same on every rank."""
        found = [decode(int(gva)) for gva in self.coordinator.match(self.keys(number, BLOCKS)).hit.gvas]
        return [(place.medium, place.offset_bytes) for place in found]
