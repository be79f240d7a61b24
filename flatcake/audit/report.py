"""Shows what `flatcake inspect` found: aligned columns for people, one object for programs.

Pure: text out, nothing printed.  `docs/inspect.md` lists the keys of the object.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from flatcake.about import About
from flatcake.audit.facts import Found, HomeFacts, MediumFacts, RankFacts, RowFacts, ScopeFacts, StoreFacts
from flatcake.io.pooldir import Header
from flatcake.units import format_bytes

SCOPES_SHOWN = 20

_Row = Sequence[str]


def as_mapping(store: StoreFacts) -> dict[str, object]:
    """Everything as nested plain values; absent facts are None."""
    found, about = store.found, store.found.about
    return {
        "path": found.path,
        "catalog": found.catalog.path,
        "owner": found.owner,
        "format": _header(found.header),
        "identity": asdict(about.identity) if about is not None else None,
        "geometry": _geometry(about) if about is not None else None,
        "ranks": [_rank(rank) for rank in found.ranks],
        "directories": [_directory(home, rank) for rank in found.ranks for home in rank.homes],
        "manifest": _manifest(found.catalog, found.rows, store) if found.rows is not None else None,
        "media": [_medium(medium) for medium in store.survey.media] if store.survey is not None else None,
        "scopes": [_scope(scope) for scope in store.survey.scopes] if store.survey is not None else None,
        "problems": list(store.problems),
        "notes": list(store.notes),
    }


def as_text(store: StoreFacts, *, scopes_max: int | None = SCOPES_SHOWN) -> str:
    """Lines for a terminal; None shows all scopes."""
    facts = list(_facts(store))
    width = max(len(label) for label, _ in facts)
    lines = [f"{label:{width}}  {value}" for label, value in facts]
    if store.found.is_engine and store.found.ranks:
        rows = [_rank_row(rank, home) for rank in store.found.ranks for home in rank.homes]
        lines += ["", *columns([_RANKS, *rows], text=4)]
    if store.survey is not None:
        lines += ["", *columns([_MEDIA, *map(_medium_row, store.survey.media)], text=1)]
        scopes = store.survey.scopes[:scopes_max]
        if scopes:
            lines += ["", *columns([_SCOPES, *map(_scope_row, scopes)], text=4)]
        hidden = store.survey.scopes[len(scopes) :]
        if hidden:
            more = format_bytes(sum(scope.extent_bytes for scope in hidden))
            lines.append(f"... {len(hidden)} more scopes with {more} in extents; --all shows them")
    marks = [f"problem: {text}" for text in store.problems] + [f"note: {text}" for text in store.notes]
    return "\n".join([*lines, *([""] if marks else []), *marks]) + "\n"


def columns(rows: Sequence[_Row], *, text: int) -> list[str]:
    """Rows of cells as aligned lines; the first `text` columns to the left, numbers to the right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row[:text], widths, strict=False)]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[text:], widths[text:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


_RANKS: _Row = ("rank", "directory", "state", "geometry", "files", "of", "bytes")
_MEDIA: _Row = (
    "medium",
    "size",
    "scopes",
    "extents",
    "in extents",
    "blocks",
    "bytes",
    "amplification",
    "free",
    "in ranges",
    "largest",
    "runs",
)
_SCOPES: _Row = (
    "scope",
    "kind",
    "session",
    "medium",
    "turns",
    "blocks",
    "bytes",
    "extents",
    "in extents",
    "runs",
    "generation",
    "use",
)


def session_label(session: str | None) -> str:
    """The start of a digest, as far as it is told apart by people."""
    return session[:12] if session is not None else "-"


def kind_label(session: str | None) -> str:
    """Whose a scope is."""
    return "shared" if session is None else "session"


def _facts(store: StoreFacts) -> Iterator[tuple[str, str]]:
    found = store.found
    yield "directory", found.path
    if found.is_engine:
        yield "catalog", found.catalog.path
    else:
        for home in found.homes[1:]:
            yield "and", home.path
    yield "owner", found.owner or "none: no process has it open"
    if (header := found.header) is not None:
        several = ", ".join(str(rank.rank) for rank in found.ranks)
        which = f"{len(found.ranks)} ranks: {several}" if len(found.ranks) > 1 else f"rank {header.rank}"
        yield "format", f"version {header.version}, {which}"
        size_bytes = header.files * header.pool_file_bytes
        each = " on each rank" if len(found.ranks) > 1 else ""
        pool = f"{header.files} files of {format_bytes(header.pool_file_bytes)}, {format_bytes(size_bytes)}"
        yield "pool", pool + each
    about = found.about
    if about is not None:
        yield "identity", ", ".join(f"{name} {value}" for name, value in asdict(about.identity).items())
        yield "geometry", _geometry_text(about)
    if found.rows is not None:
        yield "manifest", _manifest_text(found, found.rows)
    dump_bytes = found.catalog.dump_bytes
    yield "DRAM dump", format_bytes(dump_bytes) if dump_bytes is not None else "none"


def _geometry_text(about: About) -> str:
    shape = about.geometry
    padding = shape.block_bytes / shape.block_payload_bytes - 1
    blocks = f"blocks of {shape.block_tokens} tokens in {shape.pages_per_block} pages"
    return f"{shape.layer_count} layers, {blocks}, {format_bytes(shape.block_bytes)} a block, {padding:.1%} of padding"


def _rank_row(rank: RankFacts, home: HomeFacts) -> _Row:
    header = home.header
    state = home.faults[0] if home.faults else "in use" if home.owner is not None else "sound"
    return (
        str(rank.rank),
        home.path,
        state if len(home.faults) < 2 else f"{state}, and {len(home.faults) - 1} more",
        header.geometry[:12] if header is not None else "-",
        str(home.pool_files),
        format_bytes(header.pool_file_bytes) if header is not None else "-",
        format_bytes(home.pool_bytes),
    )


def _manifest_text(found: Found, rows: RowFacts) -> str:
    blocks = int(rows.stored.block_counts.sum())
    size = format_bytes((found.catalog.manifest_bytes or 0) + found.catalog.log_bytes)
    how = "in use" if found.owner is not None else "closed" if rows.state and rows.state.was_closed else "not closed"
    return f"{how}; {len(rows.stored)} turns, {blocks} blocks, generation {rows.stored.generation}; {size}"


def _medium_row(medium: MediumFacts) -> _Row:
    amplification = medium.space_amplification
    return (
        medium.medium.name,
        format_bytes(medium.size_bytes),
        str(medium.scopes),
        str(medium.extents),
        format_bytes(medium.extent_bytes),
        str(medium.blocks),
        format_bytes(medium.block_bytes),
        f"{amplification:.2f}" if amplification is not None else "-",
        format_bytes(medium.free_bytes),
        str(medium.free_ranges),
        format_bytes(medium.largest_free_bytes),
        str(medium.runs),
    )


def _scope_row(scope: ScopeFacts) -> _Row:
    first, last = scope.generation_min, scope.generation_max
    return (
        str(scope.scope_id),
        kind_label(scope.session),
        session_label(scope.session),
        scope.medium.name,
        str(scope.turns),
        str(scope.blocks),
        format_bytes(scope.size_bytes),
        str(scope.extents),
        format_bytes(scope.extent_bytes),
        str(scope.runs),
        str(first) if first == last else f"{first}+{last - first}",
        str(scope.use) if scope.use is not None else "-",
    )


def _rank(rank: RankFacts) -> dict[str, object]:
    return {"rank": rank.rank, "owner": rank.owner, "directories": [home.path for home in rank.homes]}


def _directory(home: HomeFacts, rank: RankFacts) -> dict[str, object]:
    names = ("path", "pool_files", "pool_bytes", "manifest_bytes", "log_bytes", "dump_bytes")
    return {
        "rank": rank.rank,
        "format": _header(home.header),
        **{name: getattr(home, name) for name in names},
        "faults": list(home.faults),
        "aside": list(home.aside),
    }


def _header(header: Header | None) -> dict[str, object] | None:
    return asdict(header) if header is not None else None


def _geometry(about: About) -> dict[str, object]:
    shape = about.geometry
    return {
        "block_tokens": shape.block_tokens,
        "page_tokens": shape.page_tokens,
        "dtype": shape.dtype,
        "layers": [
            {"piece_bytes": shape.piece_bytes(layer), "components": [part.name for part in shape.layers[layer]]}
            for layer in range(shape.layer_count)
        ],
        "block_bytes": shape.block_bytes,
        "block_payload_bytes": shape.block_payload_bytes,
    }


def _manifest(catalog: HomeFacts, rows: RowFacts, store: StoreFacts) -> dict[str, object]:
    return {
        "manifest_bytes": catalog.manifest_bytes,
        "log_bytes": catalog.log_bytes,
        "aside": list(catalog.aside),
        "closed": rows.state.was_closed if rows.state is not None else None,
        "turns": len(rows.stored),
        "blocks": int(rows.stored.block_counts.sum()),
        "generation": rows.stored.generation,
        "damages": rows.damages,
        "bad_turns": rows.bad_rows,
        "left_out": dict(store.survey.left_out) if store.survey is not None else None,
        "verify": rows.about.verify if rows.about is not None else None,
    }


def _medium(medium: MediumFacts) -> dict[str, object]:
    amplification = medium.space_amplification
    return {
        **asdict(medium),
        "medium": medium.medium.name.lower(),
        "space_amplification": round(amplification, 4) if amplification is not None else None,
    }


def _scope(scope: ScopeFacts) -> dict[str, object]:
    return {**asdict(scope), "kind": kind_label(scope.session), "medium": scope.medium.name.lower()}
