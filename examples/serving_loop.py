"""A serving loop of your own over FlatCake.  Copy the first part; the second only makes it run without a model.

python examples/serving_loop.py [DIRECTORY]
"""

import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch

import flatcake
from flatcake.units import MiB


class FreePages:
    """The engine's free pages.  Several threads ask; None means not now."""

    def __init__(self, count: int) -> None:
        self.free, self.lock = list(range(count)), threading.Lock()

    def take(self, count: int) -> list[int] | None:
        with self.lock:
            return [self.free.pop() for _ in range(count)] if count <= len(self.free) else None

    def give_back(self, pages: Any) -> None:
        with self.lock:
            self.free.extend(pages.tolist())


def serve_next(store: flatcake.Store, loop: flatcake.Loop, layers: int, forward: Callable[..., None]) -> int:
    """Serve the next request; returns how many of its tokens were not computed.  Call it for ever."""
    ready = loop.next_ready()
    if ready is None:  # the loop was closed
        return 0
    prompt, session = ready.request.tokens, ready.request.session
    for layer in range(layers):
        if not ready.wait_layer(layer):  # late, slow or failed
            break
        forward(layer, prompt, ready.tokens, ready.pages)
    good_tokens = ready.result().tokens  # verified: ask before a token is shown
    if ready.recompute or good_tokens < ready.tokens:
        for layer in range(layers):
            forward(layer, prompt, good_tokens, ready.pages)
    store.save(session, prompt, ready.pages).published()
    loop.done(ready)  # the pages go back to `FreePages`
    return good_tokens


# -- what follows stands in for a model and its users ----------------------------------------------------------

LAYERS, PAGES, PAGE_TOKENS, HEADS, DIM = 4, 512, 16, 2, 64


def stand_in(pool: torch.Tensor) -> Callable[..., None]:
    """A model whose KV is a number made of token and layer; it stops when its prefix is not what it computed."""

    def forward(layer: int, tokens: list[int], start: int, pages: Any) -> None:
        at, values = torch.arange(len(tokens)), torch.tensor(tokens, dtype=torch.float32) * (layer + 1)
        page, slot = torch.as_tensor(pages)[at // PAGE_TOKENS], at % PAGE_TOKENS
        assert (pool[layer, :, page[:start], slot[:start]] == values[:start, None, None]).all(), "not my prefix"
        pool[layer, :, page[start:], slot[start:]] = values[start:, None, None]

    return forward


def main(directory: str) -> int:
    """Four sessions of three turns."""
    pool = torch.zeros(LAYERS, 2, PAGES, PAGE_TOKENS, HEADS, DIM)
    kv = flatcake.PagedKV.of_stacked(pool, page_tokens=PAGE_TOKENS, page_axis=2, split_axis=1)
    identity = flatcake.Identity(model="m", revision="1", kv_dtype="f32", layout="mine", block_tokens=32)
    sizes = {"dram_bytes_max": 64 * MiB, "ssd_bytes_max": 256 * MiB, "pool_file_bytes": 64 * MiB}
    room = flatcake.CapacityConfig(ssd_free_bytes_min=0, **sizes)
    config = flatcake.StoreConfig(directories=(directory,), capacity=room)
    prompts = {f"session {n}": [n * 1000 + t for t in range(200 + 32 * n)] for n in range(4)}
    restored_tokens = 0
    with flatcake.open(config, identity, kv) as store, flatcake.Loop(store, pages=FreePages(PAGES)) as loop:
        for _turn in range(3):
            for session, prompt in prompts.items():
                loop.submit(flatcake.LoopRequest(tokens=prompt, session=session))
            restored_tokens += sum(serve_next(store, loop, LAYERS, stand_in(pool)) for _ in prompts)
            prompts = {session: prompt + prompt[:64] for session, prompt in prompts.items()}
        print(f"{loop.stats()['done']} requests served; {restored_tokens} tokens came from the store")
    return restored_tokens


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
