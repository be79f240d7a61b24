"""What vLLM's configuration says about the bytes of a block, and what this adapter cannot serve.

Reads vLLM's configuration objects by attribute, and imports nothing of vLLM.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from flatcake.engines.vllm.options import EngineConfig, Place
from flatcake.engines.vllm.weights import fingerprint
from flatcake.errors import ConfigError
from flatcake.keys import Identity

FULL = {"FullAttentionSpec", "MLAAttentionSpec"}
"""vLLM's kinds of KV cache in which a request keeps every block of its prefix."""


def require_supported(config: Any, kv_cache_config: Any) -> None:
    """Refuse at start what would be wrong later.

    Raises:
        ConfigError: Says what, and what to change.
    """
    parallel, cache = config.parallel_config, config.cache_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name}={getattr(parallel, name)}: expected 1; FlatCake serves tensor parallelism only")
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ConfigError(
            f"{groups} groups of KV cache: expected 1; start vLLM with --disable-hybrid-kv-cache-manager, if the "
            "model allows it"
        )
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    kinds = {type(each).__name__ for each in getattr(spec, "kv_cache_specs", {"": spec}).values()}
    if not kinds <= FULL:  # Others give back blocks of a prefix before its end, or keep no blocks of it at all.
        raise ConfigError(f"KV cache of kind {', '.join(sorted(kinds))}: expected full attention or MLA in every layer")
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError("calculate_kv_scales: expected off, as scales are computed anew at each start")
    algorithm = getattr(cache, "prefix_caching_hash_algo", "sha256")
    if not str(algorithm).startswith("sha256"):
        raise ConfigError(f"prefix_caching_hash_algo={algorithm}: expected sha256 or sha256_cbor, which do not collide")


def place_of(config: Any, rank: int = 0) -> Place:
    """Where a worker stands among the others."""
    parallel = config.parallel_config
    replicas = getattr(parallel, "data_parallel_size", 1)
    replica = getattr(parallel, "data_parallel_index", None) or getattr(parallel, "data_parallel_rank", 0) or 0
    return Place(rank, parallel.tensor_parallel_size, replica if replicas > 1 else 0, replicas)


def block_tokens_of(config: Any, engine: EngineConfig) -> int:
    """Tokens in one block of the store.

    Raises:
        ConfigError: Not a multiple of vLLM's block size.
    """
    size: int = config.cache_config.block_size
    if engine.block_tokens % size:
        raise ConfigError(
            f"engine.block_tokens={engine.block_tokens}: expected a multiple of vLLM's block size, {size}"
        )
    return engine.block_tokens or size


def identity_of(config: Any, engine: EngineConfig, block_tokens: int, layouts: Iterable[str]) -> Identity:
    """Everything that changes the bytes; the geometry is added when the store is opened.

    Args:
        config: vLLM's.
        engine: The adapter's settings.
        block_tokens: Of the store.
        layouts: What each worker says about its blocks.

    Raises:
        ConfigError: Nothing tells these weights from others of the same name.
    """
    model, cache = config.model_config, config.cache_config
    commit = getattr(getattr(model, "hf_config", None), "_commit_hash", None)
    weights = engine.revision or fingerprint(model.model)
    if not weights and not commit:
        raise ConfigError(f"{model.model}: no files and no commit tell its weights from others; set engine.revision")
    text = model.hf_config.to_json_string(use_diff=False) if hasattr(model, "hf_config") else ""
    facts = [
        str(getattr(model, "revision", None)),
        str(commit),
        str(getattr(model, "quantization", None)),
        str(getattr(model, "dtype", None)),
        weights,
        text,
    ]
    digest = hashlib.blake2b("\0".join(facts).encode(), digest_size=16).hexdigest()
    return Identity(
        model=model.model,
        revision=digest,
        kv_dtype=f"{cache.cache_dtype}/{model.dtype}",
        layout=f"vllm/{'|'.join(sorted(set(layouts)))}",
        block_tokens=block_tokens,
        tp_size=config.parallel_config.tensor_parallel_size,
    )


def layout_text(version: str, config: Any, layer_names: Iterable[str]) -> str:
    """vLLM's version and attention backends: the order of bytes inside a block is theirs, and changes with them."""
    layers = getattr(config.compilation_config, "static_forward_context", {})
    backends = set()
    for name in layer_names:
        backend: Any = getattr(layers.get(name), "attn_backend", None)
        backends.add(str(backend.get_name()) if hasattr(backend, "get_name") else "unknown")
    return f"{version}/{'+'.join(sorted(backends))}"
