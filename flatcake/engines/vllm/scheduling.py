"""The scheduler's side: answers vLLM's questions from the catalog, and writes the orders of each step.

One request, in vLLM's order: [matched] -> [allocated] -> orders -> workers -> [take_output] … [finished] -> orders.
A hit that lies in DRAM is loaded in the step that computes the rest; one that needs SSD is held until FC-MAS grants
it, and then loaded between steps.  Nothing here decides by itself: placement and order are the store's.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from flatcake.catalog import Refused
from flatcake.coordinator import Coordinator
from flatcake.engines.vllm.changes import Changes
from flatcake.engines.vllm.loads import Loads
from flatcake.engines.vllm.orders import LoadOrder, Orders, Reports, SaveOrder
from flatcake.engines.vllm.signals import EngineRequest, Sessions
from flatcake.gva import Medium, decode_array
from flatcake.hits import Lease
from flatcake.keys import keys_of_digests
from flatcake.messages import Int64Array, KeyArray
from flatcake.sched.actions import Request
from flatcake.units import SECOND

log = logging.getLogger(__name__)

NULL_BLOCK = 0
"""vLLM's id for a block that is none."""
LEASE_NS = 600 * SECOND
"""A request that is held for longer than this has no claim on its blocks any more."""


@dataclass(eq=False, slots=True)
class _Hit:
    """What is stored of a request that vLLM has not begun yet; pinned."""

    lease: Lease
    is_async: bool
    computed: int = 0
    """Tokens that vLLM has itself, as of its last question."""


