"""Deleting, pinning and expiring sessions in a catalog: who goes when, who stays, and what a restart finds."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.catalog import Catalog, Refused
from flatcake.errors import OwnershipError
from flatcake.gva import Medium
from flatcake.ledger import Outcome
from flatcake.manifest import TurnRow
from flatcake.messages import Plan
from flatcake.placement import Decision, Placement, TurnSignals
from flatcake.retention import EXPIRE_SCOPES_MAX, unused
from flatcake.scopes import Scope, ScopeTable
from flatcake.space import Space
from flatcake.units import SECOND
from flatcake.wear import DAY_NS, WriteBudget
from tests.builders import (
    AGENT,
    BLOCK_TOKENS,
    CHAT,
    IDLE_NS,
    LEASE_NS,
    ONE_SHOT,
    REPORT_NS,
    begin,
    branch,
    make_catalog,
    make_keys,
    make_space,
    report,
    save,
)
from tests.manifests import MemoryManifest
from tests.test_reopen import kept_catalog, reopened, space_of

TURNS = {Medium.SSD: ONE_SHOT, Medium.DRAM: CHAT}


def aging_catalog(ttl_ns: int, space: Space | None = None) -> Catalog:
    catalog = make_catalog(space)
    return Catalog(
        catalog.space,
        catalog._placement,
        block_tokens=BLOCK_TOKENS,
        lease_ns=LEASE_NS,
        report_ns=REPORT_NS,
        ttl_ns=ttl_ns,
    )


# -- policies -------------------------------------------------------------------------------------------


@given(
    scopes=st.lists(st.tuples(st.integers(0, 30), st.integers(-1, 40)), max_size=12),
    ttl_ns=st.integers(1, 20),
    now_ns=st.integers(0, 40),
)
def test_unused_are_those_that_nobody_used_or_pinned(scopes: list[tuple[int, int]], ttl_ns: int, now_ns: int) -> None:
    made = [Scope(n, None, Medium.SSD, used, n) for n, (used, _) in enumerate(sorted(scopes))]
    for scope, (_, kept) in zip(made, sorted(scopes), strict=True):
        scope.kept_until_ns = kept
    wanted = [s for s in made if now_ns - s.last_use_ns > ttl_ns and s.kept_until_ns <= now_ns]
    assert list(unused(made, ttl_ns, now_ns)) == wanted


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_victims_are_in_the_order_of_use_and_pinned_ones_come_last(data: st.DataObject) -> None:
    table, now_ns = ScopeTable(), 10
    made = [table.create(f"s{n}", Medium.SSD, n) for n in range(data.draw(st.integers(0, 8)))]
    for scope in made:
        scope.kept_until_ns = data.draw(st.integers(8, 12))
        scope.pins = data.draw(st.integers(0, 1))
    for scope in data.draw(st.lists(st.sampled_from(made), max_size=6)) if made else []:
        table.touch([scope], now_ns)
    free = sorted((scope for scope in made if not scope.pins), key=lambda scope: scope.order)
    wanted = [s for s in free if s.kept_until_ns <= now_ns] + [s for s in free if s.kept_until_ns > now_ns]
    assert list(table.victims(Medium.SSD, now_ns)) == wanted
    table.check()


# -- delete ---------------------------------------------------------------------------------------------


def test_a_deleted_session_is_gone_from_every_medium_and_others_are_not() -> None:
    catalog = make_catalog()
    for name in "ab":
        save(catalog, name, make_keys(f"{name} ssd", 4))
        save(catalog, name, make_keys(f"{name} dram", 3), CHAT)
    assert catalog.retention.delete_session("a") == 7 and catalog.retention.delete_session("a") == 0
    catalog.check()
    assert [catalog.match(make_keys(f"a {medium}", 4)).blocks for medium in ("ssd", "dram")] == [0, 0]
    assert [catalog.match(make_keys(f"b {medium}", 4)).blocks for medium in ("ssd", "dram")] == [4, 3]
    save(catalog, "a", make_keys("a ssd", 4))
    assert catalog.match(make_keys("a ssd", 4)).blocks == 4
    assert catalog.retention.delete_session("nobody") == 0 and catalog.retention.counts["deleted_blocks"] == 7


def test_a_prefix_goes_with_its_session_and_a_shared_prompt_stays() -> None:
    catalog = make_catalog()
    prompt = make_keys("prompt", 4)
    save(catalog, "a", prompt)
    save(catalog, "b", branch(prompt, "b", 2))
    assert catalog.retention.delete_session("a") == 0, "its only blocks are a shared prompt by now"
    assert catalog.match(branch(prompt, "b", 2)).blocks == 6
    save(catalog, "c", make_keys("own", 4))
    save(catalog, "c", branch(make_keys("own", 4), "more", 2))
    assert catalog.retention.delete_session("c") == 6
    catalog.check()


def test_a_lease_keeps_what_it_holds_and_its_bytes_are_nobody_elses() -> None:
    catalog = make_catalog(space_of(ssd_files=1))
    keys = make_keys("a", 30)
    save(catalog, "a", keys)
    entry = catalog.lease(keys, 0)
    assert catalog.retention.delete_session("a") == 30 and catalog.match(keys).blocks == 0
    held = {extent.base_bytes for scope in entry.scopes for extent in scope.extents}
    catalog.check()
    plan = catalog.start_restore(entry.lease_id, 1, 10)
    assert isinstance(plan, Plan) and plan.runs.blocks == 20
    assert catalog.begin_save("b", make_keys("b", 30), ONE_SHOT, 2) == Refused("no room")
    catalog.release(entry.lease_id)
    assert catalog.open_counts()["draining"] == 1, "it is being read"
    report(catalog, plan)
    assert catalog.open_counts() == {"leases": 0, "plans": 0, "draining": 0}
    save(catalog, "b", make_keys("b", 30))
    assert {e.base_bytes for s in catalog.space.scopes for e in s.extents} & held
    catalog.check()


def test_a_lease_on_a_deleted_session_ends_with_the_rank_that_had_the_bytes() -> None:
    catalog = make_catalog()
    keys = make_keys("a", 4)
    save(catalog, "a", keys, CHAT)
    entry = catalog.lease(keys, 0)
    catalog.retention.delete_session("a")
    catalog.rank_started(0, 2)
    assert catalog.start_restore(entry.lease_id, 1) == Refused("rank lost")
    catalog.release(entry.lease_id)
    catalog.check()


@pytest.mark.parametrize("turn", [ONE_SHOT, CHAT])
def test_a_save_under_way_ends_as_a_refusal(turn: object) -> None:
    catalog, manifest = kept_catalog()
    plan = begin(catalog, "a", make_keys("a", 4), turn)  # type: ignore[arg-type]
    other = begin(catalog, "b", make_keys("b", 4))
    assert catalog.retention.delete_session("a") == 0
    outcome = report(catalog, plan)
    assert outcome is not None and (outcome.published_blocks, outcome.reason) == (0, "session deleted")
    report(catalog, other)
    catalog.check()
    assert catalog.match(make_keys("a", 4)).blocks == 0 and catalog.match(make_keys("b", 4)).blocks == 4
    assert len(catalog.space.scopes) == 1 and len(manifest.rows) == 1


def test_a_deletion_waits_for_the_commit_and_takes_its_row_along() -> None:
    catalog, manifest = kept_catalog()
    reached, go = threading.Event(), threading.Event()
    outcomes: list[Outcome | None] = []

    def wait(row: TurnRow) -> None:
        reached.set()
        assert go.wait(30)

    manifest.before_commit = wait
    plan = begin(catalog, "a", make_keys("a", 4))
    threads = [threading.Thread(target=lambda: outcomes.append(report(catalog, plan)))]
    threads[0].start()
    assert reached.wait(30)
    threads.append(threading.Thread(target=catalog.retention.delete_session, args=("a",)))
    threads[1].start()
    while plan_is_good(catalog, plan):
        pass
    assert manifest.rows == {}
    go.set()
    for thread in threads:
        thread.join()
    assert outcomes[0] is not None and outcomes[0].reason == "session deleted"
    assert manifest.rows == {}, "durable when delete_session returns"
    catalog.check()


def plan_is_good(catalog: Catalog, plan: Plan) -> bool:
    return catalog._ledger.plans[plan.plan_id].first_bad_block is None


def test_no_turn_is_committed_behind_a_deletion() -> None:
    class DeletionFirst:
        """A lock that lets the thread which reports wait until the deletion is over."""

        def __enter__(self) -> None:
            if threading.current_thread() is reporting:
                arrived.set()
                assert deleted.wait(30)

        def __exit__(self, *raised: object) -> None:
            return None

    catalog, manifest = kept_catalog()
    arrived, deleted = threading.Event(), threading.Event()
    plan = begin(catalog, "a", make_keys("a", 4))
    outcomes: list[Outcome | None] = []
    reporting = threading.Thread(target=lambda: outcomes.append(report(catalog, plan)))
    catalog.retention.committing = DeletionFirst()  # type: ignore[assignment]
    reporting.start()
    assert arrived.wait(30)
    catalog.retention.delete_session("a")
    deleted.set()
    reporting.join()
    assert manifest.rows == {} and outcomes[0] is not None and outcomes[0].published_blocks == 0
    catalog.check()


def test_a_deletion_outlives_the_process_or_says_that_it_does_not() -> None:
    catalog, manifest = kept_catalog()
    for name in "ab":
        save(catalog, name, make_keys(name, 4))
    manifest.is_broken = True
    with pytest.raises(OwnershipError, match="delete it again before a restart"):
        catalog.retention.delete_session("a")
    assert catalog.match(make_keys("a", 4)).blocks == 0
    manifest.is_broken = False
    assert catalog.retention.delete_session("a") == 0
    again = reopened(manifest)
    assert [again.match(make_keys(name, 4)).blocks for name in "ab"] == [0, 4]
    assert again.retention.delete_session("b") == 4, "by the name of an earlier run"
    assert not manifest.rows


# -- time to live ---------------------------------------------------------------------------------------


def test_what_was_unused_for_too_long_is_dropped_and_what_is_used_stays() -> None:
    catalog = aging_catalog(10 * SECOND)
    catalog.rank_started(0, 1)
    for name, turn in (("ssd", ONE_SHOT), ("dram", CHAT), ("used", ONE_SHOT), ("leased", ONE_SHOT)):
        save(catalog, name, make_keys(name, 4), turn)
    catalog.release(catalog.lease(make_keys("used", 4), 6 * SECOND).lease_id)
    held = catalog.lease(make_keys("leased", 4), 0, 100 * SECOND)
    catalog.expire(10 * SECOND)
    assert catalog.space.scopes.next_id == 5 and len(catalog.space.scopes) == 4
    assert catalog.match(make_keys("ssd", 4)).blocks == 4, "a look is no use"
    catalog.expire(10 * SECOND + 1)
    names = ("ssd", "dram", "used", "leased")
    assert [catalog.match(make_keys(name, 4)).blocks for name in names] == [0, 0, 4, 4]
    catalog.expire(17 * SECOND)
    assert [catalog.match(make_keys(name, 4)).blocks for name in names] == [0, 0, 0, 4]
    catalog.release(held.lease_id)
    catalog.expire(17 * SECOND)
    assert not len(catalog.space.scopes) and not any(t.used_bytes for t in catalog.space.tables.values())
    assert catalog.retention.counts == {"expired_scopes": 4, "expired_blocks": 16}
    catalog.check()


def test_without_a_time_to_live_nothing_expires() -> None:
    catalog = make_catalog()
    save(catalog, "a", make_keys("a", 4))
    catalog.expire(1 << 62)
    assert catalog.match(make_keys("a", 4)).blocks == 4 and not catalog.retention.counts


def test_a_prefix_lives_as_long_as_what_hangs_on_it() -> None:
    catalog = aging_catalog(10 * SECOND)
    catalog.rank_started(0, 1)
    parent = make_keys("parent", 4)
    save(catalog, "parent", parent)
    for turn in range(1, 6):
        save(catalog, "child", branch(parent, "child", turn), AGENT, turn * 6 * SECOND)
        catalog.expire(turn * 6 * SECOND)
    assert catalog.match(branch(parent, "child", 5)).blocks == 9
    catalog.expire(41 * SECOND)
    assert not len(catalog.space.index)


def test_many_expire_step_by_step() -> None:
    catalog = aging_catalog(1, make_space(ssd_files=30))
    catalog.rank_started(0, 1)
    for number in range(EXPIRE_SCOPES_MAX + 10):
        save(catalog, f"s{number}", make_keys(number, 1))
    catalog.expire(SECOND)
    assert len(catalog.space.scopes) == 10
    catalog.expire(SECOND)
    assert not len(catalog.space.scopes)


# -- soft pins ------------------------------------------------------------------------------------------


def fill(catalog: Catalog, names: list[str], turn: object, now_ns: int = 0) -> list[str]:
    """Save a session each; returns those that are still there."""
    for name in names:
        plan = catalog.begin_save(name, make_keys(name, 4), turn, now_ns)  # type: ignore[arg-type]
        if isinstance(plan, Plan):
            report(catalog, plan)
    return [name for name in names if catalog.match(make_keys(name, 4)).blocks]


NAMES = [f"s{number}" for number in range(30)]


@pytest.mark.parametrize("medium", list(Medium))
def test_a_pinned_session_outlives_all_others_until_its_time(medium: Medium) -> None:
    space = space_of(ssd_files=1 if medium is Medium.SSD else 0)
    catalog, turn = make_catalog(space), TURNS[medium]
    fill(catalog, ["a", "b"], turn)
    assert catalog.retention.pin("a", 10) == 4
    left = fill(catalog, NAMES, turn, 9)
    assert catalog.match(make_keys("a", 4)).blocks == 4 and not catalog.match(make_keys("b", 4)).blocks
    assert 3 < len(left) < 30 and catalog.space.reclaimed_pinned_scopes == 0
    fill(catalog, [f"later {name}" for name in NAMES], turn, 10)
    assert not catalog.match(make_keys("a", 4)).blocks and catalog.space.reclaimed_pinned_scopes == 0
    catalog.check()


def test_pins_never_fill_a_store() -> None:
    catalog = make_catalog(space_of(ssd_files=1))
    for name in NAMES:
        save(catalog, name, make_keys(name, 4))
        catalog.retention.pin(name, 1000)
    assert catalog.space.reclaimed_pinned_scopes > 15
    left = [name for name in NAMES if catalog.match(make_keys(name, 4)).blocks]
    assert left == NAMES[-len(left) :] and len(left) > 3, "the one used longest ago went first"
    catalog.check()


def test_a_pin_in_dram_sends_new_turns_to_ssd_when_idle_ones_do_not() -> None:
    catalog = make_catalog(space_of(ssd_files=2))
    fill(catalog, NAMES[:9], CHAT)
    for name in NAMES[:9]:
        catalog.retention.pin(name, 10 * IDLE_NS)
    fill(catalog, ["new"], CHAT, 2 * IDLE_NS)
    assert catalog.match(make_keys("new", 4)).blocks_on(Medium.SSD) == 4
    assert all(catalog.match(make_keys(name, 4)).blocks == 4 for name in NAMES[:9])
    catalog.retention.unpin(NAMES[0])
    fill(catalog, ["newer"], CHAT, 2 * IDLE_NS)
    assert catalog.match(make_keys("newer", 4)).blocks_on(Medium.DRAM) == 4
    assert not catalog.match(make_keys(NAMES[0], 4)).blocks and catalog.space.reclaimed_pinned_scopes == 0


def test_a_pin_keeps_what_the_session_follows_on() -> None:
    catalog = make_catalog(space_of(ssd_files=1))
    parent = make_keys("parent", 4)
    save(catalog, "parent", parent)
    save(catalog, "child", branch(parent, "child", 4))
    assert catalog.retention.pin("child", 10) == 8
    fill(catalog, NAMES, ONE_SHOT, 5)
    assert catalog.match(branch(parent, "child", 4)).blocks == 8
    catalog.retention.unpin("child")
    catalog.retention.unpin("nobody")
    fill(catalog, NAMES, ONE_SHOT, 5)
    assert catalog.match(branch(parent, "child", 4)).blocks == 4, "the parent stays until its time"


def test_a_pin_holds_for_what_is_saved_later_and_for_time_to_live() -> None:
    catalog = aging_catalog(SECOND)
    catalog.rank_started(0, 1)
    save(catalog, "a", make_keys("ssd", 4))
    assert catalog.retention.pin("nobody", 10 * SECOND) == 0
    assert catalog.retention.pin("a", 10 * SECOND) == 4
    assert catalog.retention.pin("a", 5 * SECOND) == 4, "a later pin does not make it shorter"
    save(catalog, "a", make_keys("dram", 4), CHAT)
    catalog.expire(9 * SECOND)
    assert catalog.match(make_keys("ssd", 4)).blocks == catalog.match(make_keys("dram", 4)).blocks == 4
    catalog.expire(10 * SECOND)
    assert not len(catalog.space.index)


# -- the write budget -----------------------------------------------------------------------------------


def budgeted(saves: int, placement: Placement | None = None) -> Catalog:
    """So many saves of 4 blocks may go to SSD a day."""
    catalog = make_catalog(placement=placement)
    lanes = catalog.space.tables[Medium.SSD].lanes
    catalog.space.budget = WriteBudget(saves * lanes.extent_bytes(4))
    return catalog


def test_beyond_the_budget_saves_to_ssd_are_refused_and_to_dram_are_not() -> None:
    catalog = budgeted(3)
    assert fill(catalog, NAMES[:5], ONE_SHOT) == NAMES[:3] and catalog.counts["refused: SSD write budget"] == 2
    assert fill(catalog, ["dram"], CHAT) == ["dram"]
    save(catalog, NAMES[0], make_keys(NAMES[0], 4))  # All of it is stored.
    assert catalog.begin_save("x", make_keys("x", 4), ONE_SHOT, DAY_NS // 4) == Refused("SSD write budget")
    assert fill(catalog, ["next"], ONE_SHOT, DAY_NS // 3) == ["next"]
    catalog.check()


def test_a_spill_counts_and_nothing_is_reclaimed_for_a_save_that_is_refused() -> None:
    class ToDram:
        def place(self, signals: TurnSignals) -> Decision:
            return Decision(0, Medium.DRAM, 3)

    catalog = budgeted(12, ToDram())
    names = fill(catalog, [f"d{number}" for number in range(80)], CHAT)
    assert catalog.counts["dram_spills"] == 12 and catalog.counts["refused: SSD write budget"] == 80 - len(names) > 0
    catalog.space.budget = WriteBudget(1)
    used, scopes = catalog.space.tables[Medium.SSD].used_bytes, len(catalog.space.scopes)
    assert isinstance(catalog.begin_save("x", make_keys("x", 100), AGENT, 0), Refused)
    assert catalog.space.tables[Medium.SSD].used_bytes == used and len(catalog.space.scopes) == scopes
    catalog.check()


def test_a_store_without_ssd_has_no_budget_to_spend() -> None:
    catalog = make_catalog(space_of(ssd_files=0))
    catalog.space.budget = WriteBudget(1)
    assert fill(catalog, NAMES[:3], ONE_SHOT) == NAMES[:3]
    assert catalog.begin_save("x", make_keys("x", 1000), ONE_SHOT, 0) == Refused("no room")


# -- all of it together ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_at_any_moment_books_agree_and_a_restart_finds_no_deleted_session(seed: int) -> None:
    dice = random.Random(seed)
    manifest = MemoryManifest()
    catalog = aging_catalog(12, space_of(ssd_files=1))
    catalog.rank_started(0, 1)
    catalog.space.manifest = manifest
    alive: set[str] = set()
    open_plans: list[tuple[str, Plan]] = []
    serial = 0
    for now_ns in range(400):
        name = f"s{dice.randrange(8)}"
        step = dice.random()
        if step < 0.45:
            serial += 1
            plan = catalog.begin_save(name, make_keys(f"{name} {serial}", dice.randint(1, 8)), ONE_SHOT, now_ns)
            if isinstance(plan, Plan):
                open_plans.append((name, plan))
        elif step < 0.7 and open_plans:
            name, plan = open_plans.pop(dice.randrange(len(open_plans)))
            outcome = report(catalog, plan)
            if outcome is not None and outcome.published_blocks:
                alive.add(name)
        elif step < 0.8:
            catalog.retention.delete_session(name)
            alive.discard(name)
            again = reopened(manifest, ssd_files=1)
            assert again.retention.delete_session(name) == 0, "durable"
        elif step < 0.9:
            catalog.retention.pin(name, now_ns + dice.randint(1, 50))
        else:
            catalog.expire(now_ns)
        catalog.check()
        assert {scope.session for scope in catalog.space.scopes if scope.keys} <= alive
    assert catalog.space.reclaimed_scopes and catalog.retention.counts["expired_scopes"]
    for name in {f"s{number}" for number in range(8)}:
        catalog.retention.delete_session(name)
    for _, plan in open_plans:
        report(catalog, plan)
    assert not any(table.used_bytes for table in catalog.space.tables.values()) and not manifest.rows
