"""Looks at one directory: header, owner, files.  Takes no lock, writes nothing, follows no link.

Everything is opened for reading alone.  A directory that is open in another process is looked at like any
other; not in that process itself.
"""

import errno
from collections.abc import Collection
from dataclasses import fields, replace

from flatcake.audit.facts import HomeFacts
from flatcake.doctor.machine import read_holder
from flatcake.errors import ConfigError, FormatError
from flatcake.io.dramdump import DUMP
from flatcake.io.filepool import FILES_MAX
from flatcake.io.manifestdb import MANIFEST
from flatcake.io.manifestfile import ASIDE
from flatcake.io.pooldir import FORMAT, LOCK, POOL_NAME, Header, explained, find_header
from flatcake.io.seam import Files
from flatcake.keys import FORMAT_VERSION
from flatcake.units import DIRECT_BYTES

NO_FILE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO}
"""What opening says where there is no regular file of that name."""


def look(files: Files, path: str) -> HomeFacts:
    """Look at a directory of a pool.

    Raises:
        ConfigError: There is no such directory.
        FormatError: It is not FlatCake's, or of another format.
        OwnershipError: It may not be read.
    """
    home = files.real_path(path)
    names = names_in(files, home)
    if names is None:
        raise ConfigError(f"{home}: no such directory; name one that a store was opened in")
    with explained(files, home, "it is to be read"):
        header = find_header(files, home, FORMAT_VERSION)
        if header is None and LOCK not in names:
            raise FormatError(f"{home}: no FlatCake store; name a directory that one was opened in")
        faults = _header_faults(header, names)
        sizes = {name: _size_bytes(files, f"{home}/{name}") for name in names if POOL_NAME.fullmatch(name)}
        missing, wrong = (frozenset[int](), []) if header is None or faults else _compare(header, sizes)
        return replace(
            _without_pool(files, home, names),
            has_pool=True,
            header=None if faults else header,
            pool_files=sum(size is not None for size in sizes.values()),
            pool_bytes=sum(size or 0 for size in sizes.values()),
            faults=(*faults, *wrong),
            missing_files=missing,
        )


def look_rank(files: Files, path: str) -> HomeFacts:
    """Look at a directory that a rank should have a pool in; if it has none, that is a fault.

    Raises:
        FormatError, OwnershipError: As for `look`.
    """
    home = files.real_path(path)
    names = names_in(files, home)
    if names is not None and has_pool(names):
        return look(files, home)
    with explained(files, home, "it is to be read"):
        fault = "there is no such directory" if names is None else "there is no pool in it"
        return replace(_without_pool(files, home, names or []), faults=(fault,))


def look_catalog(files: Files, path: str) -> HomeFacts:
    """Look at a directory that only has a manifest; one that is not there has none.

    Raises:
        OwnershipError: It may not be read.
    """
    home = files.real_path(path)
    names = names_in(files, home)
    with explained(files, home, "it is to be read"):
        return _without_pool(files, home, names or [])


def has_pool(names: Collection[str]) -> bool:
    """Whether a directory with these names in it is, or was, a pool's."""
    return FORMAT in names or LOCK in names


def names_in(files: Files, home: str) -> list[str] | None:
    """What is in a directory; None where there is no directory.

    Raises:
        OwnershipError: It may not be read.
    """
    with explained(files, home, "it is to be read"):
        try:
            return files.list_directory(home)
        except (FileNotFoundError, NotADirectoryError):
            return None


def pool_name(number: int) -> str:
    """The name of a pool file."""
    return f"pool-{number:04d}.fc"


def _without_pool(files: Files, home: str, names: list[str]) -> HomeFacts:
    """All that is not the pool's."""
    return HomeFacts(
        path=home,
        has_pool=False,
        header=None,
        owner=_owner(files, home, names),
        pool_files=0,
        pool_bytes=0,
        faults=(),
        manifest_bytes=_size_bytes(files, f"{home}/{MANIFEST}") if MANIFEST in names else None,
        has_manifest=MANIFEST in names,
        log_bytes=_size_bytes(files, f"{home}/{MANIFEST}-wal") or 0,
        dump_bytes=_size_bytes(files, f"{home}/{DUMP}"),
        aside=tuple(name for name in names if name.endswith(ASIDE)),
    )


def _header_faults(header: Header | None, names: list[str]) -> list[str]:
    if header is None:
        return [f"{FORMAT} is {'damaged' if FORMAT in names else 'missing'}"]
    sane = all(type(getattr(header, entry.name)) is entry.type for entry in fields(header))
    sane &= 0 <= header.directory < header.directories and 1 <= header.files <= FILES_MAX
    sane &= header.pool_file_bytes > 0 and header.pool_file_bytes % DIRECT_BYTES == 0
    return [] if sane else [f"{FORMAT} says what cannot be"]


def _compare(header: Header, sizes: dict[str, int | None]) -> tuple[frozenset[int], list[str]]:
    """The pool files that are not there, and what to say of those that are not as they should be."""
    missing, wrong = [], []
    for number in range(header.directory, header.files, header.directories):
        size_bytes = sizes.get(pool_name(number))
        if size_bytes is None:
            missing.append(number)
            wrong.append(f"{pool_name(number)} is missing")
        elif size_bytes != header.pool_file_bytes:
            wrong.append(f"{pool_name(number)} has {size_bytes} bytes, not {header.pool_file_bytes}")
    return frozenset(missing), wrong


def _size_bytes(files: Files, path: str) -> int | None:
    """Size of a regular file; None where there is none of that name."""
    try:
        fd = files.open_reading(path, direct=False)
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        raise
    try:
        return files.size_bytes(fd)
    finally:
        files.close(fd)


def _owner(files: Files, home: str, names: list[str]) -> str | None:
    """Who holds the directory's lock.

    /proc/locks tells nothing of processes in another container; there the manifest's own lock gives them away.
    """
    try:
        found = read_holder(files, home)
    except OSError:
        found = None
    if found is None and MANIFEST in names and _is_locked(files, f"{home}/{MANIFEST}"):
        found = "another process"
    return found


def _is_locked(files: Files, path: str) -> bool:
    try:
        fd = files.open_reading(path, direct=False)
    except OSError:
        return False
    try:
        return files.is_locked(fd)
    except OSError:
        return False
    finally:
        files.close(fd)
