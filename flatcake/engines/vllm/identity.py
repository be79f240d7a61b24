"""What vLLM's configuration says about the bytes of a block, and what this adapter cannot serve.

Reads vLLM's configuration objects by attribute, and imports nothing of vLLM.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

from flatcake.engines.vllm.groups import Groups, groups_of
from flatcake.engines.vllm.options import EngineConfig, Place
from flatcake.engines.vllm.weights import fingerprint
from flatcake.errors import ConfigError
from flatcake.keys import Identity


def require_supported(config: Any, kv_cache_config: Any) -> Groups:
    """Refuse at start what would be wrong later; returns the groups of layers.

    Raises:
        ConfigError: Says what, and what to change.
    """
    parallel, cache = config.parallel_config, config.cache_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name}={getattr(parallel, name)}: expected 1; FlatCake serves tensor parallelism only")
    hashed = getattr(kv_cache_config, "hash_block_size", None) or cache.block_size
    if hashed != cache.block_size:
        raise ConfigError(f"hashes of {hashed} tokens for blocks of {cache.block_size}: expected one hash a block")
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError("calculate_kv_scales: expected off, as scales are computed anew at each start")
    algorithm = getattr(cache, "prefix_caching_hash_algo", "sha256")
    if not str(algorithm).startswith("sha256"):
        raise ConfigError(f"prefix_caching_hash_algo={algorithm}: expected sha256 or sha256_cbor, which do not collide")
    return groups_of(kv_cache_config, cache.block_size)


def place_of(config: Any, rank: int = 0) -> Place:
    """Where a worker stands among the others."""
    parallel = config.parallel_config
    replicas = getattr(parallel, "data_parallel_size", 1)
    replica = getattr(parallel, "data_parallel_index", None) or getattr(parallel, "data_parallel_rank", 0) or 0
    return Place(rank, parallel.tensor_parallel_size, replica if replicas > 1 else 0, replicas)


def block_tokens_of(config: Any, engine: EngineConfig, groups: Groups) -> int:
    """Tokens in one block of the store.

    Raises:
        ConfigError: Not a multiple of vLLM's block size, or more than the smallest window has.
    """
    size: int = config.cache_config.block_size
    if engine.block_tokens % size:
        raise ConfigError(
            f"engine.block_tokens={engine.block_tokens}: expected a multiple of vLLM's block size, {size}"
        )
    if 0 < groups.window_min < engine.block_tokens:  # Its first tokens would leave the window before its last come.
        raise ConfigError(
            f"engine.block_tokens={engine.block_tokens}: expected at most {groups.window_min}, the smallest window"
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
