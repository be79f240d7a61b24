"""Rows that lose single blocks: everything else about them stays."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flatcake.gva import Medium
from flatcake.manifest import TurnRow, decode_rows, encode_row, trim_row

ORIGIN = b"o" * 16


@st.composite
def rows(draw: st.DrawFn) -> tuple[TurnRow, list[bool]]:
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    parts = [(4096 * at, 9, 100 + at, draw(st.integers(0, 4)), count) for at, count in enumerate(counts)]
    blocks = sum(counts)
    row = TurnRow(
        scope_id=draw(st.integers(1, 99)),
        session=draw(st.sampled_from([None, b"s" * 16])),
        medium=draw(st.sampled_from(list(Medium))),
        shared_blocks=draw(st.integers(0, 9)),
        parts=np.array(parts, np.int64),
        keys=np.arange(2 * blocks, dtype=np.uint64).reshape(blocks, 2),
    )
    return row, draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks))


def slots(parts: list[list[int]]) -> list[tuple[int, int, int, int]]:
    """Base, room, generation and slot of each block."""
    return [(base, room, generation, slot + nth) for base, room, generation, slot, n in parts for nth in range(n)]


@given(rows(), st.integers(1, 1 << 40))
def test_trim_row_takes_blocks_and_nothing_else(drawn: tuple[TurnRow, list[bool]], sequence: int) -> None:
    row, kept = drawn
    body = trim_row(encode_row(row, sequence, ORIGIN), np.array(kept), ORIGIN)
    if not any(kept):
        assert body == b""
        return
    stored, bad = decode_rows([(7, body)], ORIGIN)
    assert not bad and stored.sequence == sequence
    assert stored.scopes.tolist() == [row.scope_id] and stored.media.tolist() == [row.medium]
    assert stored.shared.tolist() == [row.shared_blocks] and stored.has_session.tolist() == [row.session is not None]
    assert not row.session or stored.sessions.tobytes() == row.session
    wanted = [place for place, keep in zip(slots(row.parts.tolist()), kept, strict=True) if keep]
    assert slots(stored.parts.tolist()) == wanted
    assert stored.keys.tolist() == row.keys[np.array(kept)].tolist()
    if all(kept):
        assert body == encode_row(row, sequence, ORIGIN), "a row that loses nothing stays as it is"
