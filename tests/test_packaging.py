"""The wheel: built from a copy of the source, installed alone, imported from there."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("FLATCAKE_NIGHTLY") != "1", reason="builds a wheel; FLATCAKE_NIGHTLY=1 runs it"),
]


def run(*words: str | Path, where: Path, **environ: str) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=where, env=os.environ | environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "flatcake", source / "flatcake", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, where=source)
    (built,) = out.glob("flatcake-*.whl")
    return built


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {str(path.relative_to(ROOT)) for path in (ROOT / "flatcake").rglob("*.py")} | {"flatcake/py.typed"}
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == wanted
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        (scripts,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        headers = Parser().parsestr(archive.read(metadata).decode())
        assert "flatcake = flatcake.cli:main" in archive.read(scripts).decode()
    assert set(headers["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    needs = headers.get_all("Requires-Dist") or []
    core = [need for need in needs if "extra ==" not in need]
    assert {re.split(r"[<>=;~! ]", need)[0] for need in core} == {
        *("numpy", "sortedcontainers", "torch", "triton", "nvtx")
    }
    assert not any("==" in need.partition(";")[0] for need in needs), "a pin belongs in constraints.txt"
    assert set(headers.get_all("Provides-Extra") or []) == {"cuda12", "cuda13", "demo", "test"}


def test_wheel_installs_and_imports_alone(wheel: Path, tmp_path: Path) -> None:
    target, where = tmp_path / "target", tmp_path / "elsewhere"
    where.mkdir()
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    run(*install, where=where)
    code = "import flatcake; print(flatcake.__file__, flatcake.__version__)"
    file, version = run(sys.executable, "-c", code, where=where, PYTHONPATH=str(target)).split()
    assert Path(file) == target / "flatcake" / "__init__.py"
    assert wheel.name.startswith(f"flatcake-{version}-")
    script = run(target / "bin" / "flatcake", "--version", where=where, PYTHONPATH=str(target))
    assert script == f"flatcake {version}\n"
