"""The `flatcake` command: finds the subcommand, reads the settings file, turns errors into exit codes.

With `settings` the only module that reads the environment and settings files.  A subcommand's module is imported
when it is chosen and not before, so that `flatcake doctor` does not load what `flatcake demo` needs.
Exit codes: the subcommand's own; 2 for a caller's mistake; 130 when interrupted.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from flatcake import __version__
from flatcake.config import StoreConfig
from flatcake.errors import FlatCakeError
from flatcake.settings import CONFIG_VARIABLE, from_environment, merge, read_settings, without_adapter


class Subcommand(Protocol):
    """What the module of a subcommand offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code; `args.settings` is what file and environment say, or empty."""


class Command(NamedTuple):
    """One line of the help, and the way to the module."""

    summary: str
    load: Callable[[], Subcommand]
    reads_settings: bool = True
    """Else `args.settings` is empty, and nothing that is wrong in file or environment stops it."""


def load_demo() -> Subcommand:
    from flatcake.demo import command

    return command


def load_doctor() -> Subcommand:
    from flatcake.doctor import command

    return command


def load_inspect() -> Subcommand:
    from flatcake.audit import inspect

    return inspect


def load_verify() -> Subcommand:
    from flatcake.audit import verify

    return verify


COMMANDS: Mapping[str, Command] = {
    "demo": Command("serve a real transformer over several sessions and compare its logits", load_demo),
    "doctor": Command("say what this machine can do, which I/O path will be used, and what to change", load_doctor),
    "inspect": Command(
        "say what is in a store's directory, open or closed, without touching it", load_inspect, reads_settings=False
    ),
    "verify": Command(
        "read everything in a store's directory and say what is damaged, or drop that",
        load_verify,
        reads_settings=False,
    ),
}


def main(
    argv: Sequence[str] | None = None,
    commands: Mapping[str, Command] = COMMANDS,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run one subcommand.

    Args:
        argv: Words after the program's name; the process's own by default.
        commands: Subcommands by name.
        environ: Environment; the process's own by default.

    Returns:
        The exit code.

    Raises:
        SystemExit: Help or version was asked for (0), or a word is not understood (2).
    """
    head = _head_parser(commands).parse_args(argv)
    logging.basicConfig(level=logging.DEBUG if head.verbose else logging.WARNING)
    command = commands[head.command]
    try:
        module = command.load()
        parser = argparse.ArgumentParser(prog=f"flatcake {head.command}", description=command.summary)
        module.add_arguments(parser)
        args = parser.parse_args(head.rest)
        around = os.environ if environ is None else environ
        args.settings = _gather(head.config, around) if command.reads_settings else {}
        return module.run(args)
    except FlatCakeError as error:
        sys.stderr.write(f"flatcake {head.command}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"flatcake {head.command}: interrupted\n")
        return 130


def _gather(file: str | None, environ: Mapping[str, str]) -> dict[str, object]:
    path = file or environ.get(CONFIG_VARIABLE)
    settings, variables = without_adapter(read_settings(path) if path else {}, environ)
    return merge(settings, from_environment(StoreConfig, variables))


def _head_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    width = max(map(len, commands), default=0)
    lines = [f"  {name:{width}}  {command.summary}" for name, command in commands.items()]
    parser = argparse.ArgumentParser(
        prog="flatcake",
        description="A flat KV-cache store for LLM serving.",
        epilog="\n".join(["commands:", *lines, "", "`flatcake COMMAND --help` says more."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flatcake {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log everything to stderr")
    parser.add_argument("--config", metavar="FILE", help=f"settings, TOML, JSON or YAML; default: ${CONFIG_VARIABLE}")
    parser.add_argument("command", choices=commands, metavar="COMMAND", help="one of those below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its options")
    return parser