@dataclass(frozen=True, slots=True)
class _Loading:
    tokens: dict[Medium, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens in a block of the store, and in one of vLLM, which hashes each."""

    store: int
    engine: int


@dataclass(slots=True)
class SchedulerSide:
    """One engine's scheduler.  For its thread alone."""

    coordinator: Coordinator
    loads: Loads
    sessions: Sessions
    sizes: Sizes
    hold_ns_max: int = 0
    changes: Changes | None = None
    """Where somebody listens to KV events."""
    _hits: dict[str, _Hit] = field(default_factory=dict)
    _keys_of: dict[str, KeyArray] = field(default_factory=dict)
    """Of requests that vLLM has asked about and not begun: it asks at each step."""
    _given_up: set[str] = field(default_factory=set)
    """Requests that were held too long, until vLLM has begun them."""
    _answered: set[str] = field(default_factory=set)
    """Granted requests that vLLM was told of in this step."""
    _loading: dict[str, _Loading] = field(default_factory=dict)
    """Asynchronous loads under way."""
    _sources: dict[str, dict[Medium, int]] = field(default_factory=dict)
    _saving: dict[int, KeyArray] = field(default_factory=dict)
    """Keys of the saves that are not settled, by plan."""
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
        if self.loads.is_late(name):
            self._given_up.add(name)
            tokens = 0
        if tokens <= 0:
            self._drop(name)
            return 0, False
        if not hit.is_async:
            return tokens, False
        if not self.loads.is_granted(name):
            return None, False
        self._answered.add(name)
        return tokens, True

    def allocated(self, request: EngineRequest, blocks: Sequence[int], tokens: int) -> None:
        """vLLM has blocks for a request; `tokens` are to be loaded into them."""
        name = request.request_id
        self._answered.discard(name)
        self._keys_of.pop(name, None)
        self._given_up.discard(name)
        hit = self._hits.get(name)
        if hit is None or tokens <= 0:
            self._drop(name)
            return
        del self._hits[name]
        lease, end = hit.lease, hit.computed + tokens
        table = np.array(blocks[: lease.tokens // self.sizes.engine], np.int64)
        table[: hit.computed // self.sizes.engine] = -1
        table[end // self.sizes.engine :] = -1
        plan = self.coordinator.start_restore(lease, hit.computed // self.sizes.store)
        if isinstance(plan, Refused):
            log.warning("load of %s refused: %s", name, plan.reason)
        by_medium = self._sources[name] = self._tokens_by_medium(lease, hit.computed, end)
        slots = None
        if hit.is_async:
            slots = self.loads.start(name)
            self._loading[name] = _Loading(by_medium)
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

    def take_orders(self) -> Orders:
        """The orders of this step; the next one begins."""
        for name in self._answered:  # vLLM had no blocks for these.
            self.loads.refuse(name)
        self._answered.clear()
        self._sources.clear()
        self.loads.tick()
        self.coordinator.tick()
        self._orders.cancels.extend(self.loads.take_cancels())
        orders, self._orders = self._orders, Orders()
        return orders

    def take_output(self, reports: Reports | None, loaded: set[str]) -> None:
        """What the workers report of a step."""
        for completion in reports.completions if reports else ():
            self.coordinator.take(completion)
        for _ in range(len(self.coordinator.ended)):
            keys = self._saving.pop(self.coordinator.ended.popleft().plan_id, None)
            if keys is not None and self.changes is not None:
                self.changes.forget(keys)
        for name in loaded:
            loading = self._loading.pop(name, None)
            if loading is not None:
                size = {medium: self._bytes(tokens) for medium, tokens in loading.tokens.items()}
                self.loads.end(name, ssd_bytes=size.get(Medium.SSD, 0), dram_bytes=size.get(Medium.DRAM, 0))

    def finished(self, request: EngineRequest, blocks: Sequence[int]) -> bool:
        """A request has ended; True when its blocks are being saved and must stay until that is reported."""
        name = request.request_id
        self._given_up.discard(name)
        self._drop(name)
        if name in self._loading:  # vLLM keeps the blocks until the end of the load is reported.
            self.loads.drop(name)
            self._orders.cancels.append(name)
            return False
        if getattr(getattr(request, "status", None), "name", "") == "FINISHED_ERROR":
            return False
        computed = request.num_computed_tokens - getattr(request, "num_in_flight_tokens", 0)
        computed = min(computed, len(blocks) * self.sizes.engine, len(request.block_hashes) * self.sizes.engine)
        if NULL_BLOCK in blocks:  # From there on vLLM has given blocks back.
            computed = min(computed, list(blocks).index(NULL_BLOCK) * self.sizes.engine)
        keys = self._keys(request, computed // self.sizes.store)
        session = self.sessions.name(request)
        turn = self.sessions.turn(session, request, request.num_tokens)
        self.sessions.finish(session, request, computed // self.sizes.engine)
        if not len(keys):
            return False
        plan = self.coordinator.begin_save(session, keys, turn)
        if isinstance(plan, Refused):
            log.info("save of %s refused: %s", name, plan.reason)
            return False
        if not len(plan.runs):
            return False
        self._saving[plan.plan_id] = keys
        if self.changes is not None:
            self.changes.expect(keys, self._digests(request, len(keys)), request, session)
        table = np.array(blocks[: len(keys) * self.sizes.store // self.sizes.engine], np.int64)
        self._orders.saves.append(SaveOrder(request_id=name, plan=plan, blocks=table))
        return True

    def reset(self) -> int:
        """Forget everything that is stored; loads under way end as failures, and are computed."""
        for name in list(self._hits):
            self._drop(name)
        self._orders.cancels.extend(self._loading)
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
        assert all(self.loads.knows(name) == hit.is_async for name, hit in self._hits.items())

    # -- private ----------------------------------------------------------------------------------------

    def _look_up(self, request: EngineRequest, computed: int) -> _Hit | None:
        """Pin what is stored of a request beyond what vLLM has; None where that is nothing."""
        blocks_max = (request.num_tokens - 1) // self.sizes.store  # vLLM computes one token at least.
        keys = self._keys_of.get(request.request_id)
        if keys is None or len(keys) != blocks_max:
            keys = self._keys_of[request.request_id] = self._keys(request, blocks_max)
        match = self.coordinator.match(keys)
        if match.tokens <= computed:
            return None
        lease = self.coordinator.lease(match, hold_ns=LEASE_NS)
        if lease.tokens <= computed:
            lease.close()
            return None
        tokens = self._tokens_by_medium(lease, computed, lease.tokens)
        ssd_bytes, dram_bytes = (self._bytes(tokens.get(medium, 0)) for medium in (Medium.SSD, Medium.DRAM))
        hit = self._hits[request.request_id] = _Hit(lease, is_async=ssd_bytes > 0)
        if hit.is_async:
            deadline_ns = self.loads.now_ns() + self.hold_ns_max if self.hold_ns_max else 0
            pages = -(-request.num_tokens // self.sizes.engine)
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

    def _keys(self, request: EngineRequest, blocks: int) -> KeyArray:
        """Keys of the leading blocks: each the last of vLLM's hashes in it, which chain all tokens and extras."""
        return keys_of_digests(self.coordinator.identity, self._digests(request, blocks))

    def _digests(self, request: EngineRequest, blocks: int) -> list[bytes]:
        step = self.sizes.store // self.sizes.engine
        return [bytes(digest) for digest in request.block_hashes[step - 1 : blocks * step : step]]

    def _tokens_by_medium(self, lease: Lease, start: int, end: int) -> dict[Medium, int]:
        """How many of the tokens from `start` to `end` lie on each medium; only those that have some."""
        size = self.sizes.store
        first = np.arange(lease.blocks) * size
        tokens: Int64Array = np.clip(first + size, start, end) - np.clip(first, start, end)
        media = decode_array(lease.entry.gvas)[0]
        found = {medium: int(tokens[media == int(medium)].sum()) for medium in (Medium.DRAM, Medium.SSD)}
        return {medium: count for medium, count in found.items() if count}

    def _bytes(self, tokens: int) -> int:
        return -(-tokens * self.coordinator.geometry.block_bytes // self.sizes.store)
