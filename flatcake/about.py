"""What a store is, as its manifest says it: identity, geometry, sizes.  docs/restart.md.

Pure.  A store writes this beside its rows at every open, so that `flatcake inspect` and `verify` can read a
directory without the engine that filled it; a coordinator writes it for all of its ranks.  It proves itself like
a row; salts and tokens are not in it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

from flatcake.errors import FlatCakeError
from flatcake.geometry import Component, Geometry
from flatcake.keys import FORMAT_VERSION, Identity
from flatcake.manifest import origin_digest

_DIGEST_BYTES = 16


class RankHomes(NamedTuple):
    """Where one rank keeps its pool."""

    rank: int
    directories: tuple[str, ...]
    """Paths at the last open, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """One store: of one process, or of a coordinator and its ranks."""

    identity: Identity
    """Its `layout` holds the geometry's fingerprint."""
    geometry: Geometry
    pool_file_bytes: int
    directories: tuple[str, ...]
    """Paths of all directories of one rank, the first one, at the last open, in order."""
    rank: int
    """That rank."""
    dram_bytes: int
    """Size of the DRAM medium, of each rank; 0 without one."""
    verify: bool
    """Whether pieces have checksums, and are compared with them."""
    ranks: tuple[RankHomes, ...] = ()
    """All ranks of a coordinator; empty for a store in one process."""

    @property
    def homes(self) -> tuple[RankHomes, ...]:
        """All ranks, whoever keeps the manifest."""
        return self.ranks or (RankHomes(self.rank, self.directories),)

    def origin(self) -> bytes:
        """16 bytes that the rows of this store are keyed with: of a coordinator's, the number of ranks counts."""
        which = len(self.ranks) or self.rank
        return origin_digest(self.identity.digest(), self.pool_file_bytes, len(self.directories), which, FORMAT_VERSION)


def encode_about(about: About) -> bytes:
    """The bytes that `decode_about` reads."""
    geometry = about.geometry
    shape = {
        "block_tokens": geometry.block_tokens,
        "page_tokens": geometry.page_tokens,
        "dtype": geometry.dtype,
        "layers": [[[part.name, part.page_bytes] for part in layer] for layer in geometry.layers],
    }
    facts = {
        "identity": asdict(about.identity),
        "geometry": shape,
        "pool_file_bytes": about.pool_file_bytes,
        "directories": about.directories,
        "rank": about.rank,
        "dram_bytes": about.dram_bytes,
        "verify": about.verify,
        "ranks": about.ranks,
    }
    text = json.dumps(facts).encode()
    return _digest(text, about.origin()) + text


def decode_about(body: object) -> About | None:
    """Read what `encode_about` wrote; None when it is damaged, or of a form that this version does not know."""
    if not isinstance(body, bytes):
        return None
    digest, text = body[:_DIGEST_BYTES], body[_DIGEST_BYTES:]
    try:
        facts = json.loads(text)
        shape = facts["geometry"]
        layers = tuple(tuple(Component(str(name), int(size)) for name, size in layer) for layer in shape["layers"])
        about = About(
            identity=Identity(**facts["identity"]),
            geometry=Geometry(
                block_tokens=int(shape["block_tokens"]),
                page_tokens=int(shape["page_tokens"]),
                layers=layers,
                dtype=str(shape["dtype"]),
            ),
            pool_file_bytes=int(facts["pool_file_bytes"]),
            directories=tuple(map(str, facts["directories"])),
            rank=int(facts["rank"]),
            dram_bytes=int(facts["dram_bytes"]),
            verify=bool(facts["verify"]),
            ranks=tuple(RankHomes(int(rank), tuple(map(str, paths))) for rank, paths in facts.get("ranks", ())),
        )
        whole = _digest(text, about.origin()) == digest and _is_even(about)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, FlatCakeError):
        return None
    return about if whole else None


def _is_even(about: About) -> bool:
    """Whether there are directories, as many for every rank."""
    return {len(home.directories) for home in about.homes} == {len(about.directories)} != {0}


def _digest(text: bytes, origin: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES, key=origin, person=b"flatcake.about").digest()
