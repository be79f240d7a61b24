"""The manifest: what a restart must know of every committed turn, as rows that prove themselves.  docs/restart.md.

Pure: rows to bytes and back.  `io.manifestdb` keeps them in a file, `reopen` builds the index from them.  A row
is one turn on one medium; its digest is keyed with the origin, so a row of another identity is known as such,
and one of another pool or with a flipped bit is no row.  Session names are stored as digests, salts and tokens
not at all.
Write path:  data planes -> finish -> [manifest] -> index
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from flatcake.gva import Medium
from flatcake.messages import Flags, Int64Array, KeyArray
from flatcake.wear import Wear

BASE_BYTES, ROOM_BLOCKS, EXTENT_GENERATION, SLOT, COUNT = range(5)
PART_COLUMNS = 5
GENERATION_LIMIT = 1 << 62
SESSION_BYTES = 16


_DIGEST_BYTES = 16
_HEAD = struct.Struct("<16sqqqIIBB2xI16s")
"""Digest, sequence, scope, shared blocks, parts, blocks, medium, whether it has a session, wall clock, session."""
_MEDIUM_AT = 48
_STATE = struct.Struct("<16s16sqqBBH4x")
"""Digest, origin, generation, scopes in order of use, whether the store was closed, what follows, layers."""
_HAS_TIMES, _HAS_LAYERS = 1, 2
_WALL_LIMIT = 1 << 32


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
    sequences: Int64Array
    """int64 [rows]: place of each commit among all."""
    saved_s: Int64Array
    """int64 [rows]: wall clock of each commit, seconds since 1970; 0 where it is not known."""
    tenants: Int64Array
    """int64 [rows]: 0 for rows of this identity, n for those of the n-th other one."""
    piece_bytes: tuple[tuple[int, ...], ...] = ()
    """Of each other identity: bytes of a piece of each layer."""
    carried: tuple[tuple[int, bytes], ...] = ()
    """Rows of other identities in DRAM as they are: a row there counts for one restart, so it must be written again."""
    sequence: int = 0
    """Largest number of a commit."""
    generation: int = 0
    """No extent has had a larger one."""
    used: tuple[int, ...] = ()
    """Scopes in order of use, oldest first, as far as it is known."""
    idle_s: Mapping[int, int] = field(default_factory=dict)
    """For how many seconds each scope has not been used; 0 where it is not known."""
    wear: Wear = field(default_factory=Wear)

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a manifest says about the whole store, or of another identity that has used the directory."""

    origin: bytes
    generation: int = 0
    was_closed: bool = False
    used: tuple[int, ...] = ()
    """Scopes in order of use, oldest first."""
    used_s: tuple[int, ...] = ()
    """Wall clock of the last use of each; empty where it is not known."""
    noted: int = 0
    """Commits up to this one are in `used`."""
    piece_bytes: tuple[int, ...] = ()
    """Bytes of a piece of each layer; empty where it is not known."""


def session_digest(session: str) -> bytes:
    """16 bytes that stand for a session's name, whatever letters it has."""
    name = session.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, digest_size=SESSION_BYTES, person=b"flatcake.session").digest()


def origin_digest(identity: bytes, *facts: int) -> bytes:
    """16 bytes that stand for an identity and whatever else decides where bytes lie."""
    text = identity + b"".join(fact.to_bytes(8, "little") for fact in facts)
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, person=b"flatcake.origin").digest()


def encode_row(row: TurnRow, sequence: int, origin: bytes, wall_s: int = 0) -> bytes:
    """The bytes of a row that is committed at `wall_s`, in seconds since 1970."""
    assert row.parts.shape[1] == PART_COLUMNS and int(row.parts[:, COUNT].sum()) == len(row.keys) > 0
    head = (sequence, row.scope_id, row.shared_blocks, len(row.parts), len(row.keys), int(row.medium))
    wall_s = min(max(0, wall_s), _WALL_LIMIT - 1)
    body = _HEAD.pack(b"", *head, row.session is not None, wall_s, row.session or b"")[_DIGEST_BYTES:]
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


