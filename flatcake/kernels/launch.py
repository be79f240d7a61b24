"""Launches one compiled kernel again and again with little Python.

A `@triton.jit` call looks at every argument each time, 40 µs and more; what it looks for does not change between the
launches of one table.  So the kernel that it compiled is kept, and called at once with plain addresses: a tensor
would be asked for its address, and the driver whether that address is its own.
"""

from collections.abc import Hashable
from typing import Any

from triton.compiler.compiler import CompiledKernel


class Launches:
    """Compiled kernels of one table, by everything that Triton would compile them again for."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, CompiledKernel] = {}

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
