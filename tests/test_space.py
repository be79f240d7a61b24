import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.gva import Medium, decode_array
from flatcake.layout import LaneTable
from flatcake.scopes import Scope
from flatcake.space import Slots, Space, Watermarks
from flatcake.units import KiB, MiB
from tests.builders import IDLE_NS, make_geometry, make_keys, make_space

LANES = LaneTable.of(make_geometry())


def publish(space: Space, scope: Scope, name: str, slots: list[Slots]) -> None:
    """What a finished save does: enter the blocks of `slots` in the index and in their scope."""
    keys = make_keys(name, sum(part.count for part in slots))
    gvas = np.concatenate([space.gvas(part) for part in slots])
    space.index.publish(keys, gvas)
    scope.record(keys, gvas)


def fill(space: Space, session: str | None, blocks: int, now_ns: int = 0, medium: Medium = Medium.SSD) -> Scope:
    """A scope with that many published blocks and no pins."""
    known = space.scopes.of_session(session, medium) if session else None
    scope = known or space.scopes.create(session, medium, now_ns)
    slots = space.reserve(scope, blocks, now_ns)
    assert slots is not None and sum(part.count for part in slots) == blocks
    publish(space, scope, f"{session} {scope.blocks}", slots)
    return scope


def small_space(blocks: int, **changes: int | Watermarks) -> Space:
    """An SSD pool of one file that holds one extent of `blocks` blocks, and an arena of the same size."""
    return make_space(lanes=LANES, ssd_files=1, file_bytes=LANES.extent_bytes(blocks), **changes)  # type: ignore[arg-type]


def test_reserve_fills_the_tail_before_it_opens_an_extent() -> None:
    space = make_space(lanes=LANES, percent=100)
    scope = fill(space, "a", 4)
    fill(space, "a", 1)
    assert [(extent.room_blocks, extent.used_blocks) for extent in scope.extents] == [(4, 4), (4, 1)]
    slots = space.reserve(scope, 5, 0)
    assert slots is not None
    assert [(part.extent.generation, part.first, part.count) for part in slots] == [(2, 1, 3), (3, 0, 2)]


def test_addresses_of_slots_are_those_of_their_pieces() -> None:
    space = make_space(lanes=LANES)
    scope = space.scopes.create("a", Medium.SSD, 0)
    (slots,) = space.reserve(scope, 3, 0) or []
    media, nodes, offsets = decode_array(space.gvas(slots))
    assert media.tolist() == [1, 1, 1] and nodes.tolist() == [0, 0, 0]
    assert offsets.tolist() == [LANES.record_bytes(3) + slot * 4 * KiB for slot in range(3)]


def test_generations_never_come_back() -> None:
    space = small_space(8)
    seen: set[int] = set()
    for turn in range(50):
        scope = fill(space, f"s{turn}", 1 + turn % 4, now_ns=turn)
        generations = {extent.generation for extent in scope.extents}
        assert not generations & seen
        seen |= generations
        space.check()
    assert space.reclaimed_scopes > 40


def test_reclaim_takes_whole_scopes_oldest_first_down_to_the_low_mark() -> None:
    space = small_space(100, marks=Watermarks(high=0.95, low=0.53, dram_idle_ns_max=IDLE_NS))
    for number in range(9):
        fill(space, f"s{number}", 10, now_ns=number)
    space.scopes.touch([space.scopes.of_session("s0", Medium.SSD)], 20)  # type: ignore[list-item]
    assert space.reclaimed_scopes == 0
    fill(space, "new", 10, now_ns=30)
    left = {scope.session for scope in space.scopes}
    assert left == {"s0", "s6", "s7", "s8", "new"} and space.reclaimed_scopes == 5 and space.reclaimed_blocks == 50
    assert len(space.index) == 50
    space.check()


def test_reclaim_passes_over_pinned_scopes() -> None:
    space = small_space(40)
    first, second = fill(space, "a", 15), fill(space, "b", 15)
    space.pin(first)
    fill(space, "c", 15, now_ns=1)
    assert not first.withdrawn and second.withdrawn
    space.unpin(first)
    space.check()


def test_a_turn_that_cannot_fit_reclaims_nothing() -> None:
    space = small_space(40)
    pinned, other = fill(space, "a", 15), fill(space, "b", 15)
    space.pin(pinned)
    scope = space.scopes.create("c", Medium.SSD, 1)
    space.pin(scope)
    for blocks in (26, 41, 10_000):
        assert space.reserve(scope, blocks, 1) is None
        assert not other.withdrawn and not scope.extents and space.reclaimed_scopes == 0
    assert space.reserve(scope, 23, 1) is not None and other.withdrawn
    space.unpin(pinned)
    space.unpin(scope)
    space.check()


def test_dram_drops_idle_scopes_only() -> None:
    space = small_space(20)
    fill(space, "a", 10, now_ns=5, medium=Medium.DRAM)
    scope = space.scopes.create("b", Medium.DRAM, 5)
    space.pin(scope)
    assert space.available_blocks(Medium.DRAM, 5 + IDLE_NS, 99) < 10
    assert space.reserve(scope, 12, 5 + IDLE_NS) is None and space.reclaimed_scopes == 0
    assert space.available_blocks(Medium.DRAM, 6 + IDLE_NS, 99) == 18
    assert space.reserve(scope, 12, 6 + IDLE_NS) is not None and space.reclaimed_scopes == 1
    space.unpin(scope)
    space.check()


