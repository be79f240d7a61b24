"""The stores that a test has opened, so that what they still hold at its end can be asked for.

`tests/conftest.py` reads this before anything of FlatCake may be imported.
"""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatcake.store import Store


@dataclass(eq=False)
class Opened:
    """One of them, as long as it lives."""

    _store: "weakref.ref[Store]"

    def left_open(self) -> dict[str, int]:
        """What is not at its baseline, by name; nothing for a store that is gone."""
        store = self._store()
        if store is None:
            return {}
        stats, parts = store.stats(), store.plane.parts
        if not stats.plans:  # Nobody else looks at them.
            parts.window.collect()
            parts.save_window.collect()
        found = {
            "slots": parts.window.slots - parts.window.free_slots,
            "slots of saves": parts.save_window.slots - parts.save_window.free_slots,
            "leases": stats.leases,
            "plans": stats.plans,
            "draining scopes": stats.draining_scopes,
        }
        return {name: count for name, count in found.items() if count}


OPENED: list[Opened] = []


def note(store: "Store") -> "Store":
    """Have a store looked at when the test is over."""
    OPENED.append(Opened(weakref.ref(store)))
    return store
