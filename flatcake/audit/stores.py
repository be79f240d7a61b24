"""From directories on a command line to the stores that they are of.

A store has one rank or several, and each of them one directory or several.  The manifest is with the first one, or
in an engine's catalog, and says where the others are, so naming the first is enough while they are where they were.
"""

from collections.abc import Sequence

from flatcake.about import About
from flatcake.audit.facts import Found, HomeFacts, RankFacts, StoreFacts
from flatcake.audit.home import look, look_catalog, look_rank
from flatcake.audit.roots import Root, find_roots
from flatcake.audit.rows import read_rows
from flatcake.audit.survey import find_problems, pool_files, survey
from flatcake.errors import ConfigError
from flatcake.homes import catalog_in
from flatcake.io.manifestdb import MANIFEST
from flatcake.io.seam import Files


def group(files: Files, directories: list[str]) -> list[list[Root]]:
    """Look at directories, and put those of one store together: its first one, then the others in order.

    Raises:
        ConfigError: There is no such directory, it is one rank's, or named twice; or some but not all directories of
            a store follow its first.
        FormatError: One is not FlatCake's, or of another format.
        OwnershipError: One may not be read.
    """
    stores: list[list[Root]] = []
    begun: list[list[Root]] = []
    for directory in directories:
        roots = find_roots(files, directory)
        for path in {root.path for root in roots} & {root.path for store in stores for root in store}:
            raise ConfigError(f"{path}: named twice; name it once")
        before = [next((store for store in begun if _follows(store, root)), None) for root in roots]
        if all(before):
            for store, root in zip(before, roots, strict=True):
                assert store is not None
                store.append(root)
        else:
            begun = [[root] for root in roots]
            stores += begun
    for store in stores:
        header = store[0].header
        if header is not None and len(store) > 1 and len(store) != header.directories:
            raise ConfigError(
                f"{store[0].path}: its store has {header.directories} directories, {len(store)} are named; "
                "name the first one alone, or all of them in order"
            )
    return stores


def read_store(files: Files, roots: Sequence[Root]) -> Found:
    """Read a store's manifest, and look at the directories that it names, unless they are known.

    Raises:
        ConfigError: The store was elsewhere, or a directory of a store in one process is not there any more.
        FormatError, OwnershipError, CapacityError: As for `look` and `read_rows`.
    """
    first, rows = roots[0], None
    catalog = look_catalog(files, catalog_in(first.path)) if first.is_engine else next(iter(first.homes.values()))
    if catalog.manifest_bytes is not None and (first.header is None or not first.header.directory):
        rows = read_rows(files, f"{catalog.path}/{MANIFEST}")
    ranks = _ranks(files, roots, rows.about if rows is not None else None)
    used = {home.path for rank in ranks for home in rank.homes}
    return Found(
        path=first.path,
        is_engine=first.is_engine,
        catalog=catalog,
        ranks=ranks,
        rows=rows,
        unused=tuple(home for root in roots for home in root.homes.values() if home.path not in used),
    )


def describe(files: Files, roots: Sequence[Root]) -> StoreFacts:
    """Everything that can be said of a store without reading its pool; arguments and errors as for `read_store`."""
    found = read_store(files, roots)
    problems, notes = find_problems(found)
    seen = None
    if found.rows is not None and found.about is not None:
        is_hidden = found.is_engine or found.owner is not None
        seen = survey(found.about, pool_files(found.ranks), found.rows.stored, hides_dram=is_hidden)
        notes += [f"{count} {reason}: the next open leaves them out" for reason, count in seen.left_out.items()]
        if found.about.dram_bytes and found.is_engine:
            notes.append("what ranks have in DRAM is known to their processes alone, and is gone when they end")
        elif found.about.dram_bytes and is_hidden:
            notes.append("what is in DRAM is known to the process that has the store open, and to nobody else")
    return StoreFacts(found=found, survey=seen, problems=tuple(problems), notes=tuple(notes))


def _follows(store: list[Root], root: Root) -> bool:
    """Whether a directory is the next one of a store that has been begun with its first one."""
    first, header = store[0].header, root.header
    if first is None or header is None or first.directory != 0:
        return False
    if (root.is_engine, root.replica) != (store[0].is_engine, store[0].replica):
        return False
    return header.directory == len(store) and (header.directories, header.rank, header.geometry) == (
        first.directories,
        first.rank,
        first.geometry,
    )


def _ranks(files: Files, roots: Sequence[Root], about: About | None) -> tuple[RankFacts, ...]:
    """The ranks of a store and their directories: those that are named, else those that the manifest names."""
    first = roots[0]
    looked = {home.path: home for root in roots for home in root.homes.values()}

    def at(path: str) -> HomeFacts:
        known = looked.get(files.real_path(path))
        return known or (look_rank(files, path) if first.is_engine else look(files, path))

    if about is not None and len(roots) == 1 and len(about.directories) > 1:
        _require_unmoved(files, first, about)
        paths = {home.rank: home.directories for home in about.homes}
    else:
        numbers = [home.rank for home in about.homes] if about is not None else list(first.homes)
        paths = {rank: tuple(root.home_of(rank) for root in roots) for rank in numbers}
    return tuple(RankFacts(rank=rank, homes=tuple(map(at, directories))) for rank, directories in paths.items())


def _require_unmoved(files: Files, first: Root, about: About) -> None:
    was, now = about.homes[0].directories[0], files.real_path(first.home_of(about.homes[0].rank))
    if was != now:
        raise ConfigError(
            f"{now}: was {was} when its store was open; name all of its {len(about.directories)} directories in order"
        )
