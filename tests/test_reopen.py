"""A catalog after a restart: what it finds, against what was there, and rows that do not fit together."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.catalog import Catalog
from flatcake.gva import Medium
from flatcake.index import MISS
from flatcake.layout import LaneTable
from flatcake.ledger import Outcome
from flatcake.manifest import Stored, TurnRow, decode_rows, encode_row
from flatcake.messages import Plan
from flatcake.reserve import DRAM_GVA_LIMIT
from flatcake.space import Space
from flatcake.units import SECOND
from tests.builders import (
    AGENT,
    CHAT,
    ONE_SHOT,
    begin,
    branch,
    make_catalog,
    make_geometry,
    make_keys,
    make_space,
    report,
    save,
)
from tests.manifests import ORIGIN, MemoryManifest

LANES = LaneTable.of(make_geometry())
FILE_BYTES = LANES.extent_bytes(40)
SEQUENCES = [branch(make_keys(f"root {i % 3}", 4), f"leaf {i}", 8) for i in range(8)]


def space_of(ssd_files: int = 2, **changes: Any) -> Space:
    return make_space(lanes=LANES, ssd_files=ssd_files, file_bytes=FILE_BYTES, **changes)


def kept_catalog(**changes: Any) -> tuple[Catalog, MemoryManifest]:
    catalog, manifest = make_catalog(space_of(**changes)), MemoryManifest()
    catalog.space.manifest = manifest
    return catalog, manifest


def reopened(manifest: MemoryManifest, *, dropped: int = 0, **changes: Any) -> Catalog:
    """A new catalog from what is committed."""
    catalog = make_catalog(space_of(**changes))
    assert len(catalog.reopen(manifest.stored(), 0)) == dropped
    catalog.space.manifest = manifest
    catalog.check()
    return catalog


def on_ssd(catalog: Catalog, keys: np.ndarray) -> dict[bytes, int]:
    gvas = catalog.space.index.lookup(keys)
    pairs = zip(keys, gvas.tolist(), strict=True)
    return {key.tobytes(): gva for key, gva in pairs if gva != int(MISS) and gva >= int(DRAM_GVA_LIMIT)}


def test_what_was_saved_is_found_at_the_same_place_and_grows_on() -> None:
    catalog, manifest = kept_catalog()
    keys = make_keys("a", 30)
    for blocks in (4, 7, 12):
        save(catalog, "a", keys[:blocks])
    again = reopened(manifest)
    assert (again.match(keys).gvas == catalog.match(keys).gvas).all() and again.match(keys).blocks == 12
    save(again, "a", keys)
    again.check()
    assert len(again.space.scopes) == 1 and again.match(keys).blocks == 30
    third = reopened(manifest)
    assert (third.match(keys).gvas == again.match(keys).gvas).all()


def test_a_session_of_an_earlier_run_is_recognized_on_both_media() -> None:
    catalog, manifest = kept_catalog()
    save(catalog, "a", make_keys("ssd", 4))
    save(catalog, "a", make_keys("dram", 4), CHAT)
    for row in catalog.rows_of(Medium.DRAM):
        manifest.commit_turn(row, 0)
    again = reopened(manifest)
    assert {type(scope.session) for scope in again.space.scopes} == {bytes}
    before = {scope.medium: scope.scope_id for scope in again.space.scopes}
    save(again, "b", make_keys("other", 4))
    save(again, "a", make_keys("ssd", 6))
    save(again, "a", make_keys("dram", 6), CHAT)
    again.check()
    after = {scope.medium: scope.scope_id for scope in again.space.scopes if scope.session == "a"}
    assert after == before and len(again.space.scopes) == 3


def test_a_shared_prompt_of_an_earlier_run_still_counts_as_shared() -> None:
    catalog, manifest = kept_catalog()
    prompt = make_keys("prompt", 6)
    save(catalog, "a", prompt)
    again = reopened(manifest)
    save(again, "a", branch(prompt, "a", 2))  # Its own: not shared.
    assert again.space.index.lookup(prompt).min() >= DRAM_GVA_LIMIT
    save(again, "b", branch(prompt, "b", 2))
    assert again.space.index.lookup(prompt).max() < DRAM_GVA_LIMIT
    again.check()


def test_the_scope_used_last_is_reclaimed_last_after_a_restart() -> None:
    catalog, manifest = kept_catalog()
    for name in "abc":
        save(catalog, name, make_keys(name, 4))
    catalog.release(catalog.lease(make_keys("a", 4), 1).lease_id)
    order = [scope.scope_id for scope in sorted(catalog.space.scopes, key=lambda scope: scope.order)]
    again = make_catalog(space_of())
    again.reopen(replace(manifest.stored(), used=tuple(order)), 0)
    assert [scope.scope_id for scope in again.space.scopes.oldest(Medium.SSD)] == order == [2, 3, 1]
    assert [scope.scope_id for scope in reopened(manifest).space.scopes.oldest(Medium.SSD)] == [1, 2, 3]


def test_last_uses_are_in_the_order_of_use_whatever_the_wall_clock_did() -> None:
    catalog, manifest = kept_catalog()
    for name in "abc":
        save(catalog, name, make_keys(name, 4))
    stored = replace(manifest.stored(), used=(2, 3, 1), idle_s={1: 50, 2: 30, 3: 70})
    again = make_catalog(space_of())
    again.reopen(stored, 0)
    found = [(scope.scope_id, scope.last_use_ns // SECOND) for scope in again.space.scopes.oldest(Medium.SSD)]
    assert found == [(2, -30), (3, -30), (1, -30)]


def test_generations_and_scopes_go_on_above_all_that_were() -> None:
    catalog, manifest = kept_catalog()
    for name in "abcd":
        save(catalog, name, make_keys(name, 4))
    again = reopened(manifest)
    save(again, "e", make_keys("e", 4))
    *old, new = sorted(again.space.scopes, key=lambda scope: scope.scope_id)
    assert new.extents[0].generation > max(extent.generation for scope in old for extent in scope.extents)
    assert new.session == "e" and again.space.generation == catalog.space.generation + 1


# -- what is never visible ------------------------------------------------------------------------------


def test_a_turn_is_committed_before_it_is_visible_and_without_the_lock() -> None:
    catalog, manifest = kept_catalog()
    keys, seen = make_keys("a", 4), []

    def look(row: TurnRow) -> None:
        seen.append((catalog.match(keys).blocks, len(row.keys)))
        assert catalog._lock.acquire(blocking=False)
        catalog._lock.release()

    manifest.before_commit = look
    save(catalog, "a", keys)
    assert seen == [(0, 4)] and catalog.match(keys).blocks == 4


def test_turns_on_dram_are_not_committed() -> None:
    catalog, manifest = kept_catalog()
    save(catalog, "a", make_keys("a", 4), CHAT)
    assert catalog.match(make_keys("a", 4)).blocks == 4 and not manifest.rows
    assert reopened(manifest).match(make_keys("a", 4)).blocks == 0


def test_a_failed_save_is_not_committed() -> None:
    catalog, manifest = kept_catalog()
    report(catalog, begin(catalog, "a", make_keys("a", 4)), bad=1, reason="EIO")
    assert not manifest.rows and not catalog.space.tables[Medium.SSD].used_bytes


@pytest.mark.parametrize("what", ["reset", "expire"])
def test_a_save_that_fails_while_it_is_committed_is_dropped_again(what: str) -> None:
    catalog, manifest = kept_catalog()
    save(catalog, "kept", make_keys("kept", 4))

    def interrupt(row: TurnRow) -> None:
        manifest.before_commit = lambda row: None
        if what == "reset":
            catalog.reset()
        else:
            assert len(catalog.expire(1 << 60)) == 1

    manifest.before_commit = interrupt
    outcome = report(catalog, begin(catalog, "a", make_keys("a", 4)))
    assert outcome is not None and outcome.published_blocks == 0 and outcome.first_bad_block is not None
    catalog.check()
    manifest.settle()
    again = reopened(manifest)
    assert again.match(make_keys("a", 4)).blocks == 0
    assert again.match(make_keys("kept", 4)).blocks == (0 if what == "reset" else 4)


def test_a_rank_that_is_lost_while_a_save_is_committed_changes_nothing_for_it() -> None:
    catalog, manifest = kept_catalog()
    ended: list[list[Outcome]] = []
    manifest.before_commit = lambda row: ended.append(catalog.rank_lost(0))
    outcome = report(catalog, begin(catalog, "a", make_keys("a", 4)))
    assert outcome is not None and outcome.published_blocks == 4 and ended == [[]]
    catalog.check()


def test_a_commit_that_fails_loses_the_turn_over_the_restart_only() -> None:
    catalog, manifest = kept_catalog()
    manifest.is_broken = True
    save(catalog, "a", make_keys("a", 4))
    assert catalog.match(make_keys("a", 4)).blocks == 4
    manifest.is_broken = False
    save(catalog, "a", make_keys("a", 6))
    again = reopened(manifest)
    assert again.match(make_keys("a", 6)).blocks == 0 and len(again.space.index) == 2


def test_reset_is_forgotten_for_good_and_new_turns_are_not() -> None:
    catalog, manifest = kept_catalog()
    save(catalog, "a", make_keys("a", 4))
    late = begin(catalog, "b", make_keys("b", 4))
    assert catalog.reset() == 4
    report(catalog, late)
    save(catalog, "c", make_keys("c", 4))
    again = reopened(manifest)
    assert [again.match(make_keys(name, 4)).blocks for name in "abc"] == [0, 0, 4]


def test_a_reclaimed_scope_is_forgotten_before_its_bytes_are_anothers() -> None:
    catalog, manifest = kept_catalog(ssd_files=1)
    for number in range(40):
        save(catalog, f"s{number}", make_keys(number, 6), ONE_SHOT, number)
        reopened(manifest, ssd_files=1)
    assert catalog.space.reclaimed_scopes > 20
    again = reopened(manifest, ssd_files=1)
    for number in range(40):
        assert again.match(make_keys(number, 6)).blocks == catalog.match(make_keys(number, 6)).blocks
    assert again.space.tables[Medium.SSD].used_bytes == catalog.space.tables[Medium.SSD].used_bytes


@pytest.mark.parametrize("seed", range(4))
def test_at_any_moment_a_restart_finds_what_is_visible_on_ssd(seed: int) -> None:
    catalog, manifest = kept_catalog(ssd_files=1)
    dice, open_plans = random.Random(seed), list[Plan]()
    everything = np.concatenate(SEQUENCES)
    hits, ever = 0, set[bytes]()
    for step in range(250):
        keys = SEQUENCES[dice.randrange(8)][: dice.randint(1, 12)]
        if dice.random() < 0.4:
            keys = make_keys(f"once {seed} {step}", dice.randint(1, 12))
        if dice.random() < 0.6:
            turn = dice.choice([ONE_SHOT, CHAT, AGENT])
            plan = catalog.begin_save(f"s{dice.randrange(6)}", keys, turn, step)
            open_plans += [plan] if isinstance(plan, Plan) and len(plan.runs) else []
        elif open_plans:
            plan = open_plans.pop(dice.randrange(len(open_plans)))
            outcome = report(catalog, plan, bad=0 if dice.random() < 0.2 else None, reason="EIO")
            if outcome is not None and outcome.first_bad_block is None:
                ever |= {key.tobytes() for key in plan.keys}
        elif dice.random() < 0.1:
            catalog.reset()
            ever.clear()
        if step % 5 == 0:
            manifest.settle()
            again = reopened(manifest, ssd_files=1)
            wanted, found = on_ssd(catalog, everything), on_ssd(again, everything)
            # More than is visible: of a block that two sessions wrote, or that was written once more to DRAM,
            # the other copy may outlive the one in the index.
            assert wanted.keys() <= found.keys() <= ever
            hits += len(found)
    assert hits > 100 and catalog.space.reclaimed_scopes > 5


# -- rows that do not fit -------------------------------------------------------------------------------


def row(scope: int, base: int, generation: int, slot: int, count: int, **changes: Any) -> TurnRow:
    """A turn in an extent with room for 4."""
    made = TurnRow(
        scope_id=scope,
        session=scope.to_bytes(16, "little"),
        medium=Medium.SSD,
        shared_blocks=0,
        parts=np.array([[base, changes.pop("room", 4), generation, slot, count]]),
        keys=make_keys(f"{scope} {base} {generation} {slot}", count),
    )
    return replace(made, **changes)


OTHERS = (b"x" * 16, b"y" * 16, b"z" * 16)
OTHER_PIECES = ((4096, 8192, 4096), (20480,), ())
"""Three lanes, one, and a manifest that says nothing."""


def load(*rows: TurnRow, tenants: Sequence[int] = (), **changes: Any) -> tuple[Catalog, list[int], Counter[str]]:
    """A catalog from rows of this identity, or of others as `tenants` says."""
    owners = [(ORIGIN, *OTHERS)[tenant] for tenant in tenants or [0] * len(rows)]
    bodies = [(n, encode_row(r, n, owner)) for n, (r, owner) in enumerate(zip(rows, owners, strict=True), 1)]
    stored, bad = decode_rows(bodies, ORIGIN, OTHERS)
    assert not bad and stored.tenants.tolist() == list(tenants or [0] * len(rows))
    stored = replace(stored, piece_bytes=OTHER_PIECES)
    catalog = make_catalog(space_of(**changes))
    dropped = catalog.reopen(stored, 0)
    catalog.check()
    return catalog, dropped, catalog.counts


EXTENT = LANES.extent_bytes(4)


@pytest.mark.parametrize(
    ("rows", "dropped"),
    [
        ([row(1, 0, 1, 0, 2), row(1, 0, 1, 2, 2)], []),
        ([row(1, 0, 1, 0, 2), row(2, EXTENT, 2, 0, 2)], []),
        ([row(1, -4096, 1, 0, 2)], [1]),
        ([row(1, 2 * FILE_BYTES, 1, 0, 2)], [1]),
        ([row(1, 2 * FILE_BYTES - 4096, 1, 0, 2)], [1]),
        ([row(1, FILE_BYTES - 4096, 1, 0, 2)], [1]),
        ([row(1, 1, 1, 0, 2)], [1]),
        ([row(1, 0, 0, 0, 2)], [1]),
        ([row(1, 0, 1 << 62, 0, 2)], [1]),
        ([row(1, 0, 1, 3, 2)], [1]),
        ([row(1, 0, 1, -1, 2)], [1]),
        ([row(1, 0, 1, 0, 2, room=0)], [1]),
        ([row(1, 0, 1, 0, 2, room=1 << 61)], [1]),
        ([row(1, 0, 1, 0, 2, room=41)], [1]),
        ([row(0, 0, 1, 0, 2)], [1]),
        ([row(1, 0, 1, 0, 2, shared_blocks=-1)], [1]),
        # One extent, two stories: the later row counts.
        ([row(1, 0, 1, 0, 2), row(1, 0, 1, 2, 2, room=5)], [1]),
        ([row(1, 0, 1, 0, 2), row(2, 0, 1, 2, 2)], [1]),
        ([row(1, 0, 1, 0, 2), row(1, EXTENT, 1, 2, 2)], [1]),
        # One scope, two owners; one session, two scopes.
        ([row(1, 0, 1, 0, 2), row(1, EXTENT, 2, 0, 2, session=b"x" * 16)], [1]),
        ([row(1, 0, 1, 0, 2), row(1, EXTENT, 2, 0, 2, session=None)], [1]),
        ([row(1, 0, 1, 0, 2), row(2, EXTENT, 2, 0, 2, session=row(1, 0, 1, 0, 2).session)], [1]),
        ([row(1, 0, 1, 0, 2, session=None), row(2, EXTENT, 2, 0, 2, session=None)], []),
        # Bytes of an extent that a newer one has taken.
        ([row(1, 0, 1, 0, 2), row(2, 4096, 2, 0, 2)], [1]),
        ([row(1, 0, 2, 0, 2), row(2, 4096, 1, 0, 2)], [2]),
        ([row(1, 0, 1, 0, 2), row(2, 0, 2, 0, 2), row(3, 0, 3, 0, 2)], [1, 2]),
        ([row(1, 0, 3, 0, 2), row(2, 4096, 2, 0, 2), row(3, EXTENT, 1, 0, 2)], [2]),
        # Slots that a later turn has taken.
        ([row(1, 0, 1, 0, 2), row(1, 0, 1, 1, 2)], [1]),
        ([row(1, 0, 1, 1, 2), row(1, 0, 1, 0, 2)], [1]),
    ],
)
def test_rows_that_do_not_fit_are_left_out(rows: list[TurnRow], dropped: list[int]) -> None:
    catalog, found, counts = load(*rows)
    # In a chain of overlaps the middle one may take its neighbour with it; it never takes the newest.
    assert set(dropped) <= set(found) and len(found) < max(2, len(rows)), found
    for number, each in enumerate(rows, 1):
        assert catalog.match(each.keys).blocks == (0 if number in found else len(each.keys))
    assert sum(n for name, n in counts.items() if name.startswith("reopen:")) == len(found)


def test_more_blocks_than_the_index_holds_lose_the_oldest() -> None:
    rows = [row(n, (n - 1) * EXTENT, n, 0, 4) for n in range(1, 6)]
    catalog, dropped, _ = load(*rows, entries=9)
    assert dropped == [1, 2, 3] and len(catalog.space.index) == 8


def test_a_smaller_pool_keeps_what_lies_inside_and_a_larger_one_everything() -> None:
    catalog, manifest = kept_catalog(ssd_files=4)
    for number in range(12):
        save(catalog, f"s{number}", make_keys(number, 10))
    inside = [n for n in range(12) if (catalog.match(make_keys(n, 10)).gvas & np.uint64(2**48 - 1)).max() < FILE_BYTES]
    smaller = reopened(manifest, dropped=12 - len(inside), ssd_files=1)
    assert [n for n in range(12) if smaller.match(make_keys(n, 10)).blocks] == inside and 0 < len(inside) < 12
    larger = reopened(manifest, ssd_files=9)
    assert all(larger.match(make_keys(n, 10)).blocks == 10 for n in range(12))
    save(larger, "new", make_keys("new", 39))
    larger.check()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_rows_give_a_sound_catalog(data: st.DataObject) -> None:
    """Rows that prove themselves may still say anything, as from a manifest that was put together by hand."""
    bases = st.integers(-1, 12).map(lambda n: n * 4096) | st.sampled_from([0, FILE_BYTES, FILE_BYTES - 4096])
    part = st.tuples(bases, st.integers(0, 6), st.integers(0, 5), st.integers(-1, 5), st.integers(0, 4))
    rows, tenants = [], []
    for number in range(data.draw(st.integers(1, 8))):
        parts = np.array(data.draw(st.lists(part, min_size=1, max_size=3)), np.int64)
        blocks = int(parts[:, 4].sum())
        if not blocks:
            continue
        tenants.append(data.draw(st.sampled_from([0, 0, 0, 1, 2, 3])))
        rows.append(
            TurnRow(
                scope_id=data.draw(st.integers(-1, 3)),
                session=data.draw(st.sampled_from([None, b"a" * 16, b"b" * 16])),
                medium=data.draw(st.sampled_from(Medium)),
                shared_blocks=data.draw(st.integers(-1, 2)),
                parts=parts,
                keys=make_keys(data.draw(st.integers(0, 3)), blocks + number)[number:],
            )
        )
    catalog, dropped, counts = load(*rows, tenants=tenants, entries=data.draw(st.sampled_from([3, 100])))
    for number, each in enumerate(rows, 1):
        if number not in dropped and tenants[number - 1]:
            assert tenants[number - 1] < 3
            assert catalog.space.scopes.get(each.scope_id).is_foreign
        elif number not in dropped:
            assert (catalog.space.index.lookup(each.keys) != MISS).all()
    mine = [n for n, tenant in enumerate(tenants, 1) if not tenant and n not in dropped]
    blocks = sum(len(rows[number - 1].keys) for number in mine)
    assert counts["reopened_blocks_ssd"] + counts["reopened_blocks_dram"] == blocks
    for name in range(4):
        plan = catalog.begin_save(f"n{name}", make_keys(f"new {name}", 2), CHAT if name % 2 else ONE_SHOT, 0)
        if isinstance(plan, Plan):
            report(catalog, plan)
        catalog.check()
    catalog.reset()
    catalog.check()
    assert not any(table.used_bytes for table in catalog.space.tables.values())


def test_rows_of_another_identity_hold_their_place_and_nothing_else() -> None:
    rows = [row(1, 0, 1, 0, 4), row(2, EXTENT, 2, 0, 4), row(3, 3 * EXTENT, 3, 0, 4)]
    rows[1] = replace(rows[1], session=rows[0].session)
    catalog, dropped, counts = load(*rows, tenants=[0, 1, 0])
    assert not dropped and not any(name.startswith("reopen: rows") for name in counts)
    assert [catalog.match(each.keys).blocks for each in rows] == [4, 0, 4]
    other = LaneTable.of_pieces(OTHER_PIECES[0]).extent_bytes(4)
    table = catalog.space.tables[Medium.SSD]
    assert other != EXTENT and table.used_bytes == 2 * EXTENT + other
    assert catalog.retention.foreign_bytes() == {Medium.SSD: other}
    assert [scope.scope_id for scope in catalog.space.scopes.oldest(Medium.SSD)] == [2, 1, 3]
    assert table.at(EXTENT + other - 1) is catalog.space.scopes.get(2).extents[0]
    assert catalog.retention.delete_session("nobody") == 0
    catalog.space.withdraw(catalog.space.scopes.get(2))
    assert table.used_bytes == 2 * EXTENT and not catalog.retention.foreign_bytes()
    catalog.check()


@pytest.mark.parametrize(
    ("rows", "tenants", "dropped"),
    [
        # Of another geometry the second would begin inside of the first.
        ([row(1, 0, 1, 0, 2), row(2, EXTENT, 2, 0, 2)], [1, 0], [1]),
        ([row(1, 0, 2, 0, 2), row(2, EXTENT, 1, 0, 2)], [1, 0], [2]),
        ([row(1, 0, 1, 0, 2), row(2, EXTENT, 2, 0, 2)], [2, 0], [1]),
        # The same scope, or extent, cannot be of two identities.
        ([row(1, 0, 1, 0, 2), row(1, 0, 1, 2, 2)], [1, 0], [1]),
        ([row(1, 0, 1, 0, 2), row(1, 0, 1, 2, 2)], [0, 1], [1]),
        ([row(1, 0, 1, 0, 2, medium=Medium.DRAM), row(2, 0, 2, 0, 2)], [1, 0], []),
        ([row(1, 0, 1, 0, 2, medium=Medium.DRAM), row(2, 0, 2, 0, 2, medium=Medium.DRAM)], [1, 0], [1]),
        ([row(1, 0, 1, 0, 2), row(2, 8 * EXTENT, 2, 0, 2)], [3, 0], [1]),
        ([row(1, FILE_BYTES - EXTENT, 1, 0, 2)], [1], [1]),
    ],
)
def test_rows_of_other_identities_that_do_not_fit_are_left_out(
    rows: list[TurnRow], tenants: list[int], dropped: list[int]
) -> None:
    catalog, found, counts = load(*rows, tenants=tenants)
    assert found == dropped and sum(n for name, n in counts.items() if name.startswith("reopen:")) == len(found)
    for number, (each, tenant) in enumerate(zip(rows, tenants, strict=True), 1):
        assert catalog.match(each.keys).blocks == (0 if tenant or number in found else len(each.keys))


def test_an_empty_manifest_gives_an_empty_catalog() -> None:
    stored: Stored = decode_rows([], ORIGIN)[0]
    catalog = make_catalog(space_of())
    assert catalog.reopen(stored, 0) == [] and not len(catalog.space.scopes)
    catalog.check()
