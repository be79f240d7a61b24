"""Every benchmark runs in its smallest form and ends with the JSON that it promises.  Nothing here looks at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
BENCHES = sorted(path.stem for path in (ROOT / "profiles").glob("bench_*.py"))
PROMISED = {
    "bench_control": {"plan_ms", "lookup_us", "index_bytes"},
    "bench_restore": {"ratio_to_floor", "cpu_s_per_gb", "read_amplification", "write_amplification", "reads_per_layer"},
    "bench_sched": {"pop_us"},
    "bench_loop": {"ratios", "ready_ms", "estimate_over_measured"},
}


def test_there_are_benches() -> None:
    assert set(PROMISED) <= set(BENCHES)


@pytest.mark.parametrize("name", BENCHES)
def test_bench_runs_and_ends_with_its_json(name: str, tmp_path: Path) -> None:
    if name == "bench_gpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, f"profiles/{name}.py", "--smoke", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert PROMISED.get(name, set()) <= set(found)
