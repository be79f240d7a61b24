"""`flatcake demo`: a real transformer serves sessions whose KV leaves memory between turns and comes back.

Every turn's logits are compared with a full recompute; at the end stored bytes are flipped, to prove that the
comparison can fail.  Exit code 0 only if all agreed, both media were used, and the flips were noticed.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import flatcake
from flatcake.config import from_mapping
from flatcake.demo.control import TURNS as CONTROL_TURNS
from flatcake.demo.control import Flipped, flip_and_serve, judge
from flatcake.demo.model import Model, ModelSize, load_transformers
from flatcake.demo.report import ControlRow, Summary, TurnRow, format_json, format_table
from flatcake.demo.serve import OpenStore, Server
from flatcake.demo.sessions import SYSTEM_TOKENS, Script
from flatcake.errors import ConfigError
from flatcake.gva import Medium
from flatcake.io.devices import open_device
from flatcake.io.seam import Files
from flatcake.units import MiB, align_up

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONTROL_SESSIONS = 2
POOL_FILE_BYTES = 64 * MiB
VERIFY: tuple[Literal["off", "full"], ...] = ("off", "full")

Advance = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    directory: str
    device: str
    dtype: str
    sessions: int
    turns: int
    seed: int
    settings: Mapping[str, Any]
    """From the settings file; the demo's own sizes and placement come first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of model and KV (default: %(default)s)")
    parser.add_argument("--directory", help="where the SSD pool lies; default: a temporary one, removed at the end")
    parser.add_argument("--sessions", type=int, default=4, help="at least 2 (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of each session, at least 2 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, words and page tables (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON line on stdout instead of the table")


def run(args: argparse.Namespace, open_store: OpenStore = flatcake.open) -> int:
    """Serve, compare, report.

    Args:
        args: As declared above, and `settings`, the mapping read from the settings file.
        open_store: Opens the store that serves; tests bring a broken one.

    Raises:
        ConfigError: Too few sessions or turns.
        DeviceError: The device or `transformers` is missing.
    """
    for name in ("sessions", "turns"):
        if getattr(args, name) < 2:
            raise ConfigError(f"--{name} {getattr(args, name)}: expected at least 2")
    load_transformers()
    with _directory(args.directory) as directory:
        options = Options(
            directory=directory,
            device=_device_name(args.device),
            dtype=args.dtype,
            sessions=args.sessions,
            turns=args.turns,
            seed=args.seed,
            settings=args.settings,
        )
        with _progress(options.sessions * options.turns + 2 * CONTROL_SESSIONS) as advance:
            summary = play(options, open_store, advance)
    sys.stdout.write((format_json if args.json else format_table)(summary) + "\n")
    return 1 if summary.faults else 0


def play(options: Options, open_store: OpenStore, advance: Advance) -> Summary:
    """The whole demo: all sessions, then the control, in stores of its own.

    Args:
        options: What to do.
        open_store: Opens the store that serves.
        advance: Called after each turn that counts.
    """
    device = torch.device(options.device)
    model = Model(ModelSize(), seed=options.seed, dtype=DTYPES[options.dtype], device=device)
    rows, stats = serve_all(options, model, open_store, advance)
    control: list[ControlRow] = []
    if all(row.ok for row in rows):  # Else the comparison has failed already.
        unverified, verified = (_control(options, model, verify, advance) for verify in VERIFY)
        control = [judge(medium, unverified.get(medium), verified.get(medium)) for medium in Medium]
    return Summary(
        rows=rows,
        control=control,
        device=str(device),
        dtype=options.dtype,
        io_path={name: medium.io_path for name, medium in stats.media.items()},
        io_reason=stats.io_reason,
    )


def serve_all(
    options: Options, model: Model, open_store: OpenStore, advance: Advance
) -> tuple[list[TurnRow], flatcake.StoreStats]:
    """Serve every turn of every session, interleaved; returns the turns, and what the store says of itself."""
    script = Script(options.sessions, options.turns, vocab=model.size.vocab, seed=options.seed)
    rows: list[TurnRow] = []
    with _server(options, model, script, "serve", "full", open_store) as server:
        server.warm_up()
        for _ in range(options.turns):
            for session in script.order():
                rows.append(server.serve(session))
                advance()
        return rows, server.store.stats()


def _control(options: Options, model: Model, verify: Literal["full", "off"], advance: Advance) -> dict[Medium, Flipped]:
    """Flip bytes in a store of its own, with verification on or off."""
    name = f"control-{verify}"
    script = Script(CONTROL_SESSIONS, CONTROL_TURNS, vocab=model.size.vocab, seed=options.seed)
    flips = {}
    with _server(options, model, script, name, verify, flatcake.open) as server:
        for medium, flipped in flip_and_serve(server, f"{options.directory}/{name}"):
            flips[medium] = flipped
            advance()
    return flips


def _server(
    options: Options, model: Model, script: Script, name: str, verify: Literal["full", "off"], open_store: OpenStore
) -> Server:
    """A server whose store has a directory, sizes and placement of its own."""
    places = {"directories": [f"{options.directory}/{name}"], "device": options.device}
    config = from_mapping({**options.settings, **places})
    layers, heads, width = model.size.kv_shape
    token_bytes = 2 * layers * heads * width * model.dtype.itemsize
    size_bytes = 2 * token_bytes * script.context_tokens_max * len(script.sessions)
    size_bytes = align_up(size_bytes, POOL_FILE_BYTES)
    config = replace(
        config,
        capacity=replace(
            config.capacity,
            dram_bytes_max=size_bytes,
            ssd_bytes_max=size_bytes,
            pool_file_bytes=POOL_FILE_BYTES,
            ssd_free_bytes_min=POOL_FILE_BYTES,
        ),
        placement=replace(
            config.placement, agent_tokens_min=script.chat_tokens_max + 1, shared_tokens_max=SYSTEM_TOKENS
        ),
        io=replace(config.io, verify=verify),
    )
    return Server(model, script, config, open_store, seed=options.seed)


def _device_name(name: str) -> str:
    """The device that is meant; raises where the name is wrong or there is no such device."""
    from_mapping({"device": name, "capacity": {"ssd_bytes_max": 0}})
    return open_device(name, Files()).name


@contextmanager
def _directory(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
    else:
        with tempfile.TemporaryDirectory(prefix="flatcake-demo-") as made:
            yield made


@contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """A bar on stderr, if that is a terminal and tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, unit="turn", leave=False, disable=None) as bar:
        yield bar.update
