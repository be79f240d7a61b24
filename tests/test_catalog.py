"""What the catalog decides, step by step; `test_catalog_random.py` has the random operations."""

import pytest

from flatcake.catalog import Catalog, Refused
from flatcake.gva import Medium, decode_array
from flatcake.index import MISS
from flatcake.layout import LaneTable
from flatcake.ledger import LeaseEntry
from flatcake.messages import FIRST_BLOCK, Completion, KeyArray, Plan, PlanKind
from flatcake.placement import Turn
from tests.builders import (
    AGENT,
    CHAT,
    IDLE_NS,
    LEASE_NS,
    ONE_SHOT,
    REPORT_NS,
    begin,
    branch,
    make_catalog,
    make_geometry,
    make_keys,
    make_space,
    report,
    save,
)

LANES = LaneTable.of(make_geometry())


def small_catalog(blocks: int, **changes: int) -> Catalog:
    """An SSD of one file with room for one extent of `blocks` blocks, and a DRAM of the same size."""
    return make_catalog(make_space(lanes=LANES, ssd_files=1, file_bytes=LANES.extent_bytes(blocks), **changes))  # type: ignore[arg-type]


def used_bytes(catalog: Catalog, medium: Medium | None = None) -> int:
    return sum(table.used_bytes for kind, table in catalog.space.tables.items() if medium in (None, kind))


def restore(catalog: Catalog, entry: LeaseEntry, now_ns: int = 0, skip_blocks: int = 0) -> Plan:
    plan = catalog.start_restore(entry.lease_id, now_ns, skip_blocks)
    assert isinstance(plan, Plan), plan
    return plan


def media_of(catalog: Catalog, keys: KeyArray) -> list[int]:
    """Medium of each block; -1 where it is not stored."""
    gvas = catalog.space.index.lookup(keys)
    return [-1 if gva == MISS else int(decode_array(gva)[0]) for gva in gvas]


# -- saving and matching --


def test_a_saved_prefix_is_found_and_restored_in_order() -> None:
    catalog, keys = make_catalog(), make_keys("a", 5)
    assert catalog.match(keys).blocks == 0
    plan = save(catalog, "s", keys)
    assert plan.kind is PlanKind.SAVE and plan.runs.blocks == 5 and (plan.keys == keys).all()
    hit = catalog.match(keys)
    assert hit.blocks == 5 == hit.blocks_on(Medium.SSD) and (hit.keys == keys).all()
    entry = catalog.lease(keys, 0)
    restored = restore(catalog, entry)
    assert (restored.runs.table == plan.runs.table).all() and restored.kind is PlanKind.RESTORE
    assert report(catalog, restored) is not None
    catalog.release(entry.lease_id)
    assert catalog.open_counts() == {"leases": 0, "plans": 0, "draining": 0}
    catalog.check()


def test_match_is_partial_and_ends_at_the_first_missing_block() -> None:
    catalog, keys = make_catalog(), make_keys("a", 6)
    save(catalog, "s", keys[:4])
    assert catalog.match(keys).blocks == 4
    assert catalog.match(branch(keys[:2], "other", 4)).blocks == 2
    assert catalog.match(make_keys("other", 4)).blocks == 0 == catalog.match(keys[:0]).blocks
    catalog.space.index.withdraw(keys[1:2], catalog.space.index.lookup(keys[1:2]))
    assert catalog.match(keys).blocks == 1


def test_match_has_no_side_effects() -> None:
    catalog, keys = make_catalog(), make_keys("a", 4)
    save(catalog, "s", keys)
    save(catalog, "t", make_keys("b", 4))
    before = [scope.session for scope in catalog.space.scopes.oldest(Medium.SSD)], dict(catalog.counts)
    catalog.match(keys)
    assert before == ([scope.session for scope in catalog.space.scopes.oldest(Medium.SSD)], dict(catalog.counts))


def test_another_session_hits_what_the_first_one_wrote() -> None:
    catalog, prompt = make_catalog(), make_keys("prompt", 3)
    save(catalog, "a", branch(prompt, "a", 2))
    plan = save(catalog, "b", branch(prompt, "b", 2), Turn(context_tokens=1 << 41))
    assert catalog.match(branch(prompt, "b", 2)).blocks == 5
    assert plan.runs.column(FIRST_BLOCK).min() == 0, "the prompt goes to DRAM once more"


