"""The demo's control: stored bytes are flipped, once on each medium, to prove that the comparison can fail.

With verification off the wrong bytes reach the model, and its logits must differ from a recompute.  With
verification on the store itself must see them, deliver less, and say why; then the logits agree again.
"""

import queue
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from flatcake.demo.report import ControlRow, TurnRow
from flatcake.demo.serve import Server
from flatcake.demo.sessions import AGENT, CHAT, Session
from flatcake.gva import Medium, decode
from flatcake.io.device import Event
from flatcake.io.engine import Buffer, Result
from flatcake.store import Store

TURNS_BEFORE = 2
"""Turns of each session before its bytes are flipped: from its second on a chat is in DRAM."""
TURNS = TURNS_BEFORE + 1
FLIP = 0x80
"""The top bit of every byte: signs and exponents change, and no number stops being one."""
WAIT_S = 10.0


class Flipped(NamedTuple):
    """A turn that was served from flipped bytes."""

    row: TurnRow
    good_tokens: int
    """Tokens before the flipped block."""
    was_ok: bool
    """Whether all turns before were right, so that the flip alone can be to blame."""


def flip_and_serve(server: Server, directory: str) -> Iterator[tuple[Medium, Flipped]]:
    """Serve an agent and a chat, flip a block of each, and serve them once more.

    Args:
        server: Fresh, over a script that has both kinds.
        directory: Where its pool is.
    """
    sessions = {Medium.DRAM: _first(server, CHAT.name), Medium.SSD: _first(server, AGENT.name)}
    before = [server.serve(session) for _ in range(TURNS_BEFORE) for session in reversed(sessions.values())]
    was_ok = all(row.ok for row in before)
    for medium, session in sessions.items():
        found = _last_block(server.store, session, medium)
        if found is None:
            continue
        block, offset_bytes = found
        size_bytes = server.store.geometry.piece_bytes(0)
        if medium is Medium.SSD:
            _flip_file(server.store, directory, offset_bytes, size_bytes)
        else:
            _flip_memory(server.store, medium, offset_bytes, size_bytes)
        yield medium, Flipped(server.serve(session), block * server.store.geometry.block_tokens, was_ok)


def judge(medium: Medium, unverified: Flipped | None, verified: Flipped | None) -> ControlRow:
    """What the two runs say of one medium; None where nothing was stored there to be flipped."""
    if unverified is None or verified is None:
        return ControlRow(medium=medium.name.lower(), caught=False, refused=False, caught_diff=0.0)
    wrong, right = unverified.row, verified.row
    delivered = unverified.was_ok and wrong.restored_tokens == wrong.expected_tokens
    stopped = verified.was_ok and right.restored_tokens == verified.good_tokens and bool(right.reason)
    return ControlRow(
        medium=medium.name.lower(),
        caught=delivered and not wrong.comparison.ok,
        refused=stopped and right.comparison.ok,
        caught_diff=wrong.comparison.logit_diff,
    )


def _first(server: Server, kind: str) -> Session:
    return next(session for session in server.script.sessions if session.kind.name == kind)


def _last_block(store: Store, session: Session, medium: Medium) -> tuple[int, int] | None:
    """The session's last stored block on a medium, and where its piece of layer 0 lies there; None if it has none."""
    places = [decode(int(gva)) for gva in store.match(session.stored).hit.gvas]
    blocks = [(at, place.offset_bytes) for at, place in enumerate(places) if place.medium is medium]
    return blocks[-1] if blocks else None


def _flip_file(store: Store, directory: str, offset_bytes: int, size_bytes: int) -> None:
    """Flip bytes of the SSD pool behind the store's back, in the file on disk."""
    number, at = store.plane.parts.media[Medium.SSD].locate(offset_bytes)
    with open(f"{directory}/pool-{number:04d}.fc", "r+b") as file:
        file.seek(at)
        data = np.frombuffer(file.read(size_bytes), np.uint8)
        assert len(data) == size_bytes, (len(data), size_bytes)
        file.seek(at)
        file.write((data ^ FLIP).tobytes())


def _flip_memory(store: Store, medium: Medium, offset_bytes: int, size_bytes: int) -> None:
    """Flip bytes of a medium that is no file, through its engine."""
    parts = store.plane.parts
    engine = parts.media[medium].host_engine
    buffer = Buffer.of(torch.zeros(size_bytes, dtype=torch.uint8))
    batch = [parts.transfer(medium, offset_bytes, size_bytes, 0)]
    answers: queue.SimpleQueue[tuple[Result, Event]] = queue.SimpleQueue()
    engine.read(batch, buffer, lambda results, ready: answers.put((results[0], ready)))
    read, ready = answers.get(timeout=WAIT_S)
    assert read.moved_bytes == size_bytes, read
    ready.wait()
    buffer.tensor.bitwise_xor_(FLIP)
    engine.write(batch, buffer, lambda results, ready: answers.put((results[0], ready)))
    written, _ = answers.get(timeout=WAIT_S)
    assert written.moved_bytes == size_bytes, written
