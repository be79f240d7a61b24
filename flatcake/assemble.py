"""Puts a data plane and a catalog together from a configuration.  The only place that picks real devices.

Cheap checks come first, then memory, then the directories: a refusal leaves nothing behind.
"""

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TypedDict

from flatcake.about import About, encode_about
from flatcake.catalog import Catalog
from flatcake.clock import Clock, MonotonicClock
from flatcake.config import CapacityConfig, StoreConfig
from flatcake.dataplane import CloseParts, DataPlane, layout_number
from flatcake.errors import ShapeError
from flatcake.extents import ExtentTable, FreeRanges
from flatcake.geometry import Geometry
from flatcake.given import expect
from flatcake.gva import Medium
from flatcake.index import Index
from flatcake.io.device import Device, When
from flatcake.io.devices import open_device
from flatcake.io.manifestdb import MANIFEST, ManifestDB
from flatcake.io.paged import PagedKV
from flatcake.io.parts import MediumIO, Parts
from flatcake.io.plan import PlanLimits
from flatcake.io.pump import Pump
from flatcake.io.records import SUM_KIND_NONE, RecordBook
from flatcake.io.seam import Files
from flatcake.io.sizing import WindowSize, size_window
from flatcake.io.tilecopy import Copier, GpuCopier, HostCopier
from flatcake.io.window import Window
from flatcake.keeper import Keeper
from flatcake.kernels.checksum import SUM_KIND
from flatcake.keys import Identity
from flatcake.layout import Growth, LaneTable, room_max
from flatcake.openmedia import around_of, open_media, pool_sizes
from flatcake.placement import Placement, TablePlacement
from flatcake.space import Space, Watermarks
from flatcake.store import Store
from flatcake.units import DIRECT_BYTES, MiB
from flatcake.wear import WriteBudget

RECORD_CACHE_BYTES = 64 * MiB
FIRST_TILE_BYTES = 4 * MiB
PROGRAMS_PER_SM = 16


def open_catalog(config: StoreConfig, geometry: Geometry, placement: Placement | None = None) -> Catalog:
    """Make an empty catalog for stores of one geometry; it needs no device, file or thread.

    Raises:
        ConfigError: A pool file is too small for one block.
    """
    capacity, lanes = config.capacity, LaneTable.of(geometry)
    sizes = {Medium.DRAM: (capacity.dram_bytes_max, capacity.dram_bytes_max), Medium.SSD: pool_sizes(config)}
    tables = {
        medium: ExtentTable(medium, FreeRanges(size_bytes=size_bytes, file_bytes=max(1, file_bytes)), lanes)
        for medium, (size_bytes, file_bytes) in sizes.items()
    }
    growth = Growth(
        layout=config.layout.kind,
        percent=config.layout.growth_percent,
        room_max=room_max(lanes, config.layout.lane_bytes_max, min(b for _, b in sizes.values() if b)),
    )
    marks = Watermarks(
        high=capacity.high_watermark, low=capacity.low_watermark, dram_idle_ns_max=capacity.dram_idle_ns_max
    )
    space = Space(tables, Index(_entries_max(capacity, lanes)), growth, marks)
    space.budget = WriteBudget(config.retention.ssd_daily_write_bytes_max)
    rules = config.placement
    return Catalog(
        space,
        placement
        or TablePlacement(
            agent_tokens_min=rules.agent_tokens_min,
            short_reply_tokens_limit=rules.short_reply_tokens_limit,
            shared_tokens_max=rules.shared_tokens_max,
        ),
        block_tokens=geometry.block_tokens,
        lease_ns=config.timeouts.lease_ns,
        report_ns=config.timeouts.rank_report_ns + max(config.timeouts.save_ns, config.timeouts.restore_ns),
        ttl_ns=config.retention.ttl_ns,
    )


