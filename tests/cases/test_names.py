"""B07, B08, B09, B10, B11: names, identities, processes and tenants are kept apart, and hit what is their own."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flatcake
from flatcake.errors import FlatCakeError
from tests.cases.shim import Shim, make_memory, open_case, tokens_of
from tests.stores import CHAT, ONE_SHOT, check, make_identity, restore, save

ROOT = Path(__file__).resolve().parents[2]
ALIKE = (
    "a/b",
    "a-SEP-b",
    "a_b",
    "a%2Fb",
    "a\\b",
    "x",
    "x ",
    "Case",
    "case",
    "\u00e9",
    "e\u0301",
    "n" * 299 + "1",
    "n" * 299 + "2",
    "",
)
HOSTILE = (
    "../../canary/owned",
    "/etc/flatcake-was-here",
    "nul\0nul",
    "line\nbreak",
    "w" * 4096,
    "-rf",
    "CON",
    ".",
    "..",
    "$(touch owned)",
    "\x1b[31mred",
    "\ud800",
)


def test_b07_names_that_look_alike_are_apart(tmp_path: Path) -> None:
    memory = make_memory()
    for turn in range(2):
        with open_case(memory, tmp_path) as store:
            for number, name in enumerate(ALIKE):
                if not turn:
                    assert save(store, memory, name, tokens_of(number, 1)).written_blocks == 1
            for number in range(len(ALIKE)):
                assert restore(store, memory, tokens_of(number, 1)).blocks == 1
            assert store.stats().blocks == store.stats().media["ssd"].extents == len(ALIKE), "a scope of two names"
            assert sum(path.is_file() for path in tmp_path.iterdir()) < 16, "a file for a name"
            check(store)
    with open_case(memory, tmp_path) as store:
        for number, name in enumerate(ALIKE):  # Each name is its own, also for what is deleted by name.
            assert store.delete_session(name) == 1
            assert store.match(tokens_of(number, 1)).blocks == 0
            assert store.stats().blocks == len(ALIKE) - number - 1
        for wrong in (None, 7, b"bytes"):
            with pytest.raises(flatcake.ConfigError, match="session"):
                store.save(wrong, tokens_of("a", 1), [0])  # type: ignore[arg-type]


def test_b07_models_with_names_that_look_alike_share_no_key(tmp_path: Path) -> None:
    memory = make_memory()
    keys = set()
    for name in (name for name in ALIKE if name):
        with open_case(memory, tmp_path, identity={"model": name}) as store:
            tokens = tokens_of("the same", 1)
            assert store.match(tokens).blocks == 0, "another model's"
            assert save(store, memory, "s", tokens).written_blocks == 1
            assert restore(store, memory, tokens).blocks == 1
            keys.add(store.keys(tokens).tobytes())
    assert len(keys) == len(ALIKE) - 1
    with pytest.raises(flatcake.ConfigError, match="model"):
        make_identity(memory, model="")


def tree(home: Path) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def test_b08_hostile_names_stay_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    memory, home, canary = make_memory(), tmp_path / "root", tmp_path / "canary"
    canary.mkdir()
    (canary / "bird").write_text("alive")
    before = tree(canary)
    stored = 0
    for turn in range(2):
        with open_case(memory, home) as store:
            for number, name in enumerate(HOSTILE):
                if not turn:
                    stored += save(store, memory, name, tokens_of(number, 1)).written_blocks
                assert restore(store, memory, tokens_of(number, 1)).blocks == 1
            check(store)
    assert stored == len(HOSTILE)
    assert tree(canary) == before and {path.name for path in tmp_path.iterdir()} == {"root", "canary"}
    assert {path.name for path in home.iterdir()} <= {
        *("format", "lock", "manifest.db", "dram.fc"),
        *(f"pool-{number:04d}.fc" for number in range(8)),
    }
    assert not Path("/etc/flatcake-was-here").exists() and not (Path.cwd() / "owned").exists()
    for record in caplog.records:
        assert record.getMessage().isprintable(), "a control character came into the log"


IDENTITIES: dict[str, dict[str, Any]] = {
    "revision": {"revision": "other"},
    "weight version": {"weight_version": 1},
    "dtype of equal size": {"kv_dtype": "f16"},
    "layout of equal size": {"layout": "other order"},
    "shards": {"tp_size": 2},
    "stages": {"pp_size": 2},
    "model": {"model": "n"},
    "key scheme": {"format_version": 2},
}


def counted(store: flatcake.Store, name: str) -> int:
    return int(store.stats().counts.get(name, 0))


@pytest.mark.parametrize("change", IDENTITIES.values(), ids=list(IDENTITIES))
def test_b09_one_identity_field_changes(tmp_path: Path, change: dict[str, Any]) -> None:
    memory = make_memory()
    names = {"ssd": ONE_SHOT, "dram": CHAT}
    with open_case(memory, tmp_path) as store:
        old_keys = {name: store.keys(tokens_of(name, 4)) for name in names}
        for name, turn in names.items():
            assert save(store, memory, name, tokens_of(name, 4), turn).written_blocks == 4
    with open_case(memory, tmp_path, identity=change) as store:
        for name in names:
            assert restore(store, memory, tokens_of(name, 4)).blocks == 0
            assert store.match(old_keys[name]).blocks == 0, "found by the other identity's keys"
        assert counted(store, "reopen: rows of another identity or pool") >= 1
        check(store)
    with open_case(memory, tmp_path) as store:
        assert restore(store, memory, tokens_of("ssd", 4)).blocks == 4, "lost by a visit of another identity"
        check(store)


def test_b09_another_shard_is_another_store(tmp_path: Path) -> None:
    """The shard's number is the rank's, and not the keys'; another one starts empty."""
    memory = make_memory()
    with open_case(memory, tmp_path) as store:
        assert save(store, memory, "s", tokens_of("s", 4)).written_blocks == 4
    with open_case(memory, tmp_path, rank=1) as store:
        assert restore(store, memory, tokens_of("s", 4)).blocks == 0


