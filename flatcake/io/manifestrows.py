"""Statements that change a manifest's tables: what is inserted, trimmed and dropped, and how rows are numbered.

Nothing is executed here but the look at a row that is to be trimmed.
"""

import sqlite3
from collections.abc import Iterable, Mapping

from flatcake.manifest import State, encode_state, trim_row
from flatcake.messages import Flags
from flatcake.tenancy import ABOUT_NUMBER, STATE_NUMBER, TENANT_NUMBER, WEAR_NUMBER
from flatcake.wear import Wear, encode_wear

SCOPE_SHIFT = 24
"""A row's number is its scope's, then this many bits of the commit's: a scope is one stretch of the table."""
SCOPE_LIMIT = 1 << (62 - SCOPE_SHIFT)
PUT_TURN = "INSERT OR REPLACE INTO turns VALUES (?, ?)"
PUT_STATE = "INSERT OR REPLACE INTO state VALUES (?, ?)"

_KEEP_BITS = (1 << SCOPE_SHIFT) - 1
_SET_TURN = "UPDATE turns SET body = ? WHERE number = ?"
_DROP_TURN = "DELETE FROM turns WHERE number = ?"

Step = tuple[str, tuple[object, ...]]
"""A statement and its values."""


def row_number(scope_id: int, sequence: int) -> int:
    """What the row of a commit is called."""
    return scope_id << SCOPE_SHIFT | sequence & _KEEP_BITS


def dropping(turns: Iterable[int], scopes: Iterable[int]) -> list[Step]:
    """Forget turns by their numbers, and whole scopes."""
    spans = [(scope << SCOPE_SHIFT, scope << SCOPE_SHIFT | _KEEP_BITS) for scope in scopes]
    steps: list[Step] = [(_DROP_TURN, (number,)) for number in turns]
    return steps + [("DELETE FROM turns WHERE number BETWEEN ? AND ?", span) for span in spans]


def dropping_below(scope_limit: int) -> Step:
    """Forget all scopes below a number."""
    return "DELETE FROM turns WHERE number < ?", (min(scope_limit, SCOPE_LIMIT) << SCOPE_SHIFT,)


def put_state(state: State) -> Step:
    """Say what this run is."""
    return PUT_STATE, (STATE_NUMBER, encode_state(state))


def put_about(about: bytes) -> Step:
    """Say what the store is."""
    return PUT_STATE, (ABOUT_NUMBER, about)


def put_wear(wear: Wear) -> Step:
    """Say what the media have taken."""
    return PUT_STATE, (WEAR_NUMBER, encode_wear(wear))


def put_tenants(rows: Iterable[tuple[int, bytes]]) -> list[Step]:
    """Say which other identities have rows."""
    forget: Step = ("DELETE FROM state WHERE number >= ? AND number < ?", (TENANT_NUMBER, WEAR_NUMBER))
    return [forget, *((PUT_STATE, row) for row in rows)]


def trimming(database: sqlite3.Connection, bad: Mapping[int, Flags], origin: bytes) -> list[Step]:
    """Forget single blocks of turns: for turns by number, which of their blocks, bool [blocks]."""
    steps: list[Step] = []
    for number, flags in bad.items():
        row = database.execute("SELECT body FROM turns WHERE number = ?", (number,)).fetchone()
        left = trim_row(row[0], ~flags, origin) if row and isinstance(row[0], bytes) else b""
        steps.append((_SET_TURN, (left, number)) if left else (_DROP_TURN, (number,)))
    return steps