def open_dataplane(
    config: StoreConfig, geometry: Geometry, kv: PagedKV, *, clock: Clock, files: Files, epoch: int
) -> DataPlane:
    """Open one rank's media, window and pipelines.

    Args:
        config: The same for all ranks, apart from `rank`, `directories` and `device`.
        geometry: Of `kv`, for the store's block size.
        kv: This rank's paged tensors.
        clock: Monotonic time.
        files: System calls.
        epoch: Another number at each start of this rank.

    Raises:
        ConfigError, ShapeError: Settings or tensors do not fit together.
        OwnershipError: A directory is another's, or may not be written.
        FormatError: A directory holds something else.
        CapacityError: Not enough memory or disk.
        DeviceError: The device or a package for it is missing.
    """
    wanted = config.device if config.device != "auto" else str(kv.device)
    device = open_device(wanted, files)
    if device.is_host != (kv.device.type == "cpu"):
        raise ShapeError(f"paged tensors on {kv.device}, device {device.name}: expected the same device")
    size = size_window(config.io, LaneTable.of(geometry), is_host=device.is_host)
    with ExitStack() as undo:
        pump = Pump(device, clock)
        undo.callback(pump.close, config.timeouts.close_ns)
        opened = open_media(config, geometry, around_of(config, device, files, pump, size.slot_bytes), undo)
        parts = Parts(
            rank=config.rank,
            epoch=epoch,
            device=device,
            clock=clock,
            pump=pump,
            media=opened.media,
            arena=opened.arena,
            pool=opened.pool,
            copier=_copier(config, geometry, kv, device),
            verify=config.io.verify == "full",
            **_shapes(config, geometry, device, size, pump.watch),
        )
        return DataPlane(
            parts,
            kv,
            geometry=geometry,
            restores_max=config.io.restores_max,
            close_parts=_closer(undo.pop_all(), opened.media, clock),
            io_reason=opened.io_reason,
        )


class _Shapes(TypedDict):
    window: Window
    save_window: Window
    lanes: LaneTable
    payload_bytes: list[int]
    layout: int
    limits: PlanLimits
    book: RecordBook


def _shapes(config: StoreConfig, geometry: Geometry, device: Device, size: WindowSize, when: When) -> _Shapes:
    """The parts that follow from the geometry."""
    lanes, layout = LaneTable.of(geometry), layout_number(geometry.fingerprint())
    sum_kind = SUM_KIND if config.io.verify == "full" else SUM_KIND_NONE
    return _Shapes(
        window=Window(device, slots=size.slots, slot_bytes=size.slot_bytes, when=when),
        save_window=Window(device, slots=size.save_slots, slot_bytes=size.slot_bytes, when=when),
        lanes=lanes,
        payload_bytes=[geometry.payload_bytes(layer) for layer in range(geometry.layer_count)],
        layout=layout,
        limits=PlanLimits(
            gap_bytes_limit=config.io.gap_bytes_limit,
            read_bytes_max=config.io.read_bytes_max,
            slot_bytes=size.slot_bytes,
            file_bytes=max(DIRECT_BYTES, pool_sizes(config)[1]),
            first_tile_bytes=min(FIRST_TILE_BYTES, size.slot_bytes),
        ),
        book=RecordBook(lanes, layout, sum_kind=sum_kind, bytes_max=RECORD_CACHE_BYTES),
    )


