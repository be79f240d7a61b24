"""The device seam: the CPU, whose work is done at once; a GPU where there is one; clear errors where there is none."""

import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from flatcake.errors import DeviceError
from flatcake.io import devices as seam
from flatcake.io.device import CpuDevice, Device
from flatcake.io.devices import cuda_is_available, open_device
from flatcake.io.seam import Files

SIZE = 1 << 20


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "cuda" and not cuda_is_available():
        pytest.skip("there is no CUDA device")
    opened = open_device(request.param, Files())
    opened.enter_thread()
    yield opened


def test_window_is_zeroed_bytes_on_the_device(device: Device) -> None:
    window = device.window(SIZE)
    assert window.dtype == torch.uint8 and window.shape == (SIZE,) and window.is_contiguous()
    assert not window.any() and window.is_cuda == (not device.is_host)
    assert window.data_ptr() % 4096 == 0 or not device.is_host


def test_copies_follow_each_other_on_a_stream(device: Device) -> None:
    stream = device.new_stream()
    window, memory = device.window(SIZE), Files().map_memory(2 * SIZE)
    device.pin(memory)
    noise = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    memory.array[:SIZE] = noise
    device.copy(window.data_ptr(), memory.address, SIZE, stream)
    device.copy(memory.address + SIZE + 64, window.data_ptr() + 128, SIZE - 128, stream)
    event = device.record(stream)
    event.wait()
    assert event.done()
    assert np.array_equal(memory.array[SIZE + 64 : 2 * SIZE - 64], noise[128:])
    assert not memory.array[SIZE : SIZE + 64].any() and not memory.array[2 * SIZE - 64 :].any()
    device.unpin(memory)


def test_stream_waits_for_another(device: Device) -> None:
    first, second = device.new_stream(), device.new_stream()
    a, b, memory = device.window(SIZE), device.window(SIZE), Files().map_memory(SIZE)
    memory.array[:] = 9
    device.copy(a.data_ptr(), memory.address, SIZE, first)
    device.wait(second, device.record(first))
    device.copy(b.data_ptr(), a.data_ptr(), SIZE, second)
    device.record(second).wait()
    assert bool(b.eq(9).all())


def test_torch_launches_on_the_stream_in_use(device: Device) -> None:
    stream, window = device.new_stream(), device.window(SIZE)
    device.use(stream)
    window.add_(3)
    device.record(stream).wait()
    assert bool(window.eq(3).all())


def test_mirror_goes_up_and_comes_back_in_part(device: Device) -> None:
    stream = device.new_stream()
    device.use(stream)
    mirror = device.mirror(SIZE, stream)
    mirror.host[:] = np.arange(SIZE) % 251
    mirror.tensor.zero_()
    mirror.push(2, SIZE)
    device.record(stream).wait()
    there = mirror.tensor.cpu().tolist()
    assert there == [0, 0, *mirror.host[2:].tolist()] and mirror.tensor.is_cuda == (not device.is_host)
    mirror.push(0, 2)
    mirror.tensor.add_(1)
    before = mirror.host.copy()
    mirror.pull(3, 9)
    device.record(stream).wait()
    assert (mirror.host[3:9] == before[3:9] + 1).all()
    assert (mirror.host[:3] == before[:3]).all() and (mirror.host[9:] == before[9:]).all()


@pytest.mark.gpu
def test_what_every_tile_needs_keeps_the_interpreter() -> None:
    if not cuda_is_available():
        pytest.skip("there is no CUDA device")
    device, counted, stop, usual_s = open_device("cuda", Files()), [0], threading.Event(), sys.getswitchinterval()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    first, second = device.new_stream(), device.new_stream()
    a, b = device.window(SIZE), device.window(SIZE)
    thread = threading.Thread(target=count)
    thread.start()
    sys.setswitchinterval(10)  # From here on the other thread runs only if a call lets it.
    before = counted[0]
    for _ in range(20):
        device.copy(a.data_ptr(), b.data_ptr(), SIZE, first)
        event = device.record(first)
        device.wait(second, event)
        event.done()
    after = counted[0]
    sys.setswitchinterval(usual_s)
    stop.set()
    thread.join()
    device.record(second).wait()
    assert before == after, "a call let the interpreter go"


def test_default_stream_of_a_caller(device: Device) -> None:
    stream = device.stream_of(None)
    device.record(stream).wait()
    assert device.stream_of(stream) is stream


def test_cpu_is_always_there() -> None:
    opened = open_device("cpu", Files())
    assert isinstance(opened, CpuDevice) and opened.is_host and opened.name == "cpu"


@pytest.mark.skipif(cuda_is_available(), reason="there is a CUDA device")
def test_missing_gpu_says_what_to_do() -> None:
    assert open_device("auto", Files()).name == "cpu"
    for name in ("cuda", "cuda:3"):
        with pytest.raises(DeviceError, match=f"device {name}: torch .*use device cpu"):
            open_device(name, Files())


@pytest.mark.parametrize(("load", "package"), [(seam.load_cupy, "CuPy"), (seam.load_kvikio, "kvikio")])
def test_missing_package_says_what_to_install(load, package: str) -> None:
    try:
        load()
    except DeviceError as error:
        assert package in str(error) and "pip install" in str(error)
    else:
        pytest.skip(f"{package} is installed")
