"""Stores for `flatcake inspect` and `verify`, and directories whose every byte is compared."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flatcake.cli import main
from flatcake.gva import Medium, decode
from flatcake.io.dramdump import DUMP
from flatcake.store import Store
from tests.stores import TURNS, Memory, make_config, make_store, make_tokens, restore, save

SESSIONS, LENGTHS = 6, (2, 5)
"""Sessions of two turns, and blocks after each; every other one in DRAM."""


def medium_of(number: int) -> Medium:
    return Medium.DRAM if number % 2 else Medium.SSD


def opened(memory: Memory, homes: Path | Sequence[Path], **changes: Any) -> Store:
    homes = [homes] if isinstance(homes, Path) else list(homes)
    identity = changes.pop("identity", None)
    return make_store(
        memory, make_config(memory, homes, **{"blocks": 96, "dram_blocks": 64} | changes), identity=identity
    )


def fill(store: Store, memory: Memory, sessions: int = SESSIONS) -> None:
    for number in range(sessions):
        for length in LENGTHS:
            assert not save(store, memory, f"s{number}", make_tokens(number, length), TURNS[medium_of(number)]).reason


def filled(memory: Memory, homes: Path | Sequence[Path], **changes: Any) -> None:
    """A store that was filled and closed."""
    with opened(memory, homes, **changes) as store:
        fill(store, memory)


def hits(store: Store, memory: Memory, sessions: int = SESSIONS) -> list[int]:
    """Blocks of each session that are delivered; every byte is compared."""
    return [restore(store, memory, make_tokens(number, LENGTHS[-1])).blocks for number in range(sessions)]


def places(store: Store, number: int) -> list[tuple[Medium, int]]:
    """Medium and offset of the first piece of each block of a session."""
    found = [decode(int(gva)) for gva in store.match(make_tokens(number, 99)).hit.gvas]
    return [(place.medium, place.offset_bytes) for place in found]


def flip(home: Path, place: tuple[Medium, int], file_bytes: int, bits: int = 1) -> None:
    """Change a byte of a block behind the store's back; it must have been there."""
    medium, offset_bytes = place
    number, at = divmod(offset_bytes, file_bytes)
    path = home / DUMP if medium is Medium.DRAM else home / f"pool-{number:04d}.fc"
    with path.open("r+b") as file:
        file.seek(offset_bytes if medium is Medium.DRAM else at)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ bits]))


Entry = tuple[int, int, bytes]


def snapshot(*homes: Path, but: Sequence[str] = ()) -> dict[str, Entry]:
    """Every name, with kind and size, time of the last change, and content; also of the directories themselves."""
    found = {}
    for path in [*homes, *(path for home in homes for path in home.iterdir())]:
        if path.name not in but:
            state = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found[str(path)] = (state.st_mode << 48 | state.st_size, state.st_mtime_ns, content)
    return found


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a command with `--json`; its exit code and its stores."""
    code = main([*words, "--json"], environ={})
    out = capsys.readouterr().out
    return code, json.loads(out)["stores"] if out else []
