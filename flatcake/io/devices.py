"""Opens the device that a setting names, and imports the packages that a GPU needs: not before they are asked for."""

from typing import Any

import torch

from flatcake.errors import DeviceError
from flatcake.io.cuda import CudaDevice
from flatcake.io.device import CpuDevice, Device
from flatcake.io.seam import Files


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
    return CudaDevice(load_cupy(), index)
