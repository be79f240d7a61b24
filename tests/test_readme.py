"""README and docs say what is so: the code runs, and every file, target, command, option and setting is there."""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import pytest

from flatcake.cli import COMMANDS
from flatcake.config import StoreConfig, from_mapping

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PATHS = {"Write path": 20, "Read path": 15, "Serving loop": 5}
"""Sections that name files in order, and how many at least."""
GLOSSARY = {
    *("block", "page", "piece", "key", "identity", "GVA", "medium", "scope", "extent", "lane", "run", "read", "tile"),
    *("window", "slot", "restore", "save"),
}
LINES_MAX = 200

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


@cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def section(name: str) -> str:
    """What stands under a heading of the README."""
    found = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text(README), re.M | re.S)
    assert found, f"README has no section {name!r}"
    return found[1]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), re.M | re.S)


def column(name: str, number: int) -> list[str]:
    """A column of the table in a section, without its head."""
    rows = [line.strip().strip("|").split(" | ") for line in section(name).splitlines() if line.startswith("|")]
    return [row[number].strip() for row in rows[2:]]


def code(page: Path) -> list[str]:
    """Inline code, and the lines of shell blocks without their comments."""
    plain = re.sub(r"^```.*?^```$", "", text(page), flags=re.M | re.S)
    lines = [line.partition("#")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]
    return re.findall(r"`([^`\n]+)`", plain) + [line for line in lines if line]


def files_of(path: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py)`", "\n".join(column(path, 0)))


# -- code -----------------------------------------------------------------------------------------------


def test_readme_code_runs(tmp_path: Path) -> None:
    (program,) = blocks(README, "python")
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "256 tokens, equal: True\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["pool"], "it says that only its pool stays"


def test_readme_code_is_ten_lines() -> None:
    (program,) = blocks(README, "python")
    lines = [line for line in program.splitlines() if line and not line.startswith("import")]
    assert len(lines) <= 10


@each_page
def test_code_is_python(page: Path) -> None:
    for number, program in enumerate(blocks(page, "python")):
        compile(program, f"{page.name}, block {number}", "exec")


@each_page
def test_settings_files_are_accepted(page: Path) -> None:
    for settings in blocks(page, "toml"):
        from_mapping(tomllib.loads(settings))


# -- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_path_names_files_that_are_there_once(path: str) -> None:
    files = files_of(path)
    assert len(files) >= PATHS[path]
    assert len(set(files)) == len(files), "a step is named twice"
    assert [name for name in files if not (ROOT / "flatcake" / name).is_file()] == []


@each_page
def test_other_files_are_there(page: Path) -> None:
    places = (ROOT, ROOT / "flatcake")
    names = {word for piece in code(page) for word in re.findall(r"[\w./*-]+\.(?:py|md|toml|csv)\b", piece)}
    assert [name for name in names if not any(list(place.glob(name)) for place in places)] == []


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", text(page)):
        name, _, anchor = target.partition("#")
        there = page if not name else (page.parent / name).resolve()
        assert there.is_file(), target
        titles = re.findall(r"^#+ (.+)$", text(there), re.M)
        assert not anchor or anchor in {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {target for piece in code(page) for target in re.findall(r"\bmake ([a-z]+)\b", piece)}
    assert named <= targets, named - targets


def test_set_up_is_two_commands() -> None:
    commands = [line.partition("#")[0].split() for line in blocks(README, "sh")[0].splitlines()]
    assert commands == [["make", "demo"], ["make", "test"]]


@each_page
def test_commands_and_options_exist(page: Path) -> None:
    for piece in code(page):
        for command, words in re.findall(r"\bflatcake ([a-z]+)\b(?!\.)(.*)", piece):
            assert command in COMMANDS, piece
            assert set(re.findall(r"--[a-z-]+", words)) <= options(command), piece


def test_options_in_the_table_of_commands_exist() -> None:
    for command, what in zip(column("Commands", 0), column("Commands", 1), strict=True):
        if command.startswith("`flatcake "):
            found = set(re.findall(r"`(--[a-z-]+)`", what))
            assert found and found <= options(command.strip("`").split()[1]), command


@each_page
def test_settings_exist(page: Path) -> None:
    groups = {field.name: field.default_factory for field in fields(StoreConfig) if is_dataclass(field.default_factory)}
    known = {f"{group}.{field.name}" for group, of in groups.items() for field in fields(of)}  # type: ignore[arg-type]
    pattern = rf"^((?:{'|'.join(groups)})\.[a-z_]+)(?= =|$)"
    named = {name for piece in code(page) for name in re.findall(pattern, piece) if not name.endswith(".py")}
    assert named <= known, named - known


def test_ranges_of_the_profiler_are_listed() -> None:
    source = "".join(path.read_text() for path in (ROOT / "flatcake").rglob("*.py"))
    made = set(re.findall(r'with span\("([a-z._]+)"', source)) - {"restore.tile"}  # an example in `trace`
    rows = re.findall(r"^\| (`[a-z]+\.[a-z_]+`.*?) \|", text(ROOT / "docs/gpu.md"), re.M)
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == made


@cache
def options(command: str) -> frozenset[str]:
    parser = argparse.ArgumentParser()
    COMMANDS[command].load().add_arguments(parser)
    return frozenset(parser._option_string_actions)


# -- the rest -------------------------------------------------------------------------------------------


def test_glossary_has_every_word() -> None:
    words = {word for row in column("Glossary", 0) for word in row.split(", ")}
    assert words >= GLOSSARY, GLOSSARY - words


def test_readme_is_short() -> None:
    assert len(text(README).splitlines()) <= LINES_MAX


@each_page
def test_lines_fit_a_terminal(page: Path) -> None:
    assert [line for line in text(page).splitlines() if len(line) > 120 and not line.startswith("|")] == []


@each_page
def test_no_figure_without_a_row(page: Path) -> None:
    """A rate is quoted only where results are named, and then there are results."""
    quoted = re.search(r"\d ?(GB/s|MB/s|tokens/s|µs)|\d ms\b", text(page))
    assert not quoted or ("profiles/results/" in text(page) and list((ROOT / "profiles/results").glob("*.csv")))
