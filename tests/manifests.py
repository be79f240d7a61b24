"""A manifest without a file, for tests of what is committed when, and of what a restart makes of it."""

from collections.abc import Callable, Iterable

from flatcake.manifest import Stored, TurnRow, decode_rows, encode_row

ORIGIN = b"origin of a test"


class MemoryManifest:
    """Keeps rows as bytes; what is dropped goes with the next transaction."""

    def __init__(self, origin: bytes = ORIGIN) -> None:
        self.origin = origin
        self.rows: dict[int, bytes] = {}
        self.scope_of: dict[int, int] = {}
        self.generation = 0
        self.is_broken = False
        self.before_commit: Callable[[TurnRow], None] = lambda row: None
        self._pending: list[Callable[[], None]] = []
        self._scope_limit = 0
        self._sequence = 0

    def commit_turn(self, row: TurnRow, generation: int) -> int:
        self.before_commit(row)
        if self.is_broken or row.scope_id < self._scope_limit:
            return 0
        self.settle()
        self._sequence += 1
        self.rows[self._sequence] = encode_row(row, self._sequence, self.origin)
        self.scope_of[self._sequence] = row.scope_id
        self.generation = max(self.generation, generation)
        return self._sequence

    def drop_turns(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._pending.append(lambda number=number: self._forget({number}))  # type: ignore[misc]

    def drop_scope(self, scope_id: int) -> None:
        self._pending.append(lambda: self._forget({n for n, scope in self.scope_of.items() if scope == scope_id}))

    def reset(self, scope_limit: int) -> bool:
        self._scope_limit = scope_limit
        self._forget({n for n, scope in self.scope_of.items() if scope < scope_limit})
        return not self.is_broken

    def checkpoint(self) -> bool:
        if not self.is_broken:
            self.settle()
        return not self.is_broken

    def settle(self) -> None:
        pending, self._pending = self._pending, []
        for forget in pending:
            forget()

    def stored(self) -> Stored:
        """What a restart would read now."""
        found, bad = decode_rows(self.rows.items(), self.origin)
        assert not bad
        return found

    def _forget(self, numbers: set[int]) -> None:
        for number in numbers:
            self.rows.pop(number, None)
            self.scope_of.pop(number, None)
