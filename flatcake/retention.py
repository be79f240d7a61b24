"""What is let go on purpose, or kept longer: sessions deleted, unused for too long, or pinned for a while.

Pure but for the catalog's lock.  Deleting takes keys out of the index at once and on every medium; bytes that
are being read stay in their place until the last reader is done, as with any reclaim.  Time comes in.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from flatcake.errors import OwnershipError
from flatcake.gva import Medium
from flatcake.ledger import Ledger
from flatcake.messages import PlanKind
from flatcake.scopes import NEVER_NS, Scope
from flatcake.space import Space

EXPIRE_SCOPES_MAX = 256
"""Scopes of a kind that go in one step, so that nobody waits long for the lock."""


def unused(scopes: Iterable[Scope], ttl_ns: int, now_ns: int) -> Iterator[Scope]:
    """Those of `scopes`, oldest last use first, that were last used longer ago than `ttl_ns` and are not pinned."""
    for scope in scopes:
        if now_ns - scope.last_use_ns <= ttl_ns:
            return
        if scope.kept_until_ns <= now_ns:
            yield scope


class Retention:
    """Deletes, soft pins and expiry of one catalog, whose lock it shares.

    Args:
        space: The scopes.
        ledger: Saves that are under way.
        lock: Of both.
        ttl_ns: A scope that was not used for longer than this is dropped; 0 keeps it until room is needed.
    """

    def __init__(self, space: Space, ledger: Ledger, lock: threading.RLock, ttl_ns: int) -> None:
        self.counts: Counter[str] = Counter()
        self.committing = threading.Lock()
        """Held while turns are committed, and while a deletion is: none slips in behind it."""
        self._space, self._ledger, self._lock, self._ttl_ns = space, ledger, lock, ttl_ns

    def delete_session(self, session: str) -> int:
        """Forget a session on every medium, for good; returns the blocks that are no longer visible.

        Its saves under way end as refusals.  What others share goes too where it lies in this session's scopes;
        a shared prompt has a scope of its own, and stays.

        Raises:
            OwnershipError: It holds for this process, but could not be written down for the next one.
        """
        with self._lock:
            scopes = self._space.scopes.all_of(session)
            for plan in self._ledger.plans.values():
                if plan.kind is PlanKind.SAVE and any(part.scope in scopes for part in plan.slots):
                    plan.note_failure(plan.first_block, "session deleted")
            blocks = sum(self._space.withdraw(scope) for scope in scopes)
            self.counts["deleted_blocks"] += blocks
        with self.committing:
            is_written = self._space.manifest.checkpoint()
        if not is_written:
            raise OwnershipError("the session is deleted, but not on the disk: delete it again before a restart")
        return blocks

    def pin(self, session: str, until_ns: int) -> int:
        """Reclaim a session, and what its blocks follow on, after all others until then; returns the blocks kept."""
        with self._lock:
            kept = set(self._space.scopes.all_of(session))
            roots = {self._space.scopes.find(number) for scope in kept for number in scope.roots}
            kept |= {scope for scope in roots if scope is not None}
            for scope in kept:
                scope.kept_until_ns = max(scope.kept_until_ns, until_ns)
            return sum(scope.blocks for scope in kept)

    def unpin(self, session: str) -> None:
        """End a session's soft pin; what its blocks follow on stays pinned until its time."""
        with self._lock:
            for scope in self._space.scopes.all_of(session):
                scope.kept_until_ns = NEVER_NS

    def expire(self, now_ns: int, scopes_max: int = EXPIRE_SCOPES_MAX) -> int:
        """Drop what was not used for too long, at most so many scopes of a kind; returns how many."""
        if not self._ttl_ns:
            return 0
        with self._lock:
            scopes, gone = self._space.scopes, list[Scope]()
            for medium in Medium:
                for oldest in (scopes.oldest_foreign(medium), scopes.oldest_own(medium)):
                    gone += islice(unused(oldest, self._ttl_ns, now_ns), scopes_max)
            for scope in gone:
                self.counts["expired_blocks"] += self._space.withdraw(scope)
            self.counts["expired_scopes"] += len(gone)
            return len(gone)

    def foreign_bytes(self) -> Counter[Medium]:
        """Bytes of each medium that other identities hold."""
        found: Counter[Medium] = Counter()
        with self._lock:
            for scope in self._space.scopes.foreign:
                found[scope.medium] += self._space.scope_bytes(scope)
        return found
