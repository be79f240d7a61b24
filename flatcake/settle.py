"""The end of a save: its blocks become visible, or its slots are given back.  Paper §3.2.

Pure.  `catalog` calls it when every rank has reported or is lost; nothing was visible before.
Write path:  begin_save -> data planes -> finish -> [settle] -> index
"""

from collections import Counter

from flatcake.index import MISS
from flatcake.ledger import OpenPlan
from flatcake.messages import KeyArray
from flatcake.reserve import DRAM_GVA_LIMIT
from flatcake.space import GvaArray, Slots, Space


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
        space.give_back(plan.slots)
        return 0
    published, at = 0, 0
    for part in plan.slots:
        blocks = plan.blocks[at : at + part.count]
        at += part.count
        if not part.scope.withdrawn:
            published += _publish(part, plan.keys[blocks], plan.gvas[blocks], space, counts)
    return published


def _publish(part: Slots, keys: KeyArray, gvas: GvaArray, space: Space, counts: Counter[str]) -> int:
    """Make blocks visible, unless another session published them first; a shared copy supersedes SSD."""
    current = space.index.lookup(keys)
    mine = current == MISS
    if part.scope.session is None:
        again = ~mine & (current >= DRAM_GVA_LIMIT)
        counts["blocks_superseded"] += int(again.sum())
        mine |= again
    counts["blocks_lost_race"] += int((~mine).sum())
    space.index.publish(keys[mine], gvas[mine])
    part.scope.record(keys[mine], gvas[mine])
    counts[f"blocks_saved_{part.extent.medium.name.lower()}"] += int(mine.sum())
    return int(mine.sum())
