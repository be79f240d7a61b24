"""What a caller holds of a request: what is stored of it, and a pin on that.

Pure values; the catalog decides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from flatcake.gva import Medium
from flatcake.ledger import LeaseEntry
from flatcake.messages import KeyArray
from flatcake.prefix import Hit


@dataclass(frozen=True, eq=False, slots=True)
class Match:
    """What the store holds of a request, when it was asked: a hint until it is leased."""

    keys: KeyArray
    """uint64 [blocks of the request, 2]: keys of all full blocks, stored or not."""
    hit: Hit
    block_tokens: int
    block_bytes: int

    @property
    def blocks(self) -> int:
        """Leading blocks that are stored."""
        return self.hit.blocks

    @property
    def tokens(self) -> int:
        """Leading tokens that are stored."""
        return self.blocks * self.block_tokens

    @property
    def size_bytes(self) -> int:
        """Bytes that a restore of them reads."""
        return self.blocks * self.block_bytes

    def tokens_on(self, medium: Medium) -> int:
        """How many of the tokens lie on one medium."""
        return self.hit.blocks_on(medium) * self.block_tokens


class Lease:
    """A pinned prefix.  Ends when closed or after its time; closing twice is safe."""

    def __init__(self, entry: LeaseEntry, block_tokens: int, release: Callable[[int], None]) -> None:
        self.entry = entry
        self._block_tokens = block_tokens
        self._release = release

    @property
    def blocks(self) -> int:
        return len(self.entry.keys)

    @property
    def tokens(self) -> int:
        return self.blocks * self._block_tokens

    def close(self) -> None:
        """Let the blocks go.  A restore that is under way keeps what it reads until it is over."""
        self._release(self.entry.lease_id)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
