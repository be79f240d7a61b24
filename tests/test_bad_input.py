"""A caller's mistake: an error that says what was given, what was expected and what to change; and no effect."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from flatcake.assemble import open_store
from flatcake.config import from_mapping
from flatcake.errors import (
    CapacityError,
    ConfigError,
    DeviceError,
    FlatCakeError,
    FormatError,
    OwnershipError,
    PageTableError,
    ShapeError,
)
from flatcake.gva import Medium
from flatcake.io.paged import PagedKV
from flatcake.keys import Identity
from flatcake.store import Store
from flatcake.units import KiB, TiB
from tests.fakes import FaultyFiles
from tests.stores import (
    Memory,
    check,
    make_config,
    make_identity,
    make_store,
    make_tokens,
    memory_engine,
    restore,
    save,
    simple_layout,
)

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


@pytest.fixture
def memory() -> Memory:
    return Memory(simple_layout())


@pytest.fixture
def store(memory: Memory):
    with make_store(memory) as opened:
        save(opened, memory, "s", make_tokens("a", 6))
        yield opened
        check(opened)
        assert restore(opened, memory, make_tokens("a", 6)).blocks == 6


def state(store: Store) -> tuple:
    """All that a call could have changed."""
    stats = store.stats()
    calls = len(memory_engine(store, Medium.SSD).calls)
    return calls, stats.plans, stats.blocks, [media.used_bytes for media in stats.media.values()]


# -- page tables ----------------------------------------------------------------------------------------

GOOD = list(range(12))
BAD_TABLES = [
    pytest.param(GOOD[:11], "page table of 11 pages: expected 12, 2 for each of 6 blocks", id="more keys than data"),
    pytest.param([], "page table of 0 pages: expected 12", id="empty"),
    pytest.param([*GOOD[:11], 0], "page 0 is named more than once", id="a page twice"),
    pytest.param([*GOOD[:11], 64], "pages 0 … 64: expected 0 … 63", id="past the end"),
    pytest.param([*GOOD[:11], -2], "pages -2 … 10: expected 0 … 63", id="below zero"),
    pytest.param([float(page) for page in GOOD], "type float.*: expected 1-D integers", id="floats"),
    pytest.param([GOOD], r"shape \(1, 12\).*expected 1-D integers", id="two dimensions"),
    pytest.param([bool(page) for page in GOOD], "type bool: expected 1-D integers", id="booleans"),
    pytest.param(7, r"shape \(\).*expected 1-D integers", id="a number"),
]


@pytest.mark.parametrize(("pages", "text"), BAD_TABLES)
def test_a_bad_page_table_of_a_restore_is_refused(store: Store, pages: object, text: str) -> None:
    before = state(store)
    with store.lease(store.match(make_tokens("a", 6))) as lease:
        for given in (pages, np.asarray(pages), torch.tensor(pages)):
            with pytest.raises(PageTableError, match=text):
                store.restore(lease, given)
    assert state(store) == before


@pytest.mark.parametrize(
    ("pages", "text"),
    [*BAD_TABLES, pytest.param([*GOOD[:11], -1], "pages -1 … 10: expected 0 … 63", id="a hole")],
)
def test_a_bad_page_table_of_a_save_is_refused(store: Store, pages: object, text: str) -> None:
    before = state(store)
    with pytest.raises(PageTableError, match=text):
        store.save("t", make_tokens("b", 6), pages)
    assert state(store) == before
    assert store.match(make_tokens("b", 6)).blocks == 0


# -- sequences ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([-1] * 8, ShapeError),
        ([2**32] * 8, ShapeError),
        ([0.5] * 8, ShapeError),
        (np.zeros((2, 8), np.int64), ShapeError),
        ("a text", ShapeError),
        (None, ShapeError),
        (np.zeros((3, 3), np.uint64), ShapeError),
    ],
)
def test_a_bad_sequence_is_refused(store: Store, tokens: object, error: type[FlatCakeError]) -> None:
    before = state(store)
    with pytest.raises(error, match="expected"):
        store.match(tokens)
    with pytest.raises(error, match="expected"):
        store.save("t", tokens, GOOD)
    assert state(store) == before


@pytest.mark.parametrize("name", ["salt", "extra"])
def test_a_salt_that_is_not_bytes_is_refused_and_not_shown(store: Store, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected bytes, got str") as caught:
        store.match(make_tokens("a", 6), **{name: "secret"})  # type: ignore[arg-type]
    assert "secret" not in str(caught.value)


# -- tensors --------------------------------------------------------------------------------------------

KV = torch.zeros(8, 4, 2, 16, dtype=torch.bfloat16)
BAD_TENSORS = [
    pytest.param(lambda: PagedKV.of_layers([], page_tokens=4), "0 layers: expected at least one", id="no layer"),
    pytest.param(lambda: PagedKV.of_layers([[KV], []], page_tokens=4), "each with a tensor", id="an empty layer"),
    pytest.param(
        lambda: PagedKV.of_layers([KV, KV[:7]], page_tokens=4),
        r"tensors of \[7, 8\] pages: expected the same number",
        id="numbers of pages",
    ),
    pytest.param(
        lambda: PagedKV.of_layers([KV, KV.to("meta")], page_tokens=4), "expected one device", id="two devices"
    ),
    pytest.param(
        lambda: PagedKV.of_layers([KV[:1].expand(8, 4, 2, 16)], page_tokens=4),
        "its pages overlap",
        id="one page for all",
    ),
    pytest.param(
        lambda: PagedKV.of_layers([torch.zeros(80, dtype=torch.int32).as_strided((8, 16), (8, 1))], page_tokens=4),
        "its pages overlap",
        id="pages overlap",
    ),
    pytest.param(
        lambda: PagedKV.of_layers([torch.zeros(8, 4, 6, 32, dtype=torch.int32)[:, :, ::3, ::2]], page_tokens=4),
        "expected pages made of equal rows at one stride",
        id="two strides",
    ),
    pytest.param(
        lambda: PagedKV.of_layers([torch.zeros(8, 4, 32, dtype=torch.bfloat16)[..., ::2]], page_tokens=4),
        "expected rows of contiguous bytes that start and end at multiples of 4 bytes",
        id="rows of 2 bytes",
    ),
    pytest.param(
        lambda: PagedKV.of_layers([KV.flatten()[1:513].view(8, 4, 16)], page_tokens=4),
        "multiples of 4 bytes",
        id="an odd address",
    ),
    pytest.param(lambda: PagedKV.of_layers([KV], page_tokens=4, page_axis=4), "axis 4 of a tensor", id="no such axis"),
    pytest.param(
        lambda: PagedKV.of_stacked(KV, page_tokens=4, page_axis=1, layer_axis=-3),
        "expected different ones",
        id="one axis",
    ),
    pytest.param(
        lambda: PagedKV.of_stacked(KV, page_tokens=4, page_axis=1, split_axis=9), "axis 9 of a tensor", id="split axis"
    ),
    pytest.param(
        lambda: PagedKV.of_layers([KV], page_tokens=4).geometry(6), "block of 6 tokens, page of 4", id="a block of 1.5"
    ),
    pytest.param(lambda: PagedKV.of_layers([KV], page_tokens=0).geometry(8), "page of 0", id="pages of nothing"),
]


@pytest.mark.parametrize(("describe", "text"), BAD_TENSORS)
def test_tensors_that_do_not_fit_their_description_are_refused(describe, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        describe()


def test_rows_of_two_bytes_are_fine_when_pages_are_whole(memory: Memory) -> None:
    """The twin of the refusal above: the same bytes without the holes."""
    assert PagedKV.of_layers([torch.zeros(8, 4, 16, dtype=torch.bfloat16)], page_tokens=4).page_count == 8


# -- opening --------------------------------------------------------------------------------------------


def refuse_open(memory: Memory, directory: Path, error: type[FlatCakeError], text: str, **changes) -> None:
    """Opening fails with an error, leaves no file but perhaps a lock, and a right call works afterwards."""
    files, identity = changes.pop("files", None), changes.pop("identity", None)
    with pytest.raises(error, match=text):
        make_store(memory, make_config(memory, [directory], **changes), files=files, identity=identity)
    left = [path.name for path in directory.rglob("*") if path.is_file()]
    assert set(left) <= {"lock"}, left
    with make_store(memory, make_config(memory, [directory])) as store:
        assert save(store, memory, "s", make_tokens("a", 3)).written_blocks == 3


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"io": {"slot_bytes": 4096, "window_bytes_max": 4 * 4096}},
            "at most 16384 in 5 slots.*raise window_bytes_max",
        ),
        ({"io": {"slot_bytes": 0, "window_bytes_max": 16 * KiB}}, "a piece has 4096 bytes, the window at most 16384"),
        ({"capacity": {"pool_file_bytes": 8 * KiB}}, "a file of 8192 bytes cannot hold one block; expected at least"),
        ({"capacity": {"dram_bytes_max": 8 * KiB}}, "a file of 8192 bytes cannot hold one block"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_any_effect(
    memory: Memory, tmp_path: Path, changes: dict, text: str
) -> None:
    refuse_open(memory, tmp_path / "pool", ConfigError, text, **changes)


def test_reads_smaller_than_a_piece_are_refused(tmp_path: Path) -> None:
    memory = Memory(simple_layout(dim=100))
    io = {"read_bytes_max": 4096}
    refuse_open(memory, tmp_path / "pool", ConfigError, "a piece has 8192 bytes, read_bytes_max=4096", io=io)


def test_a_block_that_is_no_multiple_of_pages_is_refused(memory: Memory, tmp_path: Path) -> None:
    identity = Identity(model="m", revision="r", kv_dtype="bf16", layout="x", block_tokens=7)
    refuse_open(memory, tmp_path / "pool", ShapeError, "block of 7 tokens, page of 4", identity=identity)


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="windw_bytes_max.*window_bytes_max"):
        from_mapping({"directories": [str(tmp_path)], "io": {"windw_bytes_max": "1MiB"}})
    assert not list(tmp_path.iterdir())


def test_an_arena_that_does_not_fit_is_refused_before_any_file(memory: Memory, tmp_path: Path) -> None:
    text = r"DRAM arena of \d+ bytes .*lower dram_bytes_max"
    capacity = {"dram_bytes_max": 64 * TiB, "index_entries_max": 100}
    refuse_open(memory, tmp_path / "pool", CapacityError, text, capacity=capacity)
    assert (tmp_path / "pool" / "lock").exists()


def test_a_disk_that_is_full_at_open_is_refused(memory: Memory, tmp_path: Path) -> None:
    files = FaultyFiles()
    files.fail("allocate", None, errno.ENOSPC)
    refuse_open(memory, tmp_path / "pool", CapacityError, "the pool needs", files=files)
    assert files.calls["allocate"] == 2 and not files.open_fds
    capacity = {"ssd_free_bytes_min": 1 << 60}
    with pytest.raises(CapacityError, match="must stay so; lower ssd_bytes_max or ssd_free_bytes_min"):
        make_store(memory, make_config(memory, [tmp_path / "other"], capacity=capacity))
    assert not [path for path in (tmp_path / "other").iterdir() if path.name != "lock"]


def test_a_directory_that_is_in_use_is_refused(memory: Memory, tmp_path: Path) -> None:
    with make_store(memory, make_config(memory, [tmp_path])) as store:
        save(store, memory, "s", make_tokens("a", 3))
        with pytest.raises(OwnershipError, match=str(tmp_path)):
            make_store(memory, make_config(memory, [tmp_path]))
        assert restore(store, memory, make_tokens("a", 3)).blocks == 3


@pytest.mark.parametrize("call", ["make_directory", "lock", "create_file"])
def test_a_directory_without_permission_is_refused(memory: Memory, tmp_path: Path, call: str) -> None:
    files = FaultyFiles()
    files.fail(call, errno.EACCES)
    refuse_open(memory, tmp_path / "pool", OwnershipError, "pool", files=files)
    assert files.calls[call] and not files.open_fds


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_another_owner_is_refused(memory: Memory, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OwnershipError, match="pool"):
            make_store(memory, make_config(memory, [tmp_path / "pool"]))
    finally:
        tmp_path.chmod(0o700)


def test_a_directory_that_holds_something_else_is_refused_and_left_alone(memory: Memory, tmp_path: Path) -> None:
    (tmp_path / "format").write_text("the notes of somebody\n")
    with pytest.raises(FormatError, match="format"):
        make_store(memory, make_config(memory, [tmp_path]))
    assert [path.name for path in tmp_path.iterdir()] == ["format"]
    assert (tmp_path / "format").read_text() == "the notes of somebody\n"


def test_one_directory_named_twice_is_refused(memory: Memory, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "pool")
    with pytest.raises(ConfigError, match="name it once"):
        make_store(memory, make_config(memory, [tmp_path / "pool", tmp_path / "link"]))
    assert not (tmp_path / "pool").exists()


@NO_CUDA
def test_a_device_that_is_not_there_is_refused(memory: Memory, tmp_path: Path) -> None:
    config = from_mapping({"directories": [str(tmp_path / "pool")], "device": "cuda"})
    with pytest.raises(DeviceError, match="sees 0 CUDA devices; use device cpu"):
        make_store(memory, config)
    assert not (tmp_path / "pool").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_another_device_are_refused(memory: Memory, tmp_path: Path) -> None:
    config = from_mapping({"directories": [str(tmp_path / "pool")], "device": "cuda"})
    with pytest.raises(ShapeError, match="paged tensors on cpu, device cuda:0: expected the same device"):
        make_store(memory, config)
    assert not (tmp_path / "pool").exists()


def test_identities_are_checked(memory: Memory) -> None:
    with pytest.raises(ConfigError):
        make_identity(memory, model=3)


@pytest.mark.parametrize(
    ("at", "given", "text"), [(0, {}, "from_mapping"), (1, {}, "flatcake.Identity"), (2, [], "PagedKV.of_layers")]
)
def test_what_is_no_config_identity_or_kv_is_refused(memory: Memory, at: int, given: object, text: str) -> None:
    arguments: list = [make_config(memory), make_identity(memory), memory.kv]
    arguments[at] = given
    with pytest.raises(ConfigError, match=text):
        open_store(*arguments)
