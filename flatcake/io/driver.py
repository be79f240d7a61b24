"""Calls of the CUDA driver that every tile needs, made without letting the interpreter go.

CuPy and torch let go of the interpreter's lock in each call.  Beside a thread that computes in Python, each then waits
`sys.getswitchinterval`, 5 ms, for the lock: measured on an H200, a restore of 4 GiB took 15 s instead of 0.08.  None of
these calls waits for the device, so none has to let go; only a copy of memory that could not be pinned takes its time.
They need a thread in which the device is current.
"""

import ctypes
from typing import Any

_EVENT_DISABLE_TIMING = 2


class Driver:
    """The driver, which torch has loaded already.  Safe to call from several threads."""

    def __init__(self) -> None:
        """Find the calls.

        Raises:
            OSError, AttributeError: There is no driver, or it lacks one.
        """
        cuda = ctypes.PyDLL("libcuda.so.1")
        pointer, number, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_size_t
        arguments = {
            "cuEventCreate": (pointer, number),
            "cuEventDestroy_v2": (pointer,),
            "cuEventRecord": (pointer, pointer),
            "cuEventQuery": (pointer,),
            "cuStreamWaitEvent": (pointer, pointer, number),
            "cuMemcpyAsync": (pointer, pointer, size, pointer),
            "cuLaunchKernel": (pointer, *[number] * 7, pointer, pointer, pointer),
            "cuGetErrorName": (ctypes.c_int, pointer),
        }
        for name, types in arguments.items():
            getattr(cuda, name).argtypes = types
        self._cuda = cuda
        self.destroy = cuda.cuEventDestroy_v2
        """Let go of an event, reached or not; what it returns does not matter."""

    def create(self) -> int:
        """A new event; `destroy` it."""
        handle = ctypes.c_void_p()
        self._check(self._cuda.cuEventCreate(ctypes.byref(handle), _EVENT_DISABLE_TIMING))
        assert handle.value is not None
        return handle.value

    def record(self, event: int, stream: int) -> None:
        self._check(self._cuda.cuEventRecord(event, stream))

    def is_reached(self, event: int) -> bool:
        """Never raises: on a device that has failed nothing is reached any more."""
        return bool(self._cuda.cuEventQuery(event) == 0)

    def wait(self, stream: int, event: int) -> None:
        """Let later work of the stream wait for the event."""
        self._check(self._cuda.cuStreamWaitEvent(stream, event, 0))

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        """Queue a copy between two addresses, on either side."""
        self._check(self._cuda.cuMemcpyAsync(target, source, size_bytes, stream))

    def parameter_bytes(self, function: int) -> list[int]:
        """Size of each parameter of a kernel; none where the driver cannot tell, before CUDA 12.4."""
        try:
            ask = self._cuda.cuFuncGetParamInfo
        except AttributeError:
            return []
        ask.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while ask(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
            sizes.append(size.value)
        return sizes

    def launch(self, function: int, blocks: int, threads: int, shared_bytes: int, stream: int, parameters: Any) -> None:
        """Queue a kernel; `parameters` is an array of the addresses of its arguments, which are copied now."""
        self._check(
            self._cuda.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, parameters, None)
        )

    def _check(self, code: int) -> None:
        """Raise what CuPy would raise, a RuntimeError with the driver's own name of the fault."""
        if code:
            name = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(name))
            raise RuntimeError(f"the CUDA driver answered {(name.value or b'an unknown error').decode()} ({code})")
