"""What the system says of itself: kernel, limits, memory, and the directory of the pool.

Reads /proc and /sys and changes nothing.  Every question is a probe of its own, so that one that fails costs
only its own answer.
"""

import importlib.metadata
import os
import platform
import re
import resource
import stat
from typing import NamedTuple

from flatcake.doctor.facts import MemoryFacts, PlaceFacts, Probes, State, SystemFacts
from flatcake.io.pooldir import LOCK
from flatcake.io.seam import Files
from flatcake.units import KiB, MiB

PACKAGES = (
    *("torch", "triton", "numpy", "cupy-cuda12x", "cupy-cuda13x", "kvikio-cu12", "kvikio-cu13"),
    *("nvidia-cufile", "nvidia-cufile-cu12"),
)
SAMPLE_BYTES = 64 * MiB
_HUGEPAGES = "/sys/kernel/mm/hugepages/hugepages-2048kB"
_SMAPS_RANGE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) ")


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    point: str
    filesystem: str
    source: str
    options: tuple[str, ...]


def read_system(probes: Probes) -> SystemFacts:
    """Ask for kernel, packages, processors and limits."""
    return SystemFacts(
        kernel=probes.get("kernel", platform.release),
        python=probes.get("Python", platform.python_version),
        packages=probes.get("packages", _packages) or {},
        cores=probes.get("cores", lambda: len(os.sched_getaffinity(0))),
        cores_quota=probes.get("cpu quota", _quota),
        memlock_bytes_max=probes.get("memlock", lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        open_files_max=probes.get("open files", lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    )


def read_memory(probes: Probes, files: Files) -> MemoryFacts:
    """Ask for memory and huge pages, and take a sample mapping to see what it gets."""
    memory = probes.get("memory", lambda: parse_counters(_text("/proc/meminfo"))) or {}
    sample = probes.get("huge pages", lambda: _sample(files))
    return MemoryFacts(
        total_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        cgroup_bytes_max=probes.get("memory limit", lambda: _limit("memory.max", "memory/memory.limit_in_bytes")),
        thp=probes.get("huge page mode", lambda: parse_choice(_text("/sys/kernel/mm/transparent_hugepage/enabled"))),
        hugetlb_pages=probes.get("reserved huge pages", lambda: int(_text(f"{_HUGEPAGES}/nr_hugepages"))),
        hugetlb_free=probes.get("free huge pages", lambda: int(_text(f"{_HUGEPAGES}/free_hugepages"))),
        arena_pages=sample and sample[0],
        arena_huge_share=sample and sample[1],
    )


def read_place(probes: Probes, files: Files, directory: str) -> PlaceFacts:
    """Look at a directory, or at the nearest one above it that is there."""
    path = probes.get("path", lambda: files.real_path(directory)) or directory
    state, home = _state(path)
    mount = probes.get("filesystem", lambda: find_mount(_text("/proc/self/mountinfo"), home))
    return PlaceFacts(
        directory=directory,
        path=path,
        state=state,
        mount=mount and mount.point,
        filesystem=mount and mount.filesystem,
        source=mount and mount.source,
        options=mount.options if mount else (),
        rotational=probes.get("block device", lambda: _rotational(files.filesystem(home))),
        free_bytes=probes.get("free space", lambda: files.free_bytes(home)),
        holder=probes.get("owner", lambda: read_holder(files, path)) if state == "ready" else None,
    )


def read_holder(files: Files, path: str) -> str | None:
    """Who holds a pool's lock; found without touching it, as a store may be opening just now."""
    if LOCK not in files.list_directory(path) or not held(_text("/proc/locks"), os.stat(f"{path}/{LOCK}").st_ino):
        return None
    line = files.read_text(f"{path}/{LOCK}", 4 * KiB).partition("\n")[0][:200]
    return "".join(letter for letter in line if letter.isprintable()) or "a process"


def find_mount(mountinfo: str, path: str) -> Mount | None:
    """The mount that a path without symbolic links lies on: the longest that fits, the last of equals."""
    best = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        words, tail = left.split(), right.split()
        if len(words) < 6 or len(tail) < 2:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), words[4])
        fits = path == point or path.startswith(point.rstrip("/") + "/")
        if fits and (best is None or len(point) >= len(best.point)):
            options = dict.fromkeys([*words[5].split(","), *(tail[2] if len(tail) > 2 else "").split(",")])
            best = Mount(point, tail[0], tail[1], tuple(option for option in options if option))
    return best


def parse_choice(text: str) -> str | None:
    """The word in brackets of ``always [madvise] never``."""
    match = re.search(r"\[([^\]]+)\]", text)
    return match[1] if match else None


def parse_counters(text: str) -> dict[str, int]:
    """Bytes by name, from lines like ``MemTotal:  12 kB``."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * KiB
    return found


def huge_bytes(smaps: str, start: int, size_bytes: int) -> int:
    """Bytes on huge pages in the mappings that overlap a range of addresses; at most the range."""
    total, inside = 0, False
    for line in smaps.splitlines():
        if match := _SMAPS_RANGE.match(line):
            inside = int(match[1], 16) < start + size_bytes and start < int(match[2], 16)
        elif inside and line.startswith(("AnonHugePages:", "Private_Hugetlb:")):
            total += int(line.split()[1]) * KiB
    return min(total, size_bytes)


def held(locks: str, inode: int) -> bool:
    """Whether a line of /proc/locks tells of a lock of the whole file `inode`."""
    fields = (line.split() for line in locks.splitlines())
    return any(len(words) > 5 and words[1] == "FLOCK" and words[5].endswith(f":{inode}") for words in fields)


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _first(*names: str) -> str:
    """Content of the first of these control files that is there, or nothing."""
    group = ""
    if os.path.exists("/proc/self/cgroup"):
        group = next((line[3:] for line in _text("/proc/self/cgroup").splitlines() if line.startswith("0::")), "")
    for name in names:
        for path in (f"/sys/fs/cgroup{group}/{name}", f"/sys/fs/cgroup/{name}"):
            if os.path.exists(path):
                return _text(path).strip()
    return ""


def _limit(*names: str) -> int | None:
    text = _first(*names)
    value = int(text) if text.isdigit() else None
    return None if value is None or value >= 1 << 60 else value


def _quota() -> float | None:
    words = _first("cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _sample(files: Files) -> tuple[str, float]:
    memory = files.map_memory(SAMPLE_BYTES)
    if memory.pages == "hugetlb":
        return memory.pages, 1.0
    return memory.pages, huge_bytes(_text("/proc/self/smaps"), memory.address, SAMPLE_BYTES) / SAMPLE_BYTES


def _state(path: str) -> tuple[State, str]:
    """How a directory is, and the nearest path from it upwards that is there."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        above, home = _state(os.path.dirname(path) or "/")
        return "missing" if above == "ready" else above, home
    except NotADirectoryError:
        return "not a directory", os.path.dirname(path)
    except OSError:  # No permission, too many links, a name too long: `open` would fail in the same way.
        return "denied", os.path.dirname(path) or "/"
    if not stat.S_ISDIR(mode):
        return "not a directory", path
    return "ready" if os.access(path, os.R_OK | os.W_OK | os.X_OK) else "denied", path


def _rotational(device: int) -> bool | None:
    """What the queue of a block device says; a partition has it one level up."""
    base = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for path in (f"{base}/queue/rotational", f"{base}/../queue/rotational"):
        if os.path.exists(path):
            return _text(path).strip() == "1"
    return None
