"""The baseline that every test is held to notices what it should: each kind of leak, in a run of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAD = """
import os, threading
from multiprocessing import resource_tracker, shared_memory
import pytest
from tests.stores import Memory, make_store, make_tokens, save, simple_layout
EVENT, KEPT = threading.Event(), []
resource_tracker.ensure_running()
"""
LEAKS = {
    "a descriptor": ("KEPT.append(os.dup(0))", "descriptors are left"),
    "a thread": ("threading.Thread(target=EVENT.wait, daemon=True, name='stuck').start()", "thread stuck is left"),
    "a segment": (
        "KEPT.append(shared_memory.SharedMemory(create=True, size=4096))",
        "shared memory is left",
    ),
    "a lease": (
        "memory = Memory(simple_layout()); store = make_store(memory); KEPT.append(store)\n"
        "    tokens = make_tokens('a', 2); save(store, memory, 's', tokens); store.lease(store.match(tokens))\n"
        "    store.close()",
        "'leases': 1",
    ),
    "a slot": (
        "store = make_store(Memory(simple_layout())); KEPT.append(store)\n"
        "    store.plane.parts.window.take(); store.close()",
        "'slots': 1",
    ),
}


def test_every_kind_of_leak_is_noticed(tmp_path: Path) -> None:
    """One run for all, and once more with the mark that allows it."""
    body, allowed = HEAD, HEAD
    for number, (line, _) in enumerate(LEAKS.values()):
        body += f"\ndef test_{number}():\n    {line}\n"
        mark = '@pytest.mark.leaves("threads", "files", "segments", "stores")'
        allowed += f"\n{mark}\ndef test_{number}():\n    {line}\n"
    allowed = allowed.replace("EVENT.wait", "lambda: EVENT.wait(30)")
    (tmp_path / "conftest.py").write_text(
        (ROOT / "tests/conftest.py").read_text().replace("LEAK_WAIT_S = 10.0", "LEAK_WAIT_S = 0.1")
    )
    (tmp_path / "test_leaks.py").write_text(body)
    (tmp_path / "test_allowed.py").write_text(allowed)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, f"--rootdir={ROOT}", str(tmp_path / "test_leaks.py"), str(tmp_path / "test_allowed.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{2 * len(LEAKS)} passed, {len(LEAKS)} errors" in done.stdout, done.stdout + done.stderr
    for name, (_, said) in LEAKS.items():
        assert said in done.stdout, f"{name} was not noticed"


def test_the_baseline_is_on_every_test(request: pytest.FixtureRequest) -> None:
    assert "no_leaks" in request.fixturenames
