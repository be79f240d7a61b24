"""The worker's side: runs the orders of each step on this rank's data plane, and reports how they ended.

Loads for the step at hand are waited for layer by layer; all others go on between steps.  What did not come whole
is named, block by block or as a request, so that vLLM computes it.  A storage fault never raises here.
Read path:   orders -> [start] -> data plane -> [wait_layer] -> [settle] -> errors, reports
Write path:  orders -> [start] -> data plane -> reports
"""

import logging
import queue
from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

from flatcake.clock import Clock
from flatcake.config import StoreConfig
from flatcake.dataplane import DataPlane
from flatcake.engines.vllm.groups import Groups
from flatcake.engines.vllm.orders import Hello, LoadOrder, Orders, Reports, SaveOrder
from flatcake.engines.vllm.views import KVViews
from flatcake.errors import FlatCakeError
from flatcake.io.restore import Restore
from flatcake.messages import Completion

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Load:
    order: LoadOrder
    restore: Restore | None
    """None when it could not be begun."""


class WorkerSide:
    """One rank.  For the worker's thread; reports come from the pump's."""

    def __init__(
        self, plane: DataPlane, views: KVViews, groups: Groups, config: StoreConfig, clock: Clock, layout: str
    ) -> None:
        self.plane = plane
        self.counts: Counter[str] = Counter()
        self._views, self._groups, self._config, self._clock, self._layout = views, groups, config, clock, layout
        self._ppb = plane.start_report().geometry.pages_per_block
        self._completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Requests whose asynchronous load has ended."""
        self._loads: dict[str, _Load] = {}
        """Asynchronous ones under way."""
        self._now: list[_Load] = []
        """Those that this step's forward pass waits for."""
        self._errors: set[int] = set()
        self._failed: set[str] = set()

    def hello(self) -> Hello:
        return Hello(start=self.plane.start_report(), layout=self._layout)

    # -- one step, in vLLM's order ----------------------------------------------------------------------

    def start_loads(self, orders: Orders) -> None:
        """Begin the loads of a step, and drop those that nobody wants any more."""
        for request_id in orders.cancels:
            load = self._loads.get(request_id)
            if load is not None and load.restore is not None:
                load.restore.cancel()
        for order in orders.loads:
            load = _Load(order, self._begin_load(order))
            if not order.is_async:
                self._now.append(load)
                continue
            self._loads[order.request_id] = load
            if load.restore is None:
                self._loaded.put(order.request_id)
            else:
                load.restore.on_end(lambda name=order.request_id: self._loaded.put(name))  # type: ignore[misc]

    def wait_layer(self, layer_name: str) -> None:
        """Before a layer's attention: everything that this step loads of that layer is in its blocks."""
        if self._now:
            layer = self._views.layer_of.get(layer_name)
            for load in self._now:
                if load.restore is not None and layer is not None:
                    load.restore.wait_layer(layer)

    def start_saves(self, orders: Orders) -> None:
        """After the forward pass: begin the saves of a step."""
        for order in orders.saves:
            self._begin_save(order)

    def settle(self) -> None:
        """After the forward pass: see how this step's own loads ended."""
        loads, self._now = self._now, []
        for load in loads:
            self._note_errors(load)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Requests whose asynchronous loads have ended since the last call; those that failed as a whole."""
        loaded = set(_drain(self._loaded))
        for request_id in loaded:
            self._note_errors(self._loads.pop(request_id))
        failed, self._failed = self._failed, set()
        return loaded, failed

    def take_errors(self) -> set[int]:
        """vLLM's ids of the blocks that did not come."""
        errors, self._errors = self._errors, set()
        return errors

    def take_reports(self) -> Reports | None:
        """What the catalog must know."""
        completions = _drain(self._completions)
        return Reports(completions=completions) if completions else None

    def counters(self) -> Counter[str]:
        """Everything counted since open; blocks by the first rank only, as each has its share of the same ones."""
        total = Counter(dict(self.plane.parts.counts))  # Copied in one go, as the pump goes on counting.
        total.update(self.counts)
        if self._config.rank:
            total = Counter({name: count for name, count in total.items() if "bytes" in name})
        return total

    def close(self) -> None:
        """Let everything end within the configured time."""
        if not self.plane.close(self._config.timeouts.close_ns):
            log.warning("rank %d: reads or writes are still under way", self._config.rank)

    # -- private ----------------------------------------------------------------------------------------

    def _begin_load(self, order: LoadOrder) -> Restore | None:
        plan = order.plan
        if plan is None:
            return None
        try:
            return self.plane.restore(
                plan,
                self._views.pages(order.blocks),
                deadline_ns=self._clock.now_ns() + self._config.timeouts.restore_ns,
                report=self._completions.put,
                slots_max=order.slots_max,
            )
        except FlatCakeError as error:
            log.warning("load of %s not begun: %s", order.request_id, error)
            self._completions.put(self.plane.parts.completion(plan.plan_id, 0, "not begun"))
            return None

    def _begin_save(self, order: SaveOrder) -> None:
        try:
            save = self.plane.save(
                order.plan,
                self._views.pages(order.blocks),
                deadline_ns=self._clock.now_ns() + self._config.timeouts.save_ns,
                report=self._completions.put,
                deferred=False,
            )
        except FlatCakeError as error:
            log.warning("save of %s not begun: %s", order.request_id, error)
            self._completions.put(self.plane.parts.completion(order.plan.plan_id, 0, "not begun"))
            return
        save.start()

    def _note_errors(self, load: _Load) -> None:
        """Wait for a load's verdict, and name the blocks from the first bad one on, or else the request."""
        order, good = load.order, 0
        if load.restore is not None:
            result = load.restore.result()
            good = result.blocks
            self.counts["loaded_tokens"] += result.tokens
            self.counts["read_bytes"] += result.read_bytes
            if result.reason:
                self.counts[f"loads short: {result.reason}"] += 1
                log.warning("load of %s: %s after %d blocks", order.request_id, result.reason, good)
        first = good * self._ppb // self._views.pages_per_block
        bad = order.blocks[:, first:]
        if self._groups.is_plain:
            self._errors.update(bad[bad >= 0].tolist())
        elif (bad >= 0).any():
            self._failed.add(order.request_id)


def _drain(source: "queue.SimpleQueue[T]") -> list[T]:
    return [source.get_nowait() for _ in range(source.qsize())]