def _copier(config: StoreConfig, geometry: Geometry, kv: PagedKV, device: Device) -> Copier:
    if device.is_host:
        return HostCopier(geometry, kv)
    percent, programs = config.io.scatter_sm_percent, PROGRAMS_PER_SM * device.multiprocessors
    copier = GpuCopier(geometry, kv, device, programs_max=None if percent == 100 else max(1, programs * percent // 100))
    copier.warm(sums=config.io.verify == "full")
    return copier


def _closer(closing: ExitStack, media: dict[Medium, MediumIO], clock: Clock) -> CloseParts:
    def close(wait_ns: int, before: Callable[[int], object]) -> bool:
        end_ns = clock.now_ns() + wait_ns
        engines = {id(engine): engine for io in media.values() for engine in (io.engine, io.host_engine)}
        # Every one of them, whatever the first says.
        ended = [engine.close(max(0, end_ns - clock.now_ns())) for engine in engines.values()]
        is_idle = all(ended)
        if is_idle:  # Else files and memory stay: a late transfer would hit whatever takes their place.
            try:
                before(end_ns)
            finally:
                closing.close()
        return is_idle

    return close


def _entries_max(capacity: CapacityConfig, lanes: LaneTable) -> int:
    derived = (capacity.dram_bytes_max + capacity.ssd_bytes_max) // lanes.block_bytes
    return capacity.index_entries_max or max(1, derived)


def open_store(
    config: StoreConfig,
    identity: Identity,
    kv: PagedKV,
    *,
    placement: Placement | None = None,
    clock: Clock | None = None,
    files: Files | None = None,
) -> Store:
    """Open a store: one catalog and one data plane in this process.

    Args:
        config: Sizes, directories, settings.
        identity: What the bytes depend on; the geometry of `kv` is added to its `layout`.
        kv: The engine's paged tensors.
        placement: Another rule for where turns go; None takes the paper's Table 2 with the configured bounds.
        clock: Monotonic time; tests bring their own.
        files: System calls; tests bring their own.

    Raises:
        ConfigError, ShapeError: Settings or tensors do not fit together.
        OwnershipError: A directory is another's, or may not be written.
        FormatError: A directory holds something else.
        CapacityError: Not enough memory or disk.
        DeviceError: The device or a package for it is missing.
    """
    expect("config", config, StoreConfig, "a StoreConfig; `from_mapping` makes one")
    expect("identity", identity, Identity, "a flatcake.Identity")
    expect("kv", kv, PagedKV, "a PagedKV; `PagedKV.of_layers` describes tensors")
    clock = clock or MonotonicClock()
    geometry = kv.geometry(identity.block_tokens)
    identity = replace(identity, layout=f"{identity.layout}/{geometry.fingerprint()}")
    files = files or Files()
    catalog = open_catalog(config, geometry, placement)
    epoch = clock.now_ns()
    plane = open_dataplane(config, geometry, kv, clock=clock, files=files, epoch=epoch)
    try:
        keeper = _open_keeper(config, identity, geometry, catalog, plane, files)
        catalog.rank_started(config.rank, epoch)
        store = Store(catalog, plane, geometry, identity, config, clock)
        store.keeper = keeper
        atexit.register(store.close)  # Python must not end while the pump is inside a library of C++.
        return store
    except BaseException:
        plane.close(config.timeouts.close_ns)
        raise


def _open_keeper(
    config: StoreConfig, identity: Identity, geometry: Geometry, catalog: Catalog, plane: DataPlane, files: Files
) -> Keeper | None:
    """Fill the catalog with what an earlier run has left in the directories; None where nothing is kept."""
    pool = plane.parts.pool
    if pool is None:
        return None
    home = pool.paths[0].rpartition("/")[0]
    about = About(
        identity=identity,
        geometry=geometry,
        pool_file_bytes=pool.file_bytes,
        directories=pool.homes,
        rank=config.rank,
        dram_bytes=config.capacity.dram_bytes_max,
        verify=plane.parts.verify,
    )
    pieces: list[int] = plane.parts.lanes.piece_bytes.tolist()
    manifest = ManifestDB(files, f"{home}/{MANIFEST}", about.origin(), encode_about(about), pieces)
    keeper = Keeper(catalog, plane.parts, manifest, files, config.capacity.ssd_free_bytes_min)
    try:
        keeper.reopen()
    except BaseException:
        keeper.give_up(config.timeouts.close_ns)
        raise
    plane.before_release = keeper.close
    return keeper
