"""The demo's engine: serves turns from the store, and each of them once more without it.

Write path:  decode -> pages -> [store.save] -> pages overwritten
Read path:   match -> lease -> [store.restore] -> wait_layer, prefill of the new tokens -> result -> first token
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import flatcake
from flatcake.config import StoreConfig
from flatcake.demo.model import Model
from flatcake.demo.pages import PagedMemory
from flatcake.demo.report import Comparison, TurnRow
from flatcake.demo.sessions import REPLY_TOKENS, Script, Session
from flatcake.gva import Medium, decode_array
from flatcake.keys import Identity
from flatcake.messages import Int64Array
from flatcake.placement import Turn
from flatcake.store import Store
from flatcake.units import MS

PAGE_TOKENS = 16
BLOCK_TOKENS = 32
SPARE_PAGES = 2
"""The page memory is so many times what a turn needs, so that pages change from turn to turn."""
SAVE_WAIT_S = 20.0

RELATIVE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of logits that is rounding, as a share of the largest logit."""

OpenStore = Callable[[StoreConfig, Identity, flatcake.PagedKV], Store]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one way of serving a prompt gave."""

    reply: list[int]
    logits: torch.Tensor
    """float32 [reply, vocab]"""
    first_token_ns: int


class Server:
    """A model, its paged memory, and a store."""

    def __init__(self, model: Model, script: Script, config: StoreConfig, open_store: OpenStore, *, seed: int) -> None:
        self._model, self.script = model, script
        self._threads = torch.get_num_threads()
        tokens = script.context_tokens_max * SPARE_PAGES
        self._memory = PagedMemory(
            model.size.kv_shape,
            page_count=-(-tokens // PAGE_TOKENS),
            page_tokens=PAGE_TOKENS,
            dtype=model.dtype,
            device=model.device,
            seed=seed,
        )
        identity = Identity(
            model="flatcake-demo",
            revision=f"random-{seed}",
            kv_dtype=str(model.dtype),
            layout="demo",
            block_tokens=BLOCK_TOKENS,
        )
        self.store = open_store(config, identity, self._memory.describe())
        self.store.reset()  # What an earlier run has left would make first turns hits.

    def __enter__(self) -> "Server":
        """Leave half of the cores to the store: torch's threads spin, and are slow where others want to run."""
        torch.set_num_threads(max(1, self._threads // 2))
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)
        self.store.close()

    def serve(self, session: Session) -> TurnRow:
        """Answer a session's next question, save its KV, and lose it from memory; then compare."""
        prompt = self.script.ask(session)
        expected = self.script.stored_tokens(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        table = self._memory.take(len(prompt) + REPLY_TOKENS)
        start_ns = time.monotonic_ns()
        match = self.store.match(prompt)
        with self.store.lease(match) as lease:
            restore = self.store.restore(lease, table)
        logits, result = self._prefill(prompt, table, lease.tokens, restore)
        answer = self._decode(logits, self._model.paged_cache(self._memory, table, len(prompt), None), start_ns)
        session.tokens += answer.reply
        session.stored = session.tokens[:-1]  # The last token was never an input: it has no KV yet.
        save_reason = self._save(session, table)
        self._memory.poison()
        reference = self._recompute(prompt, answer.reply)
        media = _media(match, result.blocks)
        return TurnRow(
            session=session.name,
            turn=session.turn,
            prompt_tokens=len(prompt),
            expected_tokens=expected,
            restored_tokens=result.tokens,
            dram_tokens=media[Medium.DRAM] * BLOCK_TOKENS,
            ssd_tokens=media[Medium.SSD] * BLOCK_TOKENS,
            reads=result.reads,
            read_bytes=result.read_bytes,
            block_bytes=result.blocks * self.store.geometry.block_bytes,
            restored_ms=answer.first_token_ns / MS,
            recomputed_ms=reference.first_token_ns / MS,
            comparison=_compare(answer, reference, RELATIVE_TOLERANCE[self._model.dtype]),
            reason=result.reason or save_reason,
        )

    def warm_up(self) -> None:
        """Run the model once, so that the first turn's times are like the others'."""
        self._recompute([0] * PAGE_TOKENS, [0] * REPLY_TOKENS)

    def _prefill(
        self, prompt: list[int], table: Int64Array, tokens: int, restore: flatcake.Restore
    ) -> tuple[torch.Tensor, flatcake.RestoreResult]:
        """Compute what the store does not bring, while it brings the rest layer by layer.

        Args:
            prompt: All tokens.
            table: Their pages.
            tokens: Leading tokens that the restore was asked for.
            restore: Under way.

        Returns:
            float32 [1, vocab], the last token's logits; and what was restored.
        """
        assert tokens < len(prompt), (tokens, len(prompt))
        cache = self._model.paged_cache(self._memory, table, tokens, restore.wait_layer if tokens else None)
        logits = self._model.forward(prompt[tokens:], cache, keep=1)
        result = restore.result()  # Before anything computed from the pages is shown.
        if result.tokens < tokens:  # A miss after all: from the first bad block on everything is computed.
            cache = self._model.paged_cache(self._memory, table, result.tokens, None)
            logits = self._model.forward(prompt[result.tokens :], cache, keep=1)
        return logits, result

    def _decode(self, logits: torch.Tensor, cache: object, start_ns: int) -> Answer:
        """Greedy decoding, a token at a time."""
        reply, rows = [int(logits[-1].argmax())], [logits]
        first_token_ns = time.monotonic_ns() - start_ns
        while len(reply) < REPLY_TOKENS:
            rows.append(self._model.forward(reply[-1:], cache, keep=1))
            reply.append(int(rows[-1][-1].argmax()))
        return Answer(reply, torch.cat(rows), first_token_ns)

    def _recompute(self, prompt: list[int], reply: list[int]) -> Answer:
        """The same model without store and pages, told the same reply."""
        start_ns = time.monotonic_ns()
        cache = self._model.plain_cache()
        first = self._model.forward(prompt, cache, keep=1)
        best = [int(first[-1].argmax())]
        first_token_ns = time.monotonic_ns() - start_ns
        logits = torch.cat([first, self._model.forward(reply[:-1], cache, keep=len(reply) - 1)])
        return Answer(best + logits[1:].argmax(-1).tolist(), logits, first_token_ns)

    def _save(self, session: Session, table: Int64Array) -> str:
        """Store the session's KV; returns why not all of it."""
        turn = Turn(index=session.turn, prior_reply_tokens=session.prior_reply_tokens)
        done = self.store.save(session.name, session.stored, table, turn).result(SAVE_WAIT_S)
        return done.reason if done is not None else f"the save took longer than {SAVE_WAIT_S} s"


def _media(match: flatcake.Match, blocks: int) -> dict[Medium, int]:
    """Of the leading blocks of a match, how many lie on each medium."""
    media = decode_array(match.hit.gvas[:blocks])[0]
    return {medium: int((media == int(medium)).sum()) for medium in Medium}


def _compare(answer: Answer, reference: Answer, relative: float) -> Comparison:
    """Compare logits and tokens; where two tokens are nearly equal, either may win."""
    tolerance = relative * float(reference.logits.abs().max())
    differ = (answer.logits - reference.logits).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    said, best = (torch.tensor(side.reply, device=answer.logits.device)[:, None] for side in (answer, reference))
    margins = reference.logits.gather(1, best) - reference.logits.gather(1, said)
    return Comparison(
        logit_diff=float(differ.max()), tolerance=tolerance, same_tokens=bool((margins <= 2 * tolerance).all())
    )
