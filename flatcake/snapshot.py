"""Takes the snapshot that `Store.stats` hands out."""

from collections import Counter
from collections.abc import Iterable, Mapping

from flatcake.catalog import Catalog
from flatcake.dataplane import DataPlane
from flatcake.stats import MediumStats, StoreStats


def take_stats(catalog: Catalog, plane: DataPlane, more: Iterable[Mapping[str, int]]) -> StoreStats:
    """Ask catalog and data plane what they hold and did; `more` are counts of others."""
    parts, space = plane.parts, catalog.space
    opened = catalog.open_counts()
    paths = {medium: io.engine.name for medium, io in parts.media.items()}
    media = {
        medium.name.lower(): MediumStats.of(table, space.index.blocks_on(medium), paths.get(medium, ""))
        for medium, table in space.tables.items()
    }
    counts: Counter[str] = Counter()
    for source in (*more, catalog.counts, parts.counts):
        counts.update(dict(source))
    counts["reclaimed_scopes"], counts["reclaimed_blocks"] = space.reclaimed_scopes, space.reclaimed_blocks
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
        counts=dict(counts),
    )
