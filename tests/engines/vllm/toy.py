"""The adapter's two sides under a toy engine: vLLM's order of calls, without vLLM.

Its KV is a function of the block's hash, layer and rank, so every block that a request runs on can be checked.
"""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatcake.assemble import open_dataplane
from flatcake.clock import MonotonicClock
from flatcake.coordinator import open_coordinator
from flatcake.engines.vllm.blockkeys import BlockKeys, Sizes
from flatcake.engines.vllm.groups import Group, Groups
from flatcake.engines.vllm.loads import Loads
from flatcake.engines.vllm.options import Place, VllmConfig, catalog_home, rank_config
from flatcake.engines.vllm.orders import Orders, Reports
from flatcake.engines.vllm.saving import Saves
from flatcake.engines.vllm.scheduling import SchedulerSide
from flatcake.engines.vllm.signals import Sessions
from flatcake.engines.vllm.views import view_caches
from flatcake.engines.vllm.worker import WorkerSide
from flatcake.fields import build
from flatcake.io.seam import Files
from flatcake.keys import Identity
from flatcake.sched.settings import fit_window

TOKENS, BLOCKS, LAYERS, HEADS, CONTENT = 4, 96, 3, 2, 64
PAUSE_S = 0.001
WAIT_S = 60
"""Far beyond what anything takes; reaching it is a failure."""
SIZES = {"ssd_bytes_max": "8MiB", "pool_file_bytes": "2MiB", "dram_bytes_max": "4MiB", "ssd_free_bytes_min": 0}
IO = {"slot_bytes": 16384, "window_bytes_max": 163840, "slots_min": 4, "io_threads": 2}


def hashes(tokens: list[int], salt: str = "") -> list[bytes]:
    """Chained digests of the full blocks, as vLLM's."""
    last, found = hashlib.sha256(salt.encode()).digest(), []
    for start in range(0, len(tokens) - TOKENS + 1, TOKENS):
        last = hashlib.sha256(last + repr(tokens[start : start + TOKENS]).encode()).digest()
        found.append(last)
    return found


@dataclass(eq=False)
class ToyRequest:
    """What the adapter reads of a request."""

    request_id: str
    tokens: list[int]
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    session_id: str | None = None
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_in_flight_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    """Blocks of each group; 0 where there is none."""
    state: str = "waiting"
    loaded_tokens: int = 0
    failures: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return hashes(self.tokens, self.cache_salt or "")


@dataclass(eq=False)
class ToyBlock:
    number: int
    uses: int = 0


class ToyPool:
    """vLLM's blocks and who uses them."""

    def __init__(self) -> None:
        self.blocks = [ToyBlock(number) for number in range(BLOCKS)]
        self.free = list(range(1, BLOCKS))

    def take(self, count: int) -> list[int]:
        found, self.free = self.free[:count], self.free[count:]
        self.touch([self.blocks[number] for number in found])
        return found

    def touch(self, blocks: Sequence[ToyBlock]) -> None:
        for block in blocks:
            assert block.number, "the null block is nobody's"
            block.uses += 1

    def free_blocks(self, ordered_blocks: Sequence[ToyBlock]) -> None:
        for block in ordered_blocks:
            assert block.uses, f"block {block.number} is freed twice"
            block.uses -= 1
            if not block.uses:
                self.free.insert(0, block.number)  # The next one is taken at once, so that it is overwritten.


