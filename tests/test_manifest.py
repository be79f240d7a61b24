"""Rows of the manifest: they come back as they were, in the order of their commits, or not at all."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatcake.gva import Medium
from flatcake.manifest import (
    State,
    TurnRow,
    decode_rows,
    decode_state,
    encode_row,
    encode_state,
    origin_digest,
    session_digest,
)

ORIGIN, OTHER = origin_digest(b"identity", 1, 2), origin_digest(b"identity", 1, 3)


@st.composite
def turn_rows(draw: st.DrawFn) -> TurnRow:
    counts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    numbers = st.integers(0, 2**62 - 1)
    parts = [[draw(numbers), draw(numbers), draw(numbers), draw(numbers), count] for count in counts]
    seed = draw(st.integers(0, 2**32))
    return TurnRow(
        scope_id=draw(st.integers(1, 2**38)),
        session=draw(st.none() | st.binary(min_size=16, max_size=16)),
        medium=draw(st.sampled_from(Medium)),
        shared_blocks=draw(st.integers(0, 1000)),
        parts=np.array(parts, np.int64),
        keys=np.random.default_rng(seed).integers(0, 2**64, (sum(counts), 2), np.uint64, endpoint=False),
    )


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(turn_rows(), max_size=8), data=st.data())
def test_rows_come_back_in_the_order_of_their_commits(rows: list[TurnRow], data: st.DataObject) -> None:
    found = [(100 + n, encode_row(row, n + 1, ORIGIN)) for n, row in enumerate(rows)]
    stored, bad = decode_rows(data.draw(st.permutations(found)), ORIGIN)
    assert not bad and stored.numbers.tolist() == [number for number, _ in found]
    assert stored.scopes.tolist() == [row.scope_id for row in rows]
    assert stored.media.tolist() == [int(row.medium) for row in rows]
    assert stored.shared.tolist() == [row.shared_blocks for row in rows]
    assert stored.has_session.tolist() == [row.session is not None for row in rows]
    assert [sessions.tobytes() for sessions in stored.sessions] == [row.session or bytes(16) for row in rows]
    parts = np.concatenate([row.parts for row in rows] or [np.empty((0, 5), np.int64)])
    keys = np.concatenate([row.keys for row in rows] or [np.empty((0, 2), np.uint64)])
    assert (stored.parts == parts).all() and (stored.keys == keys).all()
    assert stored.sequence == len(rows) and len(stored) == len(rows)
    assert stored.generation == (int(parts[:, 2].max()) if len(parts) else 0)
    assert stored.block_counts.tolist() == [len(row.keys) for row in rows]


@settings(max_examples=200, deadline=None)
@given(row=turn_rows(), data=st.data())
def test_a_damaged_row_is_no_row(row: TurnRow, data: st.DataObject) -> None:
    good = encode_row(row, 7, ORIGIN)
    bit = data.draw(st.integers(0, len(good) * 8 - 1))
    flipped = bytearray(good)
    flipped[bit // 8] ^= 1 << bit % 8
    cut = good[: data.draw(st.integers(0, len(good) - 1))]
    for body in (bytes(flipped), cut, good + b"\0", b"", None, 7, "text", bytes(len(good))):
        stored, bad = decode_rows([(1, good), (2, body)], ORIGIN)
        assert bad == [2] and stored.numbers.tolist() == [1]


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=400))
def test_any_bytes_are_rejected_and_nothing_is_raised(body: bytes) -> None:
    assert decode_rows([(1, body)], ORIGIN)[1] == [1] and decode_state(body) is None


def test_a_row_of_another_origin_is_no_row() -> None:
    row = TurnRow(
        scope_id=1,
        session=None,
        medium=Medium.SSD,
        shared_blocks=0,
        parts=np.array([[0, 4, 1, 0, 2]]),
        keys=np.ones((2, 2), np.uint64),
    )
    assert decode_rows([(1, encode_row(row, 1, ORIGIN))], OTHER)[1] == [1]
    assert decode_rows([(1, encode_row(row, 1, ORIGIN))], ORIGIN)[1] == []


def test_rows_of_other_origins_are_known_as_such() -> None:
    row = TurnRow(
        scope_id=1,
        session=None,
        medium=Medium.SSD,
        shared_blocks=0,
        parts=np.array([[0, 4, 1, 0, 2]]),
        keys=np.ones((2, 2), np.uint64),
    )
    third = origin_digest(b"identity", 1, 4)
    in_dram = encode_row(replace(row, medium=Medium.DRAM), 3, third)
    bodies = [(1, encode_row(row, 4, OTHER)), (2, encode_row(row, 1, ORIGIN)), (3, in_dram), (4, b"x" * 200)]
    stored, bad = decode_rows(bodies, ORIGIN, [OTHER, third])
    assert stored.numbers.tolist() == [2, 3, 1] and stored.tenants.tolist() == [0, 2, 1] and bad == [4]
    assert stored.carried == ((3, in_dram),) and decode_rows(bodies, ORIGIN, [OTHER])[1] == [3, 4]


@pytest.mark.parametrize("more", [{}, {"used_s": (7, 8, 9), "noted": 5}, {"piece_bytes": (4096, 8192)}], ids=str)
@pytest.mark.parametrize("used", [(), (3, 1, 2)])
def test_state_comes_back_or_not_at_all(used: tuple[int, ...], more: dict[str, Any]) -> None:
    more = {name: value[: len(used)] if name == "used_s" else value for name, value in more.items()}
    more |= {"noted": 0} if "noted" in more and not used else {}
    state = State(origin=ORIGIN, generation=1 << 40, was_closed=True, used=used, **more)
    body = encode_state(state)
    assert decode_state(body) == state
    for bit in range(len(body) * 8):
        flipped = bytearray(body)
        flipped[bit // 8] ^= 1 << bit % 8
        assert decode_state(bytes(flipped)) is None
    assert decode_state(body[:-1]) is None and decode_state(None) is None
    assert decode_state(encode_state(State(origin=ORIGIN, generation=-1))) is None


def test_sessions_of_any_name_have_their_own_digest() -> None:
    names = ["", "a", "A", "a ", "a/b", "../../etc", "a\0b", "\ud800", "e\u0301", "\u00e9", "x" * 300, "x" * 299 + "y"]
    assert len({session_digest(name) for name in names}) == len(names)
    assert all(len(session_digest(name)) == 16 for name in names)
