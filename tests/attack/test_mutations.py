"""Guards of the store taken out one by one: the tests that are named beside each must go red.

Each runs in a copy of the tree.  A merge checks that all of them still fit the source, and runs three; the others run
with FLATCAKE_NIGHTLY, or by `make mutations`, which says what went red.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = {"checksums are not compared", "a lease believes an old match", "a turn is visible before it is written"}
NIGHTLY = "FLATCAKE_NIGHTLY" in os.environ

each_mutation = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))


def mutated(mutation: Mutation, root: Path) -> dict[str, str]:
    """The files that change, with their new text; each old text must be there once."""
    changed: dict[str, str] = {}
    for edit in mutation.edits:
        text = changed.get(edit.file) or (root / "flatcake" / edit.file).read_text()
        assert text.count(edit.old) == 1, (
            f"{edit.file}: the text of {mutation.name!r} is there {text.count(edit.old)} times"
        )
        changed[edit.file] = text.replace(edit.old, edit.new)
    return changed


@each_mutation
def test_every_mutation_fits_the_source(mutation: Mutation) -> None:
    for file, text in mutated(mutation, ROOT).items():
        compile(text, file, "exec")
    assert mutation.tests
    for name in mutation.tests:
        path, _, function = name.partition("::")
        assert (ROOT / path).is_file(), name
        assert not function or re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.M), name


def test_names_are_distinct_and_the_sample_is_among_them() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names) and set(names) >= SAMPLE


def run(tree: Path, names: tuple[str, ...]) -> tuple[int, list[str], str]:
    """Exit status of these tests in a tree, which of them failed, and all that was said."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "100", *names]
    env = {name: value for name, value in os.environ.items() if name not in ("FLATCAKE_NIGHTLY", "PYTEST_ADDOPTS")}
    env |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::\w+)", done.stdout, re.M)
    return done.returncode, sorted(set(failed)), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@each_mutation
def test_a_guard_that_is_taken_out_is_missed(mutation: Mutation, tmp_path: Path) -> None:
    if not NIGHTLY and mutation.name not in SAMPLE:
        pytest.skip("FLATCAKE_NIGHTLY=1 and `make mutations` run all of them")
    tree = tmp_path / "tree"
    for part in ("flatcake", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    for file, text in mutated(mutation, tree).items():
        (tree / "flatcake" / file).write_text(text)
    status, failed, said = run(tree, mutation.tests)
    sys.stdout.write(f"\n{mutation.name}: {', '.join(failed) or 'nothing'} went red\n")
    assert status == 1, f"expected tests that fail, got exit status {status}:\n{said[-3000:]}"
    for name in mutation.tests:
        assert any(each.startswith(name) for each in failed), f"{name} did not go red:\n{said[-3000:]}"


def test_without_a_mutation_the_sample_is_green(tmp_path: Path) -> None:
    """The twin: what makes tests red is the mutation, not the copy."""
    names = tuple(name for mutation in MUTATIONS if mutation.name in SAMPLE for name in mutation.tests)
    tree = tmp_path / "tree"
    for part in ("flatcake", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    status, failed, said = run(tree, names)
    assert status == 0 and not failed, said
