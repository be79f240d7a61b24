"""A real vLLM engine on the CPU, in this process, over a tiny model whose weights make wrong KV visible."""

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32
"""vLLM's CPU backend takes multiples of this."""
LOGPROB_DIFF_MAX = 2e-3
ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},  # Threads that spin at barriers cost more.
}
SIZES = {"ssd_bytes_max": "128MiB", "pool_file_bytes": "32MiB", "dram_bytes_max": "32MiB", "ssd_free_bytes_min": 0}


def make_model(path: str, *, layers: int = 4, hidden: int = 256, windows: bool = False) -> None:
    """A GQA Llama with random weights and a word tokenizer; 11 MB by default, no hub.

    With `windows` a Gemma 3, every other layer of which sees 64 tokens back.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
    )

    torch.manual_seed(0)
    shape: dict[str, Any] = dict(  # noqa: C408
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=1024,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        initializer_range=0.12,  # Flat logits would hide wrong KV.
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    if windows:
        kinds = ["sliding_attention", "full_attention"] * (layers // 2)
        config = Gemma3TextConfig(**shape, sliding_window=64, layer_types=kinds, query_pre_attn_scalar=64)
        Gemma3ForCausalLM(config).float().save_pretrained(path)
    else:
        LlamaForCausalLM(LlamaConfig(**shape)).float().save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i + 4 for i in range(1020)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    fast.chat_template = "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}w3"
    fast.save_pretrained(path)


def transfer_config(directory: str, *, is_faulty: bool = False, **extra: Any) -> dict[str, Any]:
    """What a user pastes as `--kv-transfer-config`."""
    capacity = SIZES | extra.pop("capacity", {})
    return {
        "kv_connector": "FaultyConnector" if is_faulty else "FlatCakeConnector",
        "kv_connector_module_path": f"{'tests' if is_faulty else 'flatcake'}.engines.vllm."
        + ("faulty" if is_faulty else "connector"),
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"directories": [directory], "capacity": capacity, **extra},
    }


def engine_options(directory: str, **transfer: Any) -> dict[str, Any]:
    """What `LLM` is told, beside the model."""
    return {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "seed": 0,
        "kv_transfer_config": transfer_config(directory, **transfer),
    }


@dataclass(frozen=True)
class Answer:
    """What a request brought."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    """Tokens that vLLM did not compute."""

    def agrees(self, other: "Answer") -> bool:
        close = all(abs(a - b) < LOGPROB_DIFF_MAX for a, b in zip(self.logprobs, other.logprobs, strict=True))
        return self.tokens == other.tokens and close


@dataclass
class Ask:
    """A request."""

    tokens: Sequence[int]
    session: str = ""
    salt: str = ""
    new: int = 4
    params: dict[str, Any] = field(default_factory=dict)


class Engine:
    """One `LLM` that steps when told; `side` is the scheduler's half of the connector, `work` the worker's."""

    def __init__(self, model: str, directory: str, *, is_faulty: bool = False, extra: Any = None, **changes: Any):
        os.environ.update(ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        from vllm import LLM

        options = engine_options(directory, is_faulty=is_faulty, **(extra or {}))
        options["distributed_executor_backend"] = "uni"
        self.llm = LLM(model=model, **(options | changes))
        self.core = self.llm.llm_engine.engine_core.engine_core

    @property
    def connector(self) -> Any:
        return self.core.scheduler.connector

    @property
    def side(self) -> Any:
        return self.connector._scheduler

    @property
    def work(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def ask(self, *asks: Ask) -> list[Answer]:
        """Compute requests together, and let their saves end."""
        outputs = self.llm.generate(
            [self.prompt(ask) for ask in asks], [self.params(ask) for ask in asks], use_tqdm=False
        )
        self.drain()
        return [self.answer(output) for output in outputs]

    def one(self, tokens: Sequence[int], session: str = "", **more: Any) -> Answer:
        return self.ask(Ask(tokens, session, **more))[0]

    def reference(self, tokens: Sequence[int], **more: Any) -> Answer:
        """The same request computed whole: under a salt of its own nothing hits."""
        found = self.one(tokens, salt=secrets.token_hex(8), **more)
        assert found.cached == 0
        return found

    def prompt(self, ask: Ask) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt_token_ids": list(ask.tokens)}
        return prompt | ({"cache_salt": ask.salt} if ask.salt else {})

    def params(self, ask: Ask) -> Any:
        from vllm import SamplingParams

        hints = ({"session_id": ask.session} if ask.session else {}) | ask.params
        extra = {"kv_transfer_params": hints} if hints else None
        return SamplingParams(
            temperature=0, max_tokens=ask.new, ignore_eos=True, detokenize=False, logprobs=1, extra_args=extra
        )

    @staticmethod
    def answer(output: Any) -> Answer:
        first = output.outputs[0]
        logprobs = [next(iter(each.values())).logprob for each in first.logprobs]
        return Answer(list(first.token_ids), logprobs, output.num_cached_tokens or 0)

    def drain(self) -> None:
        """Step until the engine has nothing left, and what the ranks reported is settled."""
        import threading

        settled = threading.Event()
        while self.core.scheduler.has_requests():
            self.core.step()
            settled.wait(0.001)  # As vLLM's own loop: other threads must run.
        self.side.coordinator.fence(settled.set)
        assert settled.wait(30)
        self.side.check()

    def forget(self) -> None:
        """Empty vLLM's own prefix cache, so that hits come from the store alone."""
        self.drain()
        assert self.llm.reset_prefix_cache()

    def counts(self) -> dict[str, int]:
        """What catalog, data plane and worker counted."""
        return dict(self.side.coordinator.counters() + self.work.counters())

    def assert_idle(self) -> None:
        """Nothing is held by anybody."""
        self.drain()
        held = self.side.coordinator.catalog.open_counts()
        assert held == {"leases": 0, "plans": 0, "draining": 0}, held
        assert self.core.scheduler.kv_cache_manager.usage == 0, "vLLM's blocks are still held"
        assert not self.side._hits and not self.side._loading

    def close(self) -> None:
        self.core.shutdown()


def words(seed: int, count: int) -> list[int]:
    """Token ids of a prompt."""
    return [(seed * 131 + i * (7 + seed % 11)) % 1000 + 4 for i in range(count)]


def pool_files(directory: str) -> list[Path]:
    return sorted(Path(directory).glob("**/pool-*.fc"))


def flip_files(directory: str) -> None:
    """Change a byte in each 4 KiB of all pool files, behind the record lanes too."""
    for path in pool_files(directory):
        with path.open("r+b") as file:
            data = bytearray(file.read())
            data[100::4096] = bytes(byte ^ 0x80 for byte in data[100::4096])
            file.seek(0)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
