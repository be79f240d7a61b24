"""FlatCake: a flat store for the KV cache of LLM sessions, on DRAM and SSD as peers.

    store = flatcake.open(config, identity, kv)
    lease = store.lease(store.match(tokens))
    restore = store.restore(lease, pages)

Needs no GPU to be imported or used.
"""

from flatcake.assemble import open_store as open
from flatcake.config import (
    CapacityConfig,
    IOConfig,
    LayoutConfig,
    PlacementConfig,
    RetentionConfig,
    StoreConfig,
    TimeoutConfig,
    from_mapping,
    to_mapping,
)
from flatcake.errors import (
    AddressError,
    CapacityError,
    ClosedError,
    ConfigError,
    DeviceError,
    FlatCakeError,
    FormatError,
    OwnershipError,
    PageTableError,
    PlanError,
    ShapeError,
)
from flatcake.gva import Medium
from flatcake.hits import Lease, Match
from flatcake.io.paged import PagedKV, PagedTensor
from flatcake.io.restore import Restore, RestoreResult
from flatcake.io.save import Save, SaveResult
from flatcake.keys import Identity
from flatcake.loop.loop import Loop
from flatcake.loop.ready import Ready
from flatcake.loop.request import EnginePages, LoopOptions, LoopRequest, sched_config
from flatcake.placement import Decision, Placement, TablePlacement, Turn, TurnSignals
from flatcake.sched.actions import Prefix
from flatcake.sched.settings import SchedConfig
from flatcake.stats import MediumStats, StoreStats
from flatcake.store import Store

__version__ = "0.1.0.dev0"

__all__ = [
    "AddressError",
    "CapacityConfig",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "Decision",
    "DeviceError",
    "EnginePages",
    "FlatCakeError",
    "FormatError",
    "IOConfig",
    "Identity",
    "LayoutConfig",
    "Lease",
    "Loop",
    "LoopOptions",
    "LoopRequest",
    "Match",
    "Medium",
    "MediumStats",
    "OwnershipError",
    "PageTableError",
    "PagedKV",
    "PagedTensor",
    "Placement",
    "PlacementConfig",
    "PlanError",
    "Prefix",
    "Ready",
    "Restore",
    "RestoreResult",
    "RetentionConfig",
    "Save",
    "SaveResult",
    "SchedConfig",
    "ShapeError",
    "Store",
    "StoreConfig",
    "StoreStats",
    "TablePlacement",
    "TimeoutConfig",
    "Turn",
    "TurnSignals",
    "from_mapping",
    "open",
    "sched_config",
    "to_mapping",
]
