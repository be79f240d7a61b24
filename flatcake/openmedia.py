"""Opens the media of a data plane: the DRAM arena, the SSD pool, and the engines that move their bytes."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from flatcake.config import StoreConfig
from flatcake.geometry import Geometry
from flatcake.gva import Medium
from flatcake.io.arena import Arena, ArenaEngine
from flatcake.io.device import CpuDevice, Device
from flatcake.io.filepool import FilePool, PoolSpec
from flatcake.io.parts import MediumIO
from flatcake.io.posix import PosixEngine
from flatcake.io.probe import Around, choose_engine
from flatcake.io.pump import Pump
from flatcake.io.seam import Files
from flatcake.io.sizing import size_ring
from flatcake.keys import FORMAT_VERSION

RECORD_THREADS = 2


@dataclass(eq=False, slots=True)
class OpenMedia:
    """What was opened."""

    media: dict[Medium, MediumIO] = field(default_factory=dict)
    io_reason: str = "there is no SSD medium"
    """Why the SSD's engine was chosen."""
    arena: Arena | None = None
    pool: FilePool | None = None
    """None without an SSD medium, and where that is in memory."""


def pool_sizes(config: StoreConfig) -> tuple[int, int]:
    """Bytes of the SSD pool in whole files, and of one file; zeros without a pool."""
    size_bytes, file_bytes = config.capacity.ssd_bytes_max, config.capacity.pool_file_bytes
    return (size_bytes // file_bytes * file_bytes, file_bytes) if size_bytes else (0, 0)


def around_of(config: StoreConfig, device: Device, files: Files, pump: Pump, slot_bytes: int) -> Around:
    """What engines are opened with, but for the pool; `slot_bytes` of the window."""
    return Around(
        files=files,
        device=device,
        when=pump.watch,
        file_count=pool_sizes(config)[0] // config.capacity.pool_file_bytes,
        file_bytes=config.capacity.pool_file_bytes,
        pool=None,
        ring=size_ring(slot_bytes),
    )


def open_media(config: StoreConfig, geometry: Geometry, around: Around, undo: ExitStack) -> OpenMedia:
    """Open what the configuration asks for; `undo` closes it again."""
    opened = OpenMedia()
    if config.capacity.dram_bytes_max:
        arena = opened.arena = Arena(around.files, around.device, config.capacity.dram_bytes_max)
        undo.callback(arena.close)
        pieces = ArenaEngine(arena, around.device, around.when)
        records = ArenaEngine(arena, CpuDevice(around.files), around.when)
        opened.media[Medium.DRAM] = MediumIO(pieces, records, lambda offset: (0, offset))
    if config.capacity.ssd_bytes_max:
        _open_ssd(opened, config, geometry, around, undo)
    return opened


def _open_ssd(opened: OpenMedia, config: StoreConfig, geometry: Geometry, around: Around, undo: ExitStack) -> None:
    settings, pool = config.io, None
    if settings.engine != "memory":
        spec = PoolSpec(
            directories=config.directories,
            size_bytes=pool_sizes(config)[0],
            file_bytes=config.capacity.pool_file_bytes,
            direct=settings.direct,
            free_bytes_min=config.capacity.ssd_free_bytes_min,
            version=FORMAT_VERSION,
            geometry=geometry.fingerprint(),
            rank=config.rank,
        )
        pool = opened.pool = FilePool(around.files, spec)
        undo.callback(pool.close)
    engine, opened.io_reason = choose_engine(settings, replace(around, pool=pool))
    undo.callback(engine.close, 0)
    host_engine = engine
    if pool is not None and not isinstance(engine, PosixEngine):  # The window's engine moves device memory only.
        host_engine = PosixEngine(around.files, pool.fds, threads=RECORD_THREADS, task_bytes=settings.task_bytes)
        undo.callback(host_engine.close, 0)
    file_bytes = config.capacity.pool_file_bytes
    opened.media[Medium.SSD] = MediumIO(engine, host_engine, lambda offset: divmod(offset, file_bytes))
