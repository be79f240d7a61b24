"""From directories on a command line to the stores that they are of.

A store has one directory or several; its manifest is in the first and says where the others are, so naming the
first is enough while they are where they were.
"""

from flatcake.audit.facts import HomeFacts, RowFacts, StoreFacts
from flatcake.audit.home import look
from flatcake.audit.rows import read_rows
from flatcake.audit.survey import find_problems, pool_files, survey
from flatcake.errors import ConfigError
from flatcake.io.manifestdb import MANIFEST
from flatcake.io.seam import Files


def group(files: Files, directories: list[str]) -> list[list[HomeFacts]]:
    """Look at directories, and put those of one store together: its first one, then the others in order.

    Raises:
        ConfigError: There is no such directory, or some but not all directories of a store follow its first.
        FormatError: One is not FlatCake's, or of another format.
        OwnershipError: One may not be read.
    """
    stores: list[list[HomeFacts]] = []
    for directory in directories:
        home = look(files, directory)
        if stores and _follows(stores[-1], home):
            stores[-1].append(home)
        else:
            stores.append([home])
    for store in stores:
        header = store[0].header
        if header is not None and len(store) > 1 and len(store) != header.directories:
            raise ConfigError(
                f"{store[0].path}: its store has {header.directories} directories, {len(store)} are named; "
                "name the first one alone, or all of them in order"
            )
    return stores


def read_store(files: Files, homes: list[HomeFacts]) -> tuple[tuple[HomeFacts, ...], RowFacts | None]:
    """Read a store's manifest, and look at the directories that it names, unless they are known.

    Raises:
        ConfigError: A directory that the manifest names is not there any more.
        FormatError, OwnershipError, CapacityError: As for `look` and `read_rows`.
    """
    first = homes[0]
    rows = None
    is_first = first.header is None or first.header.directory == 0
    if is_first and first.manifest_bytes is not None:
        rows = read_rows(files, f"{first.path}/{MANIFEST}")
    about = rows.about if rows is not None else None
    if len(homes) == 1 and about is not None and len(about.directories) > 1:
        if about.directories[0] != first.path:
            raise ConfigError(
                f"{first.path}: was {about.directories[0]} when its store was open; "
                f"name all of its {len(about.directories)} directories in order"
            )
        homes = [first, *(look(files, path) for path in about.directories[1:])]
    return tuple(homes), rows


def describe(files: Files, homes: list[HomeFacts]) -> StoreFacts:
    """Everything that can be said of a store without reading its pool; arguments and errors as for `read_store`."""
    found, rows = read_store(files, homes)
    problems, notes = find_problems(found, rows)
    owner = next((home.owner for home in found if home.owner is not None), None)
    seen = None
    if rows is not None and rows.about is not None:
        seen = survey(rows.about, pool_files(found), rows.stored, is_open=owner is not None)
        notes += [f"{count} {reason}: the next open leaves them out" for reason, count in seen.left_out.items()]
        if owner is not None and rows.about.dram_bytes:
            notes.append("what is in DRAM is known to the process that has the store open, and to nobody else")
    return StoreFacts(homes=found, rows=rows, survey=seen, problems=tuple(problems), notes=tuple(notes))


def _follows(store: list[HomeFacts], home: HomeFacts) -> bool:
    """Whether a directory is the next one of a store that has been begun with its first one."""
    first, header = store[0].header, home.header
    if first is None or header is None or first.directory != 0:
        return False
    return header.directory == len(store) and (header.directories, header.rank, header.geometry) == (
        first.directories,
        first.rank,
        first.geometry,
    )
