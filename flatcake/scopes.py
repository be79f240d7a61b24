"""Scopes: what is placed and reclaimed together, in the order of their last use.

Pure.  A session has at most one scope per medium; a shared prompt has a scope of its own.  A scope with
pins (leases, restores, saves) is never reclaimed; withdrawn with pins, it keeps its extents until the last
pin goes.  A scope of another identity only holds its place: it is the first to go, and nothing finds it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedDict

from flatcake.extents import Extent
from flatcake.gva import Medium
from flatcake.manifest import session_digest
from flatcake.messages import KeyArray
from flatcake.units import SECOND

NEVER_NS = -(1 << 62)
"""Before any time."""


@dataclass(eq=False, slots=True)
class Scope:
    """One session's blocks on one medium, or one shared prompt."""

    scope_id: int
    session: str | bytes | None
    """None for a shared prompt; the name's digest while a session of an earlier run has not been heard of."""
    medium: Medium
    last_use_ns: int
    order: int
    """Place in the order of use: larger is later."""
    extents: list[Extent] = field(default_factory=list)
    keys: list[KeyArray] = field(default_factory=list)
    gvas: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    pins: int = 0
    shared_blocks: int = 0
    """Blocks at positions below this are known to be used by another session too."""
    withdrawn: bool = False
    is_lost: bool = False
    """Its bytes are gone with a rank."""
    kept_until_ns: int = NEVER_NS
    """A caller's soft pin: until then it is reclaimed after all others."""
    roots: frozenset[int] = frozenset()
    """Scopes that hold what its blocks follow on; they may be gone."""
    is_foreign: bool = False
    """Of another identity: `session` is a digest or None, and no keys are known."""

    @property
    def blocks(self) -> int:
        """Blocks of the scope that have been published."""
        return sum(len(part) for part in self.keys)

    @property
    def used_blocks(self) -> int:
        """Slots taken in its extents: published, being written, or lost to a failed save."""
        return sum(extent.used_blocks for extent in self.extents)

    def record(self, keys: KeyArray, gvas: npt.NDArray[np.uint64]) -> None:
        """Remember published blocks, so that they can be withdrawn with the scope."""
        if len(keys):
            self.keys.append(keys)
            self.gvas.append(gvas)


