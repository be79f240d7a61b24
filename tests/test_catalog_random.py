"""Random operations on a catalog: against a dictionary, from many threads, and until the store has aged."""

import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flatcake.catalog import Catalog
from flatcake.gva import Medium
from flatcake.index import MISS
from flatcake.layout import LaneTable, LayoutName
from flatcake.ledger import LeaseEntry, Outcome
from flatcake.messages import BLOCKS, FIRST_BLOCK, Completion, KeyArray, Plan, PlanKind
from flatcake.placement import Turn
from flatcake.units import KiB
from tests.builders import (
    AGENT,
    CHAT,
    IDLE_NS,
    LEASE_NS,
    ONE_SHOT,
    REPORT_NS,
    branch,
    make_catalog,
    make_geometry,
    make_keys,
    make_space,
    report,
)

LANES = LaneTable.of(make_geometry())
SEQUENCES = [branch(make_keys(f"root {i % 3}", 4), f"leaf {i}", 8) for i in range(8)]
"""Token sequences of 12 blocks; every third one begins with the same 4."""


@dataclass
class Open:
    """A plan that some ranks have not reported, and what the model knows of it."""

    plan: Plan
    waiting: set[tuple[int, int]]
    failed: bool = False


class CatalogMachine(RuleBasedStateMachine):
    """A catalog of two ranks against a dictionary from key to contents.

    `written` holds, for every slot that an open or published save owns, the key that was written there.  What is
    visible must have been written by a save that every rank reported, and a slot has one writer at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        space = make_space(lanes=LANES, ssd_files=1, file_bytes=LANES.extent_bytes(30), entries=50, percent=200)
        self.catalog = make_catalog(space, ranks=2)
        self.now_ns = 0
        self.epochs = {0: 1, 1: 1}
        self.open: list[Open] = []
        self.leases: list[LeaseEntry] = []
        self.visible: set[bytes] = set()
        """Keys that may be found: published, and not dropped for good since.  Reclaim may take any of them."""
        self.written: dict[int, tuple[int, bytes]] = {}
        """address -> (plan, key) of its last writer."""

    def targets(self, plan: Plan) -> list[tuple[int, int]]:
        """(address, block) of everything that a plan moves."""
        found = []
        for medium, base, room, _, slot, blocks, first in plan.runs.table.tolist():
            at = medium << 60 | base + LANES.record_bytes(room)
            found += [(at + (slot + nth) * int(LANES.piece_bytes[0]), first + nth) for nth in range(blocks)]
        return found

    @rule(
        session=st.integers(0, 5),
        sequence=st.sampled_from(SEQUENCES),
        blocks=st.sampled_from([12, 8, 10, 4, 0, 12]),
        turn=st.sampled_from([ONE_SHOT, CHAT, AGENT, Turn(shared_tokens=64)]),
        to_end=st.sampled_from([True, True, False]),
    )
    def save(self, session: int, sequence: KeyArray, blocks: int, turn: Turn, to_end: bool) -> None:
        leases = [entry for entry in self.leases if not self.is_void(entry)]
        plan = self.catalog.begin_save(f"s{session}", sequence[:blocks], turn, self.now_ns)
        assert not any(map(self.is_void, leases)), "a leased scope was reclaimed"
        if not isinstance(plan, Plan):
            assert plan.reason in ("no room", "no data plane")
            return
        busy = {gva for other in self.open for gva, _ in self.targets(other.plan)}
        targets = self.targets(plan)
        assert len({block for _, block in targets}) == len(targets) == plan.runs.blocks
        assert not busy & {gva for gva, _ in targets}, "a slot is being read or written by another plan"
        leased = {int(gva) for entry in leases for gva in entry.gvas}
        assert not leased & {gva for gva, _ in targets}, "a leased slot is given to another"
        for gva, block in targets:
            self.written[gva] = plan.plan_id, plan.keys[block].tobytes()
        if targets:
            self.open.append(Open(plan, set(self.epochs.items())))
        while to_end and targets and self.open[-1].waiting:
            self.report(self.open[-1], *min(self.open[-1].waiting))
            to_end = bool(self.open) and self.open[-1].plan is plan

    @rule(sequence=st.sampled_from(SEQUENCES), hold_ns=st.sampled_from([5, 5, None]))
    def lease(self, sequence: KeyArray, hold_ns: int | None) -> None:
        entry = self.catalog.lease(sequence, self.now_ns, hold_ns)
        assert len(entry.keys) == self.catalog.match(sequence).blocks == entry.runs.blocks
        self.leases.append(entry)

    def is_void(self, entry: LeaseEntry) -> bool:
        return entry.deadline_ns <= self.now_ns or any(scope.withdrawn for scope in entry.scopes)

    @rule(data=st.data(), skip=st.integers(0, 3))
    def start_restore(self, data: st.DataObject, skip: int) -> None:
        if not self.leases:
            return
        entry = data.draw(st.sampled_from(self.leases))
        plan = self.catalog.start_restore(entry.lease_id, self.now_ns, skip)
        if not isinstance(plan, Plan):
            assert not self.epochs or self.is_void(entry) or entry.release != self.catalog.release_number
            return
        assert not self.is_void(entry)
        for gva, block in self.targets(plan):
            assert self.written[gva][1] == entry.keys[block].tobytes(), "a restore reads another block's bytes"
        assert plan.runs.blocks == max(0, len(entry.keys) - skip)
        if len(plan.runs):
            self.open.append(Open(plan, set(self.epochs.items())))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            entry = data.draw(st.sampled_from(self.leases))
            self.leases.remove(entry)
            self.catalog.release(entry.lease_id)

    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def finish(self, data: st.DataObject, fails: bool) -> None:
        if not self.open:
            return
        item = data.draw(st.sampled_from(self.open))
        self.report(item, *data.draw(st.sampled_from(sorted(item.waiting))), fails)

    def report(self, item: Open, rank: int, epoch: int, fails: bool = False) -> None:
        bad = int(item.plan.runs.column(FIRST_BLOCK)[0]) if fails else None
        done = Completion(plan_id=item.plan.plan_id, rank=rank, epoch=epoch, first_bad_block=bad, reason="EIO")
        item.waiting.discard((rank, epoch))
        item.failed |= fails
        self.settle(item, self.catalog.finish(done))

    def settle(self, item: Open, outcome: Outcome | None) -> None:
        assert (outcome is not None) == (not item.waiting)
        if outcome is None:
            return
        self.open.remove(item)
        assert outcome.plan_id == item.plan.plan_id
        if item.failed:
            assert outcome.published_blocks == 0 and outcome.first_bad_block is not None
        elif item.plan.kind is PlanKind.SAVE and outcome.first_bad_block is None:
            self.visible |= {item.plan.keys[block].tobytes() for _, block in self.targets(item.plan)}
        elif item.plan.kind is PlanKind.SAVE:
            assert outcome.reason == "index full"

    @rule(rank=st.sampled_from([0, 0, 1, 1, None, None]), comes_back=st.integers(0, 5))
    def lose_rank(self, rank: int | None, comes_back: int) -> None:
        if rank is None or rank not in self.epochs:
            return
        before = self.epochs.pop(rank)
        ended = {outcome.plan_id: outcome for outcome in self.catalog.rank_lost(rank)}
        for item in list(self.open):
            if (rank, before) in item.waiting:
                item.waiting.discard((rank, before))
                item.failed = True
                self.settle(item, ended.pop(item.plan.plan_id, None))
        assert not ended
        if comes_back:
            self.epochs[rank] = before + 1
            assert self.catalog.rank_started(rank, before + 1) == []

    @rule(step_ns=st.sampled_from([10, 1, LEASE_NS // 2, REPORT_NS, 2 * IDLE_NS]), resets=st.integers(0, 9))
    def wait(self, step_ns: int, resets: int) -> None:
        self.now_ns += step_ns
        late = {outcome.plan_id for outcome in self.catalog.expire(self.now_ns)}
        for item in self.open:
            item.failed |= item.plan.plan_id in late or not resets
        if not resets:
            assert self.catalog.reset() <= len(self.visible)
            self.visible.clear()

    @invariant()
    def nothing_else_is_visible(self) -> None:
        self.catalog.check()
        found = 0
        for sequence in SEQUENCES:
            gvas = self.catalog.space.index.lookup(sequence)
            for key, gva in zip(sequence, gvas.tolist(), strict=True):
                if gva != int(MISS):
                    assert key.tobytes() in self.visible, "visible before it was published, or after a reset"
                    assert self.written[gva][1] == key.tobytes(), "an address of another block"
            found += self.catalog.match(sequence).blocks
        assert found <= 12 * len(SEQUENCES)

    def teardown(self) -> None:
        for entry in self.leases:
            self.catalog.release(entry.lease_id)
        for rank in (0, 1):
            self.catalog.rank_lost(rank)
        self.catalog.check()
        self.catalog.reset()
        self.catalog.check()
        assert not any(self.catalog.open_counts().values())
        for table in self.catalog.space.tables.values():
            assert not table.used_bytes and table.ranges.free_bytes == table.ranges.size_bytes
        super().teardown()


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)


def run_randomly(catalog: Catalog, seed: int, steps: int, clock: list[int], alone: bool = False) -> None:
    """One caller: saves, leases, restores, reports and forgets, in no order; `alone`, it looks after each step."""
    dice = random.Random(seed)
    plans: list[Plan] = []
    leases: list[LeaseEntry] = []
    for _ in range(steps):
        clock[0] += 1
        keys = SEQUENCES[dice.randrange(8)][: dice.randint(1, 12)]
        action = dice.randrange(6)
        if dice.random() < 0.4:
            action, keys = 0, make_keys(f"once {dice.random()}", 12)
        if action == 0:
            plan = catalog.begin_save(f"s{dice.randrange(6)}", keys, dice.choice([ONE_SHOT, CHAT, AGENT]), clock[0])
            plans += [plan] if isinstance(plan, Plan) else []
        elif action == 1:
            leases.append(catalog.lease(keys, clock[0]))
        elif action == 2 and leases:
            plan = catalog.start_restore(leases[-1].lease_id, clock[0])
            plans += [plan] if isinstance(plan, Plan) else []
        elif action == 3 and leases:
            catalog.release(leases.pop(dice.randrange(len(leases))).lease_id)
        elif action == 4 and plans:
            report(catalog, plans.pop(), bad=0 if dice.random() < 0.1 else None, reason="EIO")
        elif action == 5:
            blocks = catalog.match(keys).blocks
            assert 0 <= blocks <= len(keys)
            if dice.random() < 0.02:
                catalog.reset()
        if alone:
            for plan in plans[:-3]:
                report(catalog, plan)
            for entry in leases[:-3]:
                catalog.release(entry.lease_id)
            del plans[:-3], leases[:-3]
            catalog.check()
            held = [entry for entry in leases if entry.release == catalog.release_number]
            assert not any(scope.withdrawn for entry in held for scope in entry.scopes), "a leased scope was reclaimed"
    for plan in plans:
        report(catalog, plan)
    for entry in leases:
        catalog.release(entry.lease_id)


@pytest.mark.parametrize("seed", range(4))
def test_a_long_random_walk_reclaims_and_keeps_every_invariant(seed: int) -> None:
    catalog = make_catalog(make_space(lanes=LANES, ssd_files=1, file_bytes=LANES.extent_bytes(40), percent=200))
    run_randomly(catalog, seed, 500, [0], alone=True)
    assert catalog.space.reclaimed_scopes > 20
    catalog.reset()
    catalog.check()
    assert not any(table.used_bytes for table in catalog.space.tables.values())


def test_eight_threads_of_random_operations_leave_every_invariant() -> None:
    seed = 20_260
    catalog = make_catalog(make_space(lanes=LANES, ssd_files=2, file_bytes=LANES.extent_bytes(30)))
    clock, failures = [0], list[BaseException]()

    def work(number: int) -> None:
        try:
            run_randomly(catalog, seed + number, 400, clock)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, f"seed {seed}"
    catalog.check()
    assert catalog.open_counts() == {"leases": 0, "plans": 0, "draining": 0}
    catalog.reset()
    assert not any(table.used_bytes for table in catalog.space.tables.values())


@dataclass
class Aged:
    """What a store looks like after churn."""

    amplification: float
    extents: float
    """Per session that is still whole."""
    refused: int


def churn(layout: LayoutName, turn_blocks: int, *, percent: int = 25, file_blocks: int = 200) -> Aged:
    """Write three times the capacity in six interleaved sessions of 4 to 60 turns, and look at what is left."""
    lanes = LaneTable.of(make_geometry(*[64 * KiB] * 8))
    file_bytes = lanes.extent_bytes(file_blocks)
    space = make_space(lanes=lanes, ssd_files=8, file_bytes=file_bytes, layout=layout, percent=percent, entries=20_000)
    catalog, dice = make_catalog(space), random.Random(7)
    capacity = space.tables[Medium.SSD].ranges.size_bytes // lanes.block_bytes
    written, refused, names = 0, 0, 0
    running: list[tuple[str, int, KeyArray]] = []
    while written < 3 * capacity:
        while len(running) < 6:
            names += 1
            length = turn_blocks * dice.randint(4, 60)
            running.append((f"s{names}", 0, make_keys(names, length)))
        at = dice.randrange(len(running))
        session, done, keys = running[at]
        plan = catalog.begin_save(session, keys[: done + turn_blocks], AGENT, written)
        if isinstance(plan, Plan):
            report(catalog, plan)
            written += plan.runs.blocks
        else:
            refused += 1
        done += turn_blocks
        running[at] = session, done, keys
        if done >= len(keys):
            running.pop(at)
    catalog.check()
    table = space.tables[Medium.SSD]
    scopes = [scope for scope in space.scopes if scope.medium is Medium.SSD]
    published = sum(scope.blocks for scope in scopes)
    assert table.used_bytes >= 0.8 * table.ranges.size_bytes, "the store is full"
    return Aged(
        table.used_bytes / (published * lanes.block_bytes), float(np.mean([len(s.extents) for s in scopes])), refused
    )


@pytest.mark.parametrize("turn_blocks", [1, 4])
def test_an_aged_store_wastes_little_space_and_lanes_have_fewer_extents(turn_blocks: int) -> None:
    lanes, segments = churn("lanes", turn_blocks), churn("segments", turn_blocks)
    assert lanes.amplification <= 1.15 and segments.amplification <= 1.15, (lanes, segments)
    assert lanes.refused == segments.refused == 0
    assert 1.5 * lanes.extents < segments.extents, (lanes, segments)


def test_runs_of_a_restore_never_outnumber_extents() -> None:
    catalog = make_catalog(make_space(lanes=LANES, ssd_files=8))
    keys = {name: make_keys(name, 60) for name in "abcd"}
    for block in range(1, 61):
        for name in "abcd":
            plan = catalog.begin_save(name, keys[name][:block], AGENT, block)
            assert isinstance(plan, Plan)
            report(catalog, plan)
    for name in "abcd":
        scope = catalog.space.scopes.of_session(name, Medium.SSD)
        runs = catalog.lease(keys[name], 100).runs
        assert scope is not None and len(runs) == len(scope.extents) < 25
        assert int(runs.column(BLOCKS).sum()) == 60
