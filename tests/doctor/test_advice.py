"""Advice and report over made-up facts: each fault gives its finding, a good machine gives none."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake.config import CapacityConfig, IOConfig, StoreConfig
from flatcake.doctor.advice import SEVERITIES, Finding, advise
from flatcake.doctor.blocks import BLOCK_TOKENS, PADDING_MAX, best_block, padding
from flatcake.doctor.facts import (
    DirectFacts,
    DiskFacts,
    EngineFacts,
    Facts,
    GpuFacts,
    MemoryFacts,
    Miss,
    PlaceFacts,
    RestoreFacts,
    SystemFacts,
)
from flatcake.doctor.report import as_mapping, as_text, usable
from flatcake.units import DIRECT_BYTES, GiB, MiB

SYSTEM = SystemFacts(
    kernel="6.8",
    python="3.11",
    packages={"torch": "2.13.0"},
    cores=8,
    cores_quota=None,
    memlock_bytes_max=-1,
    open_files_max=4096,
)
MEMORY = MemoryFacts(
    total_bytes=64 * GiB,
    available_bytes=48 * GiB,
    cgroup_bytes_max=None,
    thp="madvise",
    hugetlb_pages=0,
    hugetlb_free=0,
    arena_pages="thp",
    arena_huge_share=1.0,
)
PLACE = PlaceFacts(
    directory="/kv",
    path="/kv",
    state="ready",
    mount="/kv",
    filesystem="xfs",
    source="/dev/nvme0n1",
    options=("rw", "relatime"),
    rotational=False,
    free_bytes=900 * GiB,
    holder=None,
)
NO_GPU = GpuFacts(
    cuda_build=None,
    driver=None,
    devices=(),
    cupy="not installed",
    kvikio="not installed",
    kvikio_loads=False,
    kvikio_mode=None,
    nvidia_fs=False,
)
H200 = GpuFacts(
    cuda_build="13.0",
    driver="NVIDIA UNIX Open Kernel Module  580.1",
    devices=("NVIDIA H200, 139.8 GiB",),
    cupy="14.2.0",
    kvikio="26.10.0",
    kvikio_loads=True,
    kvikio_mode="CompatMode.AUTO",
    nvidia_fs=True,
)
RESTORE = RestoreFacts(
    size_bytes=256 * MiB,
    reads=64,
    rounds=5,
    memory_bytes_s=9e9,
    predicted_ns=100_000_000,
    measured_ns=110_000_000,
    right=True,
)
ENGINE = EngineFacts(
    device="cpu", name="posix", reason="posix: there is no GPU", slots=8, save_slots=2, slot_bytes=4 * MiB
)
GOOD = Facts(
    config=StoreConfig(directories=("/kv",)),
    system=SYSTEM,
    memory=MEMORY,
    place=PLACE,
    gpu=NO_GPU,
    direct=DirectFacts(works=True, align_bytes=512),
    engine=ENGINE,
    disk=DiskFacts(size_bytes=256 * MiB, write_bytes_s=2e9, read_bytes_s=3e9),
    restore=RESTORE,
)


def changed(part: str, **values: Any) -> Facts:
    return replace(GOOD, **{part: replace(getattr(GOOD, part), **values)})


def with_gpu(device: str, gpu: GpuFacts) -> Facts:
    return replace(GOOD, gpu=gpu, config=StoreConfig(directories=("/kv",), device=device))


def of(facts: Facts) -> list[tuple[str, str]]:
    return [(finding.severity, finding.subject) for finding in advise(facts)]


def test_good_machine_has_nothing_to_change() -> None:
    assert advise(GOOD) == []
    assert advise(with_gpu("auto", H200)) == []
    assert as_text(GOOD, [], "1").endswith("\nNothing to change.\n")


def test_nothing_known_is_no_finding() -> None:
    empty = Facts(config=StoreConfig(directories=("/kv",)))
    assert advise(empty) == []
    assert as_mapping(empty, [], "1")["disk"] is None
    assert as_text(empty, [], "1") == "flatcake 1\n\nNothing to change.\n"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (changed("place", state="missing"), ("problem", "directory")),
        (changed("place", state="denied"), ("unusable", "directory")),
        (changed("place", state="not a directory"), ("unusable", "directory")),
        (changed("place", holder="pid 3"), ("note", "directory")),
        (changed("place", filesystem="tmpfs"), ("note", "filesystem")),
        (changed("place", filesystem="nfs4"), ("problem", "filesystem")),
        (changed("place", filesystem="fuse.s3fs"), ("problem", "filesystem")),
        (changed("place", filesystem="overlay"), ("problem", "filesystem")),
        (changed("place", filesystem="btrfs"), ("note", "filesystem")),
        (changed("place", options=("rw", "data=journal")), ("problem", "filesystem")),
        (changed("place", free_bytes=8 * GiB), ("problem", "free space")),
        (changed("direct", works=False, align_bytes=None), ("problem", "O_DIRECT")),
        (changed("direct", align_bytes=16384), ("unusable", "O_DIRECT")),
        (changed("direct", align_bytes=None), ("unusable", "O_DIRECT")),
        (changed("memory", thp="never"), ("problem", "huge pages")),
        (changed("memory", arena_huge_share=0.5), ("problem", "huge pages")),
        (changed("memory", available_bytes=512 * MiB), ("problem", "memory")),
        (changed("memory", cgroup_bytes_max=512 * MiB), ("problem", "memory")),
        (changed("system", open_files_max=256), ("problem", "open files")),
        (changed("system", cores=1), ("note", "cores")),
        (changed("system", cores_quota=1.5), ("note", "cores")),
        (changed("disk", read_bytes_s=0.2e9), ("problem", "disk")),
        (changed("restore", measured_ns=201_000_000), ("problem", "restore")),
        (changed("restore", measured_ns=49_000_000), ("problem", "restore")),
        (changed("restore", right=False), ("unusable", "restore")),
        (with_gpu("cuda", NO_GPU), ("unusable", "GPU")),
        (with_gpu("auto", replace(NO_GPU, driver="NVIDIA 580")), ("problem", "GPU")),
        (with_gpu("auto", replace(H200, kvikio_loads=False)), ("problem", "kvikio")),
        (with_gpu("cuda:0", replace(H200, nvidia_fs=False)), ("note", "GPUDirect Storage")),
        (replace(GOOD, token_bytes=178), ("note", "block size")),
        (replace(GOOD, misses=(Miss("a store", "CapacityError: full"),)), ("unusable", "a store")),
        (replace(GOOD, misses=(Miss("measurement", "OSError: no inodes"),)), ("unusable", "measurement")),
        (replace(GOOD, misses=(Miss("save to SSD", "OSError: EIO"),)), ("problem", "save to SSD")),
        (changed("restore", memory_bytes_s=2e9), ("note", "processor")),
        (replace(GOOD, misses=(Miss("cpu quota", "PermissionError"),)), ("note", "cpu quota")),
    ],
)
def test_each_fault_gives_its_finding_and_no_other(facts: Facts, expected: tuple[str, str]) -> None:
    assert of(facts) == [expected]
    (finding,) = advise(facts)
    assert finding.text and finding.remedy
    assert usable([finding]) is (expected[0] != "unusable")


@pytest.mark.parametrize(
    "facts",
    [
        changed("memory", thp="never", hugetlb_free=600),
        changed("memory", thp=None, arena_huge_share=None),
        changed("system", open_files_max=-1),
        changed("system", open_files_max=None, cores=None),
        changed("restore", measured_ns=200_000_000),
        changed("restore", measured_ns=50_000_000),
        changed("restore", memory_bytes_s=None),
        replace(changed("restore", memory_bytes_s=2e9), engine=replace(ENGINE, device="cuda:0")),
        changed("restore", memory_bytes_s=2.5e9),
        changed("place", free_bytes=None),
        changed("place", free_bytes=9 * GiB),
        changed("direct", align_bytes=4096),
        with_gpu("cpu", replace(H200, kvikio_loads=False, nvidia_fs=False)),
        replace(GOOD, token_bytes=4096),
    ],
)
def test_what_is_fine_gives_no_finding(facts: Facts) -> None:
    assert advise(facts) == []


def test_o_direct_counts_by_what_was_asked() -> None:
    asked = StoreConfig(directories=("/kv",), io=IOConfig(direct="on"))
    assert of(replace(changed("direct", works=False, align_bytes=None), config=asked)) == [("unusable", "O_DIRECT")]
    off = StoreConfig(directories=("/kv",), io=IOConfig(direct="off"))
    assert of(replace(changed("direct", align_bytes=16384), config=off)) == [("problem", "O_DIRECT")]


def test_space_remedy_names_a_size_that_fits() -> None:
    facts = changed("place", free_bytes=6 * GiB + 5 * MiB)
    assert "at most 5 GiB" in advise(facts)[0].remedy
    capacity = CapacityConfig(ssd_bytes_max=5 * GiB)
    assert advise(replace(facts, config=StoreConfig(directories=("/kv",), capacity=capacity))) == []
    none = advise(changed("place", free_bytes=1 * GiB))
    assert "ssd_free_bytes_min" in none[0].remedy


def test_gravest_findings_come_first() -> None:
    facts = replace(
        changed("place", filesystem="tmpfs", free_bytes=0),
        misses=(Miss("kernel", "x"), Miss("a store", "y")),
        token_bytes=178,
    )
    order = [SEVERITIES.index(finding.severity) for finding in advise(facts)]
    assert order == sorted(order) and len(set(order)) == 3


@given(token_bytes=st.integers(1, 1 << 20))
def test_padding_is_that_of_the_smallest_whole_page(token_bytes: int) -> None:
    sizes = padding(token_bytes)
    assert [size.block_tokens for size in sizes] == list(BLOCK_TOKENS)
    for size in sizes:
        payload = size.block_tokens * token_bytes
        assert size.piece_bytes % DIRECT_BYTES == 0 and payload <= size.piece_bytes < payload + DIRECT_BYTES
        assert size.share == pytest.approx(size.piece_bytes / payload - 1)
    best = best_block(token_bytes)
    assert best in sizes
    smaller = [size for size in sizes if size.block_tokens < best.block_tokens]
    assert all(size.share > PADDING_MAX for size in smaller) or best.share > PADDING_MAX
    assert best.share <= PADDING_MAX or best.share == min(size.share for size in sizes)


@pytest.mark.parametrize("facts", [GOOD, with_gpu("cuda", H200), replace(GOOD, token_bytes=178)])
def test_report_says_the_same_in_both_forms(facts: Facts) -> None:
    findings = [*advise(facts), Finding("note", "x", "seen", "change it")]
    mapping = json.loads(json.dumps(as_mapping(facts, findings, "1.2")))
    assert mapping["usable"] is True and mapping["version"] == "1.2"
    assert mapping["restore"]["ratio"] == 1.1
    text = as_text(facts, findings, "1.2")
    assert "posix on cpu: there is no GPU" in text and "3.00 GB/s read" in text and "(1.10 x, 5 rounds)" in text
    assert text.endswith("note: x: seen\n    -> change it\n")
    assert ("H200" in text) is bool(facts.gpu and facts.gpu.devices)
    labels = [line for line in text.splitlines()[1:] if line.startswith("  ") and not line.startswith("    ")]
    assert len({len(line) - len(line[2:].split("  ", 1)[1].lstrip()) for line in labels}) == 1, "values are aligned"
