"""One catalog, two data planes in processes of their own: published when both have it, and one may die."""

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatcake.assemble import open_catalog
from flatcake.catalog import Catalog
from flatcake.gva import Medium
from flatcake.keys import chain
from flatcake.ledger import Outcome
from flatcake.messages import Completion, KeyArray, Plan
from flatcake.placement import Turn
from tests.rank_worker import BLOCKS, DRAM_BLOCKS, FILE_BLOCKS, main
from tests.stores import (
    CHAT,
    ONE_SHOT,
    WAIT_S,
    Memory,
    make_config,
    make_identity,
    make_tokens,
    shuffled,
    simple_layout,
)


@pytest.fixture
def tracker() -> None:
    """Python's own helper process, with its pipe, stays for good once it has been started."""
    resource_tracker.ensure_running()


pytestmark = pytest.mark.usefixtures("tracker")


class Child:
    """The parent's end of one rank."""

    def __init__(self, rank: int, epoch: int, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank, self.epoch = rank, epoch
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, rank, epoch, str(directory)), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self) -> Any:
        assert self.pipe.poll(WAIT_S), f"rank {self.rank} does not answer"
        return self.pipe.recv()

    def ask(self, *request: object) -> Any:
        self.pipe.send(request)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)
        assert self.process.exitcode == -9

    def reap(self) -> None:
        """End the process, however it is."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join(WAIT_S)
        self.pipe.close()
        self.process.close()


class Group:
    """The catalog and its ranks."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.memory = Memory(simple_layout())
        self.directory, self._stack = directory, stack
        sizes = {"blocks": BLOCKS, "file_blocks": FILE_BLOCKS, "dram_blocks": DRAM_BLOCKS}
        config = make_config(self.memory, [directory], **sizes)
        self.catalog: Catalog = open_catalog(config, self.memory.kv.geometry(self.memory.layout.block_tokens))
        self.children: dict[int, Child] = {}
        for rank in range(2):
            self.launch(rank, epoch=1)
        for child in self.children.values():
            self.join(child)

    def launch(self, rank: int, epoch: int) -> Child:
        child = self.children[rank] = Child(rank, epoch, self.directory / f"rank {rank}")
        self._stack.callback(child.reap)
        return child

    def join(self, child: Child) -> list[Outcome]:
        assert child.answer() == "ready"
        return self.catalog.rank_started(child.rank, child.epoch)

    def keys(self, name: str, blocks: int) -> KeyArray:
        return chain(make_identity(self.memory), make_tokens(name, blocks))

    def begin(self, session: str, keys: KeyArray, turn: Turn = ONE_SHOT) -> tuple[Plan, np.ndarray]:
        """A plan for a save, and pages that hold what is to be saved, on every live rank."""
        plan, pages = self.catalog.begin_save(session, keys, turn, 0), shuffled(self.memory, len(keys), seed=len(keys))
        assert isinstance(plan, Plan) and len(plan.runs)
        for rank in self.catalog.ranks:
            self.children[rank].ask("stamp", keys, pages)
        return plan, pages

    def save(self, session: str, keys: KeyArray, turn: Turn = ONE_SHOT) -> Outcome:
        plan, pages = self.begin(session, keys, turn)
        return self.run(plan, pages)

    def run(self, plan: Plan, pages: np.ndarray) -> Outcome:
        """Every live rank runs a plan and reports; nothing is settled before the last one has."""
        outcome = None
        for rank in list(self.catalog.ranks):
            assert outcome is None
            outcome = self.catalog.finish(self.children[rank].ask("run", plan, pages))
        assert outcome is not None
        return outcome

    def plan_restore(self, keys: KeyArray) -> Plan:
        lease = self.catalog.lease(keys, 0)
        plan = self.catalog.start_restore(lease.lease_id, 0)
        self.catalog.release(lease.lease_id)
        assert isinstance(plan, Plan)
        return plan

    def restore(self, keys: KeyArray) -> Outcome:
        """Restore on every live rank; each byte of what is good on all of them is compared there."""
        plan = self.plan_restore(keys)
        pages = shuffled(self.memory, len(plan.keys), seed=plan.plan_id)
        outcome = self.run(plan, pages)
        good = len(plan.keys) if outcome.first_bad_block is None else outcome.first_bad_block
        for rank in self.catalog.ranks:
            blocks, others = self.children[rank].ask("good_blocks", plan.keys, pages)
            assert blocks >= good and others
        return outcome

    def used_bytes(self) -> list[int]:
        return [table.used_bytes for table in self.catalog.space.tables.values()]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with ExitStack() as stack:
        made = Group(tmp_path, stack)
        yield made
        made.catalog.check()
        for rank in made.catalog.ranks:
            assert made.children[rank].ask("close"), "something was still in flight"
            made.children[rank].process.join(WAIT_S)
            assert made.children[rank].process.exitcode == 0


