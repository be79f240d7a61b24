"""What is read from /proc and /sys, from texts of real machines."""

from collections.abc import Sequence

import pytest

from flatcake.doctor.direct import STEPS, probe_direct
from flatcake.doctor.facts import Probes
from flatcake.doctor.machine import (
    find_mount,
    held,
    huge_bytes,
    parse_choice,
    parse_counters,
    read_memory,
    read_system,
)
from flatcake.io.seam import Files
from flatcake.units import KiB, MiB

MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
23 22 0:21 / /proc rw,nosuid - proc proc rw
30 22 259:1 / /mnt/kv rw,noatime shared:7 master:2 - xfs /dev/nvme0n1 rw,attr2,noatime
31 30 0:40 / /mnt/kv/a\040b rw - tmpfs tmpfs rw,size=4k
32 30 0:41 / /mnt/kv/a\040b ro - btrfs /dev/sdb rw
33 22 0:42 / /odd rw - ext4
garbage
"""

SMAPS = """
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      2048 kB
Private_Hugetlb:       0 kB
7f0000400000-7f0000800000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      4096 kB
7f1000000000-7f1000400000 rw-p 00000000 00:00 0    /anon_hugepage (deleted)
Private_Hugetlb:    4096 kB
"""


@pytest.mark.parametrize(
    ("path", "point", "filesystem"),
    [
        ("/home/me", "/", "ext4"),
        ("/", "/", "ext4"),
        ("/mnt/kv", "/mnt/kv", "xfs"),
        ("/mnt/kv/pool", "/mnt/kv", "xfs"),
        ("/mnt/kvx", "/", "ext4"),
        ("/mnt/kv/a b/c", "/mnt/kv/a b", "btrfs"),
        ("/odd/x", "/", "ext4"),
    ],
)
def test_mount_is_the_nearest_and_the_last(path: str, point: str, filesystem: str) -> None:
    mount = find_mount(MOUNTS, path)
    assert mount is not None and (mount.point, mount.filesystem) == (point, filesystem)


def test_mount_options_are_those_of_mount_and_filesystem_once_each() -> None:
    mount = find_mount(MOUNTS, "/mnt/kv")
    assert mount is not None and mount.options == ("rw", "noatime", "attr2") and mount.source == "/dev/nvme0n1"
    assert find_mount("", "/") is None


def test_choice_is_the_word_in_brackets() -> None:
    assert parse_choice("always [madvise] never\n") == "madvise"
    assert parse_choice("") is None and parse_choice("never") is None


def test_counters_are_bytes() -> None:
    text = "MemTotal:       24105 kB\nHugePages_Total:       0\nMemAvailable:   12 kB\nx\n"
    assert parse_counters(text) == {"MemTotal": 24105 * KiB, "MemAvailable": 12 * KiB}


@pytest.mark.parametrize(
    ("start", "size_bytes", "expected"),
    [
        (0x7F0000000000, 4 * MiB, 2 * MiB),
        (0x7F0000000000, 8 * MiB, 6 * MiB),
        (0x7F0000400000, 4 * MiB, 4 * MiB),
        (0x7F0000400000, 1 * MiB, 1 * MiB),
        (0x7F1000000000, 4 * MiB, 4 * MiB),
        (0x7F0000800000, 4 * MiB, 0),
        (0x100, 4 * MiB, 0),
    ],
)
def test_huge_bytes_are_those_of_the_range(start: int, size_bytes: int, expected: int) -> None:
    assert huge_bytes(SMAPS, start, size_bytes) == expected


def test_lock_is_found_by_its_inode() -> None:
    locks = "1: FLOCK  ADVISORY  WRITE 12 fe:00:4711 0 EOF\n2: POSIX  ADVISORY  WRITE 13 fe:00:99 0 EOF\n\n"
    assert held(locks, 4711)
    assert not held(locks, 711) and not held(locks, 99) and not held("", 4711)


def test_this_machine_answers_every_question() -> None:
    probes = Probes()
    system, memory = read_system(probes), read_memory(probes, Files())
    assert system.kernel and system.cores and system.open_files_max and "torch" in system.packages
    assert memory.total_bytes and memory.available_bytes and memory.available_bytes <= memory.total_bytes
    assert memory.arena_huge_share is not None and 0 <= memory.arena_huge_share <= 1


class Stepping(Files):
    """A filesystem that reads in steps of one size only."""

    def __init__(self, step: int) -> None:
        self.step = step

    def read(self, fd: int, into: Sequence[memoryview], offset_bytes: int) -> int:
        (view,) = into
        if offset_bytes % self.step or len(view) % self.step:
            raise OSError(22, "on purpose")
        return len(view)


class Refusing(Files):
    """A filesystem without O_DIRECT."""

    def open_file(self, path: str, *, create: bool, direct: bool) -> int:
        if direct:
            raise OSError(22, "on purpose")
        return super().open_file(path, create=create, direct=False)


@pytest.mark.parametrize("step", [*STEPS, 2 * STEPS[-1]])
def test_smallest_step_is_found(tmp_path: object, step: int) -> None:
    found = probe_direct(Stepping(step), str(tmp_path))
    assert found.works and found.align_bytes == (step if step in STEPS else None)


def test_refusal_is_an_answer_and_other_errors_are_not(tmp_path: object) -> None:
    assert not probe_direct(Refusing(), str(tmp_path)).works
    with pytest.raises(FileExistsError):
        probe_direct(Files(), str(tmp_path))