def test_saving_what_is_stored_opens_no_plan_and_pins_nothing() -> None:
    catalog, keys = make_catalog(), make_keys("a", 4)
    save(catalog, "s", keys)
    before = used_bytes(catalog)
    plan = begin(catalog, "s", keys)
    assert not len(plan.runs) and catalog.counts["save_blocks_skipped"] == 4
    assert catalog.open_counts()["plans"] == 0 and not any(scope.pins for scope in catalog.space.scopes)
    assert used_bytes(catalog) == before and report(catalog, plan) is None
    catalog.check()


def test_saving_nothing_is_no_error() -> None:
    catalog = make_catalog()
    assert not len(begin(catalog, "s", make_keys("a", 0)).runs)
    assert not len(catalog.space.scopes)
    catalog.check()


def test_a_plan_keeps_its_keys_when_the_caller_reuses_the_array() -> None:
    catalog, keys = make_catalog(), make_keys("a", 3)
    given = keys.copy()
    plan = begin(catalog, "s", given)
    given[:] = 0
    report(catalog, plan)
    assert catalog.match(keys).blocks == 3
    given = keys.copy()
    entry = catalog.lease(given, 0)
    given[:] = 0
    assert (restore(catalog, entry).keys == keys).all()


def test_a_save_extends_its_session_and_keeps_what_it_skipped() -> None:
    catalog, keys = small_catalog(40), make_keys("a", 20)
    save(catalog, "s", keys[:10])
    plan = begin(catalog, "t", keys, AGENT)
    assert isinstance(catalog.begin_save("u", make_keys("big", 25), AGENT, 1), Refused), "nothing may go"
    report(catalog, plan)
    assert catalog.match(keys).blocks == 20
    catalog.check()


# -- publish last --


def test_nothing_is_visible_before_every_rank_has_reported() -> None:
    catalog, keys = make_catalog(ranks=3), make_keys("a", 4)
    plan = begin(catalog, "s", keys)
    for rank in (2, 0):
        assert report(catalog, plan, rank) is None
        assert report(catalog, plan, rank) is None, "a repeated report counts once"
        assert catalog.match(keys).blocks == 0
        catalog.check()
    outcome = report(catalog, plan, 1)
    assert outcome is not None and outcome.published_blocks == 4 and catalog.match(keys).blocks == 4


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_that_failed_on_one_rank_is_never_visible(failing: int) -> None:
    catalog, keys = make_catalog(ranks=2), make_keys("a", 4)
    plan = begin(catalog, "s", keys)
    report(catalog, plan, failing, bad=2, reason="EIO")
    outcome = report(catalog, plan, 1 - failing)
    assert outcome is not None
    assert (outcome.published_blocks, outcome.first_bad_block, outcome.reason) == (0, 2, "EIO")
    assert catalog.match(keys).blocks == 0 and not used_bytes(catalog) and not len(catalog.space.scopes)
    assert catalog.counts["saves_failed"] == 1
    catalog.check()
    save(catalog, "s", keys)
    assert catalog.match(keys).blocks == 4


def test_the_smallest_bad_block_of_all_ranks_counts() -> None:
    catalog, keys = make_catalog(ranks=3), make_keys("a", 9)
    plan = begin(catalog, "s", keys)
    for rank, bad in ((0, 7), (1, 3)):
        report(catalog, plan, rank, bad=bad, reason=f"rank {rank}")
    outcome = report(catalog, plan, 2, bad=5, reason="rank 2")
    assert outcome is not None and (outcome.first_bad_block, outcome.reason) == (3, "rank 1")


def test_a_late_save_keeps_its_space_until_its_rank_reports_and_is_not_published() -> None:
    catalog, keys = make_catalog(), make_keys("a", 4)
    plan = begin(catalog, "s", keys, now_ns=5)
    assert catalog.expire(4 + REPORT_NS) == []
    (outcome,) = catalog.expire(5 + REPORT_NS)
    assert outcome.plan_id == plan.plan_id and outcome.reason == "ranks did not report in time"
    assert catalog.expire(6 + REPORT_NS) == [], "said once"
    assert used_bytes(catalog) and catalog.match(keys).blocks == 0
    catalog.check()
    late = report(catalog, plan)
    assert late is not None and late.published_blocks == 0 and catalog.match(keys).blocks == 0
    assert not used_bytes(catalog)
    catalog.check()


