"""Launches one compiled kernel again and again with little Python.

A `@triton.jit` call looks at every argument each time, 40 µs and more; what it looks for does not change between the
launches of one table.  So the kernel that it compiled is kept, and called at once with plain addresses.  On a stream of
ours the driver is called by itself (`io.driver`), which keeps the interpreter; Triton's launcher lets it go.
"""

import ctypes
import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from triton.compiler.compiler import CompiledKernel

from flatcake.io.driver import Driver

_WORD_BYTES = 8
_THREADS_A_WARP = 32


@dataclass(frozen=True, slots=True)
class Function:
    """A compiled kernel as the driver takes it."""

    handle: int
    threads: int
    shared_bytes: int
    parameters: int
    """The kernel's own, and after them null pointers that Triton may have added."""


class Direct:
    """Launches of one function.  Not safe for several threads; the device must be current."""

    def __init__(self, driver: Driver, function: Function, arguments: int) -> None:
        self._driver, self._function = driver, function
        self._pack_into = struct.Struct(f"={arguments}Q").pack_into
        self._values = (ctypes.c_uint64 * function.parameters)()
        first = ctypes.addressof(self._values)
        places = [first + _WORD_BYTES * number for number in range(function.parameters)]
        self._parameters = (ctypes.c_void_p * function.parameters)(*places)

    def launch(self, programs: int, stream: int, arguments: Sequence[int]) -> None:
        """Queue `programs` programs."""
        function = self._function
        self._pack_into(self._values, 0, *arguments)
        self._driver.launch(
            function.handle, programs, function.threads, function.shared_bytes, stream, self._parameters
        )


class Launches:
    """Compiled kernels of one table, by everything that Triton would compile them again for."""

    def __init__(self, open_driver: Callable[[], Driver] = Driver) -> None:
        """Keep kernels; `open_driver` is called when the first one has been compiled."""
        self._open_driver = open_driver
        self._driver: Driver | None = None
        self._compiled: dict[Hashable, CompiledKernel] = {}
        self._functions: dict[Hashable, Function | None] = {}

    def direct(self, kernel: Any, *, key: Hashable, arguments: int) -> Direct | None:
        """What launches a kernel that was compiled before by the driver alone; None where that cannot be.

        Args:
            kernel: A `@triton.jit` function.
            key: As for `first`.
            arguments: Those that are neither constant nor absent: addresses, and at the end one of 32 bits.
        """
        if (kernel, key) not in self._compiled:
            return None
        if self._driver is None:
            self._driver = self._open_driver()
        if (kernel, key) not in self._functions:
            self._functions[kernel, key] = function_of(self._compiled[kernel, key], self._driver, arguments)
        function = self._functions[kernel, key]
        return None if function is None else Direct(self._driver, function, arguments)

    def again(self, kernel: Any, programs: int, args: tuple[Any, ...], *, key: Hashable, stream: int | None) -> bool:
        """Launch a kernel that was compiled before; False when it was not.

        Args:
            kernel: A `@triton.jit` function.
            programs: Size of the grid.
            args: All arguments in order, the constants included, tensors as addresses.
            key: As for `first`.
            stream: Pointer of the stream; None for the current one.
        """
        compiled = self._compiled.get((kernel, key))
        if compiled is None:
            return False
        compiled[programs, 1, 1](*args, stream=stream)
        return True

    def first(self, kernel: Any, programs: int, args: tuple[Any, ...], *, key: Hashable, warps: int) -> None:
        """Compile `kernel`, and launch it on the current stream; the interpreter's are called as they are.

        Args:
            kernel: A `@triton.jit` function.
            programs: Size of the grid.
            args: All arguments in order, the constants included.
            key: Must differ wherever dtypes, constants, absent arguments or specialised numbers differ.
            warps: Warps of a program.
        """
        found = kernel[programs,](*args, num_warps=warps)
        if isinstance(found, CompiledKernel):
            self._compiled[kernel, key] = found


def function_of(compiled: Any, driver: Driver, arguments: int) -> Function | None:
    """A compiled kernel for the driver, unless its launch asks for more than its arguments.

    Triton adds pointers to memory that the kernel wants for itself, one or two from version to version: they are null
    when it wants none.  So the driver is asked what the parameters are, and what is not as expected is left to Triton.
    """
    wants = compiled.metadata
    extras = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if any(getattr(wants, name, 0) for name in extras) or wants.num_ctas != 1:
        return None
    sizes = driver.parameter_bytes(compiled.function)
    own, added = sizes[:arguments], sizes[arguments:]
    if own != [_WORD_BYTES] * (arguments - 1) + [4] or set(added) - {_WORD_BYTES}:
        return None
    return Function(compiled.function, wants.num_warps * _THREADS_A_WARP, wants.shared, len(sizes))
