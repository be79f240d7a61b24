"""A process that saves sessions until it is killed, and says when each is saved and when each flush has returned."""

from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.cases.shim import make_memory, open_case, tokens_of
from tests.stores import save

SESSIONS, BLOCKS = 10, 4


def main(pipe: Connection, home: str, life: int) -> None:
    """Save the sessions of one life, a flush after every third."""
    torch.set_num_threads(1)
    if not home:
        return
    memory = make_memory()
    store = open_case(memory, Path(home))
    for number in range(SESSIONS):
        name = f"life {life}, session {number}"
        assert not save(store, memory, name, tokens_of(name, BLOCKS)).reason
        pipe.send(("saved", number))
        if number % 3 == 2:
            pipe.send(("flushed", number if store.flush() else -1))
    pipe.send(("done", SESSIONS))
    pipe.recv()
