"""The choice of an engine: what is asked for works or is refused, what is found is proven, content survives."""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flatcake.config import IOConfig
from flatcake.errors import DeviceError
from flatcake.io.device import CpuDevice
from flatcake.io.filepool import FilePool, PoolSpec
from flatcake.io.memory import MemoryEngine
from flatcake.io.posix import PosixEngine
from flatcake.io.probe import Around, choose_engine
from flatcake.io.sizing import RingSize
from flatcake.io.staged import StagedEngine
from flatcake.units import MiB
from tests.fakes import WAIT_S, FakeCuda, FakeKvikio, FaultyFiles, gpu_buffer, host_buffer, when
from tests.io.contract import CLOSE_NS, Bench, check_batch_touches_only_its_ranges

FILE = 8 * MiB


def missing() -> Any:
    raise DeviceError("kvikio cannot be loaded (no libcufile)")


class Place:
    """A pool, and what surrounds it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.files = FaultyFiles()
        self.gpu = FakeCuda()
        self.cpu = CpuDevice(self.files)
        self.pool = self.open()

    def open(self) -> FilePool:
        wanted = PoolSpec(
            directories=(str(self.home),),
            size_bytes=2 * FILE,
            file_bytes=FILE,
            direct="off",
            free_bytes_min=0,
            version=1,
            geometry="g",
            rank=0,
        )
        return FilePool(self.files, wanted)

    def around(self, device: CpuDevice, load: Callable[[], Any] = missing) -> Around:
        return Around(
            files=self.files,
            device=device,
            when=when,
            file_count=2,
            file_bytes=FILE,
            pool=self.pool,
            ring=RingSize(4 * MiB, 2, 1),
            load_kvikio=load,
        )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    before = set(threading.enumerate())
    place = Place(tmp_path)
    yield place
    place.pool.close()
    assert not place.files.open_fds and not place.gpu.pinned
    for thread in set(threading.enumerate()) - before:  # Of the stand-ins: they end by themselves.
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread.name


def finish(engine: Any, place: Place, device: CpuDevice) -> None:
    """The engine works and ends."""
    buffer = host_buffer if device.is_host else gpu_buffer
    check_batch_touches_only_its_ranges(Bench(engine=engine, file_count=2, file_bytes=FILE, buffer=buffer))
    assert engine.close(CLOSE_NS)


def test_auto_on_a_cpu_is_posix(place: Place) -> None:
    engine, reason = choose_engine(IOConfig(), place.around(place.cpu))
    assert isinstance(engine, PosixEngine) and reason == "posix: there is no GPU"
    finish(engine, place, place.cpu)


def test_auto_on_a_gpu_is_kvikio_once_it_has_proven_itself(place: Place) -> None:
    kvikio = FakeKvikio()
    engine, reason = choose_engine(IOConfig(kvikio_threads=7), place.around(place.gpu, lambda: kvikio))
    assert isinstance(engine, StagedEngine) and reason.startswith("kvikio-staged: ") and "compared 4 MiB" in reason
    assert kvikio.defaults.values["num_threads"] == 7 and kvikio.defaults.values["auto_direct_io_read"] is False
    assert len(kvikio.futures) == 4  # A small and a large transfer, written and read.
    finish(engine, place, place.gpu)


def test_auto_without_kvikio_is_staged_and_says_why(place: Place) -> None:
    engine, reason = choose_engine(IOConfig(), place.around(place.gpu))
    assert isinstance(engine, StagedEngine) and "no libcufile" in reason and reason.startswith("posix-staged: ")
    finish(engine, place, place.gpu)


def spoil(kvikio: FakeKvikio, how: str) -> None:
    if how == "other bytes":
        kvikio.damage = True
    elif how == "short count":
        kvikio.outcomes = [None, 4096]
    elif how == "error of a future":
        kvikio.outcomes = [RuntimeError("bad")]
    elif how == "lost write":
        kvikio.lose_writes = True
    elif how == "no start":
        kvikio.start_error = RuntimeError("bad")
    elif how == "no file":
        kvikio.open_error = RuntimeError("cuFileDriverOpen")
    else:
        kvikio.defaults = FakeKvikio(defaults=()).defaults


FAILURES = ["other bytes", "short count", "error of a future", "lost write", "no start", "no file", "no defaults"]


@pytest.mark.parametrize("how", FAILURES)
def test_kvikio_that_fails_its_probe_is_never_chosen(place: Place, how: str) -> None:
    kvikio = FakeKvikio()
    spoil(kvikio, how)
    engine, reason = choose_engine(IOConfig(), place.around(place.gpu, lambda: kvikio))
    assert isinstance(engine, StagedEngine) and "kvikio is not used" in reason
    assert all(file.closes == 1 for file in kvikio.files)
    finish(engine, place, place.gpu)


@pytest.mark.parametrize("how", FAILURES)
def test_kvikio_asked_for_works_or_is_refused(place: Place, how: str) -> None:
    kvikio = FakeKvikio()
    spoil(kvikio, how)
    with pytest.raises(DeviceError, match="io.engine kvikio cannot be used: "):
        choose_engine(IOConfig(engine="kvikio"), place.around(place.gpu, lambda: kvikio))
    assert all(file.closes == 1 for file in kvikio.files)


def test_kvikio_asked_for_but_missing_says_what_is_missing(place: Place) -> None:
    with pytest.raises(DeviceError, match="no libcufile"):
        choose_engine(IOConfig(engine="kvikio"), place.around(place.gpu))


def test_failing_device_does_not_escape_the_probe(place: Place) -> None:
    place.gpu.copy_error = RuntimeError("an illegal memory access was encountered")
    with pytest.raises(DeviceError, match="illegal memory access"):
        choose_engine(IOConfig(engine="kvikio"), place.around(place.gpu, FakeKvikio))


def test_failing_pool_does_not_escape_the_probe(place: Place) -> None:
    place.files.fail("read", None, errno.EIO)
    with pytest.raises(DeviceError, match="probe failed"):
        choose_engine(IOConfig(engine="kvikio"), place.around(place.gpu, FakeKvikio))


@pytest.mark.parametrize("damage", [False, True])
def test_probe_leaves_kept_content_as_it_was(place: Place, damage: bool) -> None:
    content = bytes(range(256)) * (FILE // 256)
    assert place.files.write(place.pool.fds[0], [memoryview(content)], 0) == FILE
    place.pool.close()
    place.pool = place.open()
    assert place.pool.kept
    kvikio = FakeKvikio()
    kvikio.damage = damage
    engine, _ = choose_engine(IOConfig(), place.around(place.gpu, lambda: kvikio))
    assert Path(place.pool.paths[0]).read_bytes() == content
    assert engine.close(CLOSE_NS)


def test_cufile_is_refused_until_proven(place: Place) -> None:
    with pytest.raises(DeviceError, match="cufile.*GPUDirect"):
        choose_engine(IOConfig(engine="cufile"), place.around(place.gpu, FakeKvikio))


def test_posix_asked_for_is_staged_on_a_gpu(place: Place) -> None:
    for device, kind in ((place.cpu, PosixEngine), (place.gpu, StagedEngine)):
        engine, reason = choose_engine(IOConfig(engine="posix"), place.around(device, FakeKvikio))
        assert isinstance(engine, kind) and reason == "posix: asked for"
        finish(engine, place, device)


def test_memory_needs_no_pool(place: Place) -> None:
    engine, reason = choose_engine(IOConfig(engine="memory"), place.around(place.gpu))
    assert isinstance(engine, MemoryEngine) and reason.startswith("memory: ")
    assert [len(file) for file in engine.files] == [FILE, FILE]


def test_no_memory_to_stage_in_ends_the_threads(place: Place) -> None:
    place.files.fail("map_memory", errno.ENOMEM)
    with pytest.raises(OSError, match="stage"):
        choose_engine(IOConfig(engine="posix"), place.around(place.gpu))
