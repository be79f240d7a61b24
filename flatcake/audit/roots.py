"""From a directory on a command line to the pools in it: of a store in one process, or of an engine's ranks.

`homes` says where an engine keeps what.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flatcake.audit.facts import HomeFacts
from flatcake.audit.home import has_pool, look, look_rank, names_in
from flatcake.errors import ConfigError
from flatcake.homes import CATALOG, RANK, REPLICA, catalog_in, number_in, rank_in
from flatcake.io.manifestdb import MANIFEST
from flatcake.io.pooldir import Header
from flatcake.io.seam import Files


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Root:
    """A directory of a store in one process, or what an engine has in one of its directories."""

    path: str
    """Without symbolic links."""
    is_engine: bool
    homes: Mapping[int, HomeFacts]
    """The pools in it by rank, in order; of a store in one process the sole one."""

    @property
    def replica(self) -> str:
        """Which replica's it is; empty where there are none."""
        name = _name(self.path)
        return name if self.is_engine and REPLICA.fullmatch(name) else ""

    @property
    def header(self) -> Header | None:
        """Of the first pool that has one."""
        return next((home.header for home in self.homes.values() if home.header is not None), None)

    def home_of(self, rank: int) -> str:
        """Where the pool of a rank is, or should be."""
        return rank_in(self.path, rank) if self.is_engine else self.path


def find_roots(files: Files, directory: str) -> list[Root]:
    """Look at a directory and, below it, at an engine and its replicas.

    Raises:
        ConfigError: There is no such directory, or it is one rank's.
        FormatError: It is not FlatCake's, or of another format.
        OwnershipError: It may not be read.
    """
    home = files.real_path(directory)
    names = names_in(files, home) or []
    above = home.rpartition("/")[0]
    if not has_pool(names) and _name(home) == CATALOG and _is_engine(files, above):
        return [look_root(files, above, is_engine=True)]
    is_rank = RANK.fullmatch(_name(home)) and has_pool(names) and MANIFEST not in names
    if is_rank and MANIFEST in (names_in(files, catalog_in(above)) or ()):
        raise ConfigError(f"{home}: one rank of an engine, whose manifest is in {catalog_in(above)}; name {above}")
    replicas = sorted((name for name in names if REPLICA.fullmatch(name)), key=number_in)
    engines = [path for path in (home, *(f"{home}/{name}" for name in replicas)) if _is_engine(files, path)]
    pools = [home] if has_pool(names) or not engines else []
    return [
        *(look_root(files, path, is_engine=False) for path in pools),
        *(look_root(files, path, is_engine=True) for path in engines),
    ]


def look_root(files: Files, path: str, *, is_engine: bool) -> Root:
    """Look at one of these again; errors as for `look`."""
    home = files.real_path(path)
    if not is_engine:
        pool = look(files, home)
        return Root(path=home, is_engine=False, homes={pool.header.rank if pool.header is not None else 0: pool})
    ranks = sorted((name for name in names_in(files, home) or () if RANK.fullmatch(name)), key=number_in)
    homes = {number_in(name): look_rank(files, f"{home}/{name}") for name in ranks}
    return Root(path=home, is_engine=True, homes=homes)


def _is_engine(files: Files, path: str) -> bool:
    """Whether a catalog, or the pool of a rank that has no manifest of its own, is below a directory."""
    names = names_in(files, path) or ()
    if CATALOG in names and MANIFEST in (names_in(files, catalog_in(path)) or ()):
        return True
    below = (names_in(files, f"{path}/{name}") or () for name in names if RANK.fullmatch(name))
    return any(has_pool(found) and MANIFEST not in found for found in below)


def _name(path: str) -> str:
    return path.rpartition("/")[2]
