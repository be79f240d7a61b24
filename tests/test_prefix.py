import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.gva import Medium
from flatcake.layout import LaneTable
from flatcake.messages import BLOCKS, FIRST_BLOCK, FIRST_SLOT
from flatcake.prefix import prefix_of, runs_of, shared_prefix
from flatcake.space import Space
from tests.builders import make_geometry, make_space

LANES = LaneTable.of(make_geometry())


def filled(space: Space, session: str | None, medium: Medium, blocks: int) -> np.ndarray:
    """uint64 [blocks]: addresses of so many slots of a scope."""
    known = space.scopes.of_session(session, medium) if session else None
    scope = known or space.scopes.create(session, medium, 0)
    slots = space.reserve(scope, blocks, 0)
    assert slots is not None
    return np.concatenate([space.gvas(part) for part in slots])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(Medium), st.integers(1, 9)), min_size=1, max_size=8),
    st.data(),
)
def test_runs_are_maximal_and_name_every_block_once(parts: list[tuple[int, Medium, int]], data: st.DataObject) -> None:
    space = make_space(lanes=LANES)
    gvas = np.concatenate([filled(space, f"s{s}", medium, blocks) for s, medium, blocks in parts])
    kept = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(gvas), max_size=len(gvas))))
    prefix = prefix_of(gvas[kept], kept, space)
    found = {}
    for row, owner in zip(prefix.runs.table.tolist(), prefix.owners, strict=True):
        medium, base, room, generation, slot, blocks, first = row
        extent = space.tables[Medium(medium)].at(base)
        assert extent is not None and (extent.room_blocks, extent.generation) == (room, generation)
        assert extent in owner.extents
        for nth in range(blocks):
            found[first + nth] = space.tables[Medium(medium)].piece_offset(extent, slot + nth) | medium << 60
    assert found == dict(zip(kept.tolist(), gvas[kept].tolist(), strict=True))
    assert prefix.runs.column(FIRST_BLOCK).tolist() == sorted(prefix.runs.column(FIRST_BLOCK).tolist())
    for (*left, blocks, first), (*right, _, next_first) in zip(
        prefix.runs.table.tolist(), prefix.runs.table.tolist()[1:], strict=False
    ):
        joined = left[:4] == right[:4] and left[4] + blocks == right[4] and first + blocks == next_first
        assert not joined, "two runs that are one"
    assert prefix.scopes == list(dict.fromkeys(prefix.owners))


def test_prefix_of_nothing_is_empty() -> None:
    prefix = prefix_of(np.empty(0, np.uint64), np.empty(0, np.int64), make_space())
    assert not len(prefix.runs) and not prefix.owners and not prefix.scopes


def test_neighbouring_slots_are_two_runs_where_the_request_has_a_hole() -> None:
    space = make_space(lanes=LANES)
    runs = prefix_of(filled(space, "a", Medium.SSD, 3), np.array([0, 2, 3]), space).runs
    assert runs.table[:, [FIRST_SLOT, BLOCKS, FIRST_BLOCK]].tolist() == [[0, 1, 0], [1, 2, 2]]


def test_neighbouring_extents_are_two_runs_even_with_one_layer() -> None:
    space = make_space(lanes=LaneTable.of(make_geometry(4096)))
    gvas = np.concatenate([filled(space, "a", Medium.SSD, 2), filled(space, "b", Medium.SSD, 2)])
    assert prefix_of(gvas, np.arange(4), space).runs.column(BLOCKS).tolist() == [2, 2]


def test_runs_of_slots_break_where_the_request_has_a_hole() -> None:
    space = make_space(lanes=LANES)
    scope = space.scopes.create("a", Medium.SSD, 0)
    slots = space.reserve(scope, 5, 0)
    assert slots is not None
    runs = runs_of(slots, np.array([2, 3, 6, 7, 8]))
    assert runs.table[:, [FIRST_SLOT, BLOCKS, FIRST_BLOCK]].tolist() == [[0, 2, 2], [2, 3, 6]]
    assert runs.blocks == 5 and not len(runs_of([], np.empty(0, np.int64)))


def test_shared_prefix_counts_what_another_session_wrote_and_remembers_it() -> None:
    space = make_space(lanes=LANES)
    gvas = np.concatenate([filled(space, "a", Medium.SSD, 4), filled(space, "b", Medium.SSD, 3)])
    known = prefix_of(gvas, np.arange(7), space)
    assert shared_prefix("a", prefix_of(gvas[:4], np.arange(4), space)) == 0, "its own blocks are not shared"
    assert shared_prefix("b", known) == 4
    assert shared_prefix("a", prefix_of(gvas[:4], np.arange(4), space)) == 4, "b uses them too"
    assert shared_prefix("c", known) == 7


def test_shared_prefix_ends_at_the_first_missing_block() -> None:
    space = make_space(lanes=LANES)
    gvas = filled(space, "a", Medium.SSD, 6)
    kept = np.array([0, 1, 3, 4])
    assert shared_prefix("b", prefix_of(gvas[kept], kept, space)) == 2
    kept = np.array([1, 2])
    assert shared_prefix("b", prefix_of(gvas[kept], kept, space)) == 0


def test_a_shared_prompts_scope_is_shared_for_everyone() -> None:
    space = make_space(lanes=LANES)
    gvas = filled(space, None, Medium.DRAM, 3)
    assert shared_prefix("a", prefix_of(gvas, np.arange(3), space)) == 3
