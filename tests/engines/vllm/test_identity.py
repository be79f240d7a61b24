"""What changes the identity, what is refused at start, and where each rank's part lies."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatcake.engines.vllm.groups import Group, Groups
from flatcake.engines.vllm.identity import block_tokens_of, identity_of, layout_text, place_of, require_supported
from flatcake.engines.vllm.options import EngineConfig, Place, VllmConfig, catalog_home, rank_config
from flatcake.engines.vllm.weights import fingerprint
from flatcake.errors import ConfigError
from flatcake.fields import build
from flatcake.units import GiB


def config(model: str = "m", **changes: Any) -> Any:
    hf = SimpleNamespace(
        _commit_hash=changes.get("commit", "c"), to_json_string=lambda use_diff: changes.get("hf", "{}")
    )
    attn = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: changes.get("backend", "CPU")))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model, revision=changes.get("revision"), quantization=None, dtype="bf16", hf_config=hf
        ),
        cache_config=SimpleNamespace(
            block_size=16,
            cache_dtype=changes.get("cache_dtype", "auto"),
            prefix_caching_hash_algo=changes.get("hash", "sha256"),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=changes.get("tp", 1),
            pipeline_parallel_size=changes.get("pp", 1),
            data_parallel_size=changes.get("dp", 1),
            data_parallel_rank=changes.get("dp_rank", 0),
        ),
        compilation_config=SimpleNamespace(static_forward_context={"l.0": attn}),
    )


def digest(given: Any, version: str = "0.32.0", engine: EngineConfig | None = None) -> bytes:
    return identity_of(given, engine or EngineConfig(), 16, [layout_text(version, given, ["l.0"])]).digest()


def test_everything_that_changes_the_bytes_changes_the_identity(tmp_path: Path) -> None:
    base = digest(config())
    others = [
        digest(config(revision="r")),
        digest(config("other")),
        digest(config(cache_dtype="fp8")),
        digest(config(tp=2)),
        digest(config(backend="FLASH_ATTN")),
        digest(config(hf='{"rope": 2}')),
        digest(config(), version="0.33.0"),
        digest(config(), engine=EngineConfig(revision="mine")),
    ]
    assert digest(config()) == base and len({base, *others}) == len(others) + 1


def test_other_weights_under_the_same_path(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(300_000))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("1")
    before = fingerprint(str(tmp_path))
    (tmp_path / "notes.txt").write_text("2")
    assert fingerprint(str(tmp_path)) == before
    data = bytearray(300_000)
    data[-1] = 1
    file.write_bytes(data)
    assert fingerprint(str(tmp_path)) != before
    assert fingerprint(str(tmp_path / "nothing")) == "" and fingerprint("org/model") == ""


def test_weights_that_nothing_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="set engine.revision"):
        digest(config(commit=None))
    assert digest(config(commit=None), engine=EngineConfig(revision="mine"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"pp": 2}, "pipeline_parallel_size=2"), ({"hash": "xxhash"}, "prefix_caching_hash_algo=xxhash")],
)
def test_what_cannot_be_served_is_refused_at_start(changes: dict[str, Any], text: str) -> None:
    require_supported(config(), cache_of(spec("FullAttentionSpec")))
    with pytest.raises(ConfigError, match=text):
        require_supported(config(**changes), cache_of(spec("FullAttentionSpec")))


def spec(kind: str, **fields: Any) -> Any:
    """What vLLM says of the cache of a layer."""
    return type(kind, (), {"block_size": 16} | fields)()


def cache_of(*specs: Any, **fields: Any) -> Any:
    """vLLM's description of the cache, a group for each."""
    groups = [SimpleNamespace(kv_cache_spec=each, layer_names=[f"l.{place}"]) for place, each in enumerate(specs)]
    return SimpleNamespace(kv_cache_groups=groups, **fields)


def test_groups_of_layers_and_their_windows() -> None:
    full, small = spec("MLAAttentionSpec"), spec("SlidingWindowSpec", sliding_window=40, extra_retained_tokens=2)
    groups = require_supported(config(), cache_of(full, small, spec("SlidingWindowSpec", sliding_window=64)))
    assert [group.window for group in groups.each] == [0, 42, 64] and groups.window_min == 42
    assert groups.layers == [("l.0",), ("l.1",), ("l.2",)] and not groups.is_plain
    mixed = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": full, "b": spec("FullAttentionSpec")})
    assert require_supported(config(), cache_of(mixed)).is_plain
    assert not require_supported(config(), cache_of(small)).is_plain


@pytest.mark.parametrize("kind", ["MambaSpec", "ChunkedLocalAttentionSpec", "RSWASpec", "CircularBufferSpec"])
def test_caches_of_other_kinds_are_refused(kind: str) -> None:
    text = f"KV cache of kind {kind}: expected full attention, MLA or sliding windows in every layer"
    with pytest.raises(ConfigError, match=text):
        require_supported(config(), cache_of(spec("FullAttentionSpec"), spec(kind)))
    mixed = spec("UniformTypeKVCacheSpecs", kv_cache_specs={"a": spec("FullAttentionSpec"), "b": spec(kind)})
    with pytest.raises(ConfigError, match="expected full attention, MLA or sliding windows in every layer"):
        require_supported(config(), cache_of(mixed))


def test_groups_with_blocks_or_hashes_of_other_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"blocks of \[32\] tokens: expected 16"):
        require_supported(config(), cache_of(spec("FullAttentionSpec"), spec("FullAttentionSpec", block_size=32)))
    with pytest.raises(ConfigError, match="hashes of 8 tokens for blocks of 16"):
        require_supported(config(), cache_of(spec("FullAttentionSpec"), hash_block_size=8))


def test_blocks_of_the_store_are_whole_blocks_of_vllm() -> None:
    plain, windows = Groups((Group(("l.0",), 0),)), Groups((Group(("l.0",), 0), Group(("l.1",), 47)))
    assert block_tokens_of(config(), EngineConfig(), plain) == 16
    assert block_tokens_of(config(), EngineConfig(block_tokens=48), plain) == 48
    with pytest.raises(ConfigError, match="multiple of vLLM's block size, 16"):
        block_tokens_of(config(), EngineConfig(block_tokens=24), plain)
    with pytest.raises(ConfigError, match="at most 47, the smallest window"):
        block_tokens_of(config(), EngineConfig(block_tokens=48), windows)


def test_ranks_and_replicas_share_what_was_given() -> None:
    given = {"directories": ["/a", "/b"], "capacity": {"ssd_bytes_max": "16GiB", "dram_bytes_max": "8GiB"}}
    whole = build(VllmConfig, given)
    own = rank_config(whole, Place(1, 2))
    assert own.directories == ("/a/rank-1", "/b/rank-1") and own.rank == 1
    assert (own.capacity.ssd_bytes_max, own.capacity.dram_bytes_max) == (8 * GiB, 4 * GiB)
    assert catalog_home(whole, Place(0, 2)) == "/a/catalog"
    replica = place_of(config(tp=2, dp=4, dp_rank=3), 1)
    assert replica == Place(1, 2, 3, 4)
    own = rank_config(whole, replica)
    assert own.directories == ("/a/replica-3/rank-1", "/b/replica-3/rank-1")
    assert own.capacity.ssd_bytes_max == 2 * GiB and own.capacity.pool_file_bytes == GiB
    assert rank_config(whole, Place(0, 1)) == build(VllmConfig, given | {"directories": ["/a/rank-0", "/b/rank-0"]})
