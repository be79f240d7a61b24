"""Settings under vLLM: those of a store, and a few of the adapter's own.  Where each rank's part of them lies.

Pure.  The same keys everywhere: `kv_connector_extra_config`, a settings file, `FLATCAKE_…` in the environment.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from flatcake.config import CapacityConfig, StoreConfig
from flatcake.errors import ConfigError
from flatcake.fields import check_types, require
from flatcake.homes import catalog_in, rank_in, replica_in
from flatcake.units import DIRECT_BYTES, SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How vLLM's scheduler is answered."""

    block_tokens: int = 0
    """Tokens in one block of the store, a multiple of vLLM's block size; 0: that size.  Larger blocks are padded
    less and hit less finely."""
    revision: str = ""
    """Names the weights; empty: a fingerprint of the model's files and configuration."""
    order: Literal["two_queues", "fifo_prefetch"] = "two_queues"
    """FC-MAS, or (for comparison) loads from SSD in order of arrival."""
    loads_max: int = 4
    """Loads from SSD under way at once; further requests are held."""
    wait_ns_max: int = 2 * SECOND
    """Age cap: a request held longer than this is loaded before younger ones; 0: no cap."""
    hold_ns_max: int = 0
    """A request whose load has not ended after this is computed without it; 0: however long it takes."""
    sessions_max: int = 65_536
    """Sessions whose turns are remembered, the last used ones."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("block_tokens", "wait_ns_max", "hold_ns_max"):
            require(self, name, getattr(self, name) >= 0, "0 or more")
        for name in ("loads_max", "sessions_max"):
            require(self, name, getattr(self, name) >= 1, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(StoreConfig):
    """What `kv_connector_extra_config` holds: the settings of a store, for all ranks together, and `engine`."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """The adapter's own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which of an engine's workers this is."""

    rank: int
    ranks: int
    replica: int = 0
    """Data-parallel replica: an engine of its own."""
    replicas: int = 1


def rank_config(config: VllmConfig, place: Place) -> VllmConfig:
    """The settings of one rank: its own directories, and its share of each medium.

    Raises:
        ConfigError: The share is too small for the configured pool files.
    """
    share = place.ranks * place.replicas
    capacity = config.capacity
    ssd_bytes = capacity.ssd_bytes_max // share
    files_bytes = min(capacity.pool_file_bytes, max(1, ssd_bytes // max(1, len(config.directories))))
    try:
        own: CapacityConfig = replace(
            capacity,
            dram_bytes_max=capacity.dram_bytes_max // share,
            ssd_bytes_max=ssd_bytes,
            pool_file_bytes=files_bytes // DIRECT_BYTES * DIRECT_BYTES if ssd_bytes else capacity.pool_file_bytes,
        )
    except ConfigError as error:
        raise ConfigError(f"the share of one of {share} ranks: {error}") from None
    directories = tuple(rank_in(home_of(given, place), place.rank) for given in config.directories)
    daily_bytes = -(-config.retention.ssd_daily_write_bytes_max // share)  # 0 stays without a bound.
    retention = replace(config.retention, ssd_daily_write_bytes_max=daily_bytes)
    return replace(config, directories=directories, rank=place.rank, capacity=own, retention=retention)


def catalog_home(config: VllmConfig, place: Place) -> str:
    """Directory of the manifest, which is the scheduler's; empty without an SSD pool."""
    return catalog_in(home_of(config.directories[0], place)) if config.directories else ""


def home_of(directory: str, place: Place) -> str:
    """Where an engine's part of a directory lies."""
    return directory if place.replicas == 1 else replica_in(directory, place.replica)
