"""What a manifest says beside its rows: whose directory it was, and when each scope was used last.

Pure.  Rows of other identities stay where they are until their room is needed; nothing finds them meanwhile.
Over a restart only the wall clock knows how long a scope has been idle.  It may have been set: what seems to
come from the future counts as used now, and is written down so at the next open.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from flatcake.manifest import State, Stored, decode_state, encode_state
from flatcake.wear import Wear, decode_wear

TENANTS_MAX = 8
"""Other identities whose rows are kept; beyond them, those of the one that is gone longest are dropped."""
STATE_NUMBER, ABOUT_NUMBER, TENANT_NUMBER, WEAR_NUMBER = 0, 1, 16, 64
"""Rows of the table of states: of the last run, what the store is, the first other identity, the bytes written."""

Used = Sequence[tuple[int, int]]
"""Scopes in order of use, oldest first, each with the wall clock of its last use in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """Who has used a directory."""

    last: State | None
    """What the last run wrote down, of whatever identity."""
    own: State | None
    """The same of this identity, if it is known here."""
    others: tuple[State, ...] = ()
    """Other identities, the one that is gone longest first."""
    wear: Wear = field(default_factory=Wear)

    @property
    def is_settled(self) -> bool:
        """Whether this identity's last run, and the directory's, were closed cleanly."""
        return all(state is not None and state.was_closed for state in (self.last, self.own))

    @property
    def origins(self) -> list[bytes]:
        """Of the other identities."""
        return [state.origin for state in self.others]

    def rows(self) -> list[tuple[int, bytes]]:
        """Rows of the table of states that tell of the other identities."""
        bodies = (encode_state(replace(state, used=(), used_s=(), noted=0)) for state in self.others)
        return list(enumerate(bodies, TENANT_NUMBER))

    def with_rows_only(self, stored: Stored) -> "Tenancy":
        """Without the identities of which no row is left."""
        alive = set(stored.tenants.tolist())
        return replace(self, others=tuple(s for tenant, s in enumerate(self.others, 1) if tenant in alive))


def read_tenancy(found: Iterable[tuple[int, object]], origin: bytes) -> Tenancy:
    """Make sense of the rows of states.

    Args:
        found: Numbers and bodies, in any order.
        origin: Of this identity.
    """
    bodies = dict(found)
    last = decode_state(bodies.get(STATE_NUMBER))
    states = [decode_state(bodies[number]) for number in sorted(bodies) if TENANT_NUMBER <= number < WEAR_NUMBER]
    by_origin: dict[bytes, State] = {}
    for state in (*states, last):
        if state is not None:
            by_origin.pop(state.origin, None)
            by_origin[state.origin] = state
    own = by_origin.pop(origin, None)
    wear = decode_wear(bodies.get(WEAR_NUMBER)) or Wear()
    return Tenancy(last=last, own=own, others=tuple(by_origin.values())[-TENANTS_MAX:], wear=wear)


def completed(stored: Stored, tenancy: Tenancy, wall_s: int) -> Stored:
    """Rows, and what is known beside them at a time of the wall clock, in seconds since 1970."""
    return replace(
        stored,
        used=order_of_use(stored, tenancy.last),
        idle_s=idle_seconds(stored, tenancy.last, wall_s),
        piece_bytes=tuple(state.piece_bytes for state in tenancy.others),
        wear=tenancy.wear,
    )


def idle_seconds(stored: Stored, last: State | None, wall_s: int) -> Mapping[int, int]:
    """For how many seconds each scope has not been used, as far as it is known; 0 or more.

    Args:
        stored: The rows.
        last: What the last run wrote down.  Its list counts more than rows that were committed before it.
        wall_s: The wall clock, in seconds since 1970.
    """
    noted = dict(zip(last.used, last.used_s, strict=True)) if last is not None and last.used_s else {}
    before = last.noted if last is not None else 0
    is_known = stored.saved_s > 0
    is_new = stored.sequences > before
    is_unlisted = ~np.isin(stored.scopes, np.array(list(noted), np.int64))
    scopes, which = np.unique(stored.scopes, return_inverse=True)
    used_s = np.array([noted.get(scope, 0) for scope in scopes.tolist()], np.int64)
    counts = is_known & (is_new | is_unlisted)
    np.maximum.at(used_s, which[counts], stored.saved_s[counts])
    idle = np.where(used_s > 0, np.maximum(0, wall_s - used_s), 0)
    return dict(zip(scopes.tolist(), idle.tolist(), strict=True))


def order_of_use(stored: Stored, last: State | None) -> tuple[int, ...]:
    """Scopes in order of use, oldest first, as the last run noted it; those that were saved since are not there."""
    if last is None:
        return ()
    since = set(stored.scopes[stored.sequences > last.noted].tolist()) if last.used_s else set()
    return tuple(scope for scope in last.used if scope not in since)
