"""What benchmarks share: where they ran, rows of results, and memory on huge pages."""

import csv
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from flatcake.io.seam import Files

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("date", "commit", "device", "command", "bench", "case", "figure", "value")


def huge_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A zeroed CPU tensor on huge pages where the system has them: direct reads into small ones are half as fast."""
    size_bytes = torch.empty(0, dtype=dtype).element_size()
    for size in shape:
        size_bytes *= size
    return torch.from_numpy(Files().map_memory(size_bytes).array).view(dtype).reshape(*shape)


def device_name(device: str = "cpu") -> str:
    """The GPU's name, or the processor's."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip() + f" x{torch.get_num_threads()}"
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit that is checked out, marked when files differ from it; `FLATCAKE_COMMIT` where there is no git."""
    if named := os.environ.get("FLATCAKE_COMMIT"):
        return named
    found = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def append_rows(
    bench: str, command: str, device: str, figures: dict[str, dict[str, float]], folder: Path = RESULTS
) -> Path:
    """Append a row for every figure of every case to `results/<bench>.csv`."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{bench}.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(COLUMNS)
        stamp, revision = time.strftime("%Y-%m-%d"), commit()
        for case, values in figures.items():
            for figure, value in values.items():
                writer.writerow((stamp, revision, device, command, bench, case, figure, f"{value:.6g}"))
    return path
