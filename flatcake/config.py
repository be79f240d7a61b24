"""Every setting of a store: its default, its meaning and its check.

Pure: no file, environment or device is looked at here.  `settings` reads those and hands a mapping
to `from_mapping`; programs build `StoreConfig` directly.  Where 0 means "derived", `store` derives it at open.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from flatcake.fields import build, check_types, dump, require
from flatcake.gva import OFFSET_BYTES_LIMIT
from flatcake.units import DIRECT_BYTES, SECOND, GiB, KiB, MiB

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """How much each medium may hold, and when scopes are reclaimed."""

    dram_bytes_max: int = 1 * GiB
    """Size of the DRAM arena; 0 leaves the medium out."""
    ssd_bytes_max: int = 8 * GiB
    """Size of the SSD pool, over all directories; 0 leaves the medium out."""
    pool_file_bytes: int = 1 * GiB
    """Size of one pool file, preallocated; at most the pool's share of one directory."""
    ssd_free_bytes_min: int = 1 * GiB
    """Space of the filesystem that the pool leaves to others."""
    high_watermark: float = 0.95
    """Share of a medium in use above which scopes are reclaimed."""
    low_watermark: float = 0.90
    """Share of a medium in use at which reclaiming stops."""
    dram_idle_ns_max: int = 600 * SECOND
    """A DRAM scope unused for longer than this is dropped before any other."""
    index_entries_max: int = 0
    """Blocks that the index has room for; 0 derives it from the capacity and the bytes of a block."""

    def __post_init__(self) -> None:
        check_types(self)
        pool = self.ssd_bytes_max
        for name in ("dram_bytes_max", "ssd_bytes_max"):
            addressable = 0 <= getattr(self, name) <= OFFSET_BYTES_LIMIT
            require(self, name, addressable, f"0 to {OFFSET_BYTES_LIMIT} bytes, as far as an address reaches")
        require(self, "ssd_bytes_max", pool > 0 or self.dram_bytes_max > 0, "more than 0 bytes, as dram_bytes_max is 0")
        require(self, "pool_file_bytes", _is_direct(self.pool_file_bytes), f"a multiple of {DIRECT_BYTES} bytes")
        fits = pool == 0 or self.pool_file_bytes <= pool
        require(self, "pool_file_bytes", fits, f"at most ssd_bytes_max={pool}")
        require(self, "ssd_free_bytes_min", self.ssd_free_bytes_min >= 0, "0 or more bytes")
        require(self, "high_watermark", 0 < self.high_watermark <= 1, "above 0 and at most 1")
        below = 0 < self.low_watermark < self.high_watermark
        require(self, "low_watermark", below, f"above 0 and below high_watermark={self.high_watermark}")
        require(self, "dram_idle_ns_max", self.dram_idle_ns_max >= 0, "0 or more nanoseconds")
        require(self, "index_entries_max", self.index_entries_max >= 0, "0 or more blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementConfig:
    """Bounds of the placement rules (paper Table 2)."""

    agent_tokens_min: int = 32_768
    """A context of at least so many tokens counts as a long, agentic one: SSD."""
    short_reply_tokens_limit: int = 512
    """A prior reply shorter than this counts as a short turn of chat: DRAM."""
    shared_tokens_max: int = 16_384
    """At most so many leading tokens are put into DRAM as a shared prompt."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self, "agent_tokens_min", self.agent_tokens_min >= 1, "at least 1 token")
        require(self, "short_reply_tokens_limit", self.short_reply_tokens_limit >= 0, "0 or more tokens")
        require(self, "shared_tokens_max", self.shared_tokens_max >= 0, "0 or more tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConfig:
    """How an extent is cut, and how extents grow.  Either kind is read alike, so it is not in the identity."""

    kind: Literal["lanes", "segments"] = "lanes"
    """`lanes`: one range a layer and extent; `segments`: the paper's layer-major segment a turn."""
    lane_bytes_max: int = 24 * MiB
    """Lanes of a growing scope's extents get longer up to this: as large as a slot on a GPU, so that a tile is one
    read; media gain nothing beyond 8 MiB, but each read costs its share of Python."""
    growth_percent: int = 25
    """The next extent of a scope has room for this share of the blocks that the scope has already."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self, "lane_bytes_max", _is_direct(self.lane_bytes_max), f"a multiple of {DIRECT_BYTES} bytes")
        require(self, "growth_percent", 0 <= self.growth_percent <= 1000, "0 to 1000 percent")


@dataclass(frozen=True, slots=True, kw_only=True)
class IOConfig:
    """How reads and writes are formed, staged and carried out (paper §3.4)."""

    engine: Literal["auto", "posix", "kvikio", "cufile", "memory"] = "auto"
    """What moves bytes between SSD and window; `auto` probes at open and reports its choice."""
    direct: Literal["auto", "on", "off"] = "auto"
    """O_DIRECT; `auto` falls back, and says so, where the filesystem refuses it."""
    verify: Literal["full", "off"] = "full"
    """Whether restored bytes are compared with their checksums."""
    gap_bytes_limit: int = 64 * KiB
    """A read runs through any hole smaller than this (Δgap)."""
    read_bytes_max: int = 24 * MiB
    """Largest single read; engines cut it into tasks that run side by side."""
    window_bytes_max: int = 256 * MiB
    """Most staging memory of one device: the slots of restores, and those of saves."""
    slot_bytes: int = 0
    """Size of one window slot; 0 derives it from the device and the geometry."""
    slots_min: int = 8
    """Fewest slots that the window is cut into: some being filled, some being scattered."""
    save_slots: int = 2
    """Slots of the save path; restores have the others."""
    restores_max: int = 64
    """Restores under way at once; more wait."""
    saves_max: int = 64
    """Saves under way at once; more are refused."""
    io_threads: int = 0
    """Threads of the posix engine; 0 takes three of four processors, at least 8 and at most 12."""
    task_bytes: int = 4 * MiB
    """Bytes that one posix thread takes at a time."""
    kvikio_threads: int = 0
    """Threads of kvikio's pool; 0 takes all processors but two, up to 16: the pump needs one of its own."""
    kvikio_task_bytes: int = MiB
    """Bytes that one kvikio thread takes at a time: small enough that a tile's last task is not waited for long."""
    scatter_sm_percent: int = 100
    """Share of the GPU's multiprocessors that scatter and gather may use, so that the model is not starved."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("read_bytes_max", "task_bytes", "kvikio_task_bytes"):
            require(self, name, _is_direct(getattr(self, name)), f"a multiple of {DIRECT_BYTES} bytes")
        for name in ("save_slots", "restores_max", "saves_max"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("io_threads", "kvikio_threads"):
            require(self, name, getattr(self, name) >= 0, "0 or more")
        require(self, "gap_bytes_limit", self.gap_bytes_limit >= 0, "0 or more bytes")
        require(self, "slots_min", self.slots_min >= 2, "at least 2 slots, one being filled and one being scattered")
        whole = self.slot_bytes == 0 or _is_direct(self.slot_bytes)
        require(self, "slot_bytes", whole, f"0, or a multiple of {DIRECT_BYTES} bytes")
        need_bytes = self.slots_min * (self.slot_bytes or DIRECT_BYTES)
        enough = self.window_bytes_max >= need_bytes
        require(
            self, "window_bytes_max", enough, f"at least slots_min={self.slots_min} x slot_bytes, {need_bytes} bytes"
        )
        require(self, "scatter_sm_percent", 1 <= self.scatter_sm_percent <= 100, "1 to 100 percent")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionConfig:
    """How long unused sessions stay, and how much may be written for all of them."""

    ttl_ns: int = 0
    """A session or shared prompt that nobody has leased or saved for longer than this is dropped, restarts
    included; 0 keeps it until its room is needed."""
    ssd_daily_write_bytes_max: int = 0
    """Bytes a day that saves may write to SSD, at most as many at once; those beyond are refused.  0 for no bound."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self, "ttl_ns", self.ttl_ns >= 0, "0 or more nanoseconds")
        require(self, "ssd_daily_write_bytes_max", self.ssd_daily_write_bytes_max >= 0, "0 or more bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutConfig:
    """How long each wait may last.  All of them end; none is unbounded."""

    lease_ns: int = 60 * SECOND
    """A lease that is not closed ends after this."""
    restore_ns: int = 60 * SECOND
    """A restore without a deadline of its own is cancelled after this."""
    save_ns: int = 120 * SECOND
    """A save that has not been published is given up after this."""
    rank_report_ns: int = 30 * SECOND
    """A rank that has not reported a plan's end counts as missing after this."""
    close_ns: int = 10 * SECOND
    """`close` waits this long for reads and writes under way."""

    def __post_init__(self) -> None:
        check_types(self)
        for entry in fields(self):
            require(self, entry.name, getattr(self, entry.name) > 0, "more than 0 nanoseconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Everything that `flatcake.open` is told, apart from the identity and the paged tensors."""

    directories: tuple[str, ...] = ()
    """Where the SSD pool lives: one directory, or several that share it.  One process owns each."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`: where the paged tensors are."""
    name: str = "flatcake"
    """Names this store in logs and reports."""
    rank: int = 0
    """Which of the data planes of one catalog this is."""
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    """Sizes of the media."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which medium a turn goes to."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """Order of bytes in an extent."""
    io: IOConfig = field(default_factory=IOConfig)
    """Reads, writes and their staging."""
    retention: RetentionConfig = field(default_factory=RetentionConfig)
    """How long sessions stay, and how much is written for them."""
    timeouts: TimeoutConfig = field(default_factory=TimeoutConfig)
    """Bounds of all waits."""

    def __post_init__(self) -> None:
        check_types(self)
        directories, pool = self.directories, self.capacity.ssd_bytes_max
        wanted = pool > 0 and self.io.engine != "memory"
        require(self, "directories", bool(directories) or not wanted, f"one or more, as capacity.ssd_bytes_max={pool}")
        require(self, "directories", all(directories), "no empty name")
        require(self, "directories", len(set(directories)) == len(directories), "each directory once")
        share = pool // max(1, len(directories))
        fits = pool == 0 or self.capacity.pool_file_bytes <= share
        require(self, "directories", fits, f"so few that each holds a file of pool_file_bytes (its share is {share})")
        require(self, "device", _DEVICE.fullmatch(self.device) is not None, "auto, cpu, cuda or cuda:N")
        require(self, "name", bool(self.name), "a name")
        require(self, "rank", self.rank >= 0, "0 or more")


def from_mapping(mapping: Mapping[str, object]) -> StoreConfig:
    """Build a configuration from nested mappings, as read from TOML or JSON; absent keys keep their defaults.

    Sizes and durations (`…_bytes…`, `…_ns…`) may be text with a unit, lists stand for tuples, and a whole
    number may stand for a fraction.

    Raises:
        ConfigError: An unknown key (names the nearest one), a value of another type, or one that is refused.
    """
    return build(StoreConfig, mapping)


def to_mapping(config: StoreConfig) -> dict[str, object]:
    """Write a configuration as nested plain values, all fields included; `from_mapping` gives back an equal one."""
    return dump(config)


def _is_direct(size_bytes: int) -> bool:
    return size_bytes > 0 and size_bytes % DIRECT_BYTES == 0
