"""The saves of one store that are under way: how many there may be, and the handle of each plan, if it has one here.

Write path:  save -> [begin] -> dataplane.save -> report -> catalog.finish -> [settle] -> handle
"""

import threading
from collections import Counter
from collections.abc import Callable

from flatcake.catalog import Refused
from flatcake.gva import Medium
from flatcake.io.save import Save
from flatcake.ledger import Outcome
from flatcake.messages import MEDIUM, Plan, PlanKind

BUSY = "too many saves under way"


class OpenSaves:
    """Places for `saves_max` saves.  Any number of threads may call."""

    def __init__(self, saves_max: int) -> None:
        self.counts: Counter[str] = Counter()
        self._saves_max = saves_max
        self._lock = threading.Lock()
        self._beginning = 0
        """Places taken by callers whose plan is being made."""
        self._saves: dict[int, Save | None] = {}
        """By plan; None while a save is being made."""
        self._to_commit: set[int] = set()
        """Those of them that write to SSD."""

    def __len__(self) -> int:
        return len(self._saves)

    def __contains__(self, plan_id: int) -> bool:
        """Whether a save of that plan is under way."""
        return plan_id in self._saves

    def needs_commit(self, plan_id: int) -> bool:
        """Whether the manifest must know of a plan, which is under way, before its blocks are visible."""
        return plan_id in self._to_commit

    def begin(self, make: Callable[[], Plan | Refused]) -> Plan | Refused:
        """Take a place, then make a plan; the place is given back where nothing is to be written."""
        with self._lock:
            if self._beginning + len(self._saves) >= self._saves_max:
                self.counts[f"refused: {BUSY}"] += 1
                return Refused(BUSY)
            self._beginning += 1
        plan: Plan | Refused | None = None
        try:
            plan = make()
        finally:
            with self._lock:
                self._beginning -= 1
                if isinstance(plan, Plan) and len(plan.runs):
                    self._saves[plan.plan_id] = None
                    if Medium.SSD in plan.runs.column(MEDIUM).tolist():
                        self._to_commit.add(plan.plan_id)
        return plan

    def put(self, plan_id: int, save: Save) -> None:
        """Note the handle of a plan, unless that was late from the start, and is over."""
        with self._lock:
            if plan_id in self._saves:
                self._saves[plan_id] = save

    def settle(self, outcome: Outcome | None) -> None:
        """Give the place of a plan that is over to the next one, and tell its handle."""
        if outcome is None or outcome.kind is not PlanKind.SAVE:
            return
        with self._lock:
            save = self._saves.pop(outcome.plan_id, None)
            self._to_commit.discard(outcome.plan_id)
        if save is not None:
            save.end(outcome.published_blocks, outcome.reason)

    def end_all(self, reason: str) -> None:
        """Let every caller go."""
        with self._lock:
            left = [save for save in self._saves.values() if save is not None]
        for save in left:
            save.end(0, reason)
