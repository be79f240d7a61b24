"""One order for every way in, and nothing that is not known."""

import json
from pathlib import Path

import pytest

from flatcake.config import StoreConfig, from_mapping
from flatcake.engines.vllm.options import VllmConfig
from flatcake.errors import ConfigError
from flatcake.settings import describe, from_environment, gather, merge, read_settings
from flatcake.units import GiB, MiB


def test_environment_over_mapping_over_file_over_default(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    sizes = {"ssd_bytes_max": "1GiB", "dram_bytes_max": "2GiB", "pool_file_bytes": "256MiB"}
    path.write_text(json.dumps({"directories": ["/file"], "name": "file", "capacity": sizes}))
    mapping = {"config_file": str(path), "name": "mapping", "capacity": {"dram_bytes_max": "3GiB"}}
    environ = {"FLATCAKE_CAPACITY_DRAM_BYTES_MAX": "4GiB", "FLATCAKE_IO_RESTORES_MAX": "7", "HOME": "/root"}
    found = gather(StoreConfig, mapping, environ)
    assert (found.directories, found.name, found.io.restores_max) == (("/file",), "mapping", 7)
    assert (found.capacity.dram_bytes_max, found.capacity.ssd_bytes_max) == (4 * GiB, GiB)
    assert (
        found.capacity.pool_file_bytes == 256 * MiB
        and found.io.saves_max == StoreConfig(directories=("/x",)).io.saves_max
    )
    named = gather(StoreConfig, {"name": "m"}, {"FLATCAKE_CONFIG": str(path)})
    assert (named.name, named.directories) == ("m", ("/file",))


def test_lists_fractions_and_times_in_the_environment() -> None:
    environ = {
        "FLATCAKE_DIRECTORIES": "/a;/b",
        "FLATCAKE_CAPACITY_HIGH_WATERMARK": "0.5",
        "FLATCAKE_CAPACITY_LOW_WATERMARK": "0.25",
        "FLATCAKE_TIMEOUTS_SAVE_NS": "3s",
        "FLATCAKE_ENGINE_LOADS_MAX": "2",
    }
    found = gather(VllmConfig, {}, environ)
    assert found.directories == ("/a", "/b") and found.capacity.high_watermark == 0.5
    assert found.timeouts.save_ns == 3_000_000_000 and found.engine.loads_max == 2


@pytest.mark.parametrize(
    ("mapping", "environ", "text"),
    [
        ({"capacity": {"ssd_bytes": 1}}, {}, "did you mean capacity.ssd_bytes_max?"),
        ({"dram_bytes_max": 1}, {}, "did you mean capacity.dram_bytes_max?"),
        ({"engine": {"load_max": 1}}, {}, "did you mean engine.loads_max?"),
        ({}, {"FLATCAKE_CAPACITY_SSD_BYTES": "1"}, "did you mean FLATCAKE_CAPACITY_SSD_BYTES_MAX?"),
        ({}, {"FLATCAKE_SSD_BYTES_MAX": "1"}, "did you mean FLATCAKE_CAPACITY_SSD_BYTES_MAX?"),
        ({}, {"FLATCAKE_CONFIG_FILE": "x"}, "did you mean FLATCAKE_CONFIG?"),
        ({}, {"FLATCAKE_CAPACITY_HIGH_WATERMARK": "much"}, "expected a number"),
        ({}, {"FLATCAKE_CAPACITY_SSD_BYTES_MAX": "much"}, "capacity.ssd_bytes_max"),
        ({"config_file": 3}, {}, "expected the path of a settings file"),
    ],
)
def test_what_is_not_known_is_refused_by_name(mapping: dict[str, object], environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gather(VllmConfig, {"directories": ["/a"]} | mapping, environ)
    assert text in str(caught.value)


def test_variables_of_the_tests_are_no_settings() -> None:
    assert from_environment(StoreConfig, {"FLATCAKE_NIGHTLY": "1", "FLATCAKE_CONFIG": "x", "PATH": "y"}) == {}


def test_merge_goes_down_and_changes_neither() -> None:
    under, over = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "d": {"e": 5}}
    assert merge(under, over) == {"a": {"b": 1, "c": 4}, "d": {"e": 5}}
    assert under == {"a": {"b": 1, "c": 2}, "d": 3} and over == {"a": {"c": 4}, "d": {"e": 5}}


def test_yaml_says_the_same_as_json(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "settings.yaml"
    path.write_text("directories: [/a]\ncapacity:\n  ssd_bytes_max: 8GiB\n")
    assert read_settings(str(path)) == {"directories": ["/a"], "capacity": {"ssd_bytes_max": "8GiB"}}
    path.write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        read_settings(str(path))


def test_what_is_logged_gives_back_the_same(tmp_path: Path) -> None:
    config = gather(VllmConfig, {"directories": ["/a"], "engine": {"order": "fifo_prefetch"}}, {})
    assert gather(VllmConfig, json.loads(describe(config)), {}) == config
    plain = StoreConfig(directories=("/a",))
    assert from_mapping(json.loads(describe(plain))) == plain
