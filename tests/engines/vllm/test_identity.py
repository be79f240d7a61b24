"""What changes the identity, what is refused at start, and where each rank's part lies."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
    ("changes", "groups", "text"),
    [
        ({"pp": 2}, 1, "pipeline_parallel_size=2"),
        ({}, 2, "--disable-hybrid-kv-cache-manager"),
        ({"hash": "xxhash"}, 1, "prefix_caching_hash_algo=xxhash"),
    ],
)
def test_what_cannot_be_served_is_refused_at_start(changes: dict[str, Any], groups: int, text: str) -> None:
    require_supported(config(), cache_of("FullAttentionSpec"))
    with pytest.raises(ConfigError, match=text):
        require_supported(config(**changes), cache_of(*["FullAttentionSpec"] * groups))


def cache_of(*kinds: str) -> Any:
    """vLLM's description of the cache, a group a kind."""
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=type(kind, (), {})()) for kind in kinds])


@pytest.mark.parametrize("kind", ["SlidingWindowSpec", "MambaSpec", "ChunkedLocalAttentionSpec", "RSWASpec"])
def test_caches_that_give_blocks_back_early_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"KV cache of kind {kind}"):
        require_supported(config(), cache_of(kind))
    mixed = cache_of("FullAttentionSpec")
    mixed.kv_cache_groups[0].kv_cache_spec.kv_cache_specs = {
        "a": type("FullAttentionSpec", (), {})(),
        "b": type(kind, (), {})(),
    }
    with pytest.raises(ConfigError, match="expected full attention or MLA in every layer"):
        require_supported(config(), mixed)


def test_blocks_of_the_store_are_whole_blocks_of_vllm() -> None:
    assert block_tokens_of(config(), EngineConfig()) == 16
    assert block_tokens_of(config(), EngineConfig(block_tokens=48)) == 48
    with pytest.raises(ConfigError, match="multiple of vLLM's block size, 16"):
        block_tokens_of(config(), EngineConfig(block_tokens=24))


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
