"""The one place that calls a device: streams, events, copies, pinning.  CUDA by CuPy and torch, or the CPU inline.

Nothing is imported or created before `open_device`.  A stream is an opaque handle; the CPU's does everything
at once, so its events are done when they are made.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from flatcake.errors import DeviceError
from flatcake.io.seam import ByteArray, Files, HostMemory, view_memory

PIN_CHUNK_BYTES = 1 << 30

Stream = Any


class Point(Protocol):
    """Something that is reached once, and can be asked about."""

    def done(self) -> bool:
        """Whether it has been reached; never blocks."""


When = Callable[[Point, Callable[[], None]], None]
"""Calls back from any thread once the point has been reached."""


class Event(Point, Protocol):
    """A point in a stream's work."""

    def wait(self) -> None:
        """Block the calling thread until it has been reached."""


class Device(Protocol):
    """Streams, events, copies and memory of one device.  Safe to call from several threads."""

    name: str
    is_host: bool
    """Whether kernels read host memory, so that the window is host memory too."""
    multiprocessors: int

    def enter_thread(self) -> None: ...  # call once at the top of each thread of ours
    def window(self, size_bytes: int) -> torch.Tensor: ...  # zeroed uint8
    def new_stream(self) -> Stream: ...
    def stream_of(self, stream: object) -> Stream: ...  # a caller's stream, or its current one for None
    def pointer(self, stream: Stream) -> int | None: ...  # for launches; None where a stream is nothing
    def use(self, stream: Stream) -> None: ...  # torch and Triton launch on it from now on, in this thread
    def record(self, stream: Stream) -> Event: ...
    def wait(self, stream: Stream, event: Event) -> None: ...  # later work of the stream waits for the event
    def copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None: ...  # addresses, either side
    def mirror(self, size_bytes: int, stream: Stream) -> "Mirror": ...  # `use` the stream before
    def pin(self, memory: HostMemory) -> None: ...
    def unpin(self, memory: HostMemory) -> None: ...


class Mirror:
    """Memory of one size on both sides, for small tables that go up and sums that come back.

    What is queued may read or write either side, so it must live until that has been reached.
    """

    def __init__(self, device: Device, host: torch.Tensor, tensor: torch.Tensor, stream: Stream) -> None:
        self.host: ByteArray = host.numpy()
        """uint8 [bytes], pinned; not cleared."""
        self.tensor = tensor
        """uint8 [bytes] on the device."""
        self._device, self._stream = device, stream
        self._host_address, self._address = int(host.data_ptr()), int(tensor.data_ptr())

    def push(self) -> None:
        """Queue the way of all bytes to the device."""
        self._device.copy(self._address, self._host_address, self.host.nbytes, self._stream)

    def pull(self, start: int, end: int) -> None:
        """Queue the way of bytes `start` … `end` - 1 to the host."""
        self._device.copy(self._host_address + start, self._address + start, end - start, self._stream)


