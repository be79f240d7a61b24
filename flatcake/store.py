"""The store as users hold it: a catalog and a data plane in one process.

Write path:  save -> catalog.begin_save -> dataplane.save -> report -> catalog.finish -> visible
Read path:   match -> lease -> restore -> wait_layer … -> result
"""

import atexit

import numpy as np

from flatcake.catalog import Catalog, Refused
from flatcake.clock import Clock
from flatcake.config import StoreConfig
from flatcake.dataplane import DataPlane
from flatcake.errors import ClosedError
from flatcake.geometry import Geometry
from flatcake.given import expect, expect_whole
from flatcake.hits import Lease, Match
from flatcake.io.restore import Restore
from flatcake.io.save import Save
from flatcake.keeper import Keeper
from flatcake.keys import Identity, chain
from flatcake.messages import Completion, KeyArray
from flatcake.placement import Turn
from flatcake.saves import OpenSaves
from flatcake.snapshot import take_stats
from flatcake.stats import StoreStats
from flatcake.units import MS

TICK_NS = 250 * MS
"""How often expired leases and late plans are looked for."""


class Store:
    """KV blocks of one identity on DRAM and SSD.  Any number of threads may call.

    Made by `flatcake.open`.  Wrong use raises; a storage fault never does: it is a miss or a refusal, with a
    reason in the handle and a counter in `stats`.
    """

    def __init__(
        self,
        catalog: Catalog,
        plane: DataPlane,
        geometry: Geometry,
        identity: Identity,
        config: StoreConfig,
        clock: Clock,
    ) -> None:
        self.catalog = catalog
        self.plane = plane
        self.geometry = geometry
        self.identity = identity
        self._config = config
        self._clock = clock
        self.keeper: Keeper | None = None
        """What is kept over a restart; None where nothing is.  Set before the first save."""
        self._saves = OpenSaves(config.io.saves_max)
        self._is_closed = False
        plane.parts.pump.at(clock.now_ns() + TICK_NS, self._tick)

    def keys(self, tokens: object, *, salt: bytes = b"", extra: bytes = b"") -> KeyArray:
        """Keys of the full blocks of a token sequence, uint64 [blocks, 2].

        Args:
            tokens: 1-D integers from the first token on; numpy arrays are quickest.  Ready-made keys, uint64
                [blocks, 2], are handed back as they are, so every method takes either.
            salt: A tenant's secret: sequences of different salts never hit each other.
            extra: What else changes the bytes of this request: adapter, image digests.

        Raises:
            ShapeError: Not 1-D integers from 0 to 2**32 - 1.

        Cost: about 1 µs a block.
        """
        if isinstance(tokens, np.ndarray) and tokens.ndim == 2 and tokens.dtype == np.uint64:
            return tokens
        return chain(self.identity, tokens, salt=salt, extra=extra)  # type: ignore[arg-type]

    def match(self, tokens: object, *, salt: bytes = b"", extra: bytes = b"") -> Match:
        """Find the longest stored prefix of a request.  No side effects.

        Args:
            tokens, salt, extra: As for `keys`.

        Cost: hashing, then O(blocks): about 0.4 ms for 3,421 blocks among 5 M.
        """
        self._require_open()
        found = self.keys(tokens, salt=salt, extra=extra)
        return Match(found, self.catalog.match(found), self.geometry.block_tokens, self.geometry.block_bytes)

    def lease(self, match: Match, *, hold_ns: int | None = None) -> Lease:
        """Pin what is stored of a matched request now: it is looked up again, and may be more or less than before.

        Args:
            match: From `match`.
            hold_ns: The lease ends after this; None takes the configured time.
        """
        self._require_open()
        expect("match", match, Match, "what `match` has returned")
        expect_whole("hold_ns", hold_ns, 1, "nanoseconds")
        entry = self.catalog.lease(match.keys, self._clock.now_ns(), hold_ns)
        return Lease(entry, self.geometry.block_tokens, self.catalog.release)

    def restore(
        self,
        lease: Lease,
        pages: object,
        *,
        stream: object = None,
        skip_blocks: int = 0,
        timeout_ns: int | None = None,
        slots_max: int | None = None,
    ) -> Restore:
        """Bring a leased prefix into the engine's pages; returns at once.

        Args:
            lease: From `lease`; it may be closed once this has returned.
            pages: Page table as for `PagedKV.page_table`, at least as long as the lease; -1 leaves a page alone.
            stream: Its queued work is waited for, as it may still touch the pages.  None for the current stream.
            skip_blocks: Leading blocks that are in the pages already.
            timeout_ns: Dropped after this, counted from now; None takes the configured time.
            slots_max: Window slots that it may hold at once, so that others find some; None: as many as are free.

        Raises:
            PageTableError: Too short, out of range, or a page named twice.  Nothing was begun.
        """
        self._require_open()
        expect("lease", lease, Lease, "what `lease` has returned")
        expect_whole("skip_blocks", skip_blocks, 0, "blocks that are in the pages already")
        expect_whole("timeout_ns", timeout_ns, None, "nanoseconds from now on")
        expect_whole("slots_max", slots_max, 1, "window slots")
        now_ns = self._clock.now_ns()
        deadline_ns = now_ns + (self._config.timeouts.restore_ns if timeout_ns is None else timeout_ns)
        plan = self.catalog.start_restore(lease.entry.lease_id, now_ns, skip_blocks)
        if isinstance(plan, Refused):
            return self.plane.nothing(plan.reason)
        if not len(plan.runs):
            return self.plane.nothing("", len(plan.keys))
        try:
            restore = self.plane.restore(
                plan, pages, stream=stream, deadline_ns=deadline_ns, report=self.catalog.finish, slots_max=slots_max
            )
        except Exception:
            self.catalog.finish(self.plane.parts.completion(plan.plan_id, None, "not begun"))
            raise
        if plan.release != self.catalog.release_number:  # A reset came too early to find it.
            restore.cancel("reset")
        return restore

    def save(  # noqa: PLR0913
        self,
        session: str,
        tokens: object,
        pages: object,
        turn: Turn | None = None,
        *,
        salt: bytes = b"",
        extra: bytes = b"",
        stream: object = None,
        timeout_ns: int | None = None,
        deferred: bool = False,
    ) -> Save:
        """Store the full blocks of a sequence that are not stored yet; returns at once, publishes last.

        Args:
            session: Names whose blocks these are; they are placed and reclaimed together.
            tokens: The whole sequence from its first token on, or its keys.
            pages: Page table of the sequence, read until the handle's `reusable` says so; see `PagedKV.page_table`.
            turn: What is known of the turn, for placement.
            salt, extra: As for `keys`.
            stream: The pages' producer: its queued work is waited for.  None for the current stream.
            timeout_ns: Given up after this; None takes the configured time.
            deferred: Begin only when the handle's `start` is called.

        Raises:
            PageTableError: Too short, out of range, or a page named twice.  Nothing was begun.
        """
        self._require_open(session)
        expect("turn", turn or Turn(), Turn, "a `flatcake.Turn`, or None")
        expect_whole("timeout_ns", timeout_ns, None, "nanoseconds from now on")
        found, turn = self.keys(tokens, salt=salt, extra=extra), turn or Turn()
        table = self.plane.check_pages(pages, len(found), turn.first_block)
        now_ns = self._clock.now_ns()
        deadline_ns = now_ns + (self._config.timeouts.save_ns if timeout_ns is None else timeout_ns)
        plan = self._saves.begin(lambda: self.catalog.begin_save(session, found, turn, now_ns))
        if isinstance(plan, Refused) or not len(plan.runs):
            return Save.ended(len(found), plan.reason if isinstance(plan, Refused) else "")
        try:
            save = self.plane.save(
                plan, table, stream=stream, deadline_ns=deadline_ns, report=self._on_saved, deferred=deferred
            )
        except Exception:
            self._on_saved(self.plane.parts.completion(plan.plan_id, 0, "not begun"))
            raise
        self._saves.put(plan.plan_id, save)
        if not deferred:
            save.start()
        return save

    def delete_session(self, session: str) -> int:
        """Forget a session's blocks at once, on every medium, and over a restart; waits for the disk.

        Leases and restores that have them keep them until they end; saves under way end as refusals.  Blocks that
        other sessions use as well go too, unless they are a shared prompt.

        Returns:
            Blocks dropped.

        Raises:
            OwnershipError: It could not be written down, so that it holds for this process only: call again.
        """
        self._require_open(session)
        return self.catalog.retention.delete_session(session)

    def pin(self, session: str, *, hold_ns: int) -> int:
        """Let a session's blocks, and those that they follow on, outlive all others for so long; returns their number.

        A soft pin: where nothing else is left to reclaim they go, and are counted.  No `retention.ttl_ns` applies
        meanwhile.  A later pin may make it longer; it ends with the process.

        Raises:
            ConfigError: `hold_ns` is not 1 or more nanoseconds.
        """
        self._require_open(session)
        expect_whole("hold_ns", hold_ns, 1, "nanoseconds from now on", or_none=False)
        return self.catalog.retention.pin(session, self._clock.now_ns() + hold_ns)

    def unpin(self, session: str) -> None:
        """End a session's pin now; an unknown session is no error."""
        self._require_open(session)
        self.catalog.retention.unpin(session)

    def reset(self) -> int:
        """Forget everything at once, on every medium, and over a restart; restores under way end as misses.

        Returns:
            Blocks dropped.

        Raises:
            OwnershipError: It could not be written down, so that it holds for this process only.
        """
        self._require_open()
        try:
            return self.catalog.reset()
        finally:
            self.plane.cancel_all("reset")

    def flush(self) -> bool:
        """See all that is visible on SSD to the disk, for hits after a power failure; whether all of it is there."""
        self._require_open()
        return self.keeper is not None and self.keeper.flush()

    def stats(self) -> StoreStats:
        """What the store holds and did; cheap enough to ask every second."""
        return take_stats(self.catalog, self.plane, self._saves.counts, self.keeper)

    def close(self) -> bool:
        """End everything within the configured time; True when nothing was left in flight.  Twice is safe.

        What DRAM holds is written to disk, as far as time and space allow, so that the next open finds it.
        """
        atexit.unregister(self.close)
        self._is_closed = True
        is_clean = self.plane.close(self._config.timeouts.close_ns)
        if self.keeper is None or not self.keeper.is_abandoned:
            return is_clean
        self._saves.end_all("closed")
        self.catalog.fail_all("closed")
        return False

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # -- private ----------------------------------------------------------------------------------------

    def _on_saved(self, done: Completion) -> None:
        """On the pump's thread, which must not wait for a commit; what is in DRAM needs none."""
        if self.keeper is None or not self._saves.needs_commit(done.plan_id):
            self._saves.settle(self.catalog.finish(done))
        else:
            self.keeper.post(lambda: self._saves.settle(self.catalog.finish(done)))

    def _tick(self) -> None:
        if not self._is_closed:  # Before anything that may fail.
            self.plane.parts.pump.at(self._clock.now_ns() + TICK_NS, self._tick)
        for outcome in self.catalog.expire(self._clock.now_ns()):
            self._saves.settle(outcome)
        if self.keeper is not None:
            self.keeper.tick()

    def _require_open(self, session: str = "") -> None:
        if self._is_closed:
            raise ClosedError("the store is closed; open it again")
        self.plane.require_threads()
        expect("session", session, str, "text that names whose blocks these are")
