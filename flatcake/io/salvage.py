"""What can still be read of a damaged SQLite table, row by row, in bounded time.

A page that cannot be read costs the rows that it held: the search goes on behind it.  Rows are believed by
nobody here; they prove themselves.
"""

import sqlite3
from collections.abc import Iterator

BODY_BYTES_MAX = 64 << 20
"""No row is longer."""
_NUMBER_BITS = 62
_STEPS_MAX = 10_000_000
_STEPS_BETWEEN = 100_000
_FAULTS_MAX = 10_000

Row = tuple[int, object]
DAMAGE = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises of a damaged file; the second where its message quotes damaged text."""


def is_sound(database: sqlite3.Connection) -> bool:
    """Whether SQLite can walk all of its pages.  Cost: about 2 ms a MiB."""
    try:
        return bool(database.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except DAMAGE:
        return False


def salvage(database: sqlite3.Connection, rows_max: int) -> list[Row]:
    """Rows of `turns` that can be read, at most `rows_max` of them."""
    budget = [_STEPS_MAX // _STEPS_BETWEEN]

    def is_spent() -> int:
        budget[0] -= 1
        return budget[0] < 0

    database.set_progress_handler(is_spent, _STEPS_BETWEEN)
    found: list[Row] = []
    start, faults = 0, 0
    while start < 1 << _NUMBER_BITS and len(found) < rows_max and faults < _FAULTS_MAX and budget[0] >= 0:
        for row in _rows_from(database, start):
            if len(found) >= rows_max or not isinstance(row[0], int) or row[0] < start:
                break
            found.append(row)
            start = row[0] + 1
        else:
            if _is_readable(database, start):
                break
        start, faults = _behind(database, start), faults + 1
    database.set_progress_handler(None, 0)
    return found


def _behind(database: sqlite3.Connection, start: int) -> int:
    """The first number from which on something can be read again."""
    step = 1
    while step < 1 << _NUMBER_BITS and not _is_readable(database, start + step):
        step *= 2
    low, high = step // 2, step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _is_readable(database, start + middle) else (middle, high)
    return start + high


def _is_readable(database: sqlite3.Connection, start: int) -> bool:
    try:
        database.execute("SELECT number, body FROM turns WHERE number >= ? ORDER BY number", (start,)).fetchone()
    except DAMAGE:
        return False
    return True


def _rows_from(database: sqlite3.Connection, start: int) -> Iterator[Row]:
    try:
        yield from database.execute("SELECT number, body FROM turns WHERE number >= ? ORDER BY number", (start,))
    except DAMAGE:
        return
