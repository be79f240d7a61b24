"""Shows what `flatcake verify` found: blocks good and bad, by scope and reason.

Pure: text out, nothing printed.  `docs/inspect.md` lists the keys of the object.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from flatcake.audit.report import columns, kind_label, session_label
from flatcake.audit.verdicts import FAILED, Outcome, Verdict
from flatcake.gva import Medium
from flatcake.units import SECOND, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeTally:
    """The blocks of one scope."""

    scope_id: int
    session: str | None
    """Digest of the session's name in hexadecimal; None for a shared prompt."""
    medium: Medium
    counts: Mapping[Verdict, int]

    @property
    def has_failed(self) -> bool:
        return any(verdict.outcome in FAILED for verdict in self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTally:
    """The blocks on one rank."""

    rank: int
    directories: tuple[str, ...]
    counts: Mapping[Verdict, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One store that was read from end to end."""

    path: str
    catalog: str
    """The manifest's directory."""
    directories: tuple[str, ...]
    """Of all ranks."""
    ranks: tuple[RankTally, ...] = ()
    scopes: tuple[ScopeTally, ...] = ()
    read_bytes: int = 0
    wall_ns: int = 0
    buffer_bytes: int = 0
    is_direct: bool | None = None
    """Whether it was read past the page cache; None where nothing was read."""
    dropped_blocks: int = 0
    dropped_turns: int = 0
    """Turns of which nothing is left."""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Mapping[Verdict, int] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.problems and not any(verdict.outcome in FAILED for verdict in self.counts)

    @property
    def read_bytes_s(self) -> int:
        """Bytes a second."""
        return self.read_bytes * SECOND // max(1, self.wall_ns)


def as_mapping(store: Verified) -> dict[str, object]:
    """Everything as nested plain values."""
    return {
        "path": store.path,
        "catalog": store.catalog,
        "directories": list(store.directories),
        "ranks": [
            {"rank": rank.rank, "directories": list(rank.directories), **_outcomes(rank.counts)} for rank in store.ranks
        ],
        "good": store.is_good,
        **_outcomes(store.counts),
        "read_bytes": store.read_bytes,
        "read_bytes_s": store.read_bytes_s,
        "wall_ns": store.wall_ns,
        "buffer_bytes": store.buffer_bytes,
        "direct": store.is_direct,
        "dropped_blocks": store.dropped_blocks,
        "dropped_turns": store.dropped_turns,
        "scopes": [
            {
                "scope_id": scope.scope_id,
                "kind": kind_label(scope.session),
                "session": scope.session,
                "medium": scope.medium.name.lower(),
                **_outcomes(scope.counts),
            }
            for scope in store.scopes
        ],
        "problems": list(store.problems),
        "notes": list(store.notes),
    }


def as_text(store: Verified, *, everything: bool = False) -> str:
    """Lines for a terminal: scopes with failed blocks, or all."""
    lines = [f"catalog    {store.catalog}"] if store.catalog not in store.directories else []
    lines += [f"directory  {path}" for path in store.directories]
    if len(store.ranks) > 1:
        heads = ("rank", "blocks", *(outcome.value for outcome in _SHOWN), "reasons")
        lines += ["", *columns([heads, *((str(rank.rank), *_cells(rank.counts)) for rank in store.ranks)], text=1)]
        lines += [] if any(everything or scope.has_failed for scope in store.scopes) else [""]
    shown = [scope for scope in store.scopes if everything or scope.has_failed]
    if shown:
        heads = ("scope", "kind", "session", "medium", "blocks", *(outcome.value for outcome in _SHOWN), "reasons")
        lines += ["", *columns([heads, *map(_row, shown)], text=4), ""]
    if store.is_direct is not None:
        counts = _by_outcome(store.counts)
        each = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome])
        lines.append(f"blocks     {each or 'none'}")
        rate = f"{store.read_bytes_s / 1e9:.2f} GB/s"
        how = "past the page cache" if store.is_direct else "through the page cache"
        buffers = format_bytes(store.buffer_bytes)
        lines.append(f"read       {format_bytes(store.read_bytes)}, {rate}, {how}, in {buffers} of buffers")
    if store.dropped_blocks:
        lines.append(f"dropped    {store.dropped_blocks} blocks; nothing is left of {store.dropped_turns} turns")
    lines += [f"problem: {text}" for text in store.problems] + [f"note: {text}" for text in store.notes]
    return "\n".join([*lines, "all good" if store.is_good else "NOT all good"]) + "\n"


_SHOWN = (Outcome.GOOD, Outcome.UNCHECKED, Outcome.BAD, Outcome.UNREADABLE)


def _row(scope: ScopeTally) -> tuple[str, ...]:
    return (
        str(scope.scope_id),
        kind_label(scope.session),
        session_label(scope.session),
        scope.medium.name,
        *_cells(scope.counts),
    )


def _cells(given: Mapping[Verdict, int]) -> tuple[str, ...]:
    """How many, how they fared, and why some failed."""
    counts = _by_outcome(given)
    reasons = "; ".join(f"{count} {verdict.text}" for verdict, count in given.items() if verdict.reason)
    return str(sum(given.values())), *(str(counts[outcome]) for outcome in _SHOWN), reasons or "-"


def _outcomes(counts: Mapping[Verdict, int]) -> dict[str, object]:
    found = _by_outcome(counts)
    return {
        "blocks": sum(counts.values()),
        "outcomes": {outcome.value: found[outcome] for outcome in Outcome},
        "reasons": {verdict.text: count for verdict, count in counts.items() if verdict.reason},
    }


def _by_outcome(counts: Mapping[Verdict, int]) -> Counter[Outcome]:
    found: Counter[Outcome] = Counter()
    for verdict, count in counts.items():
        found[verdict.outcome] += count
    return found
