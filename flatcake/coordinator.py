"""A catalog whose data planes are in other processes: one in each rank's worker, as under an engine's scheduler.

`store` joins a catalog and a data plane in one process; this is the other half of that for engines which cannot.
It sends nothing itself: plans go out, and reports come in, by whatever way the engine has.  Saves end on the
scribe's thread, committed and then published, so that no scheduler waits for a disk.
Write path:  begin_save -> ranks -> [take] -> manifest -> index
Read path:   match -> lease -> start_restore -> ranks -> [take]
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from flatcake.about import About, RankHomes, encode_about
from flatcake.assemble import open_catalog
from flatcake.catalog import Catalog, Refused
from flatcake.clock import Clock, MonotonicClock
from flatcake.config import StoreConfig
from flatcake.errors import ShapeError
from flatcake.geometry import Geometry
from flatcake.gva import Medium
from flatcake.hits import Lease, Match
from flatcake.io.manifestdb import MANIFEST, ManifestDB
from flatcake.io.scribe import Scribe
from flatcake.io.seam import Files
from flatcake.keys import Identity
from flatcake.layout import LaneTable
from flatcake.ledger import Outcome
from flatcake.messages import Completion, KeyArray, Plan, PlanKind, RankStart
from flatcake.placement import Placement, Turn
from flatcake.saves import OpenSaves
from flatcake.units import MS
from flatcake.wear import UNKNOWN, Wear

log = logging.getLogger(__name__)

TICK_NS = 250 * MS
"""How often late plans and expired leases are looked for."""


class Coordinator:
    """Decides for all ranks of one engine.  Any number of threads may call.

    Args:
        catalog: Empty, or filled from `manifest`.
        manifest: Where committed turns are kept; None where nothing outlives the process.
        identity: What the keys depend on.
        geometry: Of every rank.
        config: The settings of one rank.
        clock: Monotonic time.
    """

    def __init__(
        self,
        catalog: Catalog,
        manifest: ManifestDB | None,
        *,
        identity: Identity,
        geometry: Geometry,
        config: StoreConfig,
        clock: Clock,
    ) -> None:
        self.catalog, self.identity, self.geometry = catalog, identity, geometry
        self.counts: Counter[str] = Counter()
        self.ended: deque[Outcome] = deque()
        """Saves and restores that are over, for the caller to take."""
        self._manifest, self._config, self._clock = manifest, config, clock
        self._saves = OpenSaves(config.io.saves_max)
        self._tick_ns = 0
        self._scribe = Scribe(self._close_manifest)

    # -- reading ----------------------------------------------------------------------------------------

    def match(self, keys: KeyArray) -> Match:
        """See `Store.match`."""
        return Match(keys, self.catalog.match(keys), self.geometry.block_tokens, self.geometry.block_bytes)

    def lease(self, match: Match, *, hold_ns: int | None = None) -> Lease:
        """See `Store.lease`."""
        entry = self.catalog.lease(match.keys, self._clock.now_ns(), hold_ns)
        return Lease(entry, self.geometry.block_tokens, self.catalog.release)

    def start_restore(self, lease: Lease, skip_blocks: int = 0) -> Plan | Refused:
        """Make the plan that every rank runs with `DataPlane.restore`; the lease may be closed afterwards."""
        return self.catalog.start_restore(lease.entry.lease_id, self._clock.now_ns(), skip_blocks)

    # -- writing ----------------------------------------------------------------------------------------

    def begin_save(self, session: str, keys: KeyArray, turn: Turn) -> Plan | Refused:
        """Make the plan that every rank runs with `DataPlane.save`; without runs, everything is stored already."""
        return self._saves.begin(lambda: self.catalog.begin_save(session, keys, turn, self._clock.now_ns()))

    # -- reports and time -------------------------------------------------------------------------------

    def take(self, completion: Completion) -> None:
        """Take a rank's report.  A save that went well is committed and published soon, on another thread."""
        if completion.plan_id not in self._saves or completion.first_bad_block is not None:
            self._finish(completion)
        elif not self._scribe.post(lambda: self._finish(completion)):
            self.counts["reports after close"] += 1

    def tick(self) -> None:
        """Fail what is late, and let the manifest forget what was reclaimed; cheap enough for every step."""
        now_ns = self._clock.now_ns()
        if now_ns < self._tick_ns:
            return
        self._tick_ns = now_ns + TICK_NS
        for outcome in self.catalog.expire(now_ns):
            self._settle(outcome)
        if self._manifest is not None:
            self._scribe.post(self._manifest.settle)

    def reset(self) -> int:
        """Forget everything at once, for good; the caller cancels restores under way.  Returns blocks dropped.

        Raises:
            OwnershipError: It could not be written down, so that it holds for this process only.
        """
        return self.catalog.reset()

    def fence(self, then: Callable[[], object]) -> None:
        """Call `then` on the scribe's thread, when all reports so far are settled."""
        self._scribe.post(then)

    def counters(self) -> Counter[str]:
        """Everything counted since open, by name."""
        total: Counter[str] = Counter()
        kept = [self._manifest.counts] if self._manifest is not None else []
        for counts in (self.counts, self._saves.counts, self.catalog.counts, self.catalog.retention.counts, *kept):
            total.update(dict(counts))  # Copied in one go, as other threads go on counting.
        return total

    def close(self) -> bool:
        """Settle what has been reported and close the manifest, within the configured time; twice is safe."""
        return self._scribe.close(self._config.timeouts.close_ns)

    # -- private ----------------------------------------------------------------------------------------

    def _finish(self, completion: Completion) -> None:
        outcome = self.catalog.finish(completion)
        if outcome is not None:
            self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        self._saves.settle(outcome)
        if outcome.kind is PlanKind.SAVE and outcome.reason:
            self.counts[f"saves failed: {outcome.reason}"] += 1
        self.ended.append(outcome)

    def _close_manifest(self) -> None:
        """On the scribe's thread, last."""
        if self._manifest is not None:
            used = self.catalog.space.scopes.by_use(self._clock.now_ns(), self._manifest.wall_s())
            self._manifest.close((), used, clean=True)


