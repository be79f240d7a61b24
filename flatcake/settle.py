"""The end of a save: committed to the manifest, then visible; or its slots are given back.  Paper §3.2.

Pure.  `catalog` calls it when every rank has reported or is lost; nothing was visible before.
Write path:  begin_save -> data planes -> finish -> [settle] -> manifest -> [settle] -> index
"""

from collections import Counter

import numpy as np

from flatcake.gva import Medium
from flatcake.index import MISS
from flatcake.ledger import OpenPlan
from flatcake.manifest import TurnRow
from flatcake.messages import Int64Array, KeyArray, PlanKind
from flatcake.reopen import turn_row
from flatcake.reserve import DRAM_GVA_LIMIT
from flatcake.scopes import Scope
from flatcake.space import GvaArray, Slots, Space


def rows_to_commit(plan: OpenPlan) -> list[TurnRow]:
    """What the manifest must know before a save is published: a row for each scope on SSD; DRAM dies with us."""
    if plan.kind is not PlanKind.SAVE or plan.first_bad_block is not None:
        return []
    if not any(part.scope.medium is Medium.SSD for part in plan.slots):
        return []
    rows = []
    for scope, (slots, blocks) in _shares(plan).items():
        if scope.medium is Medium.SSD:
            parts: list[tuple[int, ...]] = [
                (part.extent.base_bytes, part.extent.room_blocks, part.extent.generation, part.first, part.count)
                for part in slots
            ]
            rows.append(turn_row(scope, parts, plan.keys[blocks]))
    return rows


def settle_save(plan: OpenPlan, space: Space, counts: Counter[str]) -> int:
    """Publish a save that every rank wrote, or give its slots back.

    Args:
        plan: A save that no rank works on any more; a failure that is found here is noted in it.
        space: Owner of the slots and of the index.
        counts: Increased by what happens.

    Returns:
        Blocks that are visible now and were not before, or that have moved to a shared prompt.
    """
    index = space.index
    if plan.first_bad_block is None and len(plan.blocks) > index.entries_max - len(index):
        plan.note_failure(plan.first_block, "index full")
    if plan.first_bad_block is not None:
        counts["saves_failed"] += 1
        space.manifest.drop_turns(plan.committed)
        space.give_back(plan.slots)
        return 0
    shares = _shares(plan).items()
    return sum(_publish(scope, plan.keys[blocks], plan.gvas[blocks], space, counts) for scope, (_, blocks) in shares)


def _shares(plan: OpenPlan) -> dict[Scope, tuple[list[Slots], Int64Array]]:
    """Slots and blocks of a save by scope, without the scopes that were withdrawn meanwhile."""
    found: dict[Scope, tuple[list[Slots], list[Int64Array]]] = {}
    at = 0
    for part in plan.slots:
        if not part.scope.withdrawn:
            slots, blocks = found.setdefault(part.scope, ([], []))
            slots.append(part)
            blocks.append(plan.blocks[at : at + part.count])
        at += part.count
    return {scope: (slots, np.concatenate(blocks)) for scope, (slots, blocks) in found.items()}


def _publish(scope: Scope, keys: KeyArray, gvas: GvaArray, space: Space, counts: Counter[str]) -> int:
    """Make blocks visible, unless another session published them first; a shared copy supersedes SSD."""
    over = DRAM_GVA_LIMIT if scope.session is None else MISS
    before = space.index.claim(keys, gvas, over)
    mine = before >= over
    if not mine.all():
        keys, gvas, before = keys[mine], gvas[mine], before[mine]
    counts["blocks_lost_race"] += len(mine) - len(keys)
    if scope.session is None:
        counts["blocks_superseded"] += int((before != MISS).sum())
    scope.record(keys, gvas)
    counts[f"blocks_saved_{scope.medium.name.lower()}"] += len(keys)
    return len(keys)
