"""A process that saves turns until it is killed, and says what it does before and after."""

from multiprocessing.connection import Connection

import numpy as np
import torch

from flatcake.gva import Medium
from tests.stores import CHAT, ONE_SHOT, WAIT_S, Memory, make_config, make_store, make_tokens, simple_layout

LENGTHS = (2, 3, 6)
"""Blocks of each session after its turns."""


def main(pipe: Connection, directory: str, first: int, blocks: int, dram_blocks: int) -> None:
    """Open the store, and save sessions `first`, `first` + 1, … for ever; without a directory, nothing."""
    torch.set_num_threads(1)
    if not directory:
        return
    memory = Memory(simple_layout())
    store = make_store(memory, make_config(memory, [directory], blocks=blocks, dram_blocks=dram_blocks))
    pipe.send(("open", first, 0, 0))
    number = first
    while True:
        for length in LENGTHS:
            tokens = make_tokens(number, length)
            pages = np.arange(length * 2)
            memory.stamp(store.keys(tokens), pages)
            pipe.send(("save", number, length, 0))
            found = store.save(f"s{number}", tokens, pages, CHAT if number % 4 == 3 else ONE_SHOT).result(WAIT_S)
            if found is not None and not found.reason:
                pipe.send(("saved", number, length, store.match(tokens).hit.blocks_on(Medium.DRAM)))
        if number % 5 == 4:
            store.flush()
        number += 1
