"""Launches one compiled kernel again and again with little Python.

A `@triton.jit` call looks at every argument each time, 40 µs and more; what it looks for does not change
between the launches of one table, so the kernel that it compiled is kept and called at once.
"""

from collections.abc import Callable, Hashable
from typing import Any

from triton.compiler.compiler import CompiledKernel


class Launches:
    """Compiled kernels of one table, by everything that Triton would compile them again for."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, CompiledKernel] = {}

    def launch(self, kernel: Any, programs: int, args: tuple[Any, ...], *, key: Hashable, warps: int) -> None:
        """Launch `kernel` on the current stream.

        Args:
            kernel: A `@triton.jit` function; the interpreter's are called as they are.
            programs: Size of the grid.
            args: All arguments in order, the constants included.
            key: Must differ wherever dtypes, constants, absent arguments or specialised numbers differ.
            warps: Warps of a program.
        """
        compiled = self._compiled.get((kernel, key))
        if compiled is not None:
            run: Callable[..., None] = compiled[programs, 1, 1]
            run(*args)
            return
        found = kernel[programs,](*args, num_warps=warps)
        if isinstance(found, CompiledKernel):
            self._compiled[kernel, key] = found
