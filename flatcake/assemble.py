"""Puts a data plane and a catalog together from a configuration.  The only place that picks real devices.

Cheap checks come first, then memory, then the directories: a refusal leaves nothing behind.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TypedDict

from flatcake.catalog import Catalog
from flatcake.clock import Clock, MonotonicClock
from flatcake.config import CapacityConfig, StoreConfig
from flatcake.dataplane import DataPlane, layout_number
from flatcake.errors import ShapeError
from flatcake.extents import ExtentTable, FreeRanges
from flatcake.geometry import Geometry
from flatcake.gva import Medium
from flatcake.index import Index
from flatcake.io.arena import Arena, ArenaEngine
from flatcake.io.device import CpuDevice, Device, open_device
from flatcake.io.filepool import FilePool, PoolSpec
from flatcake.io.paged import PagedKV
from flatcake.io.parts import MediumIO, Parts
from flatcake.io.plan import PlanLimits
from flatcake.io.posix import PosixEngine
from flatcake.io.probe import Around, choose_engine
from flatcake.io.pump import Pump
from flatcake.io.records import SUM_KIND_NONE, RecordBook
from flatcake.io.seam import Files
from flatcake.io.sizing import WindowSize, size_window
from flatcake.io.staged import Twins
from flatcake.io.tilecopy import Copier, GpuCopier, HostCopier
from flatcake.io.window import Window
from flatcake.kernels.checksum import SUM_KIND
from flatcake.keys import FORMAT_VERSION, Identity
from flatcake.layout import Growth, LaneTable, room_max
from flatcake.placement import Placement, TablePlacement
from flatcake.space import Space, Watermarks
from flatcake.store import Store
from flatcake.units import DIRECT_BYTES, MiB

RECORD_CACHE_BYTES = 64 * MiB
RECORD_THREADS = 2
FIRST_TILE_BYTES = 4 * MiB
PROGRAMS_PER_SM = 16


def open_catalog(config: StoreConfig, geometry: Geometry, placement: Placement | None = None) -> Catalog:
    """Make an empty catalog for stores of one geometry; it needs no device, file or thread.

    Raises:
        ConfigError: A pool file is too small for one block.
    """
    capacity, lanes = config.capacity, LaneTable.of(geometry)
    sizes = {Medium.DRAM: (capacity.dram_bytes_max, capacity.dram_bytes_max), Medium.SSD: _pool_sizes(config)}
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
        media, io_reason = _open_media(config, geometry, _around(config, device, files, pump, size), undo)
        parts = Parts(
            rank=config.rank,
            epoch=epoch,
            device=device,
            clock=clock,
            pump=pump,
            media=media,
            copier=_copier(config, geometry, kv, device),
            verify=config.io.verify == "full",
            **_shapes(config, geometry, device, size),
        )
        return DataPlane(
            parts,
            kv,
            geometry=geometry,
            restores_max=config.io.restores_max,
            close_parts=_closer(undo.pop_all(), media, clock),
            io_reason=io_reason,
        )


def _around(config: StoreConfig, device: Device, files: Files, pump: Pump, size: WindowSize) -> Around:
    return Around(
        files=files,
        device=device,
        when=lambda event, then: pump.post(lambda: pump.when(event, then)),
        file_count=_pool_sizes(config)[0] // config.capacity.pool_file_bytes,
        file_bytes=config.capacity.pool_file_bytes,
        pool=None,
        twins=Twins(count=size.slots + size.save_slots, size_bytes=size.slot_bytes),
    )


class _Shapes(TypedDict):
    window: Window
    save_window: Window
    lanes: LaneTable
    payload_bytes: list[int]
    layout: int
    limits: PlanLimits
    book: RecordBook


def _shapes(config: StoreConfig, geometry: Geometry, device: Device, size: WindowSize) -> _Shapes:
    """The parts that follow from the geometry."""
    lanes, layout = LaneTable.of(geometry), layout_number(geometry.fingerprint())
    sum_kind = SUM_KIND if config.io.verify == "full" else SUM_KIND_NONE
    return _Shapes(
        window=Window(device, slots=size.slots, slot_bytes=size.slot_bytes),
        save_window=Window(device, slots=size.save_slots, slot_bytes=size.slot_bytes),
        lanes=lanes,
        payload_bytes=[geometry.payload_bytes(layer) for layer in range(geometry.layer_count)],
        layout=layout,
        limits=PlanLimits(
            gap_bytes_limit=config.io.gap_bytes_limit,
            read_bytes_max=config.io.read_bytes_max,
            slot_bytes=size.slot_bytes,
            file_bytes=max(DIRECT_BYTES, _pool_sizes(config)[1]),
            first_tile_bytes=min(FIRST_TILE_BYTES, size.slot_bytes),
        ),
        book=RecordBook(lanes, layout, sum_kind=sum_kind, bytes_max=RECORD_CACHE_BYTES),
    )


def _open_media(
    config: StoreConfig, geometry: Geometry, around: Around, undo: ExitStack
) -> tuple[dict[Medium, MediumIO], str]:
    media: dict[Medium, MediumIO] = {}
    reason = "there is no SSD medium"
    if config.capacity.dram_bytes_max:
        arena = Arena(around.files, around.device, config.capacity.dram_bytes_max)
        undo.callback(arena.close)
        pieces = ArenaEngine(arena, around.device, around.when)
        records = ArenaEngine(arena, CpuDevice(around.files), around.when)
        media[Medium.DRAM] = MediumIO(pieces, records, lambda offset: (0, offset))
    if config.capacity.ssd_bytes_max:
        media[Medium.SSD], reason = _open_ssd(config, geometry, around, undo)
    return media, reason


def _open_ssd(config: StoreConfig, geometry: Geometry, around: Around, undo: ExitStack) -> tuple[MediumIO, str]:
    settings, pool = config.io, None
    if settings.engine != "memory":
        spec = PoolSpec(
            directories=config.directories,
            size_bytes=_pool_sizes(config)[0],
            file_bytes=config.capacity.pool_file_bytes,
            direct=settings.direct,
            free_bytes_min=config.capacity.ssd_free_bytes_min,
            version=FORMAT_VERSION,
            geometry=geometry.fingerprint(),
            rank=config.rank,
        )
        pool = FilePool(around.files, spec)
        undo.callback(pool.close)
    engine, reason = choose_engine(settings, replace(around, pool=pool))
    undo.callback(engine.close, 0)
    host_engine = engine
    if pool is not None and not isinstance(engine, PosixEngine):  # The window's engine moves device memory only.
        host_engine = PosixEngine(around.files, pool.fds, threads=RECORD_THREADS, task_bytes=settings.task_bytes)
        undo.callback(host_engine.close, 0)
    file_bytes = config.capacity.pool_file_bytes
    return MediumIO(engine, host_engine, lambda offset: divmod(offset, file_bytes)), reason


def _copier(config: StoreConfig, geometry: Geometry, kv: PagedKV, device: Device) -> Copier:
    if device.is_host:
        return HostCopier(geometry, kv)
    programs = PROGRAMS_PER_SM * device.multiprocessors * config.io.scatter_sm_percent // 100
    return GpuCopier(geometry, kv, device, programs_max=max(1, programs))


def _closer(closing: ExitStack, media: dict[Medium, MediumIO], clock: Clock) -> Callable[[int], bool]:
    def close(wait_ns: int) -> bool:
        end_ns = clock.now_ns() + wait_ns
        engines = {id(engine): engine for io in media.values() for engine in (io.engine, io.host_engine)}
        # Every one of them, whatever the first says.
        ended = [engine.close(max(0, end_ns - clock.now_ns())) for engine in engines.values()]
        is_idle = all(ended)
        if is_idle:  # Else files and memory stay: a late transfer would hit whatever takes their place.
            closing.close()
        return is_idle

    return close


def _pool_sizes(config: StoreConfig) -> tuple[int, int]:
    """Bytes of the SSD pool in whole files, and of one file; zeros without a pool."""
    size_bytes, file_bytes = config.capacity.ssd_bytes_max, config.capacity.pool_file_bytes
    return (size_bytes // file_bytes * file_bytes, file_bytes) if size_bytes else (0, 0)


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
    clock = clock or MonotonicClock()
    geometry = kv.geometry(identity.block_tokens)
    identity = replace(identity, layout=f"{identity.layout}/{geometry.fingerprint()}")
    catalog = open_catalog(config, geometry, placement)
    epoch = clock.now_ns()
    plane = open_dataplane(config, geometry, kv, clock=clock, files=files or Files(), epoch=epoch)
    catalog.rank_started(config.rank, epoch)
    return Store(catalog, plane, geometry, identity, config, clock)
