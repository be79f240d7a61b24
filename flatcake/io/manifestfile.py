"""Opens the manifest's file, whatever has become of it, or says why it may not.

A file that SQLite cannot walk is set aside under another name, after what can be read of it has been copied.
What is no regular file is set aside too; nothing is followed, and nothing is deleted.
"""

import errno
import logging
import sqlite3

from flatcake.errors import CapacityError, FormatError, OwnershipError
from flatcake.io.pooldir import explained
from flatcake.io.salvage import BODY_BYTES_MAX, DAMAGE, Row, is_sound, salvage
from flatcake.io.seam import Files

log = logging.getLogger(__name__)

ASIDE = ".damaged"
FORMAT = 1
ROWS_MAX = 1 << 24
LOG_BYTES_MAX = 16 << 20
PADDED_BYTES_MAX = 1 << 36

_APPLICATION = 0x4643_0000  # "FC", then the format once more: one flipped bit never looks like a newer one.
_SCHEMA = (
    "CREATE TABLE turns (number INTEGER PRIMARY KEY, body BLOB NOT NULL)",
    "CREATE TABLE state (number INTEGER PRIMARY KEY, body BLOB NOT NULL)",
)
_MARKS = (f"PRAGMA application_id={_APPLICATION + FORMAT}", f"PRAGMA user_version={FORMAT}")
_BEFORE = ("locking_mode=EXCLUSIVE", "trusted_schema=OFF", "cell_size_check=ON", "synchronous=NORMAL")
_HEAD_BYTES = 100
_FOREIGN = {errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO}
_FAULTS = {sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_IOERR}


def open_manifest(files: Files, path: str) -> tuple[sqlite3.Connection, int]:
    """Open or make a manifest.

    Returns:
        The database, and how many damages were found.

    Raises:
        OwnershipError: It is locked, or may not be read or written.
        FormatError: It is of a newer format.  Nothing was changed.
        CapacityError: There is no room for it.
    """
    with explained(files, path, "the manifest needs a file"):
        damages = 0
        if not _make(files, path):
            _set_aside(files, path, "no regular file")
            damages += 1
            _make(files, path)
        try:
            return _connect(files, path), damages
        except DAMAGE as error:
            _require_damage(error, path)
            rows = _readable_rows(files, path)
            _set_aside(files, path, str(error))
        _make(files, path)
        try:
            database = _connect(files, path)
            database.execute("BEGIN IMMEDIATE")
            database.executemany("INSERT OR IGNORE INTO turns VALUES (?, ?)", rows)
            database.execute("COMMIT")
        except sqlite3.Error as error:
            raise OwnershipError(f"{path}: {error}; look at the disk, or use another directory") from error
        return database, damages + 1


def _make(files: Files, path: str) -> bool:
    """Make the file if it is not there; False when something else has its name."""
    for create in (False, True):
        try:
            fd = files.open_file(path, create=create, direct=False)
            try:
                files.make_private(fd)
            finally:
                files.close(fd)
            return True
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in _FOREIGN:
                raise
            return False
    return False


def _connect(files: Files, path: str) -> sqlite3.Connection:
    database = files.open_database(path, blob_bytes_max=BODY_BYTES_MAX)
    try:
        for pragma in _BEFORE:
            database.execute(f"PRAGMA {pragma}")
        marks = [database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        schema = [sql for (sql,) in database.execute("SELECT sql FROM sqlite_master ORDER BY rowid")]
        if marks[0] == _APPLICATION + marks[1] and FORMAT < marks[1] < 1 << 15:
            raise FormatError(f"{path}: format {marks[1]}, this program writes {FORMAT}; use another directory")
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(f"PRAGMA journal_size_limit={LOG_BYTES_MAX}")
        if marks == [0, 0] and not schema:
            database.execute("BEGIN IMMEDIATE")
            for statement in (*_SCHEMA, *_MARKS):
                database.execute(statement)
            database.execute("COMMIT")
        elif marks != [_APPLICATION + FORMAT, FORMAT] or schema != list(_SCHEMA) or not is_sound(database):
            raise sqlite3.DatabaseError("not a sound manifest")
    except BaseException:
        files.close_database(database)
        raise
    return database


def _readable_rows(files: Files, path: str) -> list[Row]:
    """What can be read of a damaged file, the rows behind its damage included."""
    _pad(files, path)
    try:
        database = files.open_database(path, blob_bytes_max=BODY_BYTES_MAX)
        try:
            database.execute("PRAGMA locking_mode=EXCLUSIVE")
            return salvage(database, ROWS_MAX)
        finally:
            files.close_database(database)
    except DAMAGE:
        return []


def _pad(files: Files, path: str) -> None:
    """Make a file that was cut off as long as it says it is: SQLite reads nothing of a shorter one."""
    fd = files.open_file(path, create=False, direct=False)
    try:
        head = bytearray(_HEAD_BYTES)
        files.read(fd, [memoryview(head)], 0)
        size_bytes = int.from_bytes(head[16:18], "big") * int.from_bytes(head[28:32], "big")
        if files.size_bytes(fd) < size_bytes < PADDED_BYTES_MAX:
            files.truncate(fd, size_bytes)  # With a hole.
    finally:
        files.close(fd)


def _set_aside(files: Files, path: str, reason: str) -> None:
    log.warning("%s: set aside as *%s: %s", path, ASIDE, reason)
    for name in (path, *(f"{path}{tail}" for tail in ("-wal", "-journal", "-shm"))):
        try:
            files.rename(name, f"{name}{ASIDE}")
        except FileNotFoundError:
            continue


def _require_damage(error: Exception, path: str) -> None:
    """Refuse what is no damage: a lock, missing rights, a full disk."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        raise OwnershipError(f"{path}: locked by another process; end it or use another directory") from error
    if code == sqlite3.SQLITE_FULL:
        raise CapacityError(f"{path}: {error}; free space, or lower ssd_bytes_max") from error
    if code in _FAULTS:
        raise OwnershipError(f"{path}: {error}; let this user write it, or look at the disk") from error
