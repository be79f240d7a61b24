"""The scheduler's side: answers vLLM's questions from the catalog, and writes the orders of each step.

One request, in vLLM's order: [matched] -> [allocated] -> orders -> workers -> [take_output] … [finished] -> orders.
A hit that lies in DRAM is loaded in the step that computes the rest, or between steps where layers have windows;
one that needs SSD is held until FC-MAS grants it, and then loaded between steps.  Nothing here decides by itself:
placement and order are the store's.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from flatcake.catalog import Refused
from flatcake.coordinator import Coordinator
from flatcake.engines.vllm.blockkeys import BlockKeys
from flatcake.engines.vllm.groups import BlockTables, Groups, table_of
from flatcake.engines.vllm.loads import Loads
from flatcake.engines.vllm.orders import LoadOrder, Orders, Reports
from flatcake.engines.vllm.saving import Saves
from flatcake.engines.vllm.signals import EngineRequest
from flatcake.gva import Medium, decode_array
from flatcake.hits import Lease
from flatcake.messages import Int64Array, KeyArray
from flatcake.sched.actions import Request
from flatcake.units import SECOND

log = logging.getLogger(__name__)

LEASE_NS = 600 * SECOND
"""A request that is held for longer than this has no claim on its blocks any more."""


@dataclass(eq=False, slots=True)
class _Hit:
    """What is stored of a request that vLLM has not begun yet; pinned."""

    lease: Lease
    is_held: bool
    """Whether it waits for a grant of FC-MAS, as it needs SSD."""
    is_async: bool
    """Whether it is loaded between steps, and not by the step that computes the rest."""
    computed: int = 0
    """Tokens that vLLM has itself, as of its last question."""


@dataclass(slots=True)
class SchedulerSide:
    """One engine's scheduler.  For its thread alone."""

    coordinator: Coordinator
    loads: Loads
    saves: Saves
    block_keys: BlockKeys
    groups: Groups
    hold_ns_max: int = 0
    _hits: dict[str, _Hit] = field(default_factory=dict)
    _keys_of: dict[str, KeyArray] = field(default_factory=dict)
    """Of requests that vLLM has asked about and not begun: it asks at each step."""
    _given_up: set[str] = field(default_factory=set)
    """Requests that were held too long, until vLLM has begun them."""
    _answered: set[str] = field(default_factory=set)
    """Granted requests that vLLM was told of in this step."""
    _loading: dict[str, dict[Medium, int]] = field(default_factory=dict)
    """Asynchronous loads under way, and what they read."""
    _tried: dict[str, int] = field(default_factory=dict)
    """Up to which token a request was to be loaded between steps, until vLLM has begun to compute it."""
    _sources: dict[str, dict[Medium, int]] = field(default_factory=dict)
    _orders: Orders = field(default_factory=Orders)

    # -- vLLM's questions, in its order -----------------------------------------------------------------

    def matched(self, request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed` can be loaded, and whether between steps; None: ask again."""
        name = request.request_id
        if getattr(request, "skip_reading_prefix_cache", False) or name in self._given_up:
            self._drop(name)
            return 0, False
        hit = self._hits.get(name) or self._look_up(request, computed)
        if hit is None:
            return 0, False
        hit.computed, tokens = computed, hit.lease.tokens - computed
        # It asks again after a load that brought nothing: a second try is for less, or else there is no end to it.
        if self.loads.is_late(name) or hit.lease.tokens >= self._tried.get(name, math.inf):
            self._given_up.add(name)
            tokens = 0
        if tokens <= 0:
            self._drop(name)
            return 0, False
        if not hit.is_held:
            return tokens, hit.is_async
        if not self.loads.is_granted(name):
            return None, False
        self._answered.add(name)
        return tokens, True

    def allocated(self, request: EngineRequest, blocks: BlockTables, tokens: int) -> None:
        """vLLM has blocks for a request; `tokens` are to be loaded into them."""
        name = request.request_id
        self.saves.watch(request)
        self._answered.discard(name)
        self._keys_of.pop(name, None)
        self._given_up.discard(name)
        self._tried.pop(name, None)
        hit = self._hits.get(name)
        if hit is None or tokens <= 0:
            self._drop(name)
            return
        del self._hits[name]
        lease, end, size = hit.lease, hit.computed + tokens, self.block_keys.sizes.engine
        table = table_of(blocks, lease.tokens // size)
        table[:, : hit.computed // size] = table[:, end // size :] = -1
        plan = self.coordinator.start_restore(lease, hit.computed // self.block_keys.sizes.store)
        if isinstance(plan, Refused):
            log.warning("load of %s refused: %s", name, plan.reason)
        self._sources[name] = self._tokens_by_medium(lease, hit.computed, end)
        slots = self.loads.start(name) if hit.is_held else None
        if hit.is_async:
            self._loading[name] = self._bytes_by_medium(lease, hit.computed, end)
            self._tried[name] = end
        lease.close()
        order = LoadOrder(
            request_id=name,
            plan=None if isinstance(plan, Refused) else plan,
            blocks=table,
            is_async=hit.is_async,
            slots_max=slots,
        )
        self._orders.loads.append(order)

    def hit_sources(self, request: EngineRequest) -> dict[Medium, int]:
        """Tokens of the load that `allocated` has ordered, by medium."""
        return self._sources.pop(request.request_id, {})

    def take_orders(self, scheduled: Mapping[str, int], tables_of: Callable[[str], BlockTables]) -> Orders:
        """The orders of this step, which computes so many tokens of each request; the next one begins."""
        for name in self._answered:  # vLLM had no blocks for these.
            self.loads.refuse(name)
        self._answered.clear()
        self._sources.clear()
        self.loads.tick()
        self.coordinator.tick()
        self.saves.settle()
        self.saves.step(scheduled, tables_of)
        self._orders.saves.extend(self.saves.take_orders())
        self._orders.cancels.extend(self.loads.take_cancels())
        orders, self._orders = self._orders, Orders()
        return orders

    def take_output(self, reports: Reports | None, loaded: set[str]) -> None:
        """What the workers report of a step."""
        for completion in reports.completions if reports else ():
            self.coordinator.take(completion)
        for name in loaded:
            size_bytes = self._loading.pop(name, None)
            if size_bytes is not None:
                ssd_bytes, dram_bytes = (size_bytes.get(medium, 0) for medium in (Medium.SSD, Medium.DRAM))
                self.loads.end(name, ssd_bytes=ssd_bytes, dram_bytes=dram_bytes)

    def finished(self, request: EngineRequest, tables: BlockTables) -> None:
        """A request has ended: its blocks are saved, and held until that is over."""
        name = request.request_id
        self._given_up.discard(name)
        self._tried.pop(name, None)
        self._drop(name)
        if name in self._loading:  # vLLM keeps the blocks until the end of the load is reported.
            self.loads.drop(name)
            self._orders.cancels.append(name)
            self.saves.forget(name)
        elif getattr(getattr(request, "status", None), "name", "") == "FINISHED_ERROR":
            self.saves.forget(name)
        else:
            self.saves.finish(request, tables)

    def reset(self) -> int:
        """Forget everything that is stored; loads under way end as failures, and are computed."""
        for name in list(self._hits):
            self._drop(name)
        self._orders.cancels.extend(self._loading)
        self.saves.reset()
        return self.coordinator.reset()

    def close(self) -> None:
        """Let go of what is held, and close the catalog."""
        for name in list(self._hits):
            self._drop(name)
        if not self.coordinator.close():
            log.warning("closed with commits under way")

    def check(self) -> None:
        """Assert that what is held is held once."""
        self.loads.check()
        self.coordinator.catalog.check()
        assert all(self.loads.knows(name) == hit.is_held for name, hit in self._hits.items())

    # -- private ----------------------------------------------------------------------------------------

    def _look_up(self, request: EngineRequest, computed: int) -> _Hit | None:
        """Pin what is stored of a request beyond what vLLM has; None where that is nothing."""
        blocks_max = (request.num_tokens - 1) // self.block_keys.sizes.store  # vLLM computes one token at least.
        keys = self._keys_of.get(request.request_id)
        if keys is None or len(keys) != blocks_max:
            keys = self._keys_of[request.request_id] = self.block_keys.keys(request, blocks_max)
        match = self.coordinator.match(keys)
        if match.tokens <= computed:
            return None
        lease = self.coordinator.lease(match, hold_ns=LEASE_NS)
        if lease.tokens <= computed:
            lease.close()
            return None
        size_bytes = self._bytes_by_medium(lease, computed, lease.tokens)
        ssd_bytes, dram_bytes = (size_bytes.get(medium, 0) for medium in (Medium.SSD, Medium.DRAM))
        is_async = ssd_bytes > 0 or not self.groups.is_plain  # In a step nothing could be named but blocks.
        hit = self._hits[request.request_id] = _Hit(lease, is_held=ssd_bytes > 0, is_async=is_async)
        if hit.is_held:
            deadline_ns = self.loads.now_ns() + self.hold_ns_max if self.hold_ns_max else 0
            pages = -(-request.num_tokens // self.block_keys.sizes.engine) * len(self.groups.each)
            self.loads.submit(
                Request(
                    request_id=request.request_id,
                    ssd_bytes=ssd_bytes,
                    dram_bytes=dram_bytes,
                    pages=pages,
                    deadline_ns=deadline_ns,
                )
            )
        return hit

    def _drop(self, name: str) -> None:
        self._keys_of.pop(name, None)
        hit = self._hits.pop(name, None)
        if hit is not None:
            hit.lease.close()
            self.loads.drop(name)

    def _tokens_by_medium(self, lease: Lease, start: int, end: int) -> dict[Medium, int]:
        """How many of the tokens from `start` to `end` lie on each medium; only those that have some."""
        size = self.block_keys.sizes.store
        first = np.arange(lease.blocks) * size
        tokens: Int64Array = np.clip(first + size, start, end) - np.clip(first, start, end)
        media = decode_array(lease.entry.gvas)[0]
        found = {medium: int(tokens[media == int(medium)].sum()) for medium in (Medium.DRAM, Medium.SSD)}
        return {medium: count for medium, count in found.items() if count}

    def _bytes_by_medium(self, lease: Lease, start: int, end: int) -> dict[Medium, int]:
        """What is read of them: of each group's layers only what is seen from token `end` on."""
        found: Counter[Medium] = Counter()
        block_bytes, size = self.coordinator.geometry.block_bytes, self.block_keys.sizes.store
        for group, share in zip(self.groups.each, self.groups.shares(), strict=True):
            tokens = self._tokens_by_medium(lease, max(start, group.first_needed(end)), end)
            for medium, count in tokens.items():
                found[medium] += math.ceil(count * block_bytes * share / size)
        return found
