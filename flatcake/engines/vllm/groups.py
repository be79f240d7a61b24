"""vLLM's groups of layers: each has a list of blocks of its own, and some see no more than a window of the tokens.

Pure; reads vLLM's configuration objects by attribute, and imports nothing of vLLM.  A block of the store holds all
layers of its tokens, whatever their group: it is saved while every group still has it, and of what a load finds,
only the blocks inside of the windows have pages and are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatcake.errors import ConfigError
from flatcake.messages import Int64Array

FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
"""vLLM's kinds of KV cache in which a request keeps every block of its prefix."""
WINDOW = {"SlidingWindowSpec"}
"""Kinds in which it gives blocks back as soon as no later token sees them."""
NULL_BLOCK = 0
"""vLLM's id for a block that is none."""

BlockTables = Sequence[Sequence[int]]
"""Ids of a request's blocks, a list for each group; 0 where a block was given back, or never was."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a list of blocks."""

    layers: tuple[str, ...]
    window: int
    """Tokens that a layer sees, the one that is computed included; 0 when it sees all."""

    def first_needed(self, tokens: int) -> int:
        """The first token that is seen, once so many are computed."""
        return max(0, tokens - self.window + 1) if self.window else 0


@dataclass(frozen=True, slots=True)
class Groups:
    """All of a model's."""

    each: tuple[Group, ...]

    @property
    def window_min(self) -> int:
        """The smallest window; 0 when every layer sees all tokens."""
        return min((group.window for group in self.each if group.window), default=0)

    @property
    def is_plain(self) -> bool:
        """Whether a load that brought less leaves a shorter prefix, which the ids of the missing blocks tell.

        With windows, a shorter prefix needs blocks that no one has asked for; with several groups, ids do not say
        which one's they are.
        """
        return len(self.each) == 1 and not self.window_min

    @property
    def layers(self) -> list[tuple[str, ...]]:
        return [group.layers for group in self.each]

    def shares(self) -> list[float]:
        """Which part of the layers is in each group."""
        total = sum(len(group.layers) for group in self.each)
        return [len(group.layers) / max(1, total) for group in self.each]


def groups_of(kv_cache_config: Any, block_size: int) -> Groups:
    """What vLLM says of its groups.

    Raises:
        ConfigError: A kind of cache, or a size of blocks, that this adapter cannot serve.
    """
    found = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        specs = getattr(spec, "kv_cache_specs", {"": spec}).values()
        kinds = {type(each).__name__ for each in specs}
        if not kinds <= FULL and not kinds <= WINDOW:
            raise ConfigError(
                f"KV cache of kind {', '.join(sorted(kinds))}: expected full attention, MLA or sliding windows in "
                "every layer"
            )
        sizes = {each.block_size for each in specs}
        if sizes != {block_size}:
            raise ConfigError(f"a group with blocks of {sorted(sizes)} tokens: expected {block_size} in every group")
        windows = [each.sliding_window + getattr(each, "extra_retained_tokens", 0) for each in specs if kinds <= WINDOW]
        found.append(Group(tuple(group.layer_names), max(windows, default=0)))
    return Groups(tuple(found))


def table_of(tables: BlockTables, count: int) -> Int64Array:
    """int64 [groups, count]: ids of a request's first blocks; -1 where there is none."""
    found = np.full((len(tables), count), -1, np.int64)
    for row, blocks in zip(found, tables, strict=True):
        row[: len(blocks)] = blocks[:count]
    found[found == NULL_BLOCK] = -1
    return found


def first_whole(table: Int64Array) -> int:
    """The first block from which on no group has a gap, in what `table_of` has made."""
    gaps = np.flatnonzero((table < 0).any(axis=0))
    return int(gaps[-1]) + 1 if len(gaps) else 0
