"""Importing the library: needs no GPU and no CUDA package, starts nothing, touches nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROBE = """
import importlib, json, os, sys, threading

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {'cupy', 'cupyx', 'kvikio', 'cuda', 'pynvml'}:
            raise ImportError(f'{name} is not installed here')

names, here, events = sys.argv[2:], os.getcwd(), []
for name in sys.argv[1].split():
    importlib.import_module(name)  # what these do at import is theirs
before, environ = set(sys.modules), dict(os.environ)
sys.meta_path.insert(0, Blocker())

def watch(event, args):
    if event == '_thread.start_new_thread':
        events.append('thread')
    elif event == 'open' and isinstance(args[0], str):
        writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if os.path.realpath(args[0]).startswith(here + os.sep) or writes and args[0] != os.devnull:
            events.append(f'open {args[0]}')
    elif event in ('os.mkdir', 'os.remove', 'os.rename', 'subprocess.Popen', 'socket.connect'):
        events.append(event)

sys.addaudithook(watch)
for name in names:
    importlib.import_module(name)
report = {
    'events': events,
    'threads': threading.active_count(),
    'environ': environ == dict(os.environ),
    'loaded': sorted(name for name in set(sys.modules) - before if '.' not in name),
    'created': os.listdir(here),
}
json.dump(report, sys.stdout)
"""


def probe(where: Path, *names: str) -> dict[str, Any]:
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith(("TRITON", "FLATCAKE", "COVERAGE"))
    }
    environ |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "numpy torch triton nvtx", *names],
        cwd=where,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


ENGINES = {"flatcake.engines.vllm.connector", "flatcake.engines.vllm.metrics", "flatcake.engines.vllm.events"}
"""These import an engine, so they are imported by it alone; tests/engines does that."""


def modules() -> list[str]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "flatcake").rglob("*.py")))
    names = (".".join(path.parts).removesuffix(".__init__") for path in paths)
    return [name for name in names if name not in ENGINES]


def assert_quiet(report: dict[str, Any]) -> None:
    assert report["events"] == []
    assert report["threads"] == 1
    assert report["environ"], "importing changed the environment"
    assert report["created"] == []
    assert not {"transformers", "tqdm", "cupy", "cupyx", "kvikio", "cuda", "pynvml", "vllm"} & set(report["loaded"])


def test_package_imports_alone_and_quietly(tmp_path: Path) -> None:
    report = probe(tmp_path.resolve(), "flatcake")
    assert "flatcake" in report["loaded"]
    assert_quiet(report)


def test_every_module_imports_quietly_without_optional_packages(tmp_path: Path) -> None:
    assert len(modules()) > 10
    assert_quiet(probe(tmp_path.resolve(), *modules()))


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ("open('left_behind', 'w').close()", "events"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "threads"),
        ("import os; os.environ['FLATCAKE_SEEN'] = '1'", "environ"),
        ("import transformers", "loaded"),
    ],
)
def test_probe_sees_what_it_looks_for(tmp_path: Path, source: str, field: str) -> None:
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "loud.py").write_text(source)
    (package / "transformers.py").touch()
    where = tmp_path / "cwd"
    where.mkdir()
    run = f"import sys; sys.path.insert(0, {str(package)!r})\n" + PROBE
    done = subprocess.run(
        [sys.executable, "-c", run, "", "loud"],
        cwd=where.resolve(),
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    with pytest.raises(AssertionError):
        assert_quiet(json.loads(done.stdout))
    quiet = {"events": [], "threads": 1, "environ": True, "loaded": []}
    assert json.loads(done.stdout)[field] != quiet[field]
