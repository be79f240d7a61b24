"""A catalog whose data planes are elsewhere: here two of them, in this process, told by hand."""

import pickle
import queue
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flatcake.about import RankHomes, decode_about
from flatcake.assemble import open_dataplane
from flatcake.catalog import Refused
from flatcake.clock import MonotonicClock
from flatcake.config import StoreConfig
from flatcake.coordinator import Coordinator, open_coordinator
from flatcake.dataplane import DataPlane
from flatcake.errors import ShapeError
from flatcake.io.manifestdb import MANIFEST
from flatcake.io.seam import Files
from flatcake.keys import FORMAT_VERSION, chain
from flatcake.manifest import decode_rows, origin_digest
from flatcake.messages import Completion, KeyArray, Plan
from flatcake.tenancy import ABOUT_NUMBER
from tests.stores import ONE_SHOT, WAIT_NS, WAIT_S, Memory, make_config, make_identity, make_tokens, simple_layout

pytestmark = pytest.mark.usefixtures("no_leaks")


class Ranks:
    """Two data planes and their coordinator."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.memories = [Memory(simple_layout()) for _ in range(2)]
        clock = MonotonicClock()
        self.planes: list[DataPlane] = []
        for rank, memory in enumerate(self.memories):
            own = make_config(memory, [directory / f"rank-{rank}"], rank=rank, **settings)  # type: ignore[arg-type]
            geometry = memory.kv.geometry(memory.layout.block_tokens)
            plane = open_dataplane(own, geometry, memory.kv, clock=clock, files=Files(), epoch=clock.now_ns() + rank)
            self.planes.append(plane)
        self.config: StoreConfig = own
        starts = [pickle.loads(pickle.dumps(plane.start_report())) for plane in self.planes]
        identity = make_identity(self.memories[0])
        self.coordinator: Coordinator = open_coordinator(own, identity, starts, str(directory / "catalog"))

    def keys(self, name: str, blocks: int) -> KeyArray:
        return chain(self.coordinator.identity, make_tokens(name, blocks))

    def begin(self, session: str, keys: KeyArray) -> Plan:
        plan = self.coordinator.begin_save(session, keys, ONE_SHOT)
        assert isinstance(plan, Plan)
        return plan

    def run(self, rank: int, plan: Plan) -> Completion:
        """One rank writes a plan."""
        pages = np.arange(len(plan.keys) * 2)
        self.memories[rank].stamp(plan.keys ^ np.uint64(rank), pages)
        reports: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        deadline_ns = MonotonicClock().now_ns() + WAIT_NS
        self.planes[rank].save(plan, pages, deadline_ns=deadline_ns, report=reports.put).start()
        return reports.get(timeout=WAIT_S)

    def save(self, session: str, keys: KeyArray) -> None:
        plan = self.begin(session, keys)
        for rank in range(2):
            self.coordinator.take(self.run(rank, plan))
        self.settle()

    def settle(self) -> None:
        done = threading.Event()
        self.coordinator.fence(done.set)
        assert done.wait(WAIT_S)
        self.coordinator.catalog.check()

    def close(self) -> None:
        assert all(plane.close(WAIT_NS) for plane in self.planes)
        assert self.coordinator.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_published_when_the_last_rank_has_reported_and_it_is_committed(ranks: Ranks) -> None:
    keys = ranks.keys("a", 5)
    plan = ranks.begin("s", keys)
    ranks.coordinator.take(ranks.run(0, plan))
    ranks.settle()
    assert ranks.coordinator.match(keys).blocks == 0
    ranks.coordinator.take(ranks.run(1, plan))
    ranks.settle()
    assert ranks.coordinator.match(keys).blocks == 5
    (outcome,) = ranks.coordinator.ended
    assert (outcome.plan_id, outcome.published_blocks, outcome.reason) == (plan.plan_id, 5, "")


def test_one_rank_that_failed_is_enough_to_publish_nothing(ranks: Ranks) -> None:
    keys = ranks.keys("a", 5)
    plan = ranks.begin("s", keys)
    ranks.coordinator.take(ranks.run(0, plan))
    bad = ranks.planes[1].parts.completion(plan.plan_id, 2, "write failed (errno 5)")
    ranks.coordinator.take(bad)
    ranks.settle()
    assert ranks.coordinator.match(keys).blocks == 0
    assert ranks.coordinator.counters()["saves failed: write failed (errno 5)"] == 1
    ranks.save("s", keys)
    assert ranks.coordinator.match(keys).blocks == 5


def test_found_again_if_every_rank_is_as_it_was(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    keys = ranks.keys("a", 5)
    ranks.save("s", keys)
    ranks.close()
    ranks = Ranks(tmp_path)
    assert ranks.coordinator.match(keys).blocks == 5
    ranks.close()
    for path in (tmp_path / "rank-0").iterdir():
        path.unlink()
    ranks = Ranks(tmp_path)
    assert ranks.coordinator.match(keys).blocks == 0
    ranks.save("s", keys)
    ranks.close()
    ranks = Ranks(tmp_path, io={"verify": "off"})
    assert ranks.coordinator.match(keys).blocks == 0, "nothing could tell good bytes from bad"
    ranks.close()


def test_rows_are_keyed_as_ever_and_the_manifest_says_what_it_is_of(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    keys, identity = ranks.keys("a", 5), ranks.coordinator.identity
    ranks.save("s", keys)
    ranks.close()
    path, file_bytes = tmp_path / "catalog" / MANIFEST, ranks.config.capacity.pool_file_bytes
    origin = origin_digest(identity.digest(), file_bytes, 1, 2, FORMAT_VERSION)
    database = sqlite3.connect(path)
    with database:
        (row,) = database.execute("SELECT number, body FROM turns").fetchall()
        ((body,),) = database.execute("SELECT body FROM state WHERE number = ?", (ABOUT_NUMBER,)).fetchall()
        database.execute("DELETE FROM state WHERE number = ?", (ABOUT_NUMBER,))  # As it was before.
    database.close()
    assert decode_rows([row], origin)[1] == []
    about = decode_about(body)
    assert about is not None and about.origin() == origin and about.identity == identity
    assert about.ranks == tuple(RankHomes(rank, (f"{tmp_path}/rank-{rank}",)) for rank in range(2))
    ranks = Ranks(tmp_path)
    assert ranks.coordinator.match(keys).blocks == 5
    ranks.close()


def test_saves_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, io={"saves_max": 1})
    plan = ranks.begin("a", ranks.keys("a", 2))
    refused = ranks.coordinator.begin_save("b", ranks.keys("b", 2), ONE_SHOT)
    assert refused == Refused("too many saves under way")
    for rank in range(2):
        ranks.coordinator.take(ranks.run(rank, plan))
    ranks.settle()
    ranks.save("b", ranks.keys("b", 2))
    ranks.close()


def test_a_rank_that_is_late_costs_its_save(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, timeouts={"save_ns": 1, "restore_ns": 1, "rank_report_ns": 1})
    keys = ranks.keys("a", 3)
    plan = ranks.begin("s", keys)
    ranks.coordinator.tick()
    (outcome,) = ranks.coordinator.ended
    assert outcome.reason == "ranks did not report in time"
    for rank in range(2):
        ranks.coordinator.take(ranks.run(rank, plan))
    ranks.settle()
    assert ranks.coordinator.match(keys).blocks == 0
    ranks.close()


def test_reports_after_close_do_nothing(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    plan = ranks.begin("s", ranks.keys("a", 3))
    reports = [ranks.run(rank, plan) for rank in range(2)]
    ranks.close()
    for report in reports:
        ranks.coordinator.take(report)
    assert ranks.coordinator.counters()["reports after close"] == 2
    ranks.close()


def test_ranks_that_differ_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    starts = [plane.start_report() for plane in ranks.planes]
    other = replace(starts[1], geometry=replace(starts[1].geometry, dtype="other"))
    fewer = replace(starts[1], directories=())
    for start in (other, fewer):
        with pytest.raises(ShapeError, match="rank 1: other geometry or settings than rank 0"):
            identity = make_identity(ranks.memories[0])
            open_coordinator(ranks.config, identity, [starts[0], start], str(tmp_path / "catalog"))
