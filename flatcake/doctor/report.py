"""Shows what the doctor found out: aligned lines for people, one object for programs.

Pure: text out, nothing printed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from flatcake.doctor.advice import Finding
from flatcake.doctor.blocks import padding
from flatcake.doctor.facts import Facts
from flatcake.units import KiB, format_bytes

UNKNOWN = "unknown"


def usable(findings: Sequence[Finding]) -> bool:
    """Whether a store can be opened as asked."""
    return all(finding.severity != "unusable" for finding in findings)


def as_mapping(facts: Facts, findings: Sequence[Finding], version: str) -> dict[str, object]:
    """Everything as nested plain values; absent facts are None."""
    names = ("system", "memory", "place", "gpu", "direct", "engine", "disk", "restore")
    parts = {name: getattr(facts, name) for name in names}
    body: dict[str, object] = {name: part and asdict(part) for name, part in parts.items()}
    if facts.restore is not None:
        body["restore"] = {**asdict(facts.restore), "ratio": round(facts.restore.ratio, 3)}
    if facts.token_bytes:
        body["padding"] = [size._asdict() for size in padding(facts.token_bytes)]
    return {
        "version": version,
        "usable": usable(findings),
        **body,
        "findings": [finding._asdict() for finding in findings],
        "misses": [asdict(miss) for miss in facts.misses],
    }


def as_text(facts: Facts, findings: Sequence[Finding], version: str) -> str:
    """Lines for a terminal, findings last."""
    rows = [*_machine(facts), *_place(facts), *_gpu(facts), *_measured(facts), *_blocks(facts)]
    width = max((len(label) for label, _ in rows), default=0)
    lines = [f"flatcake {version}", *(f"  {label:{width}}  {value}" for label, value in rows), ""]
    if not findings:
        lines.append("Nothing to change.")
    for finding in findings:
        lines += [f"{finding.severity}: {finding.subject}: {finding.text}", f"    -> {finding.remedy}"]
    return "\n".join(lines) + "\n"


def _machine(facts: Facts) -> Iterator[tuple[str, str]]:
    system, memory = facts.system, facts.memory
    if system is not None:
        yield "kernel", f"{system.kernel or UNKNOWN}, Python {system.python or UNKNOWN}"
        yield "packages", ", ".join(f"{name} {version}" for name, version in system.packages.items()) or UNKNOWN
        quota = f", quota of {system.cores_quota:g}" if system.cores_quota is not None else ""
        files = "no limit" if system.open_files_max == -1 else _or_unknown(system.open_files_max)
        locked = "no limit" if system.memlock_bytes_max == -1 else _size(system.memlock_bytes_max)
        yield "cores", f"{_or_unknown(system.cores)}{quota}"
        yield "limits", f"open files {files}, locked memory {locked}"
    if memory is not None:
        limit = "no limit" if memory.cgroup_bytes_max is None else f"limit {_size(memory.cgroup_bytes_max)}"
        yield "memory", f"{_size(memory.total_bytes)}, {_size(memory.available_bytes)} available, {limit}"
        share = UNKNOWN if memory.arena_huge_share is None else f"{memory.arena_huge_share:.0%} huge"
        reserved = f"{_or_unknown(memory.hugetlb_pages)} reserved"
        yield (
            "huge pages",
            f"THP {memory.thp or UNKNOWN}, {reserved}; a mapping got {memory.arena_pages or UNKNOWN}, {share}",
        )


def _place(facts: Facts) -> Iterator[tuple[str, str]]:
    place, direct = facts.place, facts.direct
    if place is not None:
        spins = " (rotating, it says)" if place.rotational else ""
        options = ",".join(place.options)
        yield "directory", f"{place.path}: {place.state}" + (f", in use by {place.holder}" if place.holder else "")
        yield "filesystem", f"{place.filesystem or UNKNOWN} on {place.source or UNKNOWN}{spins}, {options}"
        yield "free space", _size(place.free_bytes)
    if direct is not None:
        steps = UNKNOWN if direct.align_bytes is None else f"{direct.align_bytes} bytes"
        yield "O_DIRECT", f"works, in steps of {steps}" if direct.works else "refused"


def _gpu(facts: Facts) -> Iterator[tuple[str, str]]:
    gpu = facts.gpu
    if gpu is None:
        return
    build = "a CPU build" if gpu.cuda_build is None else f"built for CUDA {gpu.cuda_build}"
    yield "GPU", "; ".join(gpu.devices) or f"none (torch is {build})"
    if gpu.driver is not None:
        yield "driver", gpu.driver
    yield "CuPy", gpu.cupy
    mode = "" if gpu.kvikio_mode is None else f", mode {gpu.kvikio_mode}"
    yield "kvikio", f"{gpu.kvikio}{mode}"
    yield "cuFile", "nvidia-fs loaded" if gpu.nvidia_fs else "nvidia-fs not loaded: no GPUDirect Storage"


def _measured(facts: Facts) -> Iterator[tuple[str, str]]:
    engine, disk, restore = facts.engine, facts.disk, facts.restore
    if engine is not None:
        reason = engine.reason.removeprefix(f"{engine.name}: ")
        yield "engine", f"{engine.name} on {engine.device}: {reason}"
        yield "window", f"{engine.slots} + {engine.save_slots} slots of {format_bytes(engine.slot_bytes)}"
    if disk is not None:
        rates = f"{disk.read_bytes_s / 1e9:.2f} GB/s read, {disk.write_bytes_s / 1e9:.2f} GB/s written"
        yield "disk", f"{rates}, in sequence over {format_bytes(disk.size_bytes)}"
    if restore is not None:
        times = f"{restore.predicted_ns / 1e6:.1f} ms predicted, {restore.measured_ns / 1e6:.1f} ms measured"
        size = format_bytes(restore.size_bytes)
        if restore.memory_bytes_s is not None:
            yield "memory path", f"{restore.memory_bytes_s / 1e9:.2f} GB/s restored without the disk"
        yield "restore", f"{size} in {restore.reads} reads: {times} ({restore.ratio:.2f} x, {restore.rounds} rounds)"


def _blocks(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.token_bytes:
        sizes = padding(facts.token_bytes)
        yield "padding", ", ".join(f"{each.block_tokens}: {each.share:.1%}" for each in sizes)
        yield "piece", ", ".join(f"{each.block_tokens}: {each.piece_bytes // KiB} KiB" for each in sizes)


def _size(size_bytes: int | None) -> str:
    return UNKNOWN if size_bytes is None else format_bytes(size_bytes)


def _or_unknown(value: object) -> str:
    return UNKNOWN if value is None else str(value)
