"""Launches by the driver alone: the arguments as the driver would read them, and what is left to Triton."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flatcake.kernels.gather import gather_runs
from flatcake.kernels.launch import Direct, Function, function_of
from flatcake.kernels.scatter import scatter_runs
from tests.kernels.pools import Case, Part, Pool


class Driver:
    """Reads what it is given, as the real one would."""

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self.sizes = sizes
        self.launched: list[tuple[object, ...]] = []

    def parameter_bytes(self, function: int) -> list[int]:
        assert function == 77
        return list(self.sizes)

    def launch(self, function: int, blocks: int, threads: int, shared_bytes: int, stream: int, parameters: Any) -> None:
        kinds = {8: ctypes.c_uint64, 4: ctypes.c_uint32}
        read = [kinds[size].from_address(at).value for size, at in zip(self.sizes, parameters, strict=True)]
        self.launched.append((function, blocks, threads, shared_bytes, stream, read))


def compiled(**others: object) -> Any:
    wants = {"num_warps": 4, "shared": 512, "num_ctas": 1, "global_scratch_size": 0, "launch_pdl": False} | others
    return SimpleNamespace(function=77, metadata=SimpleNamespace(**wants))


def test_the_driver_reads_every_argument_of_every_launch() -> None:
    driver: Any = Driver((8, 8, 8, 4, 8, 8))
    function = function_of(compiled(), driver, 4)
    assert function == Function(77, threads=128, shared_bytes=512, parameters=6)
    direct = Direct(driver, function, 4)
    first, second = (1 << 47, 3, (1 << 63) + 5, 1 << 31), (0, 7, 9, 11)
    direct.launch(100, 8, first)
    direct.launch(2, 16, second)
    assert driver.launched == [(77, 100, 128, 512, 8, [*first, 0, 0]), (77, 2, 128, 512, 16, [*second, 0, 0])]


@pytest.mark.parametrize(
    ("sizes", "others"),
    [
        ((), {}),
        ((8, 8, 4), {}),
        ((8, 8, 8, 8), {}),
        ((8, 8, 4, 4), {}),
        ((8, 8, 8, 4, 4), {}),
        ((8, 8, 8, 4), {"global_scratch_size": 1}),
        ((8, 8, 8, 4), {"profile_scratch_size": 1}),
        ((8, 8, 8, 4), {"launch_pdl": True}),
        ((8, 8, 8, 4), {"launch_cooperative_grid": True}),
        ((8, 8, 8, 4), {"num_ctas": 2}),
    ],
    ids=str,
)
def test_a_kernel_with_other_parameters_or_wishes_is_left_to_triton(sizes: tuple[int, ...], others: dict[str, object]):
    driver: Any = Driver(sizes)
    assert function_of(compiled(**others), driver, 4) is None
    assert function_of(compiled(), Driver((8, 8, 8, 4)), 4) is not None  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("summed", [False, True], ids=["bytes", "sums"])
@pytest.mark.parametrize("runs_of", [scatter_runs, gather_runs])
def test_a_launch_on_a_stream_that_is_given_copies_what_triton_copies(runs_of: Any, summed: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pool = Pool.random([[Part(4096, 2), Part(4096, 2)]], 20, 2)
    case = Case.random(pool, pool.table("cpu"), 6)
    stream, found = torch.cuda.Stream(), []  # type: ignore[no-untyped-call]
    for pointer in (None, stream.cuda_stream):
        there = pool.to("cuda")
        kv = there.table("cuda")
        window, pieces, pages, seeds = (each.cuda() for each in (case.window, case.pieces, case.pages, case.seeds))
        sums = torch.zeros(len(pieces), 2, dtype=torch.int32, device="cuda")
        tables = (pieces, pages, sums, seeds) if summed else (pieces, pages, None, None)
        runs = runs_of(tables, kv, None)
        runs.launch(window, 0, 2)  # Compiles.
        torch.cuda.synchronize()
        for first, last in ((2, 3), (3, len(pieces))):
            runs.launch(window, first, last, pointer)
        torch.cuda.synchronize()
        assert bool(runs._direct) == (pointer is not None), "not the launch that was meant"
        memory = [part.cpu().numpy() for layer in there.memory for part in layer]
        found.append([window.cpu().numpy(), sums.sum(dim=1).cpu().numpy(), *memory])
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))
    before = case.window if runs_of is gather_runs else pool.memory[0][0]
    assert not np.array_equal(found[0][0 if runs_of is gather_runs else 2], before.numpy()), "nothing was copied"
