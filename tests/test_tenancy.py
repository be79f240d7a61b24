"""Whose directory it was, and how long each scope has been idle, against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.gva import Medium
from flatcake.manifest import State, Stored, TurnRow, decode_rows, encode_row, encode_state
from flatcake.tenancy import (
    STATE_NUMBER,
    TENANT_NUMBER,
    TENANTS_MAX,
    WEAR_NUMBER,
    Tenancy,
    idle_seconds,
    order_of_use,
    read_tenancy,
)
from flatcake.wear import Wear, encode_wear

ORIGIN, A, B, C = (letter * 16 for letter in (b"o", b"a", b"b", b"c"))


def stored(rows: list[tuple[int, int]]) -> Stored:
    """Rows of (scope, wall clock), committed one after another from 1 on."""
    bodies = []
    for number, (scope, wall_s) in enumerate(rows, 1):
        row = TurnRow(
            scope_id=scope,
            session=None,
            medium=Medium.SSD,
            shared_blocks=0,
            parts=np.array([[0, 4, 1, 0, 1]]),
            keys=np.full((1, 2), number, np.uint64),
        )
        bodies.append((number, encode_row(row, number, ORIGIN, wall_s)))
    found, bad = decode_rows(bodies, ORIGIN)
    assert not bad and found.saved_s.tolist() == [wall_s for _, wall_s in rows]
    return found


TIMES = st.integers(0, 60)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 6), TIMES), max_size=12),
    listed=st.dictionaries(st.integers(1, 8), st.integers(1, 60), max_size=6),
    noted=st.integers(0, 12),
    wall_s=TIMES,
)
def test_idle_time_is_that_since_the_last_use_that_is_known(
    rows: list[tuple[int, int]], listed: dict[int, int], noted: int, wall_s: int
) -> None:
    last = State(origin=ORIGIN, used=tuple(listed), used_s=tuple(listed.values()), noted=noted)
    found = idle_seconds(stored(rows), last, wall_s)
    assert set(found) == {scope for scope, _ in rows}
    for scope, idle_s in found.items():
        # A list that was written later corrects what rows say, so that a stamp from the future is believed once.
        said = [s for n, (own, s) in enumerate(rows, 1) if own == scope and s and (n > noted or scope not in listed)]
        said += [listed[scope]] if scope in listed else []
        assert idle_s == (max(0, wall_s - max(said)) if said else 0)
        assert 0 <= idle_s <= wall_s


def test_rows_without_a_time_count_as_used_now() -> None:
    assert idle_seconds(stored([(1, 0), (2, 40)]), None, 100) == {1: 0, 2: 60}
    old = State(origin=ORIGIN, used=(2, 1), noted=2)  # As written before times were.
    assert idle_seconds(stored([(1, 0), (2, 40)]), old, 100) == {1: 0, 2: 60}
    assert order_of_use(stored([(1, 0), (2, 40)]), old) == (2, 1)


def test_the_order_of_use_is_without_those_that_were_saved_since() -> None:
    last = State(origin=ORIGIN, used=(3, 1, 2), used_s=(5, 6, 7), noted=3)
    assert order_of_use(stored([(1, 1), (2, 2), (3, 3)]), last) == (3, 1, 2)
    assert order_of_use(stored([(1, 1), (2, 2), (3, 3), (3, 4), (4, 5)]), last) == (1, 2)
    assert order_of_use(stored([(1, 1)]), None) == ()


def tenancy(*states: State | None, origin: bytes = ORIGIN) -> Tenancy:
    """The last run's state first, then those of others, the longest gone first."""
    numbers = (STATE_NUMBER, *range(TENANT_NUMBER, WEAR_NUMBER))
    rows = [(n, encode_state(state)) for n, state in zip(numbers, states, strict=False) if state is not None]
    return read_tenancy(rows, origin)


def state(origin: bytes, *, closed: bool = True, pieces: int = 1) -> State:
    return State(origin=origin, was_closed=closed, piece_bytes=(4096,) * pieces)


def test_the_last_one_here_is_the_youngest_of_the_others() -> None:
    found = tenancy(state(A), state(B, pieces=2), state(C))
    assert found.origins == [B, C, A] and found.own is None and found.last == state(A)
    assert found.others[0].piece_bytes == (4096, 4096)
    found = tenancy(state(ORIGIN), state(B))
    assert found.origins == [B] and found.own == found.last == state(ORIGIN)
    found = tenancy(state(B), state(ORIGIN), state(B, pieces=3), state(A))
    assert found.origins == [A, B] and found.own == state(ORIGIN) and found.others[-1].piece_bytes == (4096,)


def test_nothing_known_is_no_tenant() -> None:
    found = read_tenancy([], ORIGIN)
    assert found == Tenancy(last=None, own=None) and not found.is_settled
    found = read_tenancy([(0, b"garbage"), (16, None), (17, encode_state(state(A))), (WEAR_NUMBER, b"x")], ORIGIN)
    assert found.origins == [A] and found.last is None and found.wear == Wear()
    assert read_tenancy([(WEAR_NUMBER, encode_wear(Wear(ssd_bytes=5)))], ORIGIN).wear.ssd_bytes == 5


def test_only_so_many_others_are_kept() -> None:
    many = [state(bytes([number + 1]) * 16) for number in range(2 * TENANTS_MAX)]
    found = tenancy(*many)
    assert found.origins == [each.origin for each in [*many[1:], many[0]]][-TENANTS_MAX:]
    assert found.rows()[-1] == (TENANT_NUMBER + TENANTS_MAX - 1, encode_state(many[0]))
    assert TENANT_NUMBER + TENANTS_MAX <= WEAR_NUMBER


@pytest.mark.parametrize(("last", "own"), list(itertools.product((True, False), repeat=2)))
def test_settled_is_when_this_identity_and_the_last_one_were_closed(last: bool, own: bool) -> None:
    assert tenancy(state(A, closed=last), state(ORIGIN, closed=own)).is_settled == (last and own)
    assert tenancy(state(ORIGIN, closed=own)).is_settled == own
    assert not tenancy(state(A, closed=last)).is_settled
