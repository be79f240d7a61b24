"""The demo's sessions: who says what, and when.  Random tokens, shaped like real traffic.

Pure.  All sessions begin with one system prompt.  The agent's context is long and grows by tool output, the
chats' are short, and a sub-agent begins with what its parent has said so far.
"""

from dataclasses import dataclass, field

import numpy as np

SYSTEM_TOKENS = 128
REPLY_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kind of session sends."""

    name: str
    first_tokens: int
    """Tokens of the first turn's question, after the system prompt or the parent's context."""
    later_tokens: int
    """Tokens of each later question."""


AGENT = Kind("agent", 768, 128)
CHAT = Kind("chat", 40, 40)
SUB_AGENT = Kind("sub-agent", 72, 72)
KINDS = (AGENT, CHAT, SUB_AGENT, CHAT)
"""Sessions take these in turn."""


@dataclass(slots=True)
class Session:
    """One conversation."""

    name: str
    kind: Kind
    parent: "Session | None"
    tokens: list[int] = field(default_factory=list)
    """Everything said so far, replies included."""
    stored: list[int] = field(default_factory=list)
    """What was given to the store last."""
    turn: int = 0

    @property
    def prior_reply_tokens(self) -> int | None:
        """Tokens of the reply before this turn's; None in the first turn."""
        return REPLY_TOKENS if self.turn > 1 else None


class Script:
    """All sessions of a run, and their questions.

    Args:
        sessions: How many.
        turns: Of each.
        vocab: Tokens are below this.
        seed: Same seed, same words.
    """

    def __init__(self, sessions: int, turns: int, *, vocab: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab = vocab
        self._system = self._words(SYSTEM_TOKENS)
        self.turns = turns
        self.sessions: list[Session] = []
        for at in range(sessions):
            kind = KINDS[at % len(KINDS)]
            parents = [session for session in self.sessions if session.kind is AGENT]
            parent = parents[-1] if kind is SUB_AGENT else None
            self.sessions.append(Session(f"{kind.name}-{at + 1}", kind, parent))

    @property
    def chat_tokens_max(self) -> int:
        """Tokens of a chat after its last turn."""
        return SYSTEM_TOKENS + self.turns * (CHAT.first_tokens + REPLY_TOKENS)

    @property
    def agent_extra_tokens(self) -> int:
        """What the agents' first question has on top, so that their context is always longer than a chat's."""
        return max(0, self.chat_tokens_max - SYSTEM_TOKENS - AGENT.first_tokens + 1)

    @property
    def context_tokens_max(self) -> int:
        """No context gets longer."""
        agent = AGENT.first_tokens + self.agent_extra_tokens + self.turns * (AGENT.later_tokens + REPLY_TOKENS)
        return SYSTEM_TOKENS + agent + self.turns * (SUB_AGENT.later_tokens + REPLY_TOKENS)

    def ask(self, session: Session) -> list[int]:
        """Begin the session's next turn; returns the whole prompt."""
        session.turn += 1
        count = session.kind.later_tokens
        if session.turn == 1:
            session.tokens = list(session.parent.tokens if session.parent else self._system)
            count = session.kind.first_tokens + (self.agent_extra_tokens if session.kind is AGENT else 0)
        session.tokens += self._words(count)
        return list(session.tokens)

    def order(self) -> list[Session]:
        """Each session's next turn, in random order; all first turns come in the order of the sessions."""
        if not self.sessions[-1].turn:
            return list(self.sessions)
        return [self.sessions[at] for at in self._rng.permutation(len(self.sessions))]

    def stored_tokens(self, prompt: list[int]) -> int:
        """How many leading tokens of a prompt were given to the store, by any session."""
        return max(_common(prompt, session.stored) for session in self.sessions)

    def _words(self, count: int) -> list[int]:
        words: list[int] = self._rng.integers(0, self._vocab, count).tolist()
        return words


def _common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(np.array(left[:size]) != np.array(right[:size]))
    return int(differ[0]) if len(differ) else size