def open_coordinator(
    config: StoreConfig,
    identity: Identity,
    starts: Sequence[RankStart],
    home: str,
    *,
    placement: Placement | None = None,
    files: Files | None = None,
) -> Coordinator:
    """Open the catalog of ranks whose data planes are open already; their locks guard `home` as well.

    Args:
        config: The settings of one rank; all have the same, but for their directories.
        identity: What the bytes depend on; the geometry of the ranks is added to its `layout`.
        starts: What each rank said, once.
        home: Directory of the manifest, beside those of the ranks.
        placement, files: As for `assemble.open_store`.

    Raises:
        ShapeError: The ranks differ in geometry, in the size of their files or in the number of directories.
        OwnershipError, CapacityError: The manifest may not be read or written.
    """
    files, clock, first = files or Files(), MonotonicClock(), starts[0]
    for start in starts:
        same = (start.geometry, start.pool_file_bytes, start.verifies, len(start.directories))
        if same != (first.geometry, first.pool_file_bytes, first.verifies, len(first.directories)):
            raise ShapeError(f"rank {start.rank}: other geometry or settings than rank {first.rank}; expected the same")
    identity = replace(identity, layout=f"{identity.layout}/{first.geometry.fingerprint()}")
    catalog = open_catalog(config, first.geometry, placement)
    manifest = None
    if first.pool_file_bytes:
        files.make_directory(home)
        about = _about(config, identity, starts)
        pieces: list[int] = LaneTable.of(first.geometry).piece_bytes.tolist()
        manifest = ManifestDB(files, f"{home}/{MANIFEST}", about.origin(), encode_about(about), pieces)
        try:
            _reopen(catalog, manifest, all(start.pool_kept and start.verifies for start in starts), clock)
        except BaseException:
            manifest.close()
            raise
        log.info("%s: %d blocks found of an earlier run", home, len(catalog.space.index))
    for start in starts:
        catalog.rank_started(start.rank, start.epoch)
    return Coordinator(catalog, manifest, identity=identity, geometry=first.geometry, config=config, clock=clock)


def _about(config: StoreConfig, identity: Identity, starts: Sequence[RankStart]) -> About:
    """What the manifest says of the store, for whoever looks at its directories later."""
    first = starts[0]
    return About(
        identity=identity,
        geometry=first.geometry,
        pool_file_bytes=first.pool_file_bytes,
        directories=first.directories,
        rank=first.rank,
        dram_bytes=config.capacity.dram_bytes_max,
        verify=first.verifies,
        ranks=tuple(RankHomes(start.rank, start.directories) for start in starts),
    )


def _reopen(catalog: Catalog, manifest: ManifestDB, is_same: bool, clock: Clock) -> None:
    """Fill the catalog with what an earlier run has committed, if `is_same`: every rank still has its files.

    What was in DRAM is gone with the ranks.
    """
    stored = manifest.load(trusted=is_same)
    catalog.space.manifest = manifest  # What expires at once goes with the first transaction.
    budget, now_ns = catalog.space.budget, clock.now_ns()
    budget.resume(stored.wear.left_bytes, manifest.wall_s() - stored.wear.wall_s, now_ns)

    def wear() -> Wear:
        """What is left to write; bytes written are the ranks' to count."""
        left_bytes = budget.left_bytes(clock.now_ns())
        left_bytes = UNKNOWN if left_bytes is None else left_bytes
        return replace(stored.wear, left_bytes=left_bytes, wall_s=max(0, manifest.wall_s()))

    manifest.wear = wear
    if is_same:
        dropped = catalog.reopen(stored, now_ns)
        catalog.space.lose(Medium.DRAM)
        manifest.start(dropped, catalog.space.scopes.by_use(now_ns, manifest.wall_s()))
    else:
        catalog.counts["reopen: rows of another pool"] += len(stored)
        catalog.space.generation = stored.generation
        manifest.start((), everything=True)
