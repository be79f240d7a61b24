"""B18, B19: which way bytes go is said truly, and what a path cannot do is refused or done another way."""

import errno
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatcake
from flatcake.config import IOConfig
from flatcake.errors import DeviceError
from flatcake.io.device import CpuDevice
from flatcake.io.devices import cuda_is_available
from flatcake.io.probe import choose_engine
from tests.cases.shim import Shim, error, make_memory, open_case, tokens_of
from tests.fakes import FakeKvikio
from tests.io.test_probe import Place
from tests.opened import note
from tests.stores import WAIT_S, Layout, Memory, check, make_config, make_identity, make_tokens, restore, save

WRITES = 2
"""Transfers that the probe writes before it reads."""


@pytest.mark.skipif(cuda_is_available(), reason="a machine without a GPU is what this is about")
def test_b18_without_a_driver_auto_is_posix_and_says_so(tmp_path: Path) -> None:
    memory, tokens = make_memory(), tokens_of("s", 4)
    with open_case(memory, tmp_path) as store:
        assert save(store, memory, "s", tokens).written_blocks == 4
        assert restore(store, memory, tokens).blocks == 4
        assert store.stats().io_path == "posix" and store.stats().io_reason == "posix: there is no GPU"
    with open_case(memory, tmp_path, io={"engine": "posix"}) as store:
        assert restore(store, memory, tokens).blocks == 4 and store.stats().io_path == "posix"
    assert "kvikio" not in sys.modules, "a library was loaded that was not asked for"


@pytest.mark.skipif(cuda_is_available(), reason="a machine without a GPU is what this is about")
@pytest.mark.parametrize("engine", ["kvikio", "cufile"])
def test_b18_what_is_required_and_cannot_be_is_refused_with_the_reason(tmp_path: Path, engine: str) -> None:
    files = Shim()
    with pytest.raises(DeviceError, match=engine) as raised:
        open_case(make_memory(), tmp_path, files=files, io={"engine": engine})
    assert "use auto" in str(raised.value) and not files.open_fds


class Driver(Place):
    """A pool in front of a GPU that is made of host memory, and a kvikio that breaks as told."""

    def __init__(self, home: Path, how: str) -> None:
        super().__init__(home)
        self.kvikio, self.asked, self.how = FakeKvikio(), 0, how
        if how == "no handle":
            self.kvikio.open_error = RuntimeError("cuFileHandleRegister failed")
        elif how == "first read fails":
            self.kvikio.outcomes = [*[None] * WRITES, RuntimeError("cuFileRead failed")]

    def load(self) -> Any:
        self.asked += 1
        if self.how == "no library":
            raise DeviceError("kvikio cannot be loaded: libcufile.so.0: no such file")
        return self.kvikio

    def choose(self, engine: str) -> tuple[Any, str]:
        return choose_engine(IOConfig(engine=engine), self.around(self.gpu, self.load))  # type: ignore[arg-type]

    def end(self) -> None:
        self.pool.close()
        assert not self.files.open_fds and not self.gpu.pinned


