"""What `flatcake doctor` finds out: plain values, None where something could not be found out.

Pure.  `doctor.machine`, `doctor.gpu` and `doctor.measure` fill them in, `doctor.advice` judges them,
`doctor.report` shows them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from flatcake.config import StoreConfig

T = TypeVar("T")
State = Literal["ready", "missing", "not a directory", "denied"]
"""Of a directory.  `missing`: `open` would make it; `denied`: it may not be written, or not be made."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A probe that gave no answer."""

    probe: str
    reason: str


class Probes:
    """Runs probes one by one, and keeps what went wrong; one that fails costs only its own answer."""

    def __init__(self) -> None:
        self.misses: list[Miss] = []

    def get(self, name: str, call: Callable[[], T]) -> T | None:
        """The answer, or None; then the reason is in `misses`."""
        try:
            return call()
        except Exception as error:  # A diagnosis must survive whatever the machine does, so this catches it all.
            self.misses.append(Miss(name, f"{type(error).__name__}: {error}".partition("\n")[0][:300]))
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemFacts:
    """Kernel, processors, limits of this process."""

    kernel: str | None
    python: str | None
    packages: dict[str, str]
    """Versions of those that matter and are installed."""
    cores: int | None
    """Processors that this process may run on."""
    cores_quota: float | None
    """Processors' worth of time that the control group grants; None without a limit."""
    memlock_bytes_max: int | None
    """RLIMIT_MEMLOCK; -1 without a limit."""
    open_files_max: int | None
    """RLIMIT_NOFILE; -1 without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Host memory, and what a mapping of the arena's kind got."""

    total_bytes: int | None
    available_bytes: int | None
    cgroup_bytes_max: int | None
    """Limit of the control group; None without one."""
    thp: str | None
    """Mode of transparent huge pages: always, madvise or never."""
    hugetlb_pages: int | None
    """Reserved huge pages of 2 MiB."""
    hugetlb_free: int | None
    arena_pages: str | None
    """What the seam says of a mapping it made: hugetlb, thp or small."""
    arena_huge_share: float | None
    """Part of that mapping that really is on huge pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceFacts:
    """The directory of the SSD pool, and the filesystem under it."""

    directory: str
    path: str
    """Without symbolic links."""
    state: State
    mount: str | None
    """Where the filesystem is mounted."""
    filesystem: str | None
    source: str | None
    options: tuple[str, ...]
    rotational: bool | None
    """What the block device says; None where there is none."""
    free_bytes: int | None
    holder: str | None
    """The store that has the directory now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """CUDA as torch, CuPy and kvikio see it."""

    cuda_build: str | None
    """CUDA version that torch was built for; None for a CPU build."""
    driver: str | None
    """The kernel driver's own line."""
    devices: tuple[str, ...]
    """Name and memory of each."""
    cupy: str
    """Version, or why it cannot be loaded."""
    kvikio: str
    kvikio_loads: bool
    kvikio_mode: str | None
    """kvikio's compat mode."""
    nvidia_fs: bool | None
    """Whether the kernel module of GPUDirect Storage is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectFacts:
    """O_DIRECT in the target directory."""

    works: bool
    align_bytes: int | None
    """Smallest step of address, offset and size that a read takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What `open` would choose here."""

    device: str
    name: str
    reason: str
    slots: int
    save_slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFacts:
    """Sequential transfers through that engine."""

    size_bytes: int
    write_bytes_s: float
    read_bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFacts:
    """A restore from a small store, predicted and measured; medians."""

    size_bytes: int
    reads: int
    rounds: int
    memory_bytes_s: float | None
    """Rate of restores from memory: copies and checksums, no disk."""
    predicted_ns: int
    """The same bytes at the rate of bare reads or of restores from memory, whichever is slower."""
    measured_ns: int
    right: bool
    """Whether the bytes that came back are those that were saved."""

    @property
    def ratio(self) -> float:
        """Measured over predicted: 1.0 is a restore as fast as a bare read."""
        return self.measured_ns / max(1, self.predicted_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything found out."""

    config: StoreConfig
    """The settings that were judged."""
    system: SystemFacts | None = None
    memory: MemoryFacts | None = None
    place: PlaceFacts | None = None
    gpu: GpuFacts | None = None
    direct: DirectFacts | None = None
    engine: EngineFacts | None = None
    disk: DiskFacts | None = None
    restore: RestoreFacts | None = None
    token_bytes: int = 0
    """Bytes of one token in one layer, to judge block sizes with; 0 if not given."""
    misses: tuple[Miss, ...] = ()