class DoneEvent:
    """An event that was reached before it was made, as all of a device that does its work inline."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


NOW = DoneEvent()


class CpuDevice:
    """The host as the device: everything is done when the call returns."""

    name = "cpu"
    is_host = True
    multiprocessors = 1

    def __init__(self, files: Files) -> None:
        self._files = files

    def enter_thread(self) -> None:
        return None

    def window(self, size_bytes: int) -> torch.Tensor:
        return torch.from_numpy(self._files.map_memory(size_bytes).array)

    def new_stream(self) -> Stream:
        return None

    def stream_of(self, stream: object) -> Stream:
        return None

    def pointer(self, stream: Stream) -> int | None:
        return None

    def use(self, stream: Stream) -> None:
        return None

    def record(self, stream: Stream) -> Event:
        return DoneEvent()

    def wait(self, stream: Stream, event: Event) -> None:
        event.wait()

    def copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        view_memory(target, size_bytes)[:] = view_memory(source, size_bytes)

    def mirror(self, size_bytes: int, stream: Stream) -> Mirror:
        host, there = (torch.empty(size_bytes, dtype=torch.uint8) for _ in range(2))
        return Mirror(self, host, there, stream)

    def pin(self, memory: HostMemory) -> None:
        return None

    def unpin(self, memory: HostMemory) -> None:
        return None


class CudaEvent:
    """A CuPy event."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.done)

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """One CUDA device.  Streams are torch's, which do not wait for the NULL stream; events and copies are CuPy's."""

    is_host = False

    def __init__(self, index: int) -> None:
        cupy = load_cupy()
        self.name = f"cuda:{index}"
        self._index = index
        self._cuda = cupy.cuda
        self._runtime = cupy.cuda.runtime
        self._torch = torch.device("cuda", index)
        self._external: Any = functools.partial(torch.cuda.ExternalStream, device=self._torch)
        torch.zeros(1, device=self._torch)  # makes the context before any other library looks for one
        self.enter_thread()
        self.multiprocessors = int(torch.cuda.get_device_properties(self._torch).multi_processor_count)

    def enter_thread(self) -> None:
        self._cuda.Device(self._index).use()
        torch.cuda.set_device(self._torch)

    def window(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._torch)

    def new_stream(self) -> Stream:
        # Torch's own streams are never destroyed: its allocators still name them when a tensor is collected.
        return torch.cuda.Stream(self._torch)  # type: ignore[no-untyped-call]

    def stream_of(self, stream: object) -> Stream:
        if stream is None:
            return torch.cuda.current_stream(self._torch)
        if isinstance(stream, torch.cuda.Stream):
            return stream
        pointer = getattr(stream, "ptr", stream)
        if not isinstance(pointer, int):
            raise DeviceError(f"stream {stream!r}: expected a torch or CuPy stream, or its pointer")
        return self._external(pointer)

    def pointer(self, stream: Stream) -> int | None:
        return int(stream.cuda_stream)

    def use(self, stream: Stream) -> None:
        torch.cuda.set_stream(stream)

    def record(self, stream: Stream) -> Event:
        event = self._cuda.Event(disable_timing=True)
        self._runtime.eventRecord(event.ptr, stream.cuda_stream)
        return CudaEvent(event)

    def wait(self, stream: Stream, event: Event) -> None:
        if isinstance(event, CudaEvent):  # Others are reached.
            self._runtime.streamWaitEvent(stream.cuda_stream, event.event.ptr, 0)

    def copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        kind = self._runtime.memcpyDefault
        self._runtime.memcpyAsync(target, source, size_bytes, kind, stream.cuda_stream)

    def mirror(self, size_bytes: int, stream: Stream) -> Mirror:
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        return Mirror(self, host, torch.empty(size_bytes, dtype=torch.uint8, device=self._torch), stream)

    def pin(self, memory: HostMemory) -> None:
        with contextlib.ExitStack() as undo:  # All of it or nothing.
            for start in range(0, memory.array.nbytes, PIN_CHUNK_BYTES):
                size_bytes = min(PIN_CHUNK_BYTES, memory.array.nbytes - start)
                self._runtime.hostRegister(memory.address + start, size_bytes, 0)
                undo.callback(self._runtime.hostUnregister, memory.address + start)
            undo.pop_all()

    def unpin(self, memory: HostMemory) -> None:
        for start in range(0, memory.array.nbytes, PIN_CHUNK_BYTES):
            self._runtime.hostUnregister(memory.address + start)


def load_cupy() -> Any:
    """Import CuPy.

    Raises:
        DeviceError: It is not installed, or cannot load its libraries.
    """
    try:
        import cupy
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(f"CuPy is needed on a GPU ({error}); pip install 'flatcake[cuda13]' or [cuda12]") from error
    return cupy


def load_kvikio() -> Any:
    """Import kvikio; it raises more than `ImportError` when a library is missing.

    Raises:
        DeviceError: It is not installed, or cannot load its libraries.
    """
    try:
        import kvikio
        import kvikio.cufile_driver
        import kvikio.defaults
    except (ImportError, RuntimeError, OSError) as error:
        raise DeviceError(f"kvikio cannot be loaded ({error}); pip install 'flatcake[cuda13]' or [cuda12]") from error
    return kvikio


def cuda_is_available() -> bool:
    return torch.cuda.is_available()


def open_device(name: str, files: Files) -> Device:
    """Open the device that a setting names: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        DeviceError: There is no such device, or its packages are missing.
    """
    if name == "auto":
        name = "cuda" if cuda_is_available() else "cpu"
    if name == "cpu":
        return CpuDevice(files)
    index = int(name.partition(":")[2] or 0)
    if not cuda_is_available() or index >= torch.cuda.device_count():
        seen = f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        raise DeviceError(f"device {name}: {seen}; use device cpu, or install a CUDA build of torch")
    return CudaDevice(index)