def test_a_save_of_a_lost_rank_is_not_published_and_leaves_no_space_behind() -> None:
    catalog, keys = make_catalog(ranks=2), make_keys("a", 4)
    save(catalog, "s", make_keys("kept", 3), AGENT)
    before = used_bytes(catalog)
    plan = begin(catalog, "s", keys, AGENT)
    assert report(catalog, plan, 0) is None
    (outcome,) = catalog.rank_lost(1)
    assert (outcome.published_blocks, outcome.reason) == (0, "rank 1 lost")
    assert catalog.match(keys).blocks == 0 and used_bytes(catalog) == before
    assert catalog.match(make_keys("kept", 3)).blocks == 3, "the survivor serves"
    catalog.check()
    assert catalog.rank_lost(1) == [], "lost once"


def test_a_rank_lost_after_its_report_fails_nothing_on_ssd() -> None:
    catalog, keys = make_catalog(ranks=2), make_keys("a", 4)
    plan = begin(catalog, "s", keys)
    report(catalog, plan, 1)
    assert catalog.rank_lost(1) == [] and report(catalog, plan, 0) is not None
    assert catalog.match(keys).blocks == 4


def test_a_restarted_rank_takes_dram_with_it() -> None:
    catalog, chat, agent = make_catalog(ranks=2), make_keys("chat", 3), make_keys("agent", 3)
    save(catalog, "c", chat, CHAT)
    save(catalog, "d", agent, AGENT)
    pending = begin(catalog, "c", branch(chat, "more", 2), CHAT)
    assert catalog.rank_started(1, 1) == [], "the same epoch again is no restart"
    report(catalog, pending, 1)
    assert catalog.rank_started(1, 2) == []
    assert catalog.match(chat).blocks == 0 and catalog.match(agent).blocks == 3
    outcome = report(catalog, pending, 0)
    assert outcome is not None and outcome.published_blocks == 0 and not used_bytes(catalog, Medium.DRAM)
    catalog.check()


def test_reports_of_strangers_are_dropped_and_counted() -> None:
    catalog, keys = make_catalog(), make_keys("a", 4)
    plan = begin(catalog, "s", keys)
    catalog.rank_started(1, 1)
    for stranger in (
        Completion(plan_id=plan.plan_id, rank=0, epoch=2),
        Completion(plan_id=plan.plan_id, rank=7, epoch=1),
        Completion(plan_id=plan.plan_id, rank=1, epoch=1, first_bad_block=0, reason="started after the plan"),
        Completion(plan_id=999, rank=0, epoch=1),
    ):
        assert catalog.finish(stranger) is None
    assert catalog.counts["reports_dropped"] == 4
    outcome = report(catalog, plan)
    assert outcome is not None and outcome.published_blocks == 4 and outcome.first_bad_block is None


def test_without_a_data_plane_everything_is_refused() -> None:
    catalog = make_catalog(ranks=0)
    assert catalog.begin_save("s", make_keys("a", 2), ONE_SHOT, 0) == Refused("no data plane")
    entry = catalog.lease(make_keys("a", 2), 0)
    assert catalog.start_restore(entry.lease_id, 0) == Refused("no data plane")
    assert catalog.counts["refused: no data plane"] == 2


def test_the_first_to_publish_wins() -> None:
    catalog, keys = make_catalog(), make_keys("a", 4)
    first, second = begin(catalog, "s", keys), begin(catalog, "t", keys)
    assert len(first.runs) and len(second.runs)
    report(catalog, second)
    winner = catalog.space.index.lookup(keys)
    outcome = report(catalog, first)
    assert outcome is not None and outcome.published_blocks == 0 and outcome.first_bad_block is None
    assert (catalog.space.index.lookup(keys) == winner).all() and catalog.counts["blocks_lost_race"] == 4
    assert {scope.session for scope in catalog.space.scopes} == {"t"}, "the loser's space is free"
    catalog.check()


def test_a_full_index_fails_the_save_that_would_overfill_it() -> None:
    catalog = make_catalog(make_space(lanes=LANES, entries=10))
    first, second = begin(catalog, "s", make_keys("a", 6)), begin(catalog, "t", make_keys("b", 6))
    report(catalog, first)
    outcome = report(catalog, second)
    assert outcome is not None and (outcome.published_blocks, outcome.reason) == (0, "index full")
    assert catalog.match(make_keys("a", 6)).blocks == 6 and catalog.match(make_keys("b", 6)).blocks == 0
    catalog.check()
    save(catalog, "t", make_keys("b", 6), now_ns=1)
    assert catalog.match(make_keys("b", 6)).blocks == 6 and catalog.match(make_keys("a", 6)).blocks == 0
    catalog.check()


