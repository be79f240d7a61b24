"""Which of vLLM's blocks became stored, and which are stored no more: for its KV events, where somebody listens.

Pure, but for the threads that publish: the index tells of every change, whoever made it.  It knows keys; what vLLM
wants to hear is its own hashes and tokens, so those of saved blocks are remembered while they are stored.  Blocks of
an earlier run are not known by them, and go without a word.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from flatcake.engines.vllm.signals import EngineRequest
from flatcake.gva import Medium, decode_array
from flatcake.index import MISS, Index
from flatcake.messages import KeyArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Blocks of one sequence, one after the other, that are on a medium now."""

    medium: Medium
    digests: list[bytes]
    parent: bytes | None
    tokens: list[int]
    session: str
    adapter: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Blocks that are on a medium no more."""

    medium: Medium
    digests: list[bytes]


@dataclass(frozen=True, slots=True)
class _Block:
    digest: bytes
    parent: bytes | None
    tokens: list[int]
    session: str
    adapter: str | None


@dataclass(slots=True)
class Changes:
    """What has changed since it was last asked.  `expect`, `forget` and `take` are for the scheduler's thread.

    Args:
        index: Of the catalog; it tells this of every change from now on.
        block_tokens: Of the store.
    """

    index: Index
    block_tokens: int
    _known: dict[bytes, _Block] = field(default_factory=dict)
    _saving: Counter[bytes] = field(default_factory=Counter)
    _raw: deque[tuple[KeyArray, KeyArray, KeyArray]] = field(default_factory=deque)
    """Keys, addresses before, addresses after; from any thread."""

    def __post_init__(self) -> None:
        self.index.watch = lambda keys, before, after: self._raw.append((keys.copy(), before.copy(), after.copy()))

    def expect(self, keys: KeyArray, digests: Sequence[bytes], request: EngineRequest, session: str) -> None:
        """These blocks are being saved."""
        tokens = list(getattr(request, "all_token_ids", ()))
        adapter = getattr(getattr(request, "lora_request", None), "lora_name", None)
        size, parent = self.block_tokens, None
        self._saving.update(_names(keys))
        for place, (key, digest) in enumerate(zip(_names(keys), digests, strict=True)):
            own = tokens[place * size : (place + 1) * size]
            self._known.setdefault(key, _Block(digest, parent, own, session, adapter))
            parent = digest

    def forget(self, keys: KeyArray) -> None:
        """A save is over: those of its blocks that are not stored will not be."""
        self._saving -= Counter(_names(keys))
        self._drop(keys[self.index.lookup(keys) == MISS])

    def take(self) -> list[Stored | Removed]:
        """The changes since the last call, in order."""
        found: list[Stored | Removed] = []
        for _ in range(len(self._raw)):
            keys, before, after = self._raw.popleft()
            blocks = [self._known.get(name) for name in _names(keys)]
            found += self._removed(blocks, before)
            found += self._stored(blocks, after)
            self._drop(keys[after == MISS])
        return found

    def _drop(self, keys: KeyArray) -> None:
        for name in _names(keys):
            if name not in self._saving:
                self._known.pop(name, None)

    def _removed(self, blocks: list[_Block | None], before: KeyArray) -> Iterator[Removed]:
        for medium, rows in _by_medium(before):
            digests = [block.digest for row in rows if (block := blocks[row]) is not None]
            if digests:
                yield Removed(medium=medium, digests=digests)

    def _stored(self, blocks: list[_Block | None], after: KeyArray) -> Iterator[Stored]:
        for medium, rows in _by_medium(after):
            run: list[_Block] = []
            for row in rows:
                block = blocks[row]
                if run and (block is None or block.parent != run[-1].digest):
                    yield _joined(medium, run)
                    run = []
                if block is not None:
                    run.append(block)
            if run:
                yield _joined(medium, run)


def _joined(medium: Medium, run: list[_Block]) -> Stored:
    return Stored(
        medium=medium,
        digests=[block.digest for block in run],
        parent=run[0].parent,
        tokens=[token for block in run for token in block.tokens],
        session=run[0].session,
        adapter=run[0].adapter,
    )


def _names(keys: KeyArray) -> list[bytes]:
    return [row.tobytes() for row in keys]


def _by_medium(gvas: KeyArray) -> Iterator[tuple[Medium, list[int]]]:
    """Rows that have an address, by its medium."""
    live = np.flatnonzero(gvas != MISS)
    media = decode_array(gvas[live])[0]
    for medium in (Medium.DRAM, Medium.SSD):
        rows = live[media == int(medium)].tolist()
        if rows:
            yield medium, rows
