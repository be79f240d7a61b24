"""The class that vLLM loads: `--kv-transfer-config '{"kv_connector": "FlatCakeConnector", …}'`.

Thin: each hook hands over to the scheduler's or the worker's side.  With `metrics` and `events` the only modules
that import vLLM.  Written against vLLM 0.32; hooks of later versions have defaults in vLLM's base class.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from flatcake.assemble import open_dataplane
from flatcake.clock import MonotonicClock
from flatcake.coordinator import open_coordinator
from flatcake.engines.vllm.blockkeys import BlockKeys, Sizes
from flatcake.engines.vllm.changes import Changes
from flatcake.engines.vllm.events import events_of
from flatcake.engines.vllm.identity import (
    block_tokens_of,
    identity_of,
    layout_text,
    place_of,
    require_supported,
)
from flatcake.engines.vllm.loads import Loads
from flatcake.engines.vllm.metrics import Deltas, FlatCakeProm, FlatCakeStats
from flatcake.engines.vllm.options import VllmConfig, catalog_home, rank_config
from flatcake.engines.vllm.orders import Hello, Orders, Reports
from flatcake.engines.vllm.saving import Saves
from flatcake.engines.vllm.scheduling import SchedulerSide
from flatcake.engines.vllm.signals import Sessions
from flatcake.engines.vllm.views import view_caches
from flatcake.engines.vllm.worker import WorkerSide
from flatcake.gva import Medium
from flatcake.io.seam import Files
from flatcake.sched.settings import fit_window
from flatcake.settings import describe, gather

log = logging.getLogger("vllm.flatcake")

_SOURCES = {Medium.DRAM: CacheHitSource.HOST, Medium.SSD: CacheHitSource.DISK}


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to each worker."""

    orders: Orders


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """From the workers to the scheduler."""

    reports: Reports

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "StepReports":
        return StepReports(self.reports.joined(other.reports))


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """From each worker to the scheduler, once."""

    hello: Hello


class FlatCakeConnector(KVConnectorBase_V1, SupportsHMA):
    """KV blocks on DRAM and SSD, behind vLLM's scheduler and workers."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._groups = require_supported(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = gather(VllmConfig, transfer.kv_connector_extra_config or {}, os.environ)
        self._block_tokens = block_tokens_of(vllm_config, self._config.engine, self._groups)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._deltas = Deltas()
        if role == KVConnectorRole.SCHEDULER:
            log.info("FlatCake: %s", describe(self._config))
            if transfer.kv_load_failure_policy != "recompute":
                log.warning(
                    'kv_load_failure_policy is "%s": a request fails when a stored block cannot be read; '
                    'say "kv_load_failure_policy": "recompute" to have it computed instead',
                    transfer.kv_load_failure_policy,
                )

    # -- both -------------------------------------------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost save is a later miss, no more."""
        return False

    def get_kv_connector_stats(self) -> FlatCakeStats | None:
        if self._scheduler is not None:
            return self._deltas.take(self._scheduler.coordinator.counters())
        return self._deltas.take(self._worker.counters()) if self._worker is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FlatCakeStats:
        return FlatCakeStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> FlatCakeProm:
        return FlatCakeProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Loads from DRAM are waited for layer by layer, in Python."""
        return True

    def files(self) -> Files:
        """The seam to files; tests hand in one that fails on purpose."""
        return Files()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    # -- the scheduler's --------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Handshake]) -> None:
        """Every worker is up: open the catalog."""
        hellos = [metadata[rank].hello for rank in sorted(metadata)]
        engine, place = self._config.engine, place_of(self._vllm_config)
        identity = identity_of(self._vllm_config, engine, self._block_tokens, (hello.layout for hello in hellos))
        starts = [hello.start for hello in hellos]
        home = catalog_home(self._config, place)
        coordinator = open_coordinator(rank_config(self._config, place), identity, starts, home, files=self.files())
        sched = fit_window(
            starts[0].window_slots,
            starts[0].slot_bytes,
            order=engine.order,
            prefetches_max=engine.loads_max,
            wait_ns_max=engine.wait_ns_max,
        )
        sizes = Sizes(store=self._block_tokens, engine=self._vllm_config.cache_config.block_size)
        block_keys, manager = BlockKeys(coordinator.identity, sizes), self._kv_cache_manager
        assert manager is not None  # vLLM's scheduler has bound it before its workers are up.
        saves = Saves(coordinator, Sessions(engine.sessions_max), block_keys, self._groups, manager.block_pool)
        loads = Loads(sched, MonotonicClock())
        self._scheduler = SchedulerSide(coordinator, loads, saves, block_keys, self._groups, engine.hold_ns_max)
        events = getattr(self._vllm_config, "kv_events_config", None)
        if events is not None and events.enable_kv_cache_events:
            saves.changes = Changes(coordinator.catalog.space.index, self._block_tokens)
        log.info(
            "FlatCake: %d rank(s), %s, %d blocks stored",
            len(starts),
            starts[0].io_path,
            len(coordinator.catalog.space.index),
        )

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        found = self._scheduling.hit_sources(request)
        return {_SOURCES[medium]: tokens for medium, tokens in found.items()}

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        assert self._kv_cache_manager is not None
        scheduled, tables_of = scheduler_output.num_scheduled_tokens, self._kv_cache_manager.get_block_ids
        return StepMetadata(self._scheduling.take_orders(scheduled, tables_of))

    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        self._scheduling.take_output(meta.reports if meta else None, connector_output.finished_recving or set())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.finished(request, block_ids)
        return False, None  # Saves hold their blocks themselves.

    def has_pending_push_work(self) -> bool:
        """vLLM steps on until saves are over, also when it has no request."""
        return self._scheduler is not None and not self._scheduler.saves.is_idle

    def take_events(self) -> list[Any]:
        changes = self._scheduling.saves.changes
        return list(events_of(changes.take(), self._block_tokens)) if changes is not None else []

    def reset_cache(self) -> bool:
        self._scheduling.reset()
        return True

    # -- a worker's -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Open the data plane over vLLM's KV tensors."""
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        place = place_of(self._vllm_config, get_tensor_model_parallel_rank())
        config, clock = rank_config(self._config, place), MonotonicClock()
        views = view_caches(
            kv_caches,
            block_tokens=self._vllm_config.cache_config.block_size,
            block_count=self._kv_cache_config.num_blocks,
            groups=self._groups.layers,
        )
        geometry = views.kv.geometry(self._block_tokens)
        plane = open_dataplane(config, geometry, views.kv, clock=clock, files=self.files(), epoch=clock.now_ns())
        layout = layout_text(vllm.__version__, self._vllm_config, kv_caches)
        self._worker = WorkerSide(plane, views, self._groups, config, clock, layout)

    def get_handshake_metadata(self) -> Handshake:
        return Handshake(self._working.hello())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.start_loads(self._get_connector_metadata().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._working.wait_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved after their step, when all layers have them."""

    def wait_for_save(self) -> None:
        self._working.settle()
        self._working.start_saves(self._get_connector_metadata().orders)

    def get_transfer_results(self, finished_req_ids: Iterable[str]) -> KVConnectorTransferResults:
        self._working.settle()
        loaded, failed = self._working.take_loaded()
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.take_errors()

    def build_connector_worker_meta(self) -> StepReports | None:
        reports = self._working.take_reports()
        return StepReports(reports) if reports is not None else None

    # -- private ----------------------------------------------------------------------------------------

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "no worker has said hello yet"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "no KV tensors are registered yet"
        return self._worker
