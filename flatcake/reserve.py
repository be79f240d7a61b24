"""Where a turn's blocks go: signals to decision to slots.  Paper §3.2.

Pure.  A shared prompt that sits on SSD may be written once more, to DRAM, while its blocks are in GPU
memory: the first writer could not know that it would be shared.  That copy supersedes the old address.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flatcake.gva import Medium
from flatcake.index import MISS
from flatcake.messages import Int64Array
from flatcake.placement import Placement, Turn, TurnSignals
from flatcake.prefix import Prefix, shared_prefix
from flatcake.scopes import Scope
from flatcake.space import Slots, Space

DRAM_GVA_LIMIT = np.uint64(1 << 60)
NO_ROOM, NO_BUDGET = "no room", "SSD write budget"


@dataclass(frozen=True, eq=False, slots=True)
class Reservation:
    """Slots for the blocks of a turn that are to be written."""

    slots: list[Slots]
    blocks: Int64Array
    """Blocks of the request, in the order of the slots."""
    spilled: bool = False
    """DRAM was chosen and had no room."""


@dataclass(frozen=True, eq=False, slots=True)
class SaveRequest:
    """A turn to be saved, as the catalog found it."""

    session: str
    turn: Turn
    gvas: npt.NDArray[np.uint64]
    """uint64 [blocks]: where each block is stored already, MISS where it is not."""
    known: Prefix
    block_tokens: int


def reserve_turn(
    request: SaveRequest, space: Space, placement: Placement, pinned: list[Scope], now_ns: int
) -> Reservation | str:
    """Decide where the missing blocks go and take their slots.

    Scopes that receive blocks are pinned and added to `pinned`.  Returns why not, with nothing taken, when there
    is no room, or when too much was written to SSD already.
    """
    gvas, first_block = request.gvas, request.turn.first_block
    decision = placement.place(_signals(request, space, now_ns))
    medium = Medium(decision.medium)  # A user's placement may name anything: raise before a slot is taken.
    if not space.tables[medium].ranges.size_bytes:
        medium = next(other for other in Medium if other is not medium)
    missing = gvas == MISS
    missing[:first_block] = False
    lead, slots = _lead(request, decision.shared_dram_blocks), list[Slots]()
    if len(lead):
        found = _reserve(None, Medium.DRAM, len(lead), space, pinned, now_ns)
        lead, slots = (lead, found) if found is not None else (lead[:0], [])
        missing[lead] = False
    rest = missing.nonzero()[0]
    taken = _reserve_rest(request.session, medium, len(rest), space, pinned, now_ns)
    if isinstance(taken, str):
        space.give_back(slots)
        return taken
    roots = {scope.scope_id for scope in request.known.scopes}
    for scope in {part.scope for part in taken}:
        scope.roots |= roots - {scope.scope_id}
    spilled = medium is Medium.DRAM and any(part.extent.medium is Medium.SSD for part in taken)
    return Reservation(slots + taken, np.concatenate([lead, rest]) if len(lead) else rest, spilled)


def _lead(request: SaveRequest, shared_blocks: int) -> Int64Array:
    """Blocks of a shared prompt that are not in DRAM yet."""
    lead = np.arange(request.turn.first_block, min(shared_blocks, len(request.gvas)))
    return lead[request.gvas[lead] >= DRAM_GVA_LIMIT] if len(lead) else lead  # A miss is above all addresses.


def _signals(request: SaveRequest, space: Space, now_ns: int) -> TurnSignals:
    turn, blocks = request.turn, len(request.gvas)
    shared = max(shared_prefix(request.session, request.known), turn.shared_tokens // request.block_tokens)
    return TurnSignals(
        turn=turn.index,
        context_tokens=turn.context_tokens or blocks * request.block_tokens,
        prior_reply_tokens=turn.prior_reply_tokens,
        shared_blocks=min(shared, blocks),
        block_tokens=request.block_tokens,
        dram_free_blocks=space.available_blocks(Medium.DRAM, now_ns, blocks + 1),
    )


def _reserve_rest(
    session: str, medium: Medium, blocks: int, space: Space, pinned: list[Scope], now_ns: int
) -> list[Slots] | str:
    """Take slots where the decision says, or on SSD when DRAM is full; or say why not."""
    if medium is Medium.DRAM:
        taken = _reserve(session, medium, blocks, space, pinned, now_ns)
        if taken is not None:
            return taken
    table = space.tables[Medium.SSD]
    if not blocks or not table.ranges.size_bytes:
        return NO_ROOM if blocks else []
    size_bytes = table.lanes.extent_bytes(blocks)  # With their share of a record.
    if not space.budget.allows(size_bytes, now_ns):  # Before anything is reclaimed for it.
        return NO_BUDGET
    taken = _reserve(session, Medium.SSD, blocks, space, pinned, now_ns)
    if taken is None:
        return NO_ROOM
    space.budget.spend(size_bytes, now_ns)
    return taken


def _reserve(
    session: str | None, medium: Medium, blocks: int, space: Space, pinned: list[Scope], now_ns: int
) -> list[Slots] | None:
    if not blocks:
        return []
    scope = space.scopes.of_session(session, medium) if session is not None else None
    if scope is None:
        scope = space.scopes.create(session, medium, now_ns)
    space.pin(scope)
    taken = space.reserve(scope, blocks, now_ns)
    if taken is None or scope in pinned:
        space.unpin(scope)
    else:
        pinned.append(scope)
    return taken