@pytest.mark.leaves("files")  # The first process that is spawned leaves a pipe of multiprocessing's own.
def test_a_turn_is_published_when_both_ranks_have_it_and_restored_on_both(group: Group) -> None:
    keys = group.keys("a", 9)
    plan, pages = group.begin("s", keys[:6])
    first, second = (group.children[rank].ask("run", plan, pages) for rank in range(2))
    assert (first.rank, second.rank) == (0, 1)
    assert group.catalog.finish(first) is None and group.catalog.match(keys).blocks == 0
    outcome = group.catalog.finish(second)
    assert outcome is not None and (outcome.published_blocks, outcome.reason) == (6, "")
    assert group.catalog.finish(second) is None, "a report counts once"
    assert group.save("s", keys, CHAT).published_blocks == 3
    hit = group.catalog.match(keys)
    assert (hit.blocks, hit.blocks_on(Medium.SSD), hit.blocks_on(Medium.DRAM)) == (9, 6, 3)
    outcome = group.restore(keys)
    assert outcome.first_bad_block is None
    assert group.catalog.counts["blocks_dropped"] == 0 and group.catalog.counts["reports_dropped"] == 1
    files = [sorted((group.directory / f"rank {rank}").glob("pool-*.fc")) for rank in range(2)]
    assert [len(names) for names in files] == [2, 2]
    assert files[0][0].read_bytes() != files[1][0].read_bytes()


def test_a_rank_dies_between_its_write_and_its_report(group: Group) -> None:
    kept, new = group.keys("kept", 6), group.keys("new", 5)
    assert group.save("kept", kept).published_blocks == 6
    before = group.used_bytes()
    plan, pages = group.begin("new", new)
    assert group.used_bytes() != before
    assert group.children[1].ask("run_without_report", plan, pages) == "written"
    assert group.catalog.finish(group.children[0].ask("run", plan, pages)) is None
    group.children[1].kill()
    (outcome,) = group.catalog.rank_lost(1)
    assert (outcome.published_blocks, outcome.reason) == (0, "rank 1 lost")
    assert group.catalog.match(new).blocks == 0 and group.used_bytes() == before
    assert group.catalog.open_counts() == {"leases": 0, "plans": 0, "draining": 0}
    group.catalog.check()

    late = Completion(plan_id=plan.plan_id, rank=1, epoch=1)
    assert group.catalog.finish(late) is None and group.catalog.counts["reports_dropped"] == 1
    assert group.restore(kept).first_bad_block is None
    assert group.save("new", new).published_blocks == 5
    assert group.restore(new).first_bad_block is None

    stale = group.plan_restore(kept)
    assert group.catalog.finish(Completion(plan_id=stale.plan_id, rank=0, epoch=1)) is not None
    assert group.catalog.reset() == 11
    other = group.keys("other", 6)
    assert group.save("other", other).published_blocks == 6
    report = group.children[0].ask("run", stale, shuffled(group.memory, 6))
    assert (report.first_bad_block, report.reason) == (0, "stale plan")
    assert group.catalog.finish(report) is None and group.restore(other).first_bad_block is None

    group.launch(1, epoch=2)
    assert group.join(group.children[1]) == []
    plan, pages = group.begin("both", group.keys("both", 4))
    assert group.catalog.finish(Completion(plan_id=plan.plan_id, rank=1, epoch=1)) is None, "an old epoch's report"
    assert group.run(plan, pages).published_blocks == 4
    assert group.restore(group.keys("both", 4)).first_bad_block is None
    outcome = group.restore(other)  # Rank 1 was not there when it was saved.
    assert (outcome.first_bad_block, outcome.reason) == (0, "no valid checksum record")
    assert group.catalog.match(other).blocks == 0
