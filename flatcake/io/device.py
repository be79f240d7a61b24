"""What the library asks of a device, streams, events, copies and pinning, and the CPU, which does it inline.

A stream is an opaque handle; the CPU's does everything at once, so its events are done when they are made.
The other device is `io.cuda`; `io.devices` opens the one that a setting names.
"""

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import torch

from flatcake.io.seam import ByteArray, Files, HostMemory

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

    def push(self, start: int, end: int) -> None:
        """Queue the way of bytes `start` … `end` - 1 to the device."""
        self._device.copy(self._address + start, self._host_address + start, end - start, self._stream)

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


def end_of(device: Device, stream: Stream) -> Event:
    """The end of what a stream was given before a failure: until then its buffers are in use."""
    try:
        return device.record(stream)
    except RuntimeError:  # Nothing runs there any more.
        return NOW


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
        return NOW

    def wait(self, stream: Stream, event: Event) -> None:
        event.wait()

    def copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        ctypes.memmove(target, source, size_bytes)

    def mirror(self, size_bytes: int, stream: Stream) -> Mirror:
        host, there = (torch.empty(size_bytes, dtype=torch.uint8) for _ in range(2))
        return Mirror(self, host, there, stream)

    def pin(self, memory: HostMemory) -> None:
        return None

    def unpin(self, memory: HostMemory) -> None:
        return None
