"""The adapter's two sides under a toy engine: vLLM's order of calls, without vLLM.

Its KV is a function of the block's hash, layer and rank, so every block that a request runs on can be checked.
"""

import hashlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatcake.assemble import open_dataplane
from flatcake.clock import MonotonicClock
from flatcake.coordinator import open_coordinator
from flatcake.engines.vllm.loads import Loads
from flatcake.engines.vllm.options import Place, VllmConfig, catalog_home, rank_config
from flatcake.engines.vllm.orders import Orders, Reports
from flatcake.engines.vllm.scheduling import SchedulerSide, Sizes
from flatcake.engines.vllm.signals import Sessions
from flatcake.engines.vllm.views import view_caches
from flatcake.engines.vllm.worker import WorkerSide
from flatcake.fields import build
from flatcake.io.seam import Files
from flatcake.keys import Identity
from flatcake.sched.settings import fit_window

TOKENS, BLOCKS, LAYERS, HEADS, CONTENT = 4, 96, 3, 2, 64
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
    blocks: list[int] = field(default_factory=list)
    state: str = "waiting"
    loaded_tokens: int = 0
    errors: set[int] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return hashes(self.tokens, self.cache_salt or "")


class ToyEngine:
    """A scheduler without a prefix cache of its own, and its workers."""

    def __init__(self, directory: Path, *, ranks: int = 1, files: Files | None = None, **settings: Any) -> None:
        settings = {"capacity": SIZES, "io": IO, "directories": [str(directory)]} | settings
        self.config = build(VllmConfig, settings)
        clock, files = MonotonicClock(), files or Files()
        self.store_tokens = self.config.engine.block_tokens or TOKENS
        self.caches, self.workers = [], []
        for rank in range(ranks):
            own = rank_config(self.config, Place(rank, ranks))
            caches = {
                f"layers.{layer}.attn": torch.zeros(BLOCKS, HEADS, TOKENS, CONTENT) for layer in reversed(range(LAYERS))
            }
            views = view_caches(caches, block_tokens=TOKENS, block_count=BLOCKS)
            geometry = views.kv.geometry(self.store_tokens)
            plane = open_dataplane(own, geometry, views.kv, clock=clock, files=files, epoch=clock.now_ns())
            self.caches.append(caches)
            self.workers.append(WorkerSide(plane, views, own, clock, "toy"))
        starts = [worker.hello().start for worker in self.workers]
        identity = Identity(
            model="toy", revision="0", kv_dtype="float32", layout="toy", block_tokens=self.store_tokens, tp_size=ranks
        )
        place = Place(0, ranks)
        home = catalog_home(self.config, place)
        coordinator = open_coordinator(rank_config(self.config, place), identity, starts, home, files=files)
        sched = fit_window(starts[0].window_slots, starts[0].slot_bytes, prefetches_max=self.config.engine.loads_max)
        self.side = SchedulerSide(
            coordinator,
            Loads(sched, clock),
            Sessions(self.config.engine.sessions_max),
            Sizes(store=self.store_tokens, engine=TOKENS),
            self.config.engine.hold_ns_max,
        )
        self.free = list(range(1, BLOCKS))
        self.requests: dict[str, ToyRequest] = {}
        self.saving: set[str] = set()

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
        while self.requests:
            assert time.monotonic() < end_s, {name: request.state for name, request in self.requests.items()}
            self.step()
        done = threading.Event()
        self.side.coordinator.fence(done.set)
        assert done.wait(30)
        self.check()

    def abort(self, name: str) -> None:
        request = self.requests[name]
        is_loading = request.state == "loading"
        request.state = "ended"
        delay = self.side.finished(request, request.blocks)
        if delay:
            self.saving.add(name)
        elif not is_loading:
            self._release(request)

    def check(self) -> None:
        self.side.check()
        held = self.side.coordinator.catalog.open_counts()
        assert held == {"leases": 0, "plans": 0, "draining": 0}, held
        assert sorted(self.free) == list(range(1, BLOCKS))

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.side.close()

    # -- one step, in vLLM's order ----------------------------------------------------------------------

    def step(self) -> None:
        running = [request for request in list(self.requests.values()) if self._admit(request)]
        orders = self.side.take_orders()
        outputs = [self._work(rank, worker, orders, running) for rank, worker in enumerate(self.workers)]
        bad = set().union(*(errors for _, _, errors, _ in outputs))
        for request in self.requests.values():
            self._note_errors(request, bad)
        reports = Reports()
        for *_, report in outputs:
            reports = reports.joined(report or Reports())
        saved, loaded = self._on_all(0, outputs), self._on_all(1, outputs)
        self.side.take_output(reports, loaded)
        for name in loaded:
            request = self.requests[name]
            if request.state == "ended":
                self._release(request)
            else:
                request.state = "loaded"
        for name in saved:
            self.saving.discard(name)
            self._release(self.requests[name])
        for request in running:
            if request.state == "running":
                self._end(request)

    def _admit(self, request: ToyRequest) -> bool:
        """Whether a request is computed in this step."""
        if request.state == "loaded":
            request.state = "running"
            return True
        if request.state != "waiting":
            return False
        tokens, is_async = self.side.matched(request, 0)
        if tokens is None:
            return False
        need = -(-request.num_tokens // TOKENS)
        if need > len(self.free):
            return False
        request.blocks, self.free = self.free[:need], self.free[need:]
        self.side.allocated(request, request.blocks, tokens)
        request.num_computed_tokens = request.loaded_tokens = tokens
        assert sum(self.side.hit_sources(request).values()) == tokens
        request.state = "loading" if is_async else "running"
        return not is_async

    def _work(self, rank: int, worker: WorkerSide, orders: Orders, running: list[ToyRequest]) -> tuple[Any, ...]:
        worker.start_loads(orders)
        for layer in range(LAYERS):
            worker.wait_layer(f"layers.{layer}.attn")
        worker.settle()
        worker.start_saves(orders)
        saved, loaded = worker.take_finished()
        errors = worker.take_errors()
        for request in running:
            self._compute(rank, request, errors)
        return saved, loaded, errors, worker.take_reports()

    def _compute(self, rank: int, request: ToyRequest, errors: set[int]) -> None:
        """Check what was loaded and not reported as bad, and fill in the rest."""
        for place, digest in enumerate(request.block_hashes):
            block = request.blocks[place]
            if place * TOKENS < request.num_computed_tokens and block not in errors | request.errors:
                assert self._is_right(rank, block, digest), f"{request.request_id}: wrong KV in block {place}"
            else:
                for layer in range(LAYERS):
                    self.caches[rank][f"layers.{layer}.attn"][block] = content(digest, layer, rank)

    def _is_right(self, rank: int, block: int, digest: bytes) -> bool:
        caches = self.caches[rank]
        return all(
            torch.equal(caches[f"layers.{layer}.attn"][block], content(digest, layer, rank)) for layer in range(LAYERS)
        )

    def _note_errors(self, request: ToyRequest, bad: set[int]) -> None:
        hit = [place for place, block in enumerate(request.blocks) if block in bad]
        if hit and request.state in ("loading", "running"):
            request.errors |= bad & set(request.blocks)
            request.num_computed_tokens = min(request.num_computed_tokens, hit[0] * TOKENS)
            request.loaded_tokens = request.num_computed_tokens
            if request.state == "running":  # As vLLM: its tokens of this step do not count.
                for rank in range(len(self.workers)):
                    self._compute(rank, request, set())

    def _end(self, request: ToyRequest) -> None:
        request.num_computed_tokens, request.num_output_tokens = request.num_tokens, 1
        request.state = "ended"
        if self.side.finished(request, request.blocks):
            self.saving.add(request.request_id)
        else:
            self._release(request)

    def _release(self, request: ToyRequest) -> None:
        self.free += request.blocks
        request.blocks = []
        del self.requests[request.request_id]

    def _on_all(self, which: int, outputs: list[tuple[Any, ...]]) -> set[str]:
        """Requests that every worker has reported by now."""
        done = set()
        for output in outputs:
            for name in output[which]:
                self._reports = getattr(self, "_reports", {})
                count = self._reports.get((which, name), 0) + 1
                self._reports[which, name] = count
                if count == len(self.workers):
                    del self._reports[which, name]
                    done.add(name)
        return done


def content(digest: bytes, layer: int, rank: int) -> torch.Tensor:
    """The KV of a block."""
    seed = int.from_bytes(digest[:6], "little") * 64 + layer * 8 + rank
    values = np.random.default_rng(seed).standard_normal((HEADS, TOKENS, CONTENT))
    return torch.from_numpy(values.astype(np.float32))


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + place * 31) % 50_000 for place in range(count)]
