"""What `flatcake inspect` and `verify` find in the directories of a store: plain values, None where unknown.

Pure.  `audit.home` and `audit.rows` fill them in from files, `audit.survey` from rows, `audit.report` and
`audit.tally` show them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from flatcake.about import About
from flatcake.gva import Medium
from flatcake.io.pooldir import Header
from flatcake.manifest import State, Stored


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFacts:
    """One directory: of a pool, or of a manifest alone."""

    path: str
    """Without symbolic links."""
    has_pool: bool
    """Whether a header or a lock is there."""
    header: Header | None
    """None where it is missing, damaged, or says what cannot be."""
    owner: str | None
    """Who has the store open now, as that process wrote it; None when nobody has."""
    pool_files: int
    """Files of the pool that are there, of any size."""
    pool_bytes: int
    faults: tuple[str, ...]
    """What is wrong with the directory, the header or a pool file: with any of these the next open finds nothing."""
    missing_files: frozenset[int] = frozenset()
    """Numbers of the pool files that should be here and are not."""
    has_manifest: bool
    """Whether something has the manifest's name."""
    manifest_bytes: int | None
    """None where that is no regular file."""
    log_bytes: int
    """Of the manifest's write-ahead log."""
    dump_bytes: int | None
    """Of the DRAM medium's file; None without one."""
    aside: tuple[str, ...]
    """Names of files that an earlier open has set aside as damaged."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class RowFacts:
    """What the manifest holds."""

    state: State | None
    about: About | None
    stored: Stored
    bad_rows: int
    """Rows that are damaged, or that nothing can prove."""
    damages: int
    """Damages of the file as a whole."""
    is_steady: bool
    """False when it was being written during all attempts to read it."""
    bodies: Mapping[int, bytes] = field(default_factory=dict)
    """The good rows of the table `state`, as they are."""

    @property
    def origin(self) -> bytes | None:
        """What the rows are keyed with, as far as it is known."""
        if self.state is not None:
            return self.state.origin
        return self.about.origin() if self.about is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeFacts:
    """One scope."""

    scope_id: int
    session: str | None
    """Digest of the session's name in hexadecimal; None for a shared prompt."""
    medium: Medium
    turns: int
    """Rows of the manifest: a turn has one on each medium that it went to."""
    blocks: int
    """Blocks that a lookup would find here."""
    superseded_blocks: int
    """Blocks that are found in a later scope instead."""
    shared_blocks: int
    """Leading positions that another session is known to use too."""
    size_bytes: int
    """Of the blocks, padding included."""
    extents: int
    extent_bytes: int
    room_blocks: int
    runs: int
    """Stretches of adjacent blocks: 1 is best."""
    generation_min: int
    generation_max: int
    use: int | None
    """Place in the order of use, 1 for the scope that was used last; None while that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumFacts:
    """One medium."""

    medium: Medium
    size_bytes: int
    extents: int
    extent_bytes: int
    scopes: int
    blocks: int
    block_bytes: int
    """Of all blocks, padding included."""
    payload_bytes: int
    """Of all blocks, padding left out."""
    runs: int
    free_bytes: int
    free_ranges: int
    largest_free_bytes: int

    @property
    def space_amplification(self) -> float | None:
        """Bytes in extents for each byte of visible blocks; None when empty."""
        return self.extent_bytes / self.block_bytes if self.block_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What the next open would find."""

    media: tuple[MediumFacts, ...]
    scopes: tuple[ScopeFacts, ...]
    """Largest first."""
    left_out: Mapping[str, int]
    """Rows that it would leave out, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One rank's pool."""

    rank: int
    homes: tuple[HomeFacts, ...]
    """Its directories, in order."""

    @property
    def header(self) -> Header | None:
        """Of the first directory."""
        return self.homes[0].header

    @property
    def owner(self) -> str | None:
        """Who has it open now."""
        return next((home.owner for home in self.homes if home.owner is not None), None)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Found:
    """The directories of one store, and what its manifest holds."""

    path: str
    """The directory that stands for it: the first one of a store in one process, or an engine's."""
    is_engine: bool
    """Whether a coordinator keeps the manifest, in a directory of its own; else the sole rank does."""
    catalog: HomeFacts
    """The manifest's directory."""
    ranks: tuple[RankFacts, ...]
    rows: RowFacts | None
    """None where there is no manifest."""
    unused: tuple[HomeFacts, ...] = ()
    """Directories of ranks that the last run did not have."""

    @property
    def homes(self) -> tuple[HomeFacts, ...]:
        """All directories of all ranks."""
        return tuple(chain.from_iterable(rank.homes for rank in self.ranks))

    @property
    def header(self) -> Header | None:
        """Of the first rank that has one."""
        return next((rank.header for rank in self.ranks if rank.header is not None), None)

    @property
    def about(self) -> About | None:
        """What the manifest says of the store."""
        return self.rows.about if self.rows is not None else None

    @property
    def owner(self) -> str | None:
        """Who has it open now."""
        return next((home.owner for home in (*self.homes, self.catalog) if home.owner is not None), None)

    @property
    def is_further(self) -> bool:
        """Whether the first directory, which has the manifest, is another one."""
        return self.header is not None and self.header.directory > 0


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StoreFacts:
    """Everything that is said of one store."""

    found: Found
    survey: Survey | None
    """None where the manifest does not say what the blocks look like."""
    problems: tuple[str, ...]
    notes: tuple[str, ...]
