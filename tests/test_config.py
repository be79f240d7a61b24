"""Settings: defaults, the way in from mappings, and what is refused, each with its text."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatcake import config as settings
from flatcake.config import (
    CapacityConfig,
    IOConfig,
    LayoutConfig,
    PlacementConfig,
    StoreConfig,
    TimeoutConfig,
    from_mapping,
    to_mapping,
)
from flatcake.errors import ConfigError
from flatcake.units import DIRECT_BYTES, SECOND, GiB, KiB, MiB

SECTIONS = {
    "capacity": CapacityConfig,
    "placement": PlacementConfig,
    "layout": LayoutConfig,
    "io": IOConfig,
    "timeouts": TimeoutConfig,
}
SOMEWHERE: dict[str, Any] = {"directories": ["/somewhere"]}

sizes = st.integers(1, 1 << 20).map(lambda pages: pages * DIRECT_BYTES)


@st.composite
def configs(draw: st.DrawFn) -> StoreConfig:
    directories = tuple(draw(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3, unique=True)))
    file_bytes = draw(sizes)
    low, high = sorted(draw(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=2, unique=True)))
    slot_bytes, slots = draw(st.just(0) | sizes), draw(st.integers(2, 64))
    return StoreConfig(
        directories=directories,
        device=draw(st.sampled_from(["auto", "cpu", "cuda", "cuda:0", "cuda:13"])),
        rank=draw(st.integers(0, 7)),
        capacity=CapacityConfig(
            dram_bytes_max=draw(st.just(0) | sizes),
            ssd_bytes_max=file_bytes * len(directories) + draw(st.integers(0, GiB)),
            pool_file_bytes=file_bytes,
            low_watermark=low,
            high_watermark=high,
        ),
        placement=PlacementConfig(agent_tokens_min=draw(st.integers(1, 1 << 20))),
        layout=LayoutConfig(kind=draw(st.sampled_from(["lanes", "segments"])), lane_bytes_max=draw(sizes)),
        io=IOConfig(
            engine=draw(st.sampled_from(["auto", "posix", "kvikio", "cufile", "memory"])),
            slot_bytes=slot_bytes,
            slots_min=slots,
            window_bytes_max=slots * max(slot_bytes, DIRECT_BYTES) + draw(st.integers(0, GiB)),
        ),
        timeouts=TimeoutConfig(lease_ns=draw(st.integers(1, 1 << 50))),
    )


def given_values(path: str, value: object) -> dict[str, Any]:
    """The smallest mapping that sets one dotted name."""
    section, _, name = path.rpartition(".")
    return SOMEWHERE | ({section: {name: value}} if section else {name: value})


def test_defaults_are_the_documented_ones() -> None:
    config = from_mapping(SOMEWHERE)
    assert config == StoreConfig(directories=("/somewhere",))
    assert (config.capacity.dram_bytes_max, config.capacity.ssd_bytes_max) == (1 * GiB, 8 * GiB)
    assert (config.capacity.high_watermark, config.capacity.low_watermark) == (0.95, 0.90)
    assert (config.placement.agent_tokens_min, config.placement.short_reply_tokens_limit) == (32_768, 512)
    assert (config.layout.kind, config.layout.lane_bytes_max) == ("lanes", 24 * MiB)
    assert (config.io.gap_bytes_limit, config.io.window_bytes_max, config.io.slots_min) == (64 * KiB, 256 * MiB, 8)
    assert config.timeouts.lease_ns == 60 * SECOND


@given(configs())
def test_mapping_round_trips_through_json(config: StoreConfig) -> None:
    assert from_mapping(to_mapping(config)) == config
    assert from_mapping(json.loads(json.dumps(to_mapping(config)))) == config


def test_to_mapping_holds_every_field_and_only_plain_values() -> None:
    mapping = to_mapping(StoreConfig(directories=("a", "b")))
    assert mapping["directories"] == ["a", "b"]
    assert list(mapping) == [entry.name for entry in dataclasses.fields(StoreConfig)]
    for name, cls in SECTIONS.items():
        section = mapping[name]
        assert isinstance(section, dict)
        assert list(section) == [entry.name for entry in dataclasses.fields(cls)]


def test_sizes_and_durations_may_be_text_with_units() -> None:
    config = from_mapping(
        SOMEWHERE
        | {
            "capacity": {"ssd_bytes_max": "64GiB", "dram_idle_ns_max": "2 min", "ssd_free_bytes_min": "1.5 GB"},
            "io": {"slot_bytes": "16MiB", "gap_bytes_limit": 0},
            "timeouts": {"close_ns": "250ms"},
        }
    )
    assert config.capacity.ssd_bytes_max == 64 * GiB
    assert config.capacity.dram_idle_ns_max == 120 * SECOND
    assert config.capacity.ssd_free_bytes_min == 1_500_000_000
    assert (config.io.slot_bytes, config.io.gap_bytes_limit) == (16 * MiB, 0)
    assert config.timeouts.close_ns == SECOND // 4


def test_every_int_field_named_after_a_unit_reads_text_and_no_other_does() -> None:
    for section, cls in SECTIONS.items():
        for name, hint in get_type_hints(cls).items():
            if hint is not int:
                continue
            text = "1 h" if "_ns" in name else "4MiB"
            mapping = SOMEWHERE | {"capacity": {"pool_file_bytes": "4MiB"}}
            mapping[section] = mapping.get(section, {}) | {name: text}
            if "_ns" in name or "_bytes" in name:
                read = getattr(getattr(from_mapping(mapping), section), name)
                assert read == (3600 * SECOND if "_ns" in name else 4 * MiB)
            else:
                with pytest.raises(ConfigError, match=f"{section}.{name}='4MiB': expected a whole number"):
                    from_mapping(mapping)


def test_a_whole_number_stands_for_a_fraction() -> None:
    config = from_mapping(given_values("capacity.high_watermark", 1))
    assert config.capacity.high_watermark == 1.0
    assert type(config.capacity.high_watermark) is float


@pytest.mark.parametrize(
    ("mapping", "nearest"),
    [
        ({"directory": ["/x"]}, "directory: unknown setting; did you mean directories?"),
        ({"io": {"windw_bytes_max": 1}}, "io.windw_bytes_max: unknown setting; did you mean io.window_bytes_max?"),
        ({"window_bytes_max": 1}, "window_bytes_max: unknown setting; did you mean io.window_bytes_max?"),
        ({"io": {"lane_bytes_max": 1}}, "io.lane_bytes_max: unknown setting; did you mean layout.lane_bytes_max?"),
        ({"rank_report": 1}, "rank_report: unknown setting; did you mean timeouts.rank_report_ns?"),
        ({"layout": {"zzzz": 1}}, "known here: kind, lane_bytes_max, growth_percent"),
        ({7: 1}, "7: unknown setting"),
    ],
)
def test_unknown_key_names_the_nearest(mapping: dict[str, object], nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(SOMEWHERE | mapping)
    assert nearest in str(caught.value)


@given(st.sampled_from(sorted(SECTIONS)), st.data())
def test_unknown_key_with_one_letter_lost_finds_the_key(section: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([entry.name for entry in dataclasses.fields(SECTIONS[section])]))
    lost = data.draw(st.integers(0, len(name) - 1))
    typo = name[:lost] + name[lost + 1 :]
    with pytest.raises(ConfigError, match=rf"{section}\.{typo}: unknown setting; did you mean {section}\."):
        from_mapping(SOMEWHERE | {section: {typo: 1}})


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("directories", "/one", "directories='/one': expected a list of text"),
        ("directories", [1], "expected a list of text"),
        ("io", 3, "io=3: expected a mapping"),
        ("io", None, "io=None: expected a mapping"),
        ("io.io_threads", "4", "io.io_threads='4': expected a whole number"),
        ("io.io_threads", True, "io.io_threads=True: expected a whole number"),
        ("io.io_threads", 4.0, "io.io_threads=4.0: expected a whole number"),
        ("io.io_threads", None, "io.io_threads=None: expected a whole number"),
        ("io.slot_bytes", "many", "io.slot_bytes='many': expected a size"),
        ("io.slot_bytes", "-1MiB", "io.slot_bytes='-1MiB': expected a size"),
        ("io.slot_bytes", "5s", "io.slot_bytes='5s': expected a size"),
        ("io.engine", "posx", "io.engine='posx': expected one of auto, posix, kvikio, cufile, memory"),
        ("io.engine", 1, "expected one of"),
        ("io.direct", True, "expected one of auto, on, off"),
        ("capacity.high_watermark", "0.9", "expected a fraction"),
        ("capacity.high_watermark", True, "expected a fraction"),
        ("timeouts.lease_ns", "5MiB", "timeouts.lease_ns='5MiB': expected a duration"),
        ("name", 7, "name=7: expected text"),
    ],
)
def test_wrong_type_is_refused_not_coerced(path: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(given_values(path, value))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("capacity.dram_bytes_max", -1, "0 to"),
        ("capacity.ssd_bytes_max", 1 << 49, "as far as an address reaches"),
        ("capacity.pool_file_bytes", 4097, "a multiple of 4096"),
        ("capacity.pool_file_bytes", 0, "a multiple of 4096"),
        ("capacity.pool_file_bytes", 16 * GiB, "at most ssd_bytes_max"),
        ("capacity.ssd_free_bytes_min", -1, "0 or more"),
        ("capacity.high_watermark", 1.01, "at most 1"),
        ("capacity.high_watermark", math.nan, "at most 1"),
        ("capacity.high_watermark", 0.5, "below high_watermark=0.5"),
        ("capacity.low_watermark", 0.0, "above 0"),
        ("capacity.low_watermark", 0.95, "below high_watermark=0.95"),
        ("capacity.low_watermark", math.nan, "above 0"),
        ("capacity.dram_idle_ns_max", -1, "0 or more"),
        ("capacity.index_entries_max", -1, "0 or more"),
        ("placement.agent_tokens_min", 0, "at least 1 token"),
        ("placement.shared_tokens_max", -1, "0 or more"),
        ("placement.short_reply_tokens_limit", -1, "0 or more"),
        ("layout.lane_bytes_max", 100, "a multiple of 4096"),
        ("layout.growth_percent", 1001, "0 to 1000"),
        ("io.gap_bytes_limit", -1, "0 or more"),
        ("io.read_bytes_max", 0, "a multiple of 4096"),
        ("io.task_bytes", 4095, "a multiple of 4096"),
        ("io.kvikio_task_bytes", 0, "a multiple of 4096"),
        ("io.slot_bytes", 4095, "0, or a multiple of 4096"),
        ("io.slot_bytes", 64 * MiB, "window_bytes_max=268435456: expected at least slots_min=8 x slot_bytes"),
        ("io.slots_min", 1, "at least 2"),
        ("io.window_bytes_max", 16 * KiB, "slot_bytes, 32768 bytes"),
        ("io.save_slots", 0, "at least 1"),
        ("io.restores_max", 0, "at least 1"),
        ("io.saves_max", -1, "at least 1"),
        ("io.io_threads", -1, "0 or more"),
        ("io.kvikio_threads", -1, "0 or more"),
        ("io.scatter_sm_percent", 0, "1 to 100"),
        ("io.scatter_sm_percent", 101, "1 to 100"),
        ("timeouts.lease_ns", 0, "more than 0"),
        ("timeouts.close_ns", 0, "more than 0"),
        ("directories", [], "one or more, as capacity.ssd_bytes_max"),
        ("directories", [""], "no empty name"),
        ("directories", ["/a", "/a"], "each directory once"),
        ("directories", [f"/{i}" for i in range(9)], "so few that each holds a file"),
        ("device", "gpu", "auto, cpu, cuda or cuda:N"),
        ("device", "cuda:", "auto, cpu, cuda or cuda:N"),
        ("device", "cuda:0\n", "auto, cpu, cuda or cuda:N"),
        ("name", "", "a name"),
        ("rank", -1, "0 or more"),
    ],
)
def test_senseless_value_is_refused_with_its_bound(path: str, value: object, text: str) -> None:
    name = path.rpartition(".")[2]
    with pytest.raises(ConfigError) as caught:
        from_mapping(given_values(path, value))
    assert text in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", [entry.name for entry in dataclasses.fields(TimeoutConfig)])
def test_no_wait_is_unbounded(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"TimeoutConfig.{name}=0: expected more than 0 nanoseconds"):
        from_mapping(given_values(f"timeouts.{name}", 0))


def test_bounds_themselves_are_accepted() -> None:
    CapacityConfig(ssd_bytes_max=GiB, pool_file_bytes=GiB, high_watermark=1.0)
    IOConfig(window_bytes_max=32 * MiB, slot_bytes=4 * MiB, slots_min=8)
    IOConfig(gap_bytes_limit=0, scatter_sm_percent=1)
    StoreConfig(directories=tuple(f"/{i}" for i in range(8)))


def test_one_medium_may_be_left_out_but_not_both() -> None:
    assert StoreConfig(capacity=CapacityConfig(ssd_bytes_max=0)).directories == ()
    assert CapacityConfig(dram_bytes_max=0).ssd_bytes_max == 8 * GiB
    with pytest.raises(ConfigError, match="ssd_bytes_max=0: expected more than 0 bytes, as dram_bytes_max is 0"):
        CapacityConfig(dram_bytes_max=0, ssd_bytes_max=0)


def test_memory_engine_needs_no_directory() -> None:
    assert StoreConfig(io=IOConfig(engine="memory")).directories == ()


def test_direct_construction_checks_types_too() -> None:
    wrong: Any = "64KiB"
    with pytest.raises(ConfigError, match="IOConfig.gap_bytes_limit='64KiB': expected a whole number"):
        IOConfig(gap_bytes_limit=wrong)
    with pytest.raises(ConfigError, match="StoreConfig.io='64KiB': expected a IOConfig"):
        StoreConfig(directories=("/x",), io=wrong)


def test_settings_cannot_be_changed_or_given_by_position() -> None:
    config = StoreConfig(directories=("/x",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 3  # type: ignore[misc]
    for cls in (StoreConfig, *SECTIONS.values()):
        with pytest.raises(TypeError):
            cls(1)


def test_every_field_has_a_docstring() -> None:
    text = Path(settings.__file__).read_text(encoding="utf-8")
    for cls in (StoreConfig, *SECTIONS.values()):
        for entry in dataclasses.fields(cls):
            after = text.split(f"    {entry.name}: ", 1)[1].split("\n", 2)
            assert after[1].startswith('    """'), f"{cls.__name__}.{entry.name}"
