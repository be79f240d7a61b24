"""Judges what the doctor found out: findings, each with what to change.

Pure: facts in, findings out.  `unusable` means that no store can be opened there as asked; it is the only
severity that changes the exit code.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from flatcake.doctor.blocks import PADDING_MAX, best_block, padding
from flatcake.doctor.facts import DiskFacts, Facts, GpuFacts, MemoryFacts, PlaceFacts, RestoreFacts
from flatcake.units import DIRECT_BYTES, MiB, format_bytes

Severity = Literal["unusable", "problem", "note"]
SEVERITIES: tuple[Severity, ...] = ("unusable", "problem", "note")

RATIO_LIMIT = 2.0
"""Predicted and measured restore time agree when neither is more than this many times the other."""
LIMITS_FACTOR = 1.25
"""The processor holds a disk back that is so many times faster."""
HUGE_SHARE_MIN = 0.9
READ_BYTES_S_MIN = 0.5e9
SPARE_FILES = 256
"""Open files that the rest of a serving process needs."""

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse", "fuseblk", "ceph", "glusterfs"}
_PROCESSED = {"btrfs", "zfs", "bcachefs"}
_GRAVE: dict[str, Severity] = {
    **dict.fromkeys(("measurement", "a store"), "unusable"),
    **dict.fromkeys(("writes", "reads", "save to SSD", "restore from SSD"), "problem"),
    **dict.fromkeys(("save to DRAM", "restore from DRAM", "closing", "cleaning up"), "problem"),
}
"""Probes without which there is no store worth having."""


class Finding(NamedTuple):
    """Something that a user should know, and what to do about it."""

    severity: Severity
    subject: str
    text: str
    remedy: str


def advise(facts: Facts) -> list[Finding]:
    """All findings, the gravest first."""
    found = [*_on_place(facts), *_on_direct(facts), *_on_memory(facts), *_on_system(facts), *_on_gpu(facts)]
    found += [*_on_measured(facts), *_on_blocks(facts)]
    found += [
        Finding("note", miss.probe, f"could not be measured: {miss.reason}", "nothing else depends on it")
        for miss in facts.misses
        if miss.probe not in _GRAVE
    ]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def _on_place(facts: Facts) -> Iterator[Finding]:
    place = facts.place
    if place is None:
        return
    if place.state == "missing":
        yield Finding(
            "problem",
            "directory",
            f"{place.path} is not there, so nothing was measured; `open` would make it on {place.mount}",
            f"mount the disk that you mean, `mkdir -p {place.path}`, and run this again",
        )
    elif place.state == "not a directory":
        yield Finding("unusable", "directory", f"{place.path} is not a directory", "name a directory")
    elif place.state == "denied":
        remedy = f"`chown` or `chmod` it for this user, or use another; mounted {','.join(place.options[:1])}"
        yield Finding("unusable", "directory", f"{place.path} may not be written", remedy)
    if place.holder:
        yield Finding(
            "note",
            "directory",
            f"in use by {place.holder}; measured beside it, so the figures share its disk",
            "run this when it is idle; a second store needs a directory of its own",
        )
    yield from _on_filesystem(place)
    yield from _on_space(facts, place)


def _on_filesystem(place: PlaceFacts) -> Iterator[Finding]:
    kind = place.filesystem or ""
    if kind in ("tmpfs", "ramfs"):
        yield Finding(
            "note", "filesystem", f"{kind} is memory, not a disk", "fine for tests; else use a directory on an SSD"
        )
    elif kind in _NETWORK or kind.startswith("fuse."):
        yield Finding(
            "problem", "filesystem", f"{kind} goes over a network or a daemon", "use ext4 or XFS on a local SSD"
        )
    elif kind == "overlay":
        yield Finding(
            "problem", "filesystem", "overlay is a container's own layer", "mount a local SSD into the container"
        )
    elif kind in _PROCESSED:
        text = f"{kind} may copy, checksum or compress what O_DIRECT writes"
        yield Finding("note", "filesystem", text, "ext4 or XFS costs less; or turn copy-on-write off for the directory")
    if "data=journal" in place.options:
        yield Finding(
            "problem", "filesystem", "data=journal writes everything twice", "mount with data=ordered, the default"
        )


def _on_space(facts: Facts, place: PlaceFacts) -> Iterator[Finding]:
    capacity, free_bytes = facts.config.capacity, place.free_bytes
    if free_bytes is None or not capacity.ssd_bytes_max:
        return
    share_bytes = capacity.ssd_bytes_max // max(1, len(facts.config.directories))
    usable_bytes = max(0, free_bytes - capacity.ssd_free_bytes_min)
    if share_bytes > usable_bytes:
        fits = usable_bytes // capacity.pool_file_bytes * capacity.pool_file_bytes
        yield Finding(
            "problem",
            "free space",
            f"{format_bytes(free_bytes)} free; a new pool takes {format_bytes(share_bytes)} and leaves "
            f"{format_bytes(capacity.ssd_free_bytes_min)} to others",
            f"free space, or set capacity.ssd_bytes_max to at most {format_bytes(fits)}"
            if fits
            else "free space, or lower pool_file_bytes, ssd_bytes_max and ssd_free_bytes_min",
        )


def _on_direct(facts: Facts) -> Iterator[Finding]:
    direct, wanted = facts.direct, facts.config.io.direct
    if direct is None:
        return
    if not direct.works:
        yield Finding(
            "unusable" if wanted == "on" else "problem",
            "O_DIRECT",
            "refused here, so every byte goes through the page cache and costs a copy",
            "use ext4 or XFS on a local SSD" + ("; or set io.direct to auto" if wanted == "on" else ""),
        )
    elif direct.align_bytes is None or direct.align_bytes > DIRECT_BYTES:
        steps = "more than 64 KiB" if direct.align_bytes is None else f"{direct.align_bytes} bytes"
        yield Finding(
            "unusable" if wanted != "off" else "problem",
            "O_DIRECT",
            f"needs steps of {steps}; pieces are aligned to {DIRECT_BYTES}",
            "make the filesystem with 4 KiB blocks on a device with 512-byte or 4 KiB sectors; or set io.direct to off",
        )


def _on_memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if memory is None:
        return
    yield from _on_huge_pages(memory)
    limits = [bound for bound in (memory.available_bytes, memory.cgroup_bytes_max) if bound is not None]
    need_bytes = facts.config.capacity.dram_bytes_max
    if limits and need_bytes > min(limits):
        yield Finding(
            "problem",
            "memory",
            f"the DRAM arena takes {format_bytes(need_bytes)}, {format_bytes(min(limits))} can be had",
            f"set capacity.dram_bytes_max to at most {format_bytes(min(limits) // 2 // MiB * MiB)}, or to 0",
        )


def _on_huge_pages(memory: MemoryFacts) -> Iterator[Finding]:
    share = memory.arena_huge_share
    if memory.thp == "never" and not memory.hugetlb_free:
        yield Finding(
            "problem",
            "huge pages",
            "off: direct reads into small pages ran at half the speed",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or reserve some by sysctl vm.nr_hugepages",
        )
    elif share is not None and share < HUGE_SHARE_MIN:
        yield Finding(
            "problem",
            "huge pages",
            f"only {share:.0%} of a mapping is on huge pages: memory is in pieces, or the kernel grants none",
            "echo 1 > /proc/sys/vm/compact_memory, or reserve some at boot by sysctl vm.nr_hugepages",
        )


def _on_system(facts: Facts) -> Iterator[Finding]:
    system, capacity = facts.system, facts.config.capacity
    if system is None:
        return
    need = 3 * (capacity.ssd_bytes_max // capacity.pool_file_bytes) + SPARE_FILES
    if system.open_files_max is not None and 0 <= system.open_files_max < need:
        yield Finding(
            "problem",
            "open files",
            f"{system.open_files_max} allowed; the pool and its engine may need {need}",
            f"ulimit -n {need}, or raise capacity.pool_file_bytes",
        )
    cores = min((c for c in (system.cores, system.cores_quota) if c is not None), default=None)
    if cores is not None and cores < 2:
        yield Finding(
            "note", "cores", f"{cores:g} for model and I/O together", "give the process 2 or more, or fewer io_threads"
        )


def _on_gpu(facts: Facts) -> Iterator[Finding]:
    gpu, wanted = facts.gpu, facts.config.device
    if gpu is None:
        return
    if not gpu.devices:
        yield from _on_no_gpu(gpu, wanted)
        return
    if wanted == "cpu":
        return
    extra = "cuda12" if (gpu.cuda_build or "").startswith("12") else "cuda13"
    if not gpu.kvikio_loads:
        yield Finding(
            "problem",
            "kvikio",
            f"{gpu.kvikio}; the ring in front of the GPU is filled by Python threads",
            f"pip install 'flatcake[{extra}]'",
        )
    if not gpu.nvidia_fs:
        yield Finding(
            "note",
            "GPUDirect Storage",
            "nvidia-fs is not loaded, so bytes go through host memory",
            "where the disk is a local NVMe: install nvidia-gds and load nvidia-fs",
        )


def _on_no_gpu(gpu: GpuFacts, wanted: str) -> Iterator[Finding]:
    if wanted.startswith("cuda"):
        why = "this torch is a CPU build" if gpu.cuda_build is None else "torch sees no CUDA device"
        yield Finding("unusable", "GPU", f"{wanted} was asked for, but {why}", _gpu_remedy(gpu))
    elif gpu.driver is not None and wanted == "auto":
        yield Finding("problem", "GPU", "there is an NVIDIA driver, but torch sees no CUDA device", _gpu_remedy(gpu))


def _gpu_remedy(gpu: GpuFacts) -> str:
    if gpu.cuda_build is None:
        return "install a CUDA build of torch, or use --device cpu"
    return "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu"


def _on_measured(facts: Facts) -> Iterator[Finding]:
    for miss in facts.misses:
        if miss.probe in _GRAVE:
            text = f"failed: {miss.reason}"
            yield Finding(
                _GRAVE[miss.probe], miss.probe, text, "do what the reason says, look at `dmesg`, then run this again"
            )
    if facts.disk is not None and facts.disk.read_bytes_s < READ_BYTES_S_MIN:
        rate = facts.disk.read_bytes_s / 1e9
        yield Finding(
            "problem", "disk", f"reads run at {rate:.2f} GB/s: recomputing may be quicker", "use a local NVMe SSD"
        )
    restore = facts.restore
    if restore is None:
        return
    if not restore.right:
        text = "bytes that came back differ from those that were saved, and the checksums passed them"
        yield Finding("unusable", "restore", text, "do not use this store; report it with the output of --json")
    if facts.disk is not None and facts.engine is not None and facts.engine.device == "cpu":
        yield from _on_processor(facts.disk, restore)
    if restore.ratio > RATIO_LIMIT:
        yield Finding(
            "problem",
            "restore",
            f"takes {restore.ratio:.1f} times what disk and processor need alone: they are busy, or hinder each other",
            "stop what else runs, give the process more cores, and run this again",
        )
    elif restore.ratio < 1 / RATIO_LIMIT:
        yield Finding(
            "problem",
            "restore",
            f"takes {restore.ratio:.2f} times what disk and processor need alone: their speed varies, or a cache helps",
            "run this again with a larger --size, on an idle disk",
        )


def _on_processor(disk: DiskFacts, restore: RestoreFacts) -> Iterator[Finding]:
    rate = restore.memory_bytes_s
    if rate is not None and rate * LIMITS_FACTOR < disk.read_bytes_s:
        yield Finding(
            "note",
            "processor",
            f"copies and checksums run at {rate / 1e9:.2f} GB/s, the disk at {disk.read_bytes_s / 1e9:.2f}: "
            "restores are held back",
            "give the process more or faster cores; io.verify off is quicker, and lets bit errors through",
        )


def _on_blocks(facts: Facts) -> Iterator[Finding]:
    if not facts.token_bytes:
        return
    best = best_block(facts.token_bytes)
    for size in padding(facts.token_bytes):
        if size.block_tokens < best.block_tokens and size.share > PADDING_MAX:
            yield Finding(
                "note",
                "block size",
                f"blocks of {size.block_tokens} tokens are padded by {size.share:.0%}",
                f"block_tokens {best.block_tokens}: {best.share:.1%}",
            )
            return
