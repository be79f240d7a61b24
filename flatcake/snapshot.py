"""Takes the snapshot that `Store.stats` hands out."""

from collections import Counter
from collections.abc import Mapping

from flatcake.catalog import Catalog
from flatcake.dataplane import DataPlane
from flatcake.keeper import Keeper
from flatcake.stats import MediumStats, StoreStats


def take_stats(catalog: Catalog, plane: DataPlane, more: Mapping[str, int], keeper: Keeper | None) -> StoreStats:
    """Ask all parts of a store what they hold and did; `more` are counts of others."""
    parts, space = plane.parts, catalog.space
    opened, foreign = catalog.open_counts(), catalog.retention.foreign_bytes()
    paths = {medium: io.engine.name for medium, io in parts.media.items()}
    media = {
        medium.name.lower(): MediumStats.of(
            table,
            space.index.blocks_on(medium),
            paths.get(medium, ""),
            written_bytes=(keeper.written_before[medium] if keeper is not None else 0) + parts.written_bytes[medium],
            foreign_bytes=foreign[medium],
        )
        for medium, table in space.tables.items()
    }
    counts: Counter[str] = Counter()
    kept = keeper.counts() if keeper is not None else {}
    for source in (more, kept, catalog.counts, catalog.retention.counts, parts.counts):
        counts.update(dict(source))
    counts["reclaimed_scopes"], counts["reclaimed_blocks"] = space.reclaimed_scopes, space.reclaimed_blocks
    counts["reclaimed_pinned_scopes"] = space.reclaimed_pinned_scopes
    return StoreStats(
        io_path=media["ssd"].io_path,
        io_reason=plane.io_reason,
        media=media,
        blocks=len(space.index),
        index_bytes=space.index.size_bytes,
        window_bytes=parts.window.size_bytes + parts.save_window.size_bytes,
        leases=opened["leases"],
        plans=opened["plans"],
        draining_scopes=opened["draining"],
        ssd_write_budget_bytes=space.budget.left_bytes(parts.clock.now_ns()),
        counts=dict(counts),
    )
