"""The demo's transformer: a Llama of random weights through `transformers`, on the demo's own pages.

Weights are wide enough that attention is far from even: a wrong key or value changes the logits, and soon the
tokens.  `transformers` is an optional package, so it is imported when a model is made and not before.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatcake.demo.pages import PagedLayer, PagedMemory, WaitLayer
from flatcake.errors import DeviceError
from flatcake.messages import Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shape of the transformer."""

    layers: int = 6
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 4096
    initializer_range: float = 0.08
    """Standard deviation of the weights; the usual 0.02 makes all tokens nearly equal."""

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers, heads and head dimension of the KV cache."""
        return self.layers, self.kv_heads, self.hidden // self.heads


class Model:
    """A Llama with random weights.

    Raises:
        DeviceError: `transformers` is not installed.
    """

    def __init__(self, size: ModelSize, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self._package = load_transformers()
        config = self._package.LlamaConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=2 * size.hidden,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=1 << 16,
            initializer_range=size.initializer_range,
            tie_word_embeddings=False,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._llama = self._package.LlamaForCausalLM(config).to(device, dtype).eval()
        names = inspect.signature(self._llama.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in names else "cache"  # renamed in version 5

    def forward(self, tokens: Sequence[int], cache: object, *, keep: int) -> torch.Tensor:
        """Run new tokens on top of a cache, which takes up their keys and values.

        Returns:
            float32 [keep, vocab]: logits of the last `keep` tokens.
        """
        ids = torch.tensor([tokens], dtype=torch.int64, device=self.device)
        with torch.inference_mode():
            out = self._llama(input_ids=ids, use_cache=True, logits_to_keep=keep, **{self._cache_name: cache})
        logits: torch.Tensor = out.logits
        return logits[0].float()

    def plain_cache(self) -> object:
        """An empty cache that has nothing to do with the store: the reference."""
        return self._package.DynamicCache()

    def paged_cache(self, memory: PagedMemory, table: Int64Array, tokens: int, wait: WaitLayer | None) -> object:
        """A cache over pages whose first `tokens` tokens are there, layer l once `wait(l)` has returned."""
        kind: Any = type("PagedCacheLayer", (PagedLayer, self._package.cache_utils.DynamicLayer), {})
        slots = memory.slots(table)
        layers = [
            kind(tensor, slots, tokens, lambda layer=layer: wait(layer) if wait else None)
            for layer, tensor in enumerate(memory.tensors)
        ]
        return self._package.cache_utils.Cache(layers=layers)


def load_transformers() -> Any:
    """Import `transformers`.

    Raises:
        DeviceError: It is not installed, or is too old.
    """
    try:
        import transformers
        import transformers.cache_utils
    except ImportError as error:
        raise DeviceError(f"the demo needs transformers ({error}); pip install 'flatcake[demo]'") from None
    if not hasattr(transformers.cache_utils, "DynamicLayer"):
        raise DeviceError(f"transformers {transformers.__version__} is too old; pip install 'flatcake[demo]'")
    return transformers
