"""What the catalog asks of whoever remembers its turns over restarts.

Pure: a protocol, and the one that remembers nothing.  `io.manifestdb` keeps a file.
"""

from collections.abc import Iterable
from typing import Protocol

from flatcake.manifest import TurnRow


class Manifest(Protocol):
    """Remembers committed turns.  Any number of threads may call; a fault is counted, never raised."""

    def commit_turn(self, row: TurnRow, generation: int) -> int:
        """Remember a turn, and that generations up to `generation` are used; returns its number, 0 if it failed.

        Scopes and turns that were dropped before are forgotten in the same transaction.
        """

    def drop_turns(self, numbers: Iterable[int]) -> None:
        """Forget turns with the next transaction.  Never waits."""

    def drop_scope(self, scope_id: int) -> None:
        """Forget a scope with the next transaction.  Never waits."""

    def reset(self, scope_limit: int) -> bool:
        """Forget all scopes below a number now, for good, those that are being committed too; whether it is on disk."""

    def checkpoint(self) -> bool:
        """See all commits, and all that was dropped, to the disk; whether they are there."""


class NoManifest:
    """Remembers nothing: the store starts empty."""

    def commit_turn(self, row: TurnRow, generation: int) -> int:
        return 0

    def drop_turns(self, numbers: Iterable[int]) -> None:
        return None

    def drop_scope(self, scope_id: int) -> None:
        return None

    def reset(self, scope_limit: int) -> bool:
        return True

    def checkpoint(self) -> bool:
        return True
