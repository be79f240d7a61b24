"""What the store counts, in vLLM's own log line and under its `/metrics`.

Hits per medium need nothing here: vLLM asks the connector for them and has counters of its own.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

METRIC = "vllm:flatcake_events"
LABEL = "event"


@dataclass
class FlatCakeStats(KVConnectorStats):
    """Increases since the last step, by name; those of several ranks are added up."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data


class FlatCakeProm(KVConnectorPromMetrics):
    """One counter with a label that names what was counted: few dozen values, all of them the store's own words."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counter = self._counter_cls(
            name=METRIC,
            documentation="What FlatCake counted: blocks and bytes by medium and path, and a reason for each failure.",
            labelnames=[*labelnames, LABEL],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            self._counter.labels(*self.per_engine_labelvalues[engine_idx], name).inc(count)


class Deltas:
    """Turns totals into what came since the last call."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()

    def take(self, totals: Mapping[str, int]) -> FlatCakeStats | None:
        """None where nothing was counted."""
        now = Counter(totals)
        new = {name: count - self._before[name] for name, count in now.items() if count > self._before[name]}
        self._before = now
        return FlatCakeStats(data=new) if new else None