@pytest.mark.parametrize("how", ["no library", "no handle", "first read fails", "compat"])
def test_b18_a_driver_that_is_missing_in_four_ways(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(tmp_path / "auto", how)
    engine, reason = driver.choose("auto")
    assert driver.asked == 1 and "gds" not in (engine.name + reason).lower()
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    if how == "compat":  # Its bytes cross host memory, and its name says so.
        assert engine.name == "kvikio-staged" and not warnings
    else:
        assert engine.name == "posix-staged" and reason.startswith("posix-staged: kvikio is not used")
        assert len(warnings) == 1
    if how == "first read fails":
        assert "cuFileRead failed" in reason or "it answered" in reason
        assert not driver.kvikio.outcomes, "the fault never fired"
    assert engine.close(int(WAIT_S * 1e9))
    engine, _ = driver.choose("posix")
    assert driver.asked == 1, "the library was loaded though it was off"
    assert engine.close(int(WAIT_S * 1e9))
    driver.end()
    required = Driver(tmp_path / "required", how)
    if how == "compat":
        engine, _ = required.choose("kvikio")
        assert engine.close(int(WAIT_S * 1e9))
    else:
        with pytest.raises(DeviceError, match="kvikio cannot be used"):
            required.choose("kvikio")
    required.end()


SIZES = [*range(512, 12801, 1536), 514, 1026, 4098, 6150, 12794]
"""Bytes of a block in one layer: even and odd multiples of 512, and others."""


def odd_memory(size_bytes: int, shift_bytes: int) -> Memory:
    """Two layers of one component, whose pools begin `shift_bytes` behind an aligned address."""
    shape = (16, 2, size_bytes // 2)
    layout = Layout(
        name="odd",
        shapes=(shape,) * 2,
        dtypes=(torch.uint8,) * 2,
        page_tokens=2,
        block_tokens=2,
        page_count=16,
        describe=lambda pools: flatcake.PagedKV.of_layers(list(pools), page_tokens=2),
        views=lambda pools: [[pool] for pool in pools],
    )
    memory = Memory(layout)
    for layer, raw in enumerate(memory.raws):
        whole = torch.zeros(len(raw) + 8192, dtype=torch.uint8)
        first = -whole.data_ptr() % 4096 + shift_bytes
        memory.raws[layer] = whole[first : first + len(raw)]
    memory.kv = layout.describe([raw.view(shape) for raw in memory.raws])
    memory.views = [[raw.view(shape)] for raw in memory.raws]
    return memory


@pytest.mark.parametrize("shift_bytes", [0, 64, 512])
def test_b19_block_sizes_and_source_addresses(tmp_path: Path, shift_bytes: int) -> None:
    refused = 0
    for size_bytes in SIZES:
        files, home = Shim(), tmp_path / str(size_bytes)
        try:
            memory = odd_memory(size_bytes, shift_bytes)
        except flatcake.ShapeError as refusal:
            assert size_bytes // 2 % 4 and "multiples of 4 bytes" in str(refusal)
            refused += 1
            continue
        config = make_config(memory, [home], blocks=16, file_blocks=8, dram_blocks=8)
        with note(flatcake.open(config, make_identity(memory), memory.kv, files=files)) as store:
            tokens = make_tokens("s", 6, memory.layout.block_tokens)
            memory.fill(seed=size_bytes)
            kept = memory.take(np.arange(6))
            saved = store.save("s", tokens, np.arange(6)).result(WAIT_S)
            assert saved is not None and saved.written_blocks == 6
            with store.lease(store.match(tokens)) as lease:
                assert store.restore(lease, np.arange(8, 14)).result().blocks == 6
            back = memory.take(np.arange(8, 14))
            assert all(a.equal(b) for one, two in zip(kept, back, strict=True) for a, b in zip(one, two, strict=True))
            check(store)
        assert files.writes and not files.unaligned, f"{size_bytes} bytes: a direct call that is not aligned"
    assert refused == sum(size_bytes // 2 % 4 != 0 for size_bytes in SIZES) > 0


def test_b19_direct_io_refused_at_open(tmp_path: Path) -> None:
    memory, files, tokens = make_memory(), Shim(), tokens_of("s", 4)
    files.fail("open_direct", *[errno.EINVAL] * 8)
    with open_case(memory, tmp_path, files=files) as store:
        assert files.calls["open_direct"] == 8
        assert save(store, memory, "s", tokens).written_blocks == 4
        assert restore(store, memory, tokens).blocks == 4
    files.fail("open_direct", errno.EINVAL)
    with pytest.raises(flatcake.ConfigError, match="refuses O_DIRECT"):
        open_case(memory, tmp_path, files=files, io={"direct": "on"})
    assert not files.open_fds


def test_b19_direct_io_refused_at_every_write(tmp_path: Path) -> None:
    memory, files, tokens = make_memory(), Shim(), tokens_of("s", 4)
    with open_case(memory, tmp_path, files=files) as store:
        files.fault = lambda verb, views, at: error(errno.EINVAL) if verb == "write" else None
        for number in range(3):
            found = save(store, memory, f"s{number}", tokens_of(number, 4))
            assert found.reason == f"write failed (errno {errno.EINVAL})"
        assert files.fired and store.stats().blocks == 0
        assert store.stats().counts[f"saves failed: write failed (errno {errno.EINVAL})"] == 3, "nobody could tell"
        files.fault = lambda verb, views, at: None
        assert save(store, memory, "s", tokens).written_blocks == 4
        assert restore(store, memory, tokens).blocks == 4


def test_b19_space_that_cannot_be_preallocated(tmp_path: Path) -> None:
    files = Shim()
    files.fail("allocate", errno.EOPNOTSUPP)
    with pytest.raises(flatcake.FlatCakeError, match="another directory"):
        open_case(make_memory(), tmp_path, files=files)
    assert not files.open_fds and not list(tmp_path.glob("pool-*"))


def test_b19_the_shim_notices_what_is_not_aligned(tmp_path: Path) -> None:
    files, memory = Shim(), CpuDevice(Shim()).window(8192).numpy()
    (tmp_path / "f").write_bytes(bytes(8192))
    try:
        fd = files.open_file(str(tmp_path / "f"), create=False, direct=True)
    except OSError as refused:
        pytest.skip(f"this filesystem has no O_DIRECT: {refused}")
    for view, at in ((memory.data[1:4097], 0), (memory.data[:4096], 1)):
        with pytest.raises(OSError):
            files.write(fd, [view], at)
    files.close(fd)
    assert len(files.unaligned) == 2
