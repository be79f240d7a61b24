"""What vLLM tells of a request, turned into what placement wants to know: session, turn, prior reply.

Pure.  vLLM has no notion of a turn.  A request that names its session is that session's; one that does not is the
continuation of the finished request with which it begins, if there is one, and a session of its own otherwise.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flatcake.placement import Turn


class EngineRequest(Protocol):
    """What the adapter reads of vLLM's request."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    block_hashes: Sequence[bytes]
    cache_salt: str | None
    kv_transfer_params: Mapping[str, object] | None


@dataclass(slots=True)
class _Session:
    turns: int = 0
    reply_tokens: int | None = None


class Sessions:
    """Turns of the sessions that were used last.  For one thread.

    Args:
        sessions_max: Further ones are forgotten, oldest use first; they begin again with turn 1.
    """

    def __init__(self, sessions_max: int) -> None:
        self._max = sessions_max
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._ends: OrderedDict[bytes, str] = OrderedDict()
        """Session by the last full block of a finished request of it."""

    def name(self, request: EngineRequest) -> str:
        """Whose request it is; the same for all turns of a session.  Cost: O(blocks) where it is not said."""
        params = request.kv_transfer_params or {}
        given = getattr(request, "session_id", None) or params.get("session_id")
        if given:
            return f"{given}{_salt_suffix(request.cache_salt)}"
        for digest in reversed(request.block_hashes):
            if found := self._ends.get(bytes(digest)):
                return found
        return f"request {request.request_id}"

    def turn(self, session: str, request: EngineRequest, context_tokens: int) -> Turn:
        """What is known of the turn that this request is; what it says of itself wins."""
        params = request.kv_transfer_params or {}
        known = self._sessions.get(session, _Session())
        return Turn(
            index=_count(params.get("turn")) or known.turns + 1,
            prior_reply_tokens=known.reply_tokens,
            context_tokens=context_tokens,
            shared_tokens=_count(params.get("shared_tokens")),
        )

    def finish(self, session: str, request: EngineRequest, full_blocks: int) -> None:
        """Note that a turn is over; `full_blocks` of vLLM's blocks of it are computed."""
        known = self._sessions.pop(session, None) or _Session()
        known.turns += 1
        known.reply_tokens = request.num_output_tokens
        self._sessions[session] = known
        if full_blocks:
            digest = bytes(request.block_hashes[full_blocks - 1])
            self._ends.pop(digest, None)
            self._ends[digest] = session
        while len(self._sessions) > self._max:
            self._sessions.popitem(last=False)
        while len(self._ends) > self._max:
            self._ends.popitem(last=False)


def _salt_suffix(salt: str | None) -> str:
    """Keeps tenants that name their sessions alike apart; a salt is secret, so only its digest is shown."""
    return f"@{hashlib.blake2b(salt.encode(), digest_size=8).hexdigest()}" if salt else ""


def _count(value: object) -> int:
    """A caller's number, or 0 where it gave none or nonsense: hints come from outside and are not trusted."""
    return value if type(value) is int and value > 0 else 0
