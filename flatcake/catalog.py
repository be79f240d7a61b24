"""The catalog decides: what is stored where, what a restore reads, where a save writes, what goes when full.

It holds index, scopes, extents and placement, and never touches a byte of KV.  Time comes in as `now_ns`.
Data planes, one a rank, in this process or in others, run its plans and report; it publishes a save when
every rank has reported, and frees an extent when every rank is done with it.
Write path:  [begin_save] -> data planes -> [finish] -> index
Read path:   [match] -> [lease] -> [start_restore] -> data planes -> [finish]
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flatcake.errors import OwnershipError
from flatcake.gva import Medium
from flatcake.index import MISS
from flatcake.ledger import LeaseEntry, Ledger, OpenPlan, Outcome
from flatcake.manifest import Stored, TurnRow
from flatcake.messages import Completion, KeyArray, Plan, PlanKind, Runs
from flatcake.placement import Placement, Turn
from flatcake.prefix import Hit, leading, prefix_of, runs_from, runs_of
from flatcake.reopen import rebuild, rows_of
from flatcake.reserve import Reservation, SaveRequest, reserve_turn
from flatcake.retention import Retention
from flatcake.scopes import Scope
from flatcake.settle import rows_to_commit, settle_save
from flatcake.space import GvaArray, Space


@dataclass(frozen=True, slots=True)
class Refused:
    """A save or restore that was not started, and why."""

    reason: str


class Catalog:
    """Index, scopes, extents and open plans of one store.  Any number of threads may call."""

    def __init__(
        self, space: Space, placement: Placement, *, block_tokens: int, lease_ns: int, report_ns: int, ttl_ns: int = 0
    ) -> None:
        self.space = space
        self.ranks: dict[int, int] = {}
        """Epoch of each live rank."""
        self.counts: Counter[str] = Counter()
        self.release_number = 0
        self._placement = placement
        self._block_tokens = block_tokens
        self._lease_ns = lease_ns
        self._report_ns = report_ns
        self._ledger = Ledger()
        self._lock = threading.RLock()
        self.retention = Retention(space, self._ledger, self._lock, ttl_ns)

    # -- reading ----------------------------------------------------------------------------------------

    def match(self, keys: KeyArray) -> Hit:
        """The longest prefix of `keys` that is stored.  No lock, no side effects.  Cost: O(blocks)."""
        gvas = self.space.index.lookup(keys)
        blocks = leading(gvas != MISS)
        return Hit(keys[:blocks], gvas[:blocks])

    def lease(self, keys: KeyArray, now_ns: int, hold_ns: int | None = None) -> LeaseEntry:
        """Pin the longest stored prefix of `keys`: looked up again, under the lock, before it is trusted."""
        deadline_ns = now_ns + (self._lease_ns if hold_ns is None else hold_ns)
        with self._lock:
            hit = self.match(keys.copy())
            prefix = prefix_of(hit.gvas, np.arange(hit.blocks), self.space)
            for scope in prefix.scopes:
                self.space.pin(scope)
            self.space.scopes.touch(prefix.scopes, now_ns)
            entry = LeaseEntry(
                lease_id=self._ledger.next_id(),
                keys=hit.keys,
                gvas=hit.gvas,
                runs=prefix.runs,
                scopes=prefix.scopes,
                deadline_ns=deadline_ns,
                release=self.release_number,
            )
            self._ledger.leases[entry.lease_id] = entry
            return entry

    def release(self, lease_id: int) -> None:
        """Let a lease go; an unknown or expired one is no error."""
        with self._lock:
            entry = self._ledger.leases.pop(lease_id, None)
            for scope in entry.scopes if entry else ():
                self.space.unpin(scope)

    def start_restore(self, lease_id: int, now_ns: int, skip_blocks: int = 0) -> Plan | Refused:
        """Make the plan that restores a leased prefix from block `skip_blocks` on."""
        with self._lock:
            entry = self._ledger.leases.get(lease_id)
            if entry is None or entry.deadline_ns <= now_ns:
                return self._refuse("lease expired")
            if entry.release != self.release_number:
                return self._refuse("reset")
            if any(scope.is_lost for scope in entry.scopes):
                return self._refuse("rank lost")
            if not self.ranks:
                return self._refuse("no data plane")
            blocks = np.arange(skip_blocks, len(entry.keys))
            runs = runs_from(entry.runs, skip_blocks)
            plan = OpenPlan(kind=PlanKind.RESTORE, keys=entry.keys, gvas=entry.gvas, blocks=blocks, pinned=entry.scopes)
            return self._open(plan, runs, now_ns)

    # -- writing ----------------------------------------------------------------------------------------

    def begin_save(self, session: str, keys: KeyArray, turn: Turn, now_ns: int) -> Plan | Refused:
        """Place a turn and reserve its slots.  Blocks that are stored already are skipped and stay pinned.

        Returns:
            A plan, with no runs when everything is stored already; or why the save is refused.
        """
        with self._lock:
            if not self.ranks:
                return self._refuse("no data plane")
            self.space.scopes.recognize(session)
            keys = keys.copy()
            gvas = self.space.index.lookup(keys)
            stored = np.flatnonzero(gvas != MISS)
            known = prefix_of(gvas[stored], stored, self.space)
            pinned = list(known.scopes)
            for scope in pinned:
                self.space.pin(scope)
            request = SaveRequest(session, turn, gvas, known, self._block_tokens)
            try:
                reserved = reserve_turn(request, self.space, self._placement, pinned, now_ns)
                self.space.scopes.touch(pinned, now_ns)
                if isinstance(reserved, str):
                    return self._refuse(reserved)
                return self._save_plan(keys, gvas, reserved, pinned, now_ns)
            finally:
                self._unpin(pinned)

    # -- reports of ranks -------------------------------------------------------------------------------

    def rank_started(self, rank: int, epoch: int) -> list[Outcome]:
        """A rank's data plane is up; a new epoch means that what an older one had in DRAM is gone."""
        with self._lock:
            ended = self.rank_lost(rank) if self.ranks.get(rank, epoch) != epoch else []
            self.ranks[rank] = epoch
            return ended

    def rank_lost(self, rank: int) -> list[Outcome]:
        """A rank is gone: its open plans fail, the DRAM scopes are withdrawn, nothing waits for it."""
        with self._lock:
            if self.ranks.pop(rank, None) is None:
                return []
            for plan in list(self._ledger.plans.values()):
                if rank in plan.waiting:
                    plan.note_failure(plan.first_block, f"rank {rank} lost")
            self.space.lose(Medium.DRAM)
            waiting = [plan for plan in self._ledger.plans.values() if rank in plan.waiting]
            return [self._end(plan) for plan in waiting if plan.is_last(rank)]

    def finish(self, completion: Completion) -> Outcome | None:
        """Take a rank's report; returns the plan's outcome when that was the last one.

        Reports of unknown plans, of ranks that are not live, and of older epochs are dropped and counted.
        A save is committed to the manifest, which may take a while, without the lock: nobody else waits for it.
        """
        with self._lock:
            plan = self._ledger.plans.get(completion.plan_id)
            rank, bad = completion.rank, completion.first_bad_block
            if plan is None or rank not in plan.waiting or self.ranks.get(rank) != completion.epoch:
                self.counts["reports_dropped"] += 1
                return None
            if bad is not None:
                plan.note_failure(bad, completion.reason)
            if bad is not None and plan.kind is PlanKind.RESTORE:
                found = sorted({bad, *completion.damaged_blocks})
                self.counts["blocks_dropped"] += self.space.index.withdraw(plan.keys[found], plan.gvas[found])
            if not plan.is_last(rank):
                return None
            rows, generation = rows_to_commit(plan), self.space.generation
            if not rows:
                return self._end(plan)
        with self.retention.committing:
            if plan.first_bad_block is not None:  # Deleted meanwhile, or reset, or late.
                rows = []
            numbers = [self.space.manifest.commit_turn(row, generation) for row in rows]
            with self._lock:  # A deletion that waits drops these rows as well.
                plan.committed = [number for number in numbers if number]
                return self._end(plan)

    def expire(self, now_ns: int) -> list[Outcome]:
        """Drop leases that are past their deadline and what was unused for too long; fail plans whose ranks are late.

        A late save is never published; its slots stay taken until its ranks have reported or are lost.
        """
        with self._lock:
            for lease_id in [i for i, e in self._ledger.leases.items() if e.deadline_ns <= now_ns]:
                self.counts["leases_expired"] += 1
                self.release(lease_id)
            late = [p for p in self._ledger.plans.values() if p.deadline_ns <= now_ns and not p.timed_out]
            for plan in late:
                plan.timed_out = True
                plan.note_failure(plan.first_block, "ranks did not report in time")
            self.retention.expire(now_ns)
            return [p.outcome() for p in late]

    def fail_all(self, reason: str) -> None:
        """Fail every open plan: no save of them is published, and what is being committed now is dropped again."""
        with self._lock:
            for plan in self._ledger.plans.values():
                plan.note_failure(plan.first_block, reason)

    def reset(self) -> int:
        """Withdraw everything, on every medium, at once; open plans fail, no save is published.  Returns blocks.

        Raises:
            OwnershipError: It holds for this process, but could not be written down for the next one.
        """
        with self._lock:
            self.release_number += 1
            self.fail_all("reset")
            blocks, scope_limit = len(self.space.index), self.space.scopes.next_id
            for scope in self.space.scopes:
                self.space.withdraw(scope)
        if not self.space.manifest.reset(scope_limit):
            raise OwnershipError("reset: the manifest could not be emptied; remove the store's files before a restart")
        return blocks

    def reopen(self, stored: Stored, now_ns: int) -> list[int]:
        """Fill an empty catalog with what an earlier run has committed; returns the rows that do not fit."""
        with self._lock:
            dropped = rebuild(self.space, stored, now_ns, self.counts)
            self.retention.expire(now_ns, len(stored))
            return dropped

    def rows_of(self, medium: Medium) -> list[TurnRow]:
        """What is visible on a medium, a row each scope, the one used last first."""
        with self._lock:
            return rows_of(self.space, medium)

    def open_counts(self) -> dict[str, int]:
        """How many leases and plans are open, and how many withdrawn scopes still drain."""
        with self._lock:
            return {
                "leases": len(self._ledger.leases),
                "plans": len(self._ledger.plans),
                "draining": len(self.space.draining),
            }

    def check(self) -> None:
        """Assert the invariants of everything below, and that pins equal the leases and plans that hold them."""
        with self._lock:
            self.space.check()
            self.space.index.check()
            pins: Counter[int] = Counter()
            for scopes in self._ledger.holders():
                pins.update(scope.scope_id for scope in scopes)
            for scope in [*self.space.scopes, *self.space.draining]:
                assert scope.pins == pins[scope.scope_id], (scope.scope_id, scope.pins, pins[scope.scope_id])

    # -- private ----------------------------------------------------------------------------------------

    def _save_plan(
        self, keys: KeyArray, gvas: GvaArray, reserved: Reservation, pinned: list[Scope], now_ns: int
    ) -> Plan:
        targets = gvas.copy()
        if reserved.slots:
            targets[reserved.blocks] = np.concatenate([self.space.gvas(part) for part in reserved.slots])
        self.counts["save_blocks_skipped"] += len(keys) - len(reserved.blocks)
        self.counts["dram_spills"] += reserved.spilled
        entry = OpenPlan(
            kind=PlanKind.SAVE, keys=keys, gvas=targets, blocks=reserved.blocks, pinned=pinned, slots=reserved.slots
        )
        return self._open(entry, runs_of(reserved.slots, reserved.blocks), now_ns)

    def _open(self, entry: OpenPlan, runs: Runs, now_ns: int) -> Plan:
        """Number a plan and pin its scopes until every rank has reported; an empty plan is done at once."""
        entry.plan_id = self._ledger.next_id()
        entry.release, entry.deadline_ns = self.release_number, now_ns + self._report_ns
        entry.waiting, entry.pinned = set(self.ranks), list(entry.pinned)
        if len(entry.blocks):
            for scope in entry.pinned:
                self.space.pin(scope)
            self._ledger.plans[entry.plan_id] = entry
        return Plan(kind=entry.kind, plan_id=entry.plan_id, runs=runs, keys=entry.keys, release=entry.release)

    def _end(self, plan: OpenPlan) -> Outcome:
        del self._ledger.plans[plan.plan_id]
        published = settle_save(plan, self.space, self.counts) if plan.kind is PlanKind.SAVE else 0
        self._unpin(plan.pinned)
        return plan.outcome(published)

    def _unpin(self, scopes: Sequence[Scope]) -> None:
        for scope in scopes:
            self.space.unpin(scope)

    def _refuse(self, reason: str) -> Refused:
        self.counts[f"refused: {reason}"] += 1
        return Refused(reason)