# -- leases and draining --


def test_a_lease_keeps_its_prefix_from_reclaim() -> None:
    catalog, keys = small_catalog(40), make_keys("a", 15)
    save(catalog, "a", keys)
    entry = catalog.lease(keys, 1)
    for number in range(5):
        save(catalog, f"s{number}", make_keys(number, 15), now_ns=2 + number)
        catalog.check()
    assert catalog.match(keys).blocks == 15
    catalog.release(entry.lease_id)
    catalog.release(entry.lease_id)
    for number in range(5, 8):
        save(catalog, f"s{number}", make_keys(number, 15), now_ns=2 + number)
    assert catalog.match(keys).blocks == 0


def test_an_expired_lease_starts_no_restore() -> None:
    catalog, keys = make_catalog(), make_keys("a", 3)
    save(catalog, "s", keys)
    entry, short = catalog.lease(keys, 0), catalog.lease(keys, 0, hold_ns=10)
    assert catalog.start_restore(short.lease_id, 10) == Refused("lease expired"), "even before `expire` has run"
    restore(catalog, entry, LEASE_NS - 1)
    assert catalog.expire(LEASE_NS) == [] and catalog.counts["leases_expired"] == 2
    assert catalog.start_restore(entry.lease_id, LEASE_NS) == Refused("lease expired")
    assert catalog.open_counts()["leases"] == 0
    catalog.check()


def test_space_is_not_reused_while_a_restore_of_an_expired_lease_is_open() -> None:
    catalog, keys = small_catalog(40), make_keys("a", 15)
    save(catalog, "a", keys)
    plan = restore(catalog, catalog.lease(keys, 0))
    catalog.expire(REPORT_NS + LEASE_NS)
    assert catalog.open_counts() == {"leases": 0, "plans": 1, "draining": 0}
    now_ns = REPORT_NS + LEASE_NS
    assert isinstance(catalog.begin_save("b", make_keys("b", 30), ONE_SHOT, now_ns), Refused)
    assert catalog.match(keys).blocks == 15
    catalog.check()
    report(catalog, plan)
    save(catalog, "b", make_keys("b", 30), now_ns=now_ns)
    assert catalog.match(keys).blocks == 0
    catalog.check()


def test_a_lease_of_nothing_restores_nothing() -> None:
    catalog = make_catalog()
    entry = catalog.lease(make_keys("a", 3), 0)
    assert not len(entry.keys) and not len(restore(catalog, entry).runs)
    assert catalog.open_counts()["plans"] == 0
    catalog.check()


@pytest.mark.parametrize("skip", [0, 1, 4, 5, 7])
def test_a_restore_can_skip_leading_blocks(skip: int) -> None:
    catalog, keys = make_catalog(), make_keys("a", 7)
    save(catalog, "a", keys[:4])
    save(catalog, "a", keys, CHAT)
    plan = restore(catalog, catalog.lease(keys, 0), 0, skip)
    assert plan.runs.blocks == 7 - skip and len(plan.keys) == 7
    if skip < 7:
        assert int(plan.runs.column(FIRST_BLOCK).min()) == skip


def test_a_bad_block_is_dropped_and_the_blocks_before_it_stay() -> None:
    catalog, keys = make_catalog(ranks=2), make_keys("a", 5)
    save(catalog, "s", keys)
    plan = restore(catalog, catalog.lease(keys, 0))
    report(catalog, plan, 0, bad=3, reason="checksum")
    assert catalog.match(keys).blocks == 3, "at once, for everyone"
    outcome = report(catalog, plan, 1)
    assert outcome is not None and (outcome.first_bad_block, outcome.reason) == (3, "checksum")
    assert catalog.counts["blocks_dropped"] == 1
    catalog.check()
    save(catalog, "s", keys)
    assert catalog.match(keys).blocks == 5
    catalog.check()


def test_a_late_or_lost_restore_drops_no_block() -> None:
    catalog, keys = make_catalog(ranks=2), make_keys("a", 5)
    save(catalog, "s", keys)
    late = restore(catalog, catalog.lease(keys, 0))
    (outcome,) = catalog.expire(REPORT_NS)
    assert (outcome.plan_id, outcome.first_bad_block) == (late.plan_id, 0)
    lost = restore(catalog, catalog.lease(keys, REPORT_NS), REPORT_NS)
    for plan in (late, lost):
        report(catalog, plan, 0)
    reasons = {o.plan_id: o.reason for o in catalog.rank_lost(1)}
    assert reasons == {late.plan_id: "ranks did not report in time", lost.plan_id: "rank 1 lost"}
    assert catalog.match(keys).blocks == 5 and catalog.counts["blocks_dropped"] == 0


