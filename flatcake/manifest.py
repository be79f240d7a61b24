"""The manifest: what a restart must know of every committed turn, as rows that prove themselves.  DESIGN §7.

Pure: rows to bytes and back.  `io.manifestdb` keeps them in a file, `reopen` builds the index from them.  A row
is one turn on one medium; its digest is keyed with the origin, so a row of another identity, another pool or
with a flipped bit is no row.  Session names are stored as digests, salts and tokens not at all.
Write path:  data planes -> finish -> [manifest] -> index
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flatcake.gva import Medium
from flatcake.messages import Int64Array, KeyArray

BASE_BYTES, ROOM_BLOCKS, EXTENT_GENERATION, SLOT, COUNT = range(5)
PART_COLUMNS = 5
GENERATION_LIMIT = 1 << 62
SESSION_BYTES = 16

Flags = npt.NDArray[np.bool_]

_DIGEST_BYTES = 16
_HEAD = struct.Struct("<16sqqqIIBB6x16s")
"""Digest, sequence, scope, shared blocks, parts, blocks, medium, whether it has a session, session."""
_STATE = struct.Struct("<16s16sqqB7x")
"""Digest, origin, generation, scopes in order of use, whether the store was closed."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class TurnRow:
    """The blocks of one turn on one medium."""

    scope_id: int
    session: bytes | None
    """Digest of the session's name; None for a shared prompt."""
    medium: Medium
    shared_blocks: int
    parts: Int64Array
    """int64 [parts, 5]: base of the extent in bytes, its room in blocks, its generation, first slot, blocks."""
    keys: KeyArray
    """uint64 [blocks, 2], in the order of the parts."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Stored:
    """All rows of a manifest, column by column, in the order in which they were committed."""

    numbers: Int64Array
    """int64 [rows]: what `Manifest.drop_turns` calls them."""
    scopes: Int64Array
    media: Int64Array
    shared: Int64Array
    sessions: npt.NDArray[np.uint64]
    """uint64 [rows, 2]: digests of the sessions; zeros for a shared prompt."""
    has_session: npt.NDArray[np.bool_]
    part_counts: Int64Array
    parts: Int64Array
    """int64 [parts of all rows, 5]."""
    block_counts: Int64Array
    keys: KeyArray
    """uint64 [blocks of all rows, 2]."""
    sequence: int = 0
    """Largest number of a commit."""
    generation: int = 0
    """No extent has had a larger one."""
    used: tuple[int, ...] = ()
    """Scopes in order of use, oldest first, as far as it is known."""

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a manifest says about the whole store."""

    origin: bytes
    generation: int = 0
    was_closed: bool = False
    used: tuple[int, ...] = ()


class Manifest(Protocol):
    """Remembers committed turns.  Any number of threads may call; a fault is counted, never raised."""

    def commit_turn(self, row: TurnRow, generation: int) -> int:
        """Remember a turn, and that generations up to `generation` are used; returns its number, 0 if it failed.

        Scopes and turns that were dropped before are forgotten in the same transaction.
        """

    def drop_turns(self, numbers: Iterable[int]) -> None:
        """Forget turns with the next transaction.  Never waits."""

    def drop_scope(self, scope_id: int) -> None:
        """Forget a scope with the next transaction.  Never waits."""

    def reset(self, scope_limit: int) -> bool:
        """Forget all scopes below a number now, for good, those that are being committed too; whether it is on disk."""


class NoManifest:
    """Remembers nothing: the store starts empty."""

    def commit_turn(self, row: TurnRow, generation: int) -> int:
        return 0

    def drop_turns(self, numbers: Iterable[int]) -> None:
        return None

    def drop_scope(self, scope_id: int) -> None:
        return None

    def reset(self, scope_limit: int) -> bool:
        return True


def session_digest(session: str) -> bytes:
    """16 bytes that stand for a session's name, whatever letters it has."""
    name = session.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=SESSION_BYTES, person=b"flatcake.session").digest()


def origin_digest(identity: bytes, *facts: int) -> bytes:
    """16 bytes that stand for an identity and whatever else decides where bytes lie."""
    text = identity + b"".join(fact.to_bytes(8, "little") for fact in facts)
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"flatcake.origin").digest()


def encode_row(row: TurnRow, sequence: int, origin: bytes) -> bytes:
    """The bytes of a row."""
    assert row.parts.shape[1] == PART_COLUMNS and int(row.parts[:, COUNT].sum()) == len(row.keys) > 0
    head = (sequence, row.scope_id, row.shared_blocks, len(row.parts), len(row.keys), int(row.medium))
    body = _HEAD.pack(b"", *head, row.session is not None, row.session or b"")[_DIGEST_BYTES:]
    body += row.parts.astype("<i8").tobytes() + row.keys.astype("<u8").tobytes()
    return _digest(body, origin) + body


