"""What there is of CUDA: torch's view, the driver, CuPy, kvikio and GPUDirect Storage.

Loads packages through `io.devices` and asks; changes nothing on a device.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

from flatcake.doctor.facts import GpuFacts, Probes
from flatcake.errors import DeviceError
from flatcake.io.devices import cuda_is_available, load_cupy, load_kvikio
from flatcake.units import format_bytes

_DRIVER = "/proc/driver/nvidia/version"


def read_gpu(probes: Probes, load_kvikio: Callable[[], Any] = load_kvikio) -> GpuFacts:
    """Ask torch, the driver, CuPy and kvikio.

    Args:
        probes: Keeps what went wrong.
        load_kvikio: Gives the module, or raises `DeviceError`; its import may raise anything else too.
    """
    kvikio, why = _load(load_kvikio)
    cupy, cupy_why = _load(load_cupy)
    return GpuFacts(
        cuda_build=torch.version.cuda,
        driver=probes.get("NVIDIA driver", _driver),
        devices=probes.get("CUDA devices", _devices) or (),
        cupy=f"{cupy.__version__}" if cupy is not None else cupy_why,
        kvikio=f"{kvikio.__version__}" if kvikio is not None else why,
        kvikio_loads=kvikio is not None,
        kvikio_mode=None if kvikio is None else probes.get("kvikio mode", lambda: _mode(kvikio)),
        nvidia_fs=probes.get("nvidia-fs", lambda: os.path.exists("/proc/driver/nvidia-fs")),
    )


def _load(load: Callable[[], Any]) -> tuple[Any, str]:
    """A module, or None and why it cannot be had."""
    try:
        return load(), ""
    except DeviceError as error:
        cause = error.__cause__
        missing = isinstance(cause, ModuleNotFoundError)
        return None, "not installed" if missing else f"cannot be loaded: {cause or error}"[:300]
    except Exception as error:  # Bindings of C libraries raise whatever they like.
        return None, f"cannot be loaded: {error}"[:300]


def _driver() -> str | None:
    if not os.path.exists(_DRIVER):
        return None
    with open(_DRIVER, encoding="utf-8", errors="replace") as file:
        return file.readline().removeprefix("NVRM version:").strip()


def _devices() -> tuple[str, ...]:
    if not cuda_is_available():
        return ()
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return tuple(f"{each.name}, {format_bytes(each.total_memory)}" for each in found)


def _mode(kvikio: Any) -> str:
    mode = kvikio.defaults.get("compat_mode")
    return str(getattr(mode, "name", mode))