def decode_rows(
    found: Iterable[tuple[int, object]], origin: bytes, others: Sequence[bytes] = ()
) -> tuple[Stored, list[int]]:
    """Read rows; what is not whole, of no known origin, or no row at all is left out.

    Args:
        found: Numbers and bodies, in any order.
        origin: Of this store.
        others: Origins of other identities that have used the directory.

    Returns:
        The good rows in the order of their commits, and the numbers of the others.

    Cost: about 4 µs a row.
    """
    numbers: list[int] = []
    heads, parts, keys, tenants, carried, bad = [], [], [], [], [], []
    unpack, head_bytes, part_bytes = struct.Struct("<II").unpack_from, _HEAD.size, 8 * PART_COLUMNS
    for number, body in found:
        if not isinstance(body, bytes) or len(body) < head_bytes:
            bad.append(number)
            continue
        part_count, block_count = unpack(body, 40)
        middle = head_bytes + part_count * part_bytes
        tenant = _tenant(body, origin, others) if len(body) == middle + block_count * 16 else -1
        if tenant < 0:
            bad.append(number)
            continue
        if tenant and body[_MEDIUM_AT] == Medium.DRAM:
            carried.append((number, body))
        numbers.append(number)
        tenants.append(tenant)
        heads.append(body[_DIGEST_BYTES:head_bytes])
        parts.append(body[head_bytes:middle])
        keys.append(body[middle:])
    return replace(_columns(numbers, tenants, heads, parts, keys), carried=tuple(carried)), bad


def encode_state(state: State) -> bytes:
    follows = _HAS_TIMES * bool(state.used_s) | _HAS_LAYERS * bool(state.piece_bytes)
    assert len(state.used_s) in (0, len(state.used))
    head = (state.generation, len(state.used), state.was_closed, follows, len(state.piece_bytes))
    body = _STATE.pack(b"", state.origin, *head)[_DIGEST_BYTES:] + np.array(state.used, "<i8").tobytes()
    body += np.array([*state.used_s, *([state.noted] if state.used_s else [])], "<i8").tobytes()
    body += np.array(state.piece_bytes, "<i8").tobytes()
    return _digest(body, state.origin) + body


def decode_state(body: object) -> State | None:
    """Read what `encode_state` wrote; None when it is damaged."""
    if not isinstance(body, bytes) or len(body) < _STATE.size:
        return None
    digest, origin, generation, count, was_closed, follows, layers = _STATE.unpack_from(body)
    timed = count + 1 if follows & _HAS_TIMES else 0
    whole = len(body) == _STATE.size + 8 * (count + timed + layers) and _digest(body[_DIGEST_BYTES:], origin) == digest
    if not whole or count < 0 or not 0 <= generation < GENERATION_LIMIT or bool(follows & _HAS_LAYERS) != bool(layers):
        return None
    numbers = tuple(np.frombuffer(body, "<i8", offset=_STATE.size).tolist())
    return State(
        origin=origin,
        generation=generation,
        was_closed=bool(was_closed),
        used=numbers[:count],
        used_s=numbers[count : count + max(0, timed - 1)],
        noted=numbers[count + timed - 1] if timed else 0,
        piece_bytes=numbers[count + timed :],
    )


def _tenant(body: bytes, origin: bytes, others: Sequence[bytes]) -> int:
    """Whose row it is: 0 for `origin`, n for the n-th other one, -1 for nobody's."""
    for tenant, owner in enumerate((origin, *others)):
        if _digest(body[_DIGEST_BYTES:], owner) == body[:_DIGEST_BYTES]:
            return tenant
    return -1


def _digest(body: bytes, origin: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, key=origin, person=b"flatcake.row").digest()


_HEAD_TYPE = np.dtype(
    [
        *(("sequence", "<i8"), ("scope", "<i8"), ("shared", "<i8"), ("parts", "<u4"), ("blocks", "<u4")),
        *(("medium", "u1"), ("has_session", "u1"), ("pad", "u1", (2,)), ("saved_s", "<u4"), ("session", "<u8", (2,))),
    ]
)
assert _HEAD_TYPE.itemsize == _HEAD.size - _DIGEST_BYTES


def _columns(
    numbers: list[int], tenants: list[int], heads: list[bytes], parts: list[bytes], keys: list[bytes]
) -> Stored:
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
        sequences=head["sequence"][order].astype(np.int64),
        saved_s=head["saved_s"][order].astype(np.int64),
        tenants=np.array(tenants, np.int64)[order],
        sequence=int(head["sequence"].max(initial=0)),
        generation=int(part[:, EXTENT_GENERATION].max(initial=0)),
    )


def _reordered(counts: Int64Array, order: Int64Array) -> Int64Array:
    """Where the items of each row lie, once the rows, of `counts` items each, stand in another order."""
    starts, lengths = (np.cumsum(counts) - counts)[order], counts[order]
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    found: Int64Array = np.repeat(starts, lengths) + within
    return found
