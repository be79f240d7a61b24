"""A CUDA device: torch's streams, CuPy for pinning and whatever may wait, the driver itself for what every tile needs.

Imports no GPU package but torch: it is handed CuPy.
"""

import contextlib
import functools
import threading
from typing import Any

import torch

from flatcake.errors import DeviceError
from flatcake.io.device import PIN_CHUNK_BYTES, Event, Mirror, Stream
from flatcake.io.driver import Driver
from flatcake.io.seam import HostMemory


class CudaEvent:
    """A CUDA event that lives as long as this."""

    def __init__(self, device: "CudaDevice", handle: int) -> None:
        self.handle = handle
        self._device = device

    def __del__(self) -> None:
        self._device.destroy(self.handle)

    def done(self) -> bool:
        return self._device.is_reached(self.handle)

    def wait(self) -> None:
        self._device.synchronize(self.handle)


class CudaDevice:
    """One CUDA device.  Streams are torch's, which do not wait for the NULL stream.

    Calls on our own streams, in threads of ours, keep the interpreter (`io.driver`).  A caller's stream may be full,
    and a call on it wait until it is not; a caller's thread may have another device current, or none.  There CuPy is
    called, which lets other Python threads run meanwhile.
    """

    is_host = False

    def __init__(self, cupy: Any, index: int) -> None:
        self.name = f"cuda:{index}"
        self._index = index
        self._cuda = cupy.cuda
        self._runtime = cupy.cuda.runtime
        self._torch = torch.device("cuda", index)
        self._external: Any = functools.partial(torch.cuda.ExternalStream, device=self._torch)
        torch.zeros(1, device=self._torch)  # makes the context before any other library looks for one
        self._driver = Driver()
        self._own: set[int] = set()
        """Pointers of the streams made here."""
        self._entered = threading.local()
        self.enter_thread()
        self.multiprocessors = int(torch.cuda.get_device_properties(self._torch).multi_processor_count)

    def enter_thread(self) -> None:
        self._cuda.Device(self._index).use()
        torch.cuda.set_device(self._torch)
        self._entered.yes = True

    def window(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._torch)

    def new_stream(self) -> Stream:
        # Torch's own streams are never destroyed: its allocators still name them when a tensor is collected.
        stream = torch.cuda.Stream(self._torch)  # type: ignore[no-untyped-call]
        self._own.add(stream.cuda_stream)
        return stream

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
        pointer = stream.cuda_stream
        if self._is_ours(pointer):
            event = CudaEvent(self, self._driver.create())
            self._driver.record(event.handle, pointer)
            return event
        with self._cuda.Device(self._index):
            event = CudaEvent(self, self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))
            self._runtime.eventRecord(event.handle, pointer)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        if not isinstance(event, CudaEvent):
            return  # It is reached already.
        pointer = stream.cuda_stream
        if self._is_ours(pointer):
            self._driver.wait(pointer, event.handle)
        else:
            self._runtime.streamWaitEvent(pointer, event.handle, 0)

    def copy(self, target: int, source: int, size_bytes: int, stream: Stream) -> None:
        pointer = stream.cuda_stream
        if self._is_ours(pointer):
            self._driver.copy(target, source, size_bytes, pointer)
        else:
            self._runtime.memcpyAsync(target, source, size_bytes, self._runtime.memcpyDefault, pointer)

    def is_reached(self, event: int) -> bool:
        """Whether an event of `record` has been; never raises."""
        if self._has_entered():
            return self._driver.is_reached(event)
        with self._cuda.Device(self._index):
            return bool(self._runtime.eventQuery(event) == 0)

    def synchronize(self, event: int) -> None:
        """Block until an event of `record` has been reached."""
        self._runtime.eventSynchronize(event)

    def destroy(self, event: int) -> None:
        """Let go of an event of `record`, reached or not."""
        if self._has_entered():
            self._driver.destroy(event)
        else:
            with contextlib.suppress(RuntimeError), self._cuda.Device(self._index):
                self._runtime.eventDestroy(event)

    def _is_ours(self, stream: int) -> bool:
        # Torch's streams come from a pool, so a caller's may be one of ours: the thread counts as well.
        return stream in self._own and self._has_entered()

    def _has_entered(self) -> bool:
        return getattr(self._entered, "yes", False)

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