def test_a_lease_whose_dram_went_with_a_rank_starts_no_restore() -> None:
    catalog, keys = make_catalog(ranks=2), make_keys("a", 6)
    save(catalog, "s", keys[:3])
    save(catalog, "s", keys, CHAT)
    entry = catalog.lease(keys, 0)
    catalog.rank_started(1, 2)
    for skip in (0, 4):
        assert catalog.start_restore(entry.lease_id, 0, skip) == Refused("rank lost")
    assert catalog.lease(keys, 0).runs.blocks == 3
    catalog.release(entry.lease_id)
    assert not used_bytes(catalog, Medium.DRAM)
    catalog.check()


# -- shared prompts and sub-agents --


def shared_on_ssd(catalog: Catalog) -> tuple[KeyArray, KeyArray]:
    """Prompt of `a` on SSD, superseded by a copy in DRAM when `b` saves; returns the prompt and its old addresses."""
    prompt = make_keys("prompt", 4)
    save(catalog, "a", branch(prompt, "a", 2))
    old = catalog.space.index.lookup(prompt)
    save(catalog, "b", branch(prompt, "b", 2), now_ns=1)
    return prompt, old


def test_a_shared_prompt_on_ssd_is_superseded_by_dram_and_counted() -> None:
    catalog = make_catalog()
    prompt, old = shared_on_ssd(catalog)
    assert media_of(catalog, branch(prompt, "a", 2)) == [0, 0, 0, 0, 1, 1]
    assert media_of(catalog, branch(prompt, "b", 2)) == [0, 0, 0, 0, 1, 1]
    assert catalog.counts["blocks_superseded"] == 4 and catalog.counts["blocks_lost_race"] == 0
    assert (old != catalog.space.index.lookup(prompt)).all()
    assert len(catalog.space.index) == 8
    catalog.check()


def test_the_old_address_goes_with_its_scope_and_does_not_take_the_new_one() -> None:
    catalog = make_catalog()
    prompt, _ = shared_on_ssd(catalog)
    scope = catalog.space.scopes.of_session("a", Medium.SSD)
    assert scope is not None and scope.blocks == 6
    catalog.space.withdraw(scope)
    assert media_of(catalog, branch(prompt, "a", 2)) == [0, 0, 0, 0, -1, -1]
    catalog.check()


def test_of_two_copies_of_a_shared_prompt_one_is_kept() -> None:
    catalog, prompt = make_catalog(), make_keys("prompt", 4)
    save(catalog, "a", prompt)
    plans = [begin(catalog, name, branch(prompt, name, 1)) for name in "bc"]
    for plan in plans:
        report(catalog, plan)
    assert catalog.counts["blocks_superseded"] == 4 and catalog.counts["blocks_lost_race"] == 4
    assert sum(scope.session is None for scope in catalog.space.scopes) == 1
    assert used_bytes(catalog, Medium.DRAM) == LANES.extent_bytes(4)
    catalog.check()


def test_a_sub_agent_keeps_its_parents_scope_and_goes_first() -> None:
    catalog, parent = small_catalog(40), make_keys("parent", 6)
    child = branch(parent, "child", 4)
    save(catalog, "parent", parent)
    # DRAM is full, so that the parent's blocks stay where they are.
    save(catalog, "chat", make_keys("chat", 38), CHAT)
    save(catalog, "child", child, now_ns=1)
    save(catalog, "other", make_keys("other", 6), now_ns=2)
    assert media_of(catalog, child) == [1] * 10
    catalog.release(catalog.lease(child, 3).lease_id)
    assert [s.session for s in catalog.space.scopes.oldest(Medium.SSD)] == ["other", "child", "parent"]
    save(catalog, "big", make_keys("big", 26), now_ns=4)
    assert catalog.match(child).blocks == 6, "the leaf is gone, the parent is not"
    catalog.check()


# -- full media --


def test_reclaim_takes_whole_scopes_and_passes_over_what_a_save_skipped() -> None:
    catalog, keys = small_catalog(40), make_keys("a", 20)
    save(catalog, "a", keys[:10])
    save(catalog, "b", make_keys("b", 10), now_ns=1)
    save(catalog, "c", make_keys("c", 10), now_ns=2)
    plan = begin(catalog, "a", keys, AGENT, 3)
    assert catalog.match(keys).blocks == 10, "its own prefix was the oldest and was kept"
    assert catalog.match(make_keys("b", 10)).blocks == 0 and catalog.match(make_keys("c", 10)).blocks == 10
    report(catalog, plan)
    assert catalog.match(keys).blocks == 20
    catalog.check()