class ToyEngine:
    """A scheduler without a prefix cache of its own, and its workers.

    Args:
        windows: Of each group of layers, in tokens; 0 for all.  Layers are dealt out to the groups in turn, and
            groups share their memory, as vLLM's do.
        chunk: Tokens of a request that a step computes.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ranks: int = 1,
        files: Files | None = None,
        windows: Sequence[int] = (0,),
        chunk: int = 1 << 20,
        **settings: Any,
    ) -> None:
        settings = {"capacity": SIZES, "io": IO, "directories": [str(directory)]} | settings
        self.config = build(VllmConfig, settings)
        clock, files = MonotonicClock(), files or Files()
        self.store_tokens = self.config.engine.block_tokens or TOKENS
        self.chunk = chunk
        names = [f"layers.{layer}.attn" for layer in range(LAYERS)]
        each = [Group(tuple(names[number :: len(windows)]), window) for number, window in enumerate(windows)]
        self.groups = Groups(tuple(each))
        self.caches: list[dict[str, torch.Tensor]] = []
        self.workers = []
        for rank in range(ranks):
            own = rank_config(self.config, Place(rank, ranks))
            memory = [torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT) for _ in each[0].layers]
            caches = {name: memory[place] for group in each for place, name in enumerate(group.layers)}
            views = view_caches(caches, block_tokens=TOKENS, block_count=BLOCKS, groups=self.groups.layers)
            geometry = views.kv.geometry(self.store_tokens)
            plane = open_dataplane(own, geometry, views.kv, clock=clock, files=files, epoch=clock.now_ns())
            self.caches.append(caches)
            self.workers.append(WorkerSide(plane, views, self.groups, own, clock, "toy"))
        starts = [worker.hello().start for worker in self.workers]
        identity = Identity(
            model="toy", revision="0", kv_dtype="float32", layout="toy", block_tokens=self.store_tokens, tp_size=ranks
        )
        place = Place(0, ranks)
        home = catalog_home(self.config, place)
        coordinator = open_coordinator(rank_config(self.config, place), identity, starts, home, files=files)
        sched = fit_window(starts[0].window_slots, starts[0].slot_bytes, prefetches_max=self.config.engine.loads_max)
        self.pool = ToyPool()
        keys = BlockKeys(coordinator.identity, Sizes(store=self.store_tokens, engine=TOKENS))
        saves = Saves(coordinator, Sessions(self.config.engine.sessions_max), keys, self.groups, self.pool)
        loads = Loads(sched, clock)
        self.side = SchedulerSide(coordinator, loads, saves, keys, self.groups, self.config.engine.hold_ns_max)
        self.requests: dict[str, ToyRequest] = {}
        self._loaded_on: Counter[str] = Counter()
        self._pause = threading.Event()
        """Never set: lets other threads run when there is nothing to compute, as vLLM's loop does."""

    # -- requests ---------------------------------------------------------------------------------------

    def add(self, request: ToyRequest) -> ToyRequest:
        self.requests[request.request_id] = request
        return request

    def run(self, *requests: ToyRequest) -> None:
        """Compute requests, and let everything end."""
        for request in requests:
            self.add(request)
        self.settle()

    def settle(self) -> None:
        end_s = time.monotonic() + WAIT_S
        while self.requests or not self.side.saves.is_idle:
            assert time.monotonic() < end_s, {name: request.state for name, request in self.requests.items()}
            self.step()
        done = threading.Event()
        self.side.coordinator.fence(done.set)
        assert done.wait(30)
        self.check()

    def end_saves(self) -> None:
        """Let every save end, without a step."""
        end_s = time.monotonic() + WAIT_S
        while not self.side.saves.is_idle:
            assert time.monotonic() < end_s, "a save never ends"
            for worker in self.workers:
                self.side.take_output(worker.take_reports(), set())
            self.side.saves.settle()
            self._pause.wait(PAUSE_S)

    def abort(self, name: str) -> None:
        self._finish(self.requests[name])

    def preempt(self, name: str) -> None:
        """Take a running request's blocks; it begins anew, and nobody is told."""
        request = self.requests[name]
        assert request.state == "running", request.state
        self._free(request)
        request.num_computed_tokens, request.state = 0, "waiting"

    def check(self) -> None:
        self.side.check()
        assert not self.side._tried and not self.side.saves._progress, "of requests that are gone"
        held = self.side.coordinator.catalog.open_counts()
        assert held == {"leases": 0, "plans": 0, "draining": 0}, held
        assert sorted(self.pool.free) == list(range(1, BLOCKS))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.side.close()

    # -- one step, in vLLM's order ----------------------------------------------------------------------

    def step(self) -> None:
        scheduled = {}
        for request in list(self.requests.values()):
            if request.state == "running":
                self._drop_skipped(request)
            if self._admit(request):
                rest = request.num_tokens - request.num_computed_tokens
                scheduled[request.request_id] = min(rest, self.chunk)
        orders = self.side.take_orders(scheduled, lambda name: self.requests[name].tables)
        outputs = [self._work(rank, worker, orders, scheduled) for rank, worker in enumerate(self.workers)]
        for name, count in scheduled.items():
            self.requests[name].num_computed_tokens += count
        self._note_failures(set().union(*(failed for _, failed, _, _ in outputs)))
        self._note_errors(set().union(*(errors for _, _, errors, _ in outputs)), scheduled)
        reports = Reports()
        for *_, report in outputs:
            reports = reports.joined(report or Reports())
        self._loaded_on.update(name for loaded, *_ in outputs for name in loaded)
        everywhere = {name for name, count in self._loaded_on.items() if count == len(self.workers)}
        self.side.take_output(reports, everywhere)
        for name in everywhere:
            del self._loaded_on[name]
            request = self.requests[name]
            if request.state == "ended":
                self._release(request)
            elif request.num_computed_tokens:
                request.state = "running"
            else:  # vLLM gives the blocks back when a load brought nothing.
                self._free(request)
                request.state = "waiting"
        for name in scheduled:
            request = self.requests[name]
            if request.state == "running" and request.num_computed_tokens == request.num_tokens:
                request.num_output_tokens = 1
                self._finish(request)
        if not scheduled:
            self._pause.wait(PAUSE_S)

    def _admit(self, request: ToyRequest) -> bool:
        """Whether a request is computed in this step."""
        if request.state != "waiting":
            return request.state == "running"
        tokens, is_async = self.side.matched(request, 0)
        if tokens is None:
            return False
        need, skipped = -(-request.num_tokens // TOKENS), [group.first_needed(tokens) // TOKENS for group in self.each]
        if sum(need - gone for gone in skipped) > len(self.pool.free):
            return False
        request.tables = [[0] * gone + self.pool.take(need - gone) for gone in skipped]
        self.side.allocated(request, request.tables, tokens)
        request.num_computed_tokens = request.loaded_tokens = tokens
        assert sum(self.side.hit_sources(request).values()) == tokens
        request.state = "loading" if is_async else "running"
        return not is_async

    @property
    def each(self) -> tuple[Group, ...]:
        return self.groups.each

    def _drop_skipped(self, request: ToyRequest) -> None:
        """Give back what no later token sees."""
        for group, table in zip(self.each, request.tables, strict=bool(request.tables)):
            for place in range(group.first_needed(request.num_computed_tokens) // TOKENS):
                number, table[place] = table[place], 0
                if number:
                    self.pool.free_blocks([self.pool.blocks[number]])

    def _work(self, rank: int, worker: WorkerSide, orders: Orders, scheduled: dict[str, int]) -> tuple[Any, ...]:
        worker.start_loads(orders)
        for layer in range(LAYERS):
            worker.wait_layer(f"layers.{layer}.attn")
        worker.settle()
        errors = worker.take_errors()
        for name, count in scheduled.items():
            self._compute(rank, self.requests[name], count, errors)
        worker.start_saves(orders)
        loaded, failed = worker.take_loaded()
        return loaded, failed, errors | worker.take_errors(), worker.take_reports()

    def _compute(self, rank: int, request: ToyRequest, count: int, errors: set[int]) -> None:
        """Check what the tokens see, and fill in their own."""
        start, digests = request.num_computed_tokens, request.block_hashes
        for group, table in zip(self.each, request.tables, strict=True):
            for place in range(group.first_needed(start) // TOKENS, min(len(digests), (start + count) // TOKENS)):
                if place >= start // TOKENS:
                    for layer in group.layers:
                        self.caches[rank][layer][table[place]] = content(digests[place], layer, rank)
                elif table[place] not in errors:
                    right = self._is_right(rank, group, table[place], digests[place])
                    assert right, f"{request.request_id}: wrong KV in block {place} of {group}"

    def _is_right(self, rank: int, group: Group, block: int, digest: bytes) -> bool:
        caches = self.caches[rank]
        return all(torch.equal(caches[layer][block], content(digest, layer, rank)) for layer in group.layers)

    def _note_failures(self, failed: set[str]) -> None:
        """Loads that are to be computed as a whole."""
        for name in failed:
            request = self.requests[name]
            assert not self.groups.is_plain and request.state in ("loading", "ended")
            request.num_computed_tokens = request.loaded_tokens = 0
            request.failures += 1

    def _note_errors(self, bad: set[int], scheduled: dict[str, int]) -> None:
        """As vLLM: a request goes back to its first bad block, and its tokens of this step do not count."""
        assert not bad or self.groups.is_plain, "ids of blocks say nothing here"
        for request in self.requests.values():
            hit = [place for table in request.tables for place, block in enumerate(table) if block in bad]
            if hit and request.state in ("loading", "running"):
                request.num_computed_tokens = min(request.num_computed_tokens, hit[0] * TOKENS)
                request.loaded_tokens = min(request.loaded_tokens, request.num_computed_tokens)

    def _finish(self, request: ToyRequest) -> None:
        is_loading, request.state = request.state == "loading", "ended"
        if not is_loading:
            self._drop_skipped(request)  # vLLM does so before it tells the connector.
        self.side.finished(request, request.tables)
        if not is_loading:
            self._release(request)

    def _release(self, request: ToyRequest) -> None:
        self._free(request)
        del self.requests[request.request_id]

    def _free(self, request: ToyRequest) -> None:
        numbers = [number for table in request.tables for number in table if number]
        self.pool.free_blocks([self.pool.blocks[number] for number in numbers])
        request.tables = []


def content(digest: bytes, layer: str, rank: int) -> torch.Tensor:
    """The KV of a block."""
    seed = int.from_bytes(digest[:6], "little") * 64 + int(layer.split(".")[1]) * 8 + rank
    values = np.random.default_rng(seed).standard_normal((HEADS, TOKENS, CONTENT))
    return torch.from_numpy(values.astype(np.float32))


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + place * 31) % 50_000 for place in range(count)]