PROGRAM = """
import json, sys
from pathlib import Path
from tests.cases.shim import make_memory, open_case, tokens_of
from tests.stores import restore, save
from flatcake.errors import ConfigError
memory, tokens = make_memory(), tokens_of("s", 4)
other = tokens.copy()
other[3 * 16 - 1] += 1
said = {}
with open_case(memory, Path(sys.argv[1])) as store:
    said["found"] = restore(store, memory, tokens).blocks
    save(store, memory, "s", tokens)
    said["own"] = restore(store, memory, tokens).blocks
    said["changed"] = store.match(other).blocks
    said["keys"] = store.keys(tokens).tolist()
    said["empty"] = store.match(tokens, salt=b"", extra=b"").blocks
    said["salted"] = store.match(tokens, salt=b"a").blocks + store.match(tokens, extra=b"a").blocks
    for none in ("salt", "extra"):
        try:
            store.match(tokens, **{none: None})
            said[none] = "taken"
        except ConfigError as error:
            said[none] = str(error)
print(json.dumps(said))
"""


def test_b10_keys_are_those_of_any_process(tmp_path: Path) -> None:
    said = []
    for seed in (None, "0", "123"):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        env |= {"PYTHONPATH": str(ROOT)} | ({"PYTHONHASHSEED": seed} if seed else {})
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path)], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout))
    assert [each.pop("found") for each in said] == [0, 4, 4]
    assert said[0] == said[1] == said[2]
    assert (said[0]["own"], said[0]["empty"], said[0]["changed"], said[0]["salted"]) == (4, 4, 2, 0)
    assert said[0]["salt"] == "salt: expected bytes, got NoneType"
    assert said[0]["extra"] == "extra: expected bytes, got NoneType"


@pytest.mark.parametrize("medium", ["ssd", "dram"])
def test_b11_tenants_salt_from_both_sides(tmp_path: Path, medium: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    memory, tokens = make_memory(), tokens_of("s", 4)
    secret = b"a secret of tenant A"
    for turn in range(2):
        files = Shim()
        with open_case(memory, tmp_path, files=files) as store:
            own = store.keys(tokens, salt=secret)
            if not turn:
                assert save(store, memory, "s", own, CHAT if medium == "dram" else ONE_SHOT).written_blocks == 4
            files.reads.clear()
            before = counted(store, "blocks_delivered_dram")
            for salt in (b"", b"B", secret[:-1], secret + b"\0"):
                match = store.match(tokens, salt=salt)
                with store.lease(match) as lease:
                    found = store.restore(lease, [0] * 0)
                assert match.blocks == found.result().blocks == 0
            assert not files.reads and counted(store, "blocks_delivered_dram") == before
            assert store.match(tokens, salt=secret).blocks == restore(store, memory, own).blocks == 4
            assert store.match(tokens, salt=secret).hit.blocks_on(flatcake.Medium[medium.upper()]) == 4
    with pytest.raises(FlatCakeError) as raised, open_case(memory, tmp_path) as store:
        store.keys(tokens, salt=secret.decode())  # type: ignore[arg-type]
    for path in tmp_path.iterdir():
        assert secret not in path.read_bytes() and secret.decode() not in path.name
    for said in (*(record.getMessage() for record in caplog.records), str(raised.value)):
        assert secret.decode() not in said