def trim_row(body: bytes, kept: Flags, origin: bytes) -> bytes:
    """A row without some of its blocks, otherwise as it was; empty where none is left.

    Args:
        body: What `encode_row` made.
        kept: bool [blocks of the row].
        origin: Of this store.
    """
    if not kept.any():
        return b""
    head = np.frombuffer(body[_DIGEST_BYTES : _HEAD.size], _HEAD_TYPE).copy()
    middle = _HEAD.size + int(head["parts"][0]) * 8 * PART_COLUMNS
    parts = np.frombuffer(body[_HEAD.size : middle], "<i8").reshape(-1, PART_COLUMNS)
    assert len(kept) == int(head["blocks"][0]) == int(parts[:, COUNT].sum())
    part_of = np.repeat(np.arange(len(parts)), parts[:, COUNT])
    counts = parts[:, COUNT]
    slots = np.arange(len(kept)) - np.repeat(np.cumsum(counts) - counts - parts[:, SLOT], counts)
    blocks = np.flatnonzero(kept)
    opens = np.ones(len(blocks), np.bool_)
    opens[1:] = (np.diff(blocks) != 1) | (np.diff(part_of[blocks]) != 0)
    firsts = np.flatnonzero(opens)
    left = parts[part_of[blocks[firsts]]].copy()
    left[:, SLOT] = slots[blocks[firsts]]
    left[:, COUNT] = np.diff(np.append(firsts, len(blocks)))
    head["parts"], head["blocks"] = len(left), len(blocks)
    keys = np.frombuffer(body[middle:], "<u8").reshape(-1, 2)[blocks]
    trimmed: bytes = head.tobytes() + left.astype("<i8").tobytes() + keys.tobytes()
    return _digest(trimmed, origin) + trimmed


def decode_rows(found: Iterable[tuple[int, object]], origin: bytes) -> tuple[Stored, list[int]]:
    """Read rows; what is not whole, not of this origin, or no row at all is left out.

    Args:
        found: Numbers and bodies, in any order.
        origin: Of this store.

    Returns:
        The good rows in the order of their commits, and the numbers of the others.

    Cost: about 4 µs a row.
    """
    numbers: list[int] = []
    heads, parts, keys, bad = [], [], [], []
    unpack, head_bytes, part_bytes = struct.Struct("<II").unpack_from, _HEAD.size, 8 * PART_COLUMNS
    for number, body in found:
        if not isinstance(body, bytes) or len(body) < head_bytes:
            bad.append(number)
            continue
        part_count, block_count = unpack(body, 40)
        middle = head_bytes + part_count * part_bytes
        if len(body) != middle + block_count * 16 or _digest(body[_DIGEST_BYTES:], origin) != body[:_DIGEST_BYTES]:
            bad.append(number)
            continue
        numbers.append(number)
        heads.append(body[_DIGEST_BYTES:head_bytes])
        parts.append(body[head_bytes:middle])
        keys.append(body[middle:])
    return _columns(numbers, heads, parts, keys), bad


def encode_state(state: State) -> bytes:
    body = _STATE.pack(b"", state.origin, state.generation, len(state.used), state.was_closed)[_DIGEST_BYTES:]
    body += np.array(state.used, "<i8").tobytes()
    return _digest(body, state.origin) + body


def decode_state(body: object) -> State | None:
    """Read what `encode_state` wrote; None when it is damaged."""
    if not isinstance(body, bytes) or len(body) < _STATE.size:
        return None
    digest, origin, generation, count, was_closed = _STATE.unpack_from(body)
    whole = len(body) == _STATE.size + 8 * count and _digest(body[_DIGEST_BYTES:], origin) == digest
    if not whole or not 0 <= generation < GENERATION_LIMIT:
        return None
    used = tuple(np.frombuffer(body, "<i8", offset=_STATE.size).tolist())
    return State(origin=origin, generation=generation, was_closed=bool(was_closed), used=used)


def _digest(body: bytes, origin: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, key=origin, person=b"flatcake.row").digest()


_HEAD_TYPE = np.dtype(
    [
        *(("sequence", "<i8"), ("scope", "<i8"), ("shared", "<i8"), ("parts", "<u4"), ("blocks", "<u4")),
        *(("medium", "u1"), ("has_session", "u1"), ("pad", "u1", (6,)), ("session", "<u8", (2,))),
    ]
)
assert _HEAD_TYPE.itemsize == _HEAD.size - _DIGEST_BYTES


def _columns(numbers: list[int], heads: list[bytes], parts: list[bytes], keys: list[bytes]) -> Stored:
    head = np.frombuffer(b"".join(heads), _HEAD_TYPE)
    part = np.frombuffer(b"".join(parts), "<i8").reshape(-1, PART_COLUMNS).astype(np.int64)
    key = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 2).astype(np.uint64)
    order = np.argsort(head["sequence"], kind="stable")
    part_counts, block_counts = head["parts"].astype(np.int64), head["blocks"].astype(np.int64)
    return Stored(
        numbers=np.array(numbers, np.int64)[order],
        scopes=head["scope"][order].astype(np.int64),
        media=head["medium"][order].astype(np.int64),
        shared=head["shared"][order].astype(np.int64),
        sessions=head["session"][order].astype(np.uint64),
        has_session=head["has_session"][order] != 0,
        part_counts=part_counts[order],
        parts=part[_reordered(part_counts, order)],
        block_counts=block_counts[order],
        keys=key[_reordered(block_counts, order)],
        sequence=int(head["sequence"].max(initial=0)),
        generation=int(part[:, EXTENT_GENERATION].max(initial=0)),
    )


def _reordered(counts: Int64Array, order: Int64Array) -> Int64Array:
    """Where the items of each row lie, once the rows, of `counts` items each, stand in another order."""
    starts, lengths = (np.cumsum(counts) - counts)[order], counts[order]
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    found: Int64Array = np.repeat(starts, lengths) + within
    return found
