"""`flatcake doctor`: what this machine can do, which I/O path a store will take here, and what to change.

Always gives a report: a probe that fails becomes a finding.  Leaves nothing behind.
Exit codes: 0, whatever there is to improve; 1 when no store could be opened in the directory, on the device
and with the settings that were given.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flatcake import __version__
from flatcake.clock import Clock, MonotonicClock
from flatcake.config import StoreConfig, from_mapping
from flatcake.doctor.advice import Finding, advise
from flatcake.doctor.facts import Facts, Probes
from flatcake.doctor.gpu import read_gpu
from flatcake.doctor.machine import read_memory, read_place, read_system
from flatcake.doctor.measure import SIZE_BYTES_MIN, Measured, measure
from flatcake.doctor.report import as_mapping, as_text, usable
from flatcake.errors import ConfigError
from flatcake.io.seam import Files
from flatcake.units import MiB, format_bytes, parse_bytes

SIZE_BYTES = 256 * MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to examine."""

    directory: str | None = None
    """None takes the first one of the settings, or the current one."""
    device: str | None = None
    """None takes that of the settings."""
    size_bytes: int = SIZE_BYTES
    """How much to write, and to save; as much again for the file of bare transfers."""
    token_bytes: int = 0
    """Bytes of one token in one layer, to judge block sizes with; 0 leaves that out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--directory", metavar="DIR", help="where the pool will be; default: the settings', or here")
    parser.add_argument("--device", type=_device, help="auto, cpu, cuda or cuda:N; default: the settings'")
    parser.add_argument(
        "--size", type=_size, default=SIZE_BYTES, metavar="BYTES", help="how much to write; default: 256MiB"
    )
    parser.add_argument(
        "--token-bytes", type=_token_bytes, default=0, metavar="BYTES", help="of one token in one layer: block sizes"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, on one line, instead of text")


def run(args: argparse.Namespace) -> int:
    """Examine, report, and return the exit code."""
    request = Request(directory=args.directory, device=args.device, size_bytes=args.size, token_bytes=args.token_bytes)
    facts, findings = examine(request, getattr(args, "settings", {}), files=Files(), clock=MonotonicClock())
    if args.json:
        sys.stdout.write(json.dumps(as_mapping(facts, findings, __version__)) + "\n")
    else:
        sys.stdout.write(as_text(facts, findings, __version__))
    return 0 if usable(findings) else 1


def examine(
    request: Request, settings: Mapping[str, object], *, files: Files, clock: Clock
) -> tuple[Facts, list[Finding]]:
    """Ask everything, and judge the answers.  Never raises because of what the machine does.

    Args:
        request: What to examine.
        settings: As read from the settings file; refused ones are a finding, and the defaults are judged instead.
        files: System calls.
        clock: Monotonic time.
    """
    probes, extra = Probes(), list[Finding]()
    config = StoreConfig(directories=(".",))
    try:
        config = from_mapping({"directories": ["."], **settings})
    except ConfigError as error:
        extra.append(Finding("unusable", "settings", f"{error}", "correct them; the defaults were judged instead"))
    config = replace(config, device=request.device or config.device)
    directory = request.directory or next(iter(config.directories), ".")
    place = probes.get("directory", lambda: read_place(probes, files, directory))
    measured = None
    if place is not None and place.state == "ready":
        measured = probes.get(
            "measurement",
            lambda: measure(probes, files, clock, config=config, directory=place.path, size_bytes=request.size_bytes),
        )
    measured = measured or Measured()
    facts = Facts(
        config=config,
        system=probes.get("system", lambda: read_system(probes)),
        memory=probes.get("memory", lambda: read_memory(probes, files)),
        place=place,
        gpu=probes.get("GPU", lambda: read_gpu(probes)),
        direct=measured.direct,
        engine=measured.engine,
        disk=measured.disk,
        restore=measured.restore,
        token_bytes=request.token_bytes,
        misses=tuple(probes.misses),
    )
    return facts, sorted([*extra, *advise(facts)], key=lambda finding: finding.severity != "unusable")


def _size(text: str) -> int:
    size_bytes = _token_bytes(text)
    if size_bytes < SIZE_BYTES_MIN:
        raise argparse.ArgumentTypeError(f"{text}: expected at least {format_bytes(SIZE_BYTES_MIN)}")
    return size_bytes


def _token_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _device(text: str) -> str:
    try:
        return StoreConfig(directories=(".",), device=text).device
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
