"""Which blocks of a request are saved, and when; vLLM's blocks are held until their save is over.

A request is saved as one turn when it has ended.  Where layers have windows, vLLM gives blocks back earlier: then
what is computed is saved when half a window has passed since, which leaves time to try again, and the rest at the end.
Write path:  [step], [finish] -> coordinator -> orders -> workers -> [settle]
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flatcake.catalog import Refused
from flatcake.coordinator import Coordinator
from flatcake.engines.vllm.blockkeys import BlockKeys
from flatcake.engines.vllm.changes import Changes
from flatcake.engines.vllm.groups import BlockTables, Groups, first_whole, table_of
from flatcake.engines.vllm.orders import SaveOrder
from flatcake.engines.vllm.signals import EngineRequest, Sessions
from flatcake.messages import Int64Array, KeyArray

log = logging.getLogger(__name__)


class BlockPool(Protocol):
    """vLLM's blocks, counted by who uses them."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...

    def free_blocks(self, ordered_blocks: Sequence[Any]) -> None: ...


@dataclass(frozen=True, eq=False, slots=True)
class _Held:
    keys: KeyArray
    blocks: list[Any]


@dataclass(slots=True)
class _Progress:
    """How far the saves of a request are."""

    begun: int = 0
    """Blocks of the store that are saved, or being saved."""
    tried: int = 0
    """Full blocks of vLLM when more was last tried."""
    left: int = 0
    """Blocks of the store that could not be saved, as what is before them has left its window unsaved."""


@dataclass(slots=True)
class Saves:
    """The saves of one engine.  For the scheduler's thread alone."""

    coordinator: Coordinator
    sessions: Sessions
    block_keys: BlockKeys
    groups: Groups
    pool: BlockPool
    changes: Changes | None = None
    """Where somebody listens to KV events."""
    _running: dict[str, EngineRequest] = field(default_factory=dict)
    """Requests that have blocks."""
    _stale: set[str] = field(default_factory=set)
    """Those of them whose KV is of before a reset."""
    _progress: dict[str, _Progress] = field(default_factory=dict)
    """By request."""
    _held: dict[int, _Held] = field(default_factory=dict)
    """By plan."""
    _orders: list[SaveOrder] = field(default_factory=list)

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way."""
        return not self._held

    def watch(self, request: EngineRequest) -> None:
        """vLLM has blocks for a request, and computes it from now on."""
        name = request.request_id
        self._running[name] = request
        self._progress_of(name).tried = 0  # It may have been preempted, and begins anew.
        if not request.num_computed_tokens:
            self._stale.discard(name)

    def step(self, scheduled: Mapping[str, int], tables_of: Callable[[str], BlockTables]) -> None:
        """Save what may be given back soon, after this step has computed it.

        Args:
            scheduled: Tokens that this step computes, by request.
            tables_of: vLLM's lists of a request's blocks.
        """
        if not self.groups.window_min:
            return
        for name, count in scheduled.items():
            request = self._running.get(name)
            if request is None:
                continue
            tokens = request.num_computed_tokens + count
            progress, sizes = self._progress_of(name), self.block_keys.sizes
            # Tokens that are known by now are final; those behind them may be guesses.
            known = min(tokens, request.num_tokens)
            is_due = progress.begun * sizes.store + sizes.engine <= tokens - self.groups.window_min // 2
            if is_due and known // sizes.engine > progress.tried:
                self._save(request, tables_of(name), known)

    def finish(self, request: EngineRequest, tables: BlockTables) -> None:
        """A request has ended: save what is not saved yet."""
        in_flight = getattr(request, "num_in_flight_tokens", 0)  # Of a preempted request, more than it has computed.
        computed = max(0, request.num_computed_tokens - in_flight)
        full = self._save(request, tables, computed)
        self.sessions.finish(self.sessions.name(request), request, full)
        self.forget(request.request_id)

    def forget(self, name: str) -> None:
        """A request is gone; saves under way go on."""
        self._running.pop(name, None)
        self._stale.discard(name)
        progress = self._progress.pop(name, None)
        if progress is not None and progress.left:
            self.coordinator.counts["save_blocks_left_window"] += progress.left

    def reset(self) -> None:
        """Nothing is stored any more, nor is what was computed before worth it; saves under way end as failures."""
        self._progress.clear()
        self._stale.update(self._running)

    def take_orders(self) -> list[SaveOrder]:
        """What was begun since the last call."""
        orders, self._orders = self._orders, []
        return orders

    def settle(self) -> None:
        """Give vLLM its blocks back, of saves that are over."""
        for _ in range(len(self.coordinator.ended)):
            held = self._held.pop(self.coordinator.ended.popleft().plan_id, None)
            if held is not None:
                self.pool.free_blocks(held.blocks[::-1])  # The last ones are the first to be evicted.
                if self.changes is not None:
                    self.changes.forget(held.keys)

    # -- private ----------------------------------------------------------------------------------------

    def _save(self, request: EngineRequest, tables: BlockTables, tokens: int) -> int:
        """Begin to save the first `tokens` tokens; returns vLLM's full blocks among them."""
        sizes = self.block_keys.sizes
        if request.request_id in self._stale:
            return 0
        full = min(tokens // sizes.engine, len(request.block_hashes), *(len(blocks) for blocks in tables))
        blocks = full // sizes.ratio
        table = table_of(tables, blocks * sizes.ratio)
        progress = self._progress_of(request.request_id)
        begun, progress.tried = progress.begun, full
        first_block = max(begun, -(-first_whole(table) // sizes.ratio))
        if first_block >= blocks:
            return full
        keys = self.block_keys.keys(request, blocks)
        if first_block > begun and self.coordinator.match(keys[:first_block]).blocks < first_block:
            progress.left = blocks - first_block
            return full
        session = self.sessions.name(request)
        turn = replace(self.sessions.turn(session, request, request.num_tokens), first_block=first_block)
        plan = self.coordinator.begin_save(session, keys, turn)
        if isinstance(plan, Refused):
            log.info("save of %s refused: %s", request.request_id, plan.reason)
            return full
        progress.begun, progress.left = blocks, 0
        if len(plan.runs):
            table[:, : first_block * sizes.ratio] = -1
            self._hold(plan.plan_id, keys, table)
            self._orders.append(SaveOrder(request_id=request.request_id, plan=plan, blocks=table))
            if self.changes is not None:
                self.changes.expect(keys, self.block_keys.digests(request, blocks), request, session)
        return full

    def _progress_of(self, name: str) -> _Progress:
        return self._progress.setdefault(name, _Progress())

    def _hold(self, plan_id: int, keys: KeyArray, table: Int64Array) -> None:
        in_order = table.T  # A prefix of them is of use by itself.
        blocks = [self.pool.blocks[number] for number in in_order[in_order >= 0].tolist()]
        self.pool.touch(blocks)
        self._held[plan_id] = _Held(keys, blocks)