class ScopeTable:
    """All scopes by id and by owner, and per medium in the order of last use."""

    def __init__(self) -> None:
        self._by_id: dict[int, Scope] = {}
        self._by_owner: dict[tuple[str | bytes, Medium], Scope] = {}
        self._by_use: dict[Medium, SortedDict] = {medium: SortedDict() for medium in Medium}
        self._foreign: dict[bytes | None, dict[int, Scope]] = {}
        """Scopes of other identities by the digest of their session's name, then by id."""
        self._foreign_limit = 0
        """Their places in the order of use are below this, and nobody else's is."""
        self._unheard = 0
        """Scopes that know the digest of their session's name only."""
        self._next_id = 1
        self._next_order = 1

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def next_id(self) -> int:
        """What the next scope will be called: all that there are or were are below."""
        return self._next_id

    def __iter__(self) -> Iterator[Scope]:
        return iter(list(self._by_id.values()))

    def get(self, scope_id: int) -> Scope:
        return self._by_id[scope_id]

    def find(self, scope_id: int) -> Scope | None:
        return self._by_id.get(scope_id)

    def of_session(self, session: str, medium: Medium) -> Scope | None:
        return self._by_owner.get((session, medium))

    def all_of(self, session: str) -> list[Scope]:
        """A session's scopes on all media, those of earlier runs and of other identities too."""
        digest = session_digest(session)
        owned = [self._by_owner.get((name, medium)) for name in (session, digest) for medium in Medium]
        return [scope for scope in owned if scope is not None] + [*self._foreign.get(digest, {}).values()]

    @property
    def foreign(self) -> list[Scope]:
        """All scopes of other identities."""
        return [scope for scopes in self._foreign.values() for scope in scopes.values()]

    def create(self, session: str | bytes | None, medium: Medium, now_ns: int) -> Scope:
        """Make an empty scope; `session` None makes a shared prompt's."""
        scope = Scope(self._next_id, session, medium, now_ns, self._next_order)
        self._next_id += 1
        self._next_order += 1
        self._by_id[scope.scope_id] = scope
        self._by_use[medium][scope.order] = scope
        if session is not None:
            assert (session, medium) not in self._by_owner
            self._by_owner[session, medium] = scope
            self._unheard += isinstance(session, bytes)
            others = (self._by_owner.get((session, other)) for other in Medium)
            scope.kept_until_ns = max(other.kept_until_ns for other in others if other is not None)
        return scope

    def restore(
        self, scope_id: int, session: bytes | None, medium: Medium, last_use_ns: int, *, is_foreign: bool = False
    ) -> Scope:
        """Bring back a scope of an earlier run, used later than all that are there; `session` is a digest."""
        assert scope_id not in self._by_id
        following = max(self._next_id, scope_id + 1)
        self._next_id = scope_id
        scope = self.create(None if is_foreign else session, medium, last_use_ns)
        self._next_id = following
        if is_foreign:
            assert scope.order == 1 or self._foreign_limit == scope.order, "they come back before all others"
            scope.is_foreign, scope.session, self._foreign_limit = True, session, scope.order + 1
            self._foreign.setdefault(session, {})[scope_id] = scope
        return scope

    def recognize(self, session: str) -> None:
        """Give a session's scopes of an earlier run, which know the digest of its name only, its name."""
        if not self._unheard:
            return
        digest = session_digest(session)
        for medium in Medium:
            scope = self._by_owner.get((digest, medium))
            if scope is not None and (session, medium) not in self._by_owner:
                del self._by_owner[digest, medium]
                self._by_owner[session, medium] = scope
                scope.session = session
                self._unheard -= 1

    def touch(self, path: Iterable[Scope], now_ns: int) -> None:
        """Mark the scopes of one prefix, root first, as used now.

        Leaves come before what they hang on: a scope is never older than those that need its blocks, and
        of scopes used together the leaf is reclaimed first.
        """
        for scope in reversed(list(path)):
            if scope.withdrawn:
                continue
            del self._by_use[scope.medium][scope.order]
            scope.order, scope.last_use_ns = self._next_order, now_ns
            self._next_order += 1
            self._by_use[scope.medium][scope.order] = scope

    def by_use(self, now_ns: int, wall_s: int) -> list[tuple[int, int]]:
        """Ids of all scopes, the one used last at the end, each with the wall clock of its last use in seconds."""
        scopes = sorted(self, key=lambda scope: scope.order)
        return [(scope.scope_id, max(1, wall_s - (now_ns - scope.last_use_ns) // SECOND)) for scope in scopes]

    def oldest(self, medium: Medium) -> Iterator[Scope]:
        """Scopes of a medium without pins, oldest last use first."""
        return (scope for scope in self._by_use[medium].values() if not scope.pins)

    def oldest_own(self, medium: Medium) -> Iterator[Scope]:
        """The same without those of other identities."""
        order = self._by_use[medium]
        return (order[at] for at in order.irange(self._foreign_limit) if not order[at].pins)

    def oldest_foreign(self, medium: Medium) -> Iterator[Scope]:
        """Scopes of other identities, oldest last use first."""
        order = self._by_use[medium]
        return (order[at] for at in order.irange(maximum=self._foreign_limit, inclusive=(True, False)))

    def victims(self, medium: Medium, now_ns: int) -> Iterator[Scope]:
        """The same, in the order in which they should go: what a caller has softly pinned comes last."""
        kept: list[Scope] = []
        for scope in self.oldest(medium):
            if scope.kept_until_ns > now_ns:
                kept.append(scope)
            else:
                yield scope
        yield from kept

    def remove(self, scope: Scope) -> None:
        """Take a scope out of every order; the caller frees its extents when its pins are gone."""
        assert not scope.withdrawn
        scope.withdrawn = True
        del self._by_id[scope.scope_id]
        del self._by_use[scope.medium][scope.order]
        if scope.is_foreign:
            assert not isinstance(scope.session, str)
            del self._foreign[scope.session][scope.scope_id]
            if not self._foreign[scope.session]:
                del self._foreign[scope.session]
        elif scope.session is not None:
            del self._by_owner[scope.session, scope.medium]
            self._unheard -= isinstance(scope.session, bytes)

    def check(self) -> None:
        """Assert that all views hold the same scopes."""
        assert sum(len(order) for order in self._by_use.values()) == len(self._by_id)
        for medium, order in self._by_use.items():
            for key, scope in order.items():
                assert scope.order == key and scope.medium is medium and not scope.withdrawn
                assert self._by_id[scope.scope_id] is scope and scope.pins >= 0
        for (session, medium), scope in self._by_owner.items():
            assert scope.session == session and scope.medium is medium and not scope.is_foreign
        assert {scope.scope_id for scope in self.foreign} == {s.scope_id for s in self if s.is_foreign}
        assert not any(scope.pins or scope.keys for scope in self.foreign)
        assert all((scope.order < self._foreign_limit) == scope.is_foreign for scope in self)
        assert self._unheard == sum(isinstance(session, bytes) for session, _ in self._by_owner)
