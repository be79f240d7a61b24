"""The real engine on the CPU: each scenario in a process of its own.  Run by `make test-engines`."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 240

CPU_INFO = Path("/proc/cpuinfo")
HAS_FP8 = not CPU_INFO.exists() or bool({"avx512f", "amx_tile"} & set(CPU_INFO.read_text().split()))
"""Whether vLLM can keep FP8 KV on this processor."""

NIGHTLY = pytest.mark.skipif(os.environ.get("FLATCAKE_NIGHTLY") != "1", reason="FLATCAKE_NIGHTLY=1 runs it")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(LIMIT_S + 30),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-engines"),
]


def words_of(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", "tests.engines.vllm.scenarios", name, *map(json.dumps, arguments)]


def environment() -> dict[str, str]:
    from tests.engines.vllm.engine import ENVIRONMENT

    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FLATCAKE_", "VLLM_", "TRITON_"))}
    return kept | ENVIRONMENT | {"PYTHONPATH": str(ROOT)}


def scenario(name: str, *arguments: object, **environ: str) -> dict[str, Any]:
    """Run one; it asserts by itself, and what it printed is shown when it fails."""
    done = subprocess.run(
        words_of(name, *arguments),
        cwd=ROOT,
        env=environment() | environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    scenario("model", path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="float32"),
        pytest.param(
            {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
            id="fp8 KV",
            marks=pytest.mark.skipif(not HAS_FP8, reason="FP8 KV on a CPU needs AVX-512 or AMX"),
        ),
        pytest.param({"enforce_eager": False}, id="compiled", marks=[pytest.mark.slow, NIGHTLY]),
    ],
)
def test_restored_equals_recomputed(model: str, tmp_path: Path, options: dict[str, Any]) -> None:
    report = scenario("equal", model, str(tmp_path), options)
    assert report["counts"]["blocks_delivered_ssd"] and report["counts"]["blocks_delivered_dram"]


def test_damage_and_full_disks_cost_a_recompute_and_no_more(model: str, tmp_path: Path) -> None:
    seen = scenario("faults", model, str(tmp_path))["seen"]
    assert "loads short: read failed (errno 5)" in seen["EIO"]
    assert "saves failed: write failed (errno 28)" in seen["ENOSPC"]


def test_a_held_request_blocks_no_other(model: str, tmp_path: Path) -> None:
    sched = scenario("held", model, str(tmp_path))["sched"]
    assert sched["cancelled"] == 1 and sched["prefetches_done"] == 2


def test_a_crowd_in_few_blocks(model: str, tmp_path: Path) -> None:
    assert scenario("crowd", model, str(tmp_path))["preemptions"]


def test_a_router_hears_what_is_stored_and_what_is_not_any_more(model: str, tmp_path: Path) -> None:
    scenario("events", model, str(tmp_path))


@pytest.mark.parametrize("is_hybrid", [True, pytest.param(False, marks=[pytest.mark.slow, NIGHTLY])])
def test_layers_with_windows(tmp_path: Path, is_hybrid: bool) -> None:
    options = {"disable_hybrid_kv_cache_manager": not is_hybrid}
    report = scenario("windows", str(tmp_path / "model"), str(tmp_path / "kv"), options)
    # Two layers see all of nine blocks; of the two others the last two have what the next token sees.
    assert report["pieces_read"] == (2 * 9 + 2 * 2 if is_hybrid else 4 * 9)


@pytest.mark.slow
@NIGHTLY
@pytest.mark.parametrize("name", ["faults", "parallel", "crowd", "held"])
def test_windows_change_nothing_else(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / "model")
    scenario("model", path, True)
    scenario(name, path, str(tmp_path / "kv"))


def test_two_tensor_parallel_workers(model: str, tmp_path: Path) -> None:
    report = scenario("parallel", model, str(tmp_path))
    assert {Path(path).parent.name for path in report["files"]} == {"rank-0", "rank-1"}


def test_a_killed_engine_is_found_again_by_its_like_alone(model: str, tmp_path: Path) -> None:
    """As vLLM runs by default, and without a good-bye; another dtype of KV finds nothing."""
    command = words_of("fill", model, str(tmp_path), {})
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert "STORED\n" in iter(process.stdout.readline, ""), "it ended before it had stored anything"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=LIMIT_S)
    scenario("again", model, str(tmp_path), 192, {})
    if os.environ.get("FLATCAKE_NIGHTLY") == "1":
        scenario("again", model, str(tmp_path), 192, {})  # After a clean end too.
    scenario("overlapped", model, str(tmp_path))  # Its bytes are flipped first.
    scenario("again", model, str(tmp_path), 0, {"kv_cache_dtype": "fp8"} if HAS_FP8 else {"dtype": "bfloat16"})