def test_available_blocks_stops_at_what_was_asked() -> None:
    space = small_space(20)
    assert [space.available_blocks(Medium.SSD, 0, limit) for limit in (0, 1, 5, 99)] == [0, 1, 5, 18]


def test_a_withdrawn_scope_keeps_its_extents_until_the_last_pin() -> None:
    space = small_space(20)
    scope = fill(space, "a", 10)
    space.pin(scope)
    space.pin(scope)
    space.withdraw(scope)
    assert len(space.index) == 0 and space.tables[Medium.SSD].used_bytes and space.draining == [scope]
    space.unpin(scope)
    space.check()
    assert space.tables[Medium.SSD].used_bytes and space.scopes.of_session("a", Medium.SSD) is None
    space.unpin(scope)
    assert not space.tables[Medium.SSD].used_bytes and not space.draining
    space.check()


def test_slots_given_back_are_taken_again() -> None:
    space = make_space(lanes=LANES)
    scope = space.scopes.create("a", Medium.SSD, 0)
    space.pin(scope)
    first = space.reserve(scope, 4, 0)
    assert first is not None
    space.give_back(first)
    assert not scope.extents and not space.tables[Medium.SSD].used_bytes
    space.unpin(scope)
    assert not len(space.scopes)
    space.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_slots_lost_between_two_failed_saves_go_with_the_last_pin(order: tuple[int, int]) -> None:
    space = make_space(lanes=LANES, percent=100)
    scope = space.scopes.create("a", Medium.SSD, 0)
    saves = []
    for blocks in (3, 2):
        space.pin(scope)
        slots = space.reserve(scope, blocks, 0)
        assert slots is not None
        saves.append(slots)
    for number in order:
        space.give_back(saves[number])
        space.unpin(scope)
        space.check()
    assert not len(space.scopes) and not space.tables[Medium.SSD].used_bytes


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_save_gives_no_slot_of_another_away(failing: int) -> None:
    space = make_space(lanes=LANES, percent=200)
    scope = fill(space, "a", 4)
    saves = [space.reserve(scope, 2, 0) or [] for _ in range(2)]
    assert saves[0][0].extent is saves[1][0].extent, "both write to one extent"
    space.give_back(saves[failing])
    kept = saves[1 - failing][0]
    publish(space, scope, "kept", [kept])
    (later,) = space.reserve(scope, 3, 0) or []
    assert later.first >= kept.first + kept.count and later.extent is kept.extent
    publish(space, scope, "later", [later])
    space.check()


def test_a_full_index_reclaims_like_a_full_medium() -> None:
    space = make_space(lanes=LANES, entries=20)
    old, young = fill(space, "a", 8, now_ns=1), fill(space, "b", 8, now_ns=2)
    fill(space, "c", 8, now_ns=3)
    assert old.withdrawn and not young.withdrawn and len(space.index) == 16
    scope = space.scopes.create("d", Medium.SSD, 4)
    space.pin(scope)
    assert space.reserve(scope, 21, 4) is None and not young.withdrawn
    space.unpin(scope)
    space.check()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.sampled_from(["keep", "fail", "hold"])), max_size=40),
    st.sampled_from(["lanes", "segments"]),
)
def test_random_turns_keep_every_invariant(turns: list[tuple[int, int, str]], layout: str) -> None:
    space = make_space(lanes=LANES, ssd_files=3, file_bytes=LANES.extent_bytes(16), layout=layout)  # type: ignore[arg-type]
    held: list[tuple[Scope, list[Slots]]] = []
    for now_ns, (session, blocks, end) in enumerate(turns):
        scope = space.scopes.of_session(f"s{session}", Medium.SSD)
        scope = scope or space.scopes.create(f"s{session}", Medium.SSD, now_ns)
        space.pin(scope)
        slots = space.reserve(scope, blocks, now_ns)
        if slots is not None:
            held.append((scope, slots))
            if end != "hold":
                scope, slots = held.pop(now_ns % len(held))
                if end == "keep":
                    publish(space, scope, f"turn {now_ns}", slots)
                else:
                    space.give_back(slots)
                space.unpin(scope)
        else:
            space.unpin(scope)
        space.check()
    for scope, slots in held:
        space.give_back(slots)
        space.unpin(scope)
    space.check()
    for scope in space.scopes:
        space.withdraw(scope)
    space.check()
    table = space.tables[Medium.SSD]
    assert not table.used_bytes and not len(space.index) and table.ranges.largest_bytes == table.ranges.file_bytes


def test_segments_give_every_turn_its_own_extent() -> None:
    for layout, extents in (("segments", 12), ("lanes", 7)):
        space = make_space(lanes=LANES, layout=layout, file_bytes=1 * MiB, percent=50)  # type: ignore[arg-type]
        for _ in range(12):
            scope = fill(space, "a", 2)
        assert len(scope.extents) == extents


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_slots_that_are_given_back_in_any_order_are_free_again(order: tuple[int, ...]) -> None:
    space = make_space(percent=400)
    fill(space, "s", 4)
    scope = fill(space, "s", 1)  # Its second extent has room to spare.
    space.pin(scope)
    used = scope.used_blocks
    taken = [space.reserve(scope, blocks, 0) for blocks in (2, 1, 3)]
    assert scope.used_blocks == used + 6 and len(scope.extents) == 2
    for number in order:
        space.give_back(taken[number] or [])
    assert scope.used_blocks == used and not scope.extents[-1].holes
    space.unpin(scope)
    space.check()
