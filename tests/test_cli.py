"""The command line: finding a subcommand, handing over settings, exit codes."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatcake import __version__
from flatcake.cli import COMMANDS, CONFIG_VARIABLE, Command, main, read_settings
from flatcake.config import from_mapping
from flatcake.errors import CapacityError, ConfigError

ROOT = Path(__file__).resolve().parents[1]


class Fake:
    """A subcommand that records what it was given."""

    def __init__(self, result: int | BaseException = 0) -> None:
        self.result = result
        self.loads = 0
        self.seen: argparse.Namespace | None = None

    def load(self) -> "Fake":
        self.loads += 1
        return self

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--turns", type=int, default=4)

    def run(self, args: argparse.Namespace) -> int:
        self.seen = args
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def call(argv: list[str], environ: dict[str, str] | None = None, **fakes: Fake) -> int:
    commands = {name: Command(f"what {name} does", fake.load) for name, fake in fakes.items()}
    return main(argv, commands, environ or {})


@pytest.mark.parametrize("code", [0, 1, 7])
def test_exit_code_is_the_subcommands(code: int) -> None:
    assert call(["demo"], demo=Fake(code)) == code


def test_only_the_chosen_subcommand_is_loaded() -> None:
    demo, doctor = Fake(), Fake()
    call(["doctor", "--json", "--turns", "9"], demo=demo, doctor=doctor)
    assert (demo.loads, doctor.loads) == (0, 1)
    assert demo.seen is None
    assert doctor.seen is not None and doctor.seen.json and doctor.seen.turns == 9


@pytest.mark.parametrize("argv", [["--help"], ["-h"]])
def test_help_lists_all_and_loads_none(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    demo, doctor = Fake(), Fake()
    with pytest.raises(SystemExit) as stopped:
        call(argv, demo=demo, doctor=doctor)
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "what demo does" in text and "what doctor does" in text
    assert demo.loads == doctor.loads == 0


def test_help_after_the_subcommand_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        call(["demo", "--help"], demo=Fake())
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "usage: flatcake demo" in text and "--turns" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        call(["--version"], demo=Fake())
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"flatcake {__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["demos"], ["--unknown", "demo"], ["demo", "--unknown"], ["demo", "--turns", "x"]]
)
def test_words_that_are_not_understood_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake()
    with pytest.raises(SystemExit) as stopped:
        call(argv, demo=fake)
    assert stopped.value.code == 2
    assert fake.seen is None
    assert "usage: flatcake" in capsys.readouterr().err


def test_callers_mistake_is_one_line_and_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["demo"], demo=Fake(CapacityError("4 bytes wanted, 3 free"))) == 2
    assert capsys.readouterr().err == "flatcake demo: 4 bytes wanted, 3 free\n"


def test_interrupt_is_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["demo"], demo=Fake(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "flatcake demo: interrupted\n"


def test_our_own_fault_is_not_hidden() -> None:
    with pytest.raises(AssertionError):
        call(["demo"], demo=Fake(AssertionError("broken")))


def test_settings_are_empty_without_a_file() -> None:
    fake = Fake()
    call(["demo"], demo=fake)
    assert fake.seen is not None and fake.seen.settings == {}


@pytest.mark.parametrize("environ", [{"FLATCAKE_ENGINE_LOADS_MAX": "2"}, {"FLATCAKE_CONFIG": "/nowhere.toml"}])
def test_what_is_wrong_in_settings_does_not_stop_who_reads_none(environ: dict[str, str]) -> None:
    fake = Fake()
    assert main(["look"], {"look": Command("looks", fake.load, reads_settings=False)}, environ) == 0
    assert fake.seen is not None and fake.seen.settings == {}


def test_settings_of_an_adapter_are_left_to_it(tmp_path: Path) -> None:
    fake, path = Fake(), tmp_path / "a.json"
    path.write_text('{"name": "x", "engine": {"loads_max": 2}}')
    environ = {"FLATCAKE_CONFIG": str(path), "FLATCAKE_ENGINE_LOADS_MAX": "2", "FLATCAKE_RANK": "1"}
    assert call(["demo"], environ, demo=fake) == 0
    assert fake.seen is not None and fake.seen.settings == {"name": "x", "rank": 1}


def test_settings_come_from_the_option_before_the_environment(tmp_path: Path) -> None:
    by_option, by_environment = tmp_path / "a.toml", tmp_path / "b.json"
    by_option.write_text('directories = ["/a"]\n[io]\nslot_bytes = "16MiB"\n')
    by_environment.write_text('{"directories": ["/b"]}')
    fake, environ = Fake(), {CONFIG_VARIABLE: str(by_environment)}
    call(["--config", str(by_option), "demo"], environ, demo=fake)
    assert fake.seen is not None
    assert from_mapping(fake.seen.settings).directories == ("/a",)
    assert from_mapping(fake.seen.settings).io.slot_bytes == 16 << 20
    call(["demo"], environ, demo=fake)
    assert from_mapping(fake.seen.settings).directories == ("/b",)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b"[1]", "expected a mapping of settings, found a list"),
        ("a.json", b"\xff", "not valid JSON"),
        ("a.json", b"[" * 100_000, "a.json"),
        ("a.toml", b"= 1", "not valid TOML"),
        ("a.ini", b"a: 1", "ends in .toml, .json, .yaml or .yml"),
        ("a.toml", None, "cannot read the settings: No such file"),
    ],
)
def test_bad_settings_file_is_named(tmp_path: Path, name: str, content: bytes | None, text: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_settings(str(path))
    assert text in str(caught.value) and str(path) in str(caught.value)


def test_bad_settings_file_stops_before_the_subcommand_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = Fake()
    assert call(["--config", str(tmp_path / "none.toml"), "demo"], demo=fake) == 2
    assert fake.seen is None
    assert "none.toml: cannot read the settings" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_declares_arguments_and_json(name: str) -> None:
    parser = argparse.ArgumentParser()
    COMMANDS[name].load().add_arguments(parser)
    words = ["somewhere"] if name in ("inspect", "verify") else []
    assert parser.parse_args(["--json", *words]).json is True


def test_module_form_loads_no_heavy_package() -> None:
    code = (
        "import sys; sys.argv = ['flatcake', '--version']; import runpy\n"
        "try: runpy.run_module('flatcake', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'transformers', 'cupy', 'kvikio'} & set(sys.modules)\n"
        "assert not {'flatcake.demo.command', 'flatcake.doctor.command'} & set(sys.modules)\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"flatcake {__version__}\n"), done.stderr
