"""Which medium a turn's blocks go to: a pure function of what is known when they are written.  Paper §3.2, Table 2.

The first rule that fits decides, per turn, and a block never moves afterwards.  Users may bring another
`Placement`.
"""

from dataclasses import dataclass
from typing import Protocol

from flatcake.errors import ConfigError
from flatcake.gva import Medium


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the caller knows of the turn that it saves; all of it is optional."""

    index: int = 1
    """1 for a session's first turn."""
    prior_reply_tokens: int | None = None
    """Tokens of the session's previous reply; None when there was none."""
    context_tokens: int = 0
    """Tokens of the whole sequence; 0 takes the number of tokens that are saved."""
    shared_tokens: int = 0
    """Leading tokens that the engine knows to be shared between sessions."""
    first_block: int = 0
    """Blocks before this one are not written: they are stored, being saved, or gone from the engine's pages."""

    def __post_init__(self) -> None:
        if self.first_block < 0:
            raise ConfigError(f"Turn.first_block={self.first_block}: expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSignals:
    """What is known of a turn when it is saved."""

    turn: int
    """1 for a session's first turn."""
    context_tokens: int
    """Tokens of the whole sequence, the new ones included."""
    prior_reply_tokens: int | None
    """Tokens of the session's previous reply; None when there was none or it is unknown."""
    shared_blocks: int
    """Leading blocks that more than one session refers to."""
    block_tokens: int
    dram_free_blocks: int
    """Blocks that DRAM can take without dropping anything in use; counted to one more than the turn's."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a turn goes: so many leading blocks as a shared prompt, the others to one medium."""

    shared_dram_blocks: int
    medium: Medium
    rule: int
    """Row of Table 2 that placed the others."""


class Placement(Protocol):
    """Decides where a turn's blocks go.  Called under the catalog's lock: must be quick and pure."""

    def place(self, signals: TurnSignals) -> Decision: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlacement:
    """The paper's Table 2."""

    agent_tokens_min: int
    """Contexts of this many tokens or more count as agentic."""
    short_reply_tokens_limit: int
    """Replies shorter than this mark short-turn chat."""
    shared_tokens_max: int
    """At most so many leading tokens are put into DRAM as a shared prompt."""

    def place(self, signals: TurnSignals) -> Decision:
        shared = min(signals.shared_blocks, self.shared_tokens_max // signals.block_tokens, signals.dram_free_blocks)
        rule = self._rule(signals)
        medium = Medium.DRAM if rule == 3 and signals.dram_free_blocks > shared else Medium.SSD
        return Decision(shared, medium, rule if medium is Medium.DRAM or rule != 3 else 4)

    def _rule(self, signals: TurnSignals) -> int:
        reply = signals.prior_reply_tokens
        if signals.context_tokens >= self.agent_tokens_min:
            return 2
        if reply is not None and reply >= self.short_reply_tokens_limit:
            return 2
        if signals.turn > 1 and reply is not None:
            return 3
        return 4