def test_a_turn_larger_than_the_store_is_refused_and_flushes_nothing() -> None:
    catalog, keys = small_catalog(40), make_keys("a", 20)
    save(catalog, "a", keys)
    assert catalog.begin_save("b", make_keys("b", 100), ONE_SHOT, 1) == Refused("no room")
    assert catalog.match(keys).blocks == 20 and catalog.counts["refused: no room"] == 1
    assert len(catalog.space.scopes) == 1
    catalog.check()


def test_dram_drops_idle_scopes_first_and_then_spills() -> None:
    catalog = small_catalog(40)
    save(catalog, "a", make_keys("a", 20), CHAT, 0)
    save(catalog, "b", make_keys("b", 15), CHAT, IDLE_NS)
    save(catalog, "c", make_keys("c", 18), CHAT, IDLE_NS + 1)
    assert media_of(catalog, make_keys("a", 1)) == [-1] and media_of(catalog, make_keys("c", 18)) == [0] * 18
    save(catalog, "d", make_keys("d", 18), CHAT, IDLE_NS + 2)
    assert media_of(catalog, make_keys("b", 15)) == [0] * 15 and media_of(catalog, make_keys("d", 18)) == [1] * 18
    assert catalog.counts["dram_spills"] == 1
    catalog.check()


# -- reset --


def test_reset_withdraws_everything_and_drains_what_is_in_flight() -> None:
    catalog, keys, chat = make_catalog(), make_keys("a", 5), make_keys("chat", 3)
    save(catalog, "s", keys)
    save(catalog, "c", chat, CHAT)
    entry = catalog.lease(keys, 0)
    reading = restore(catalog, entry)
    writing = begin(catalog, "s", branch(keys, "more", 3), AGENT)
    fresh = begin(catalog, "t", make_keys("t", 2))
    assert catalog.reset() == 8 and catalog.release_number == 1
    assert catalog.match(keys).blocks == catalog.match(chat).blocks == 0 == len(catalog.space.index)
    assert not used_bytes(catalog, Medium.DRAM) and used_bytes(catalog, Medium.SSD)
    catalog.check()

    assert catalog.start_restore(entry.lease_id, 0) == Refused("reset")
    for plan in (writing, fresh, reading):
        outcome = report(catalog, plan)
        assert outcome is not None and (outcome.published_blocks, outcome.reason) == (0, "reset")
        catalog.check()
    assert catalog.match(branch(keys, "more", 3)).blocks == 0 == catalog.match(make_keys("t", 2)).blocks
    assert used_bytes(catalog) and catalog.open_counts() == {"leases": 1, "plans": 0, "draining": 1}
    catalog.release(entry.lease_id)
    assert not used_bytes(catalog) and catalog.open_counts() == {"leases": 0, "plans": 0, "draining": 0}
    catalog.check()


def test_a_store_serves_again_after_reset() -> None:
    catalog, keys = make_catalog(), make_keys("a", 5)
    before = save(catalog, "s", keys)
    catalog.reset()
    after = save(catalog, "s", keys)
    assert catalog.match(keys).blocks == 5 and (before.release, after.release) == (0, 1)
    assert after.runs.table[0, 3] > before.runs.table[0, 3], "a new generation"
    catalog.check()


# -- extents a session costs --


@pytest.mark.parametrize(("layout", "extents"), [("lanes", 20), ("segments", 100)])
def test_runs_of_a_long_session_are_extents_in_lanes_and_turns_in_segments(layout: str, extents: int) -> None:
    catalog = make_catalog(make_space(lanes=LANES, ssd_files=8, layout=layout))  # type: ignore[arg-type]
    keys = make_keys("a", 200)
    for turn in range(1, 101):
        save(catalog, "s", keys[: 2 * turn], AGENT)
        save(catalog, "other", make_keys("b", 2 * turn), AGENT)
    scope = catalog.space.scopes.of_session("s", Medium.SSD)
    assert scope is not None
    runs = catalog.lease(keys, 0).runs
    assert runs.blocks == 200 and len(scope.extents) == len(runs) <= extents
    assert layout == "lanes" or len(runs) == 100
