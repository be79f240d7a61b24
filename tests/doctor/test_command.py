"""The command as a whole: real directories, small sizes, and a system that fails at every call in turn."""

import argparse
import errno
import itertools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatcake
from flatcake.clock import MonotonicClock
from flatcake.config import CapacityConfig, StoreConfig
from flatcake.doctor.advice import Finding
from flatcake.doctor.command import Request, add_arguments, examine, run
from flatcake.doctor.facts import Facts, Probes
from flatcake.doctor.gpu import read_gpu
from flatcake.errors import DeviceError
from flatcake.io.paged import PagedKV
from flatcake.io.seam import Files
from flatcake.keys import Identity
from flatcake.units import MiB

SMALL = 16 * MiB
REQUEST = Request(device="cpu", size_bytes=SMALL)
CALLS = frozenset(name for name in vars(Files) if not name.startswith("_"))
TINY = {"capacity": {"ssd_bytes_max": "64MiB", "pool_file_bytes": "64MiB", "ssd_free_bytes_min": 0}}


def examined(
    directory: Path, files: Files | None = None, settings: Mapping[str, object] = TINY
) -> tuple[Facts, list[Finding]]:
    request = replace(REQUEST, directory=str(directory))
    return examine(request, settings, files=files or Files(), clock=MonotonicClock())


def called(*words: str) -> tuple[int, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(words)
    args.settings = TINY
    return run(args), args


def severities(findings: list[Finding]) -> set[str]:
    return {finding.severity for finding in findings}


class FailsOnce(Files):
    """The system, but for one call, counted over all of them; or for all calls from that one to another."""

    def __init__(self, number: int, error: int, until: int = 0) -> None:
        self._count, self._first, self._last = 0, number, max(number, until)
        self._error, self._lock = error, threading.Lock()
        self.failed = ""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in CALLS or name == "close":  # A descriptor that is not closed would be the test's own leak.
            return found

        def call(*args: object, **named: object) -> object:
            with self._lock:
                self._count += 1
                now = self._first <= self._count <= self._last
                if now:
                    self.failed = name
            if now:
                raise OSError(self._error, "on purpose")
            return found(*args, **named)

        return call


def test_a_good_directory_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    facts, findings = examined(tmp_path)
    assert "unusable" not in severities(findings)
    assert facts.engine is not None and (facts.engine.name, facts.engine.device) == ("posix", "cpu")
    assert "there is no GPU" in facts.engine.reason
    assert facts.disk is not None and facts.disk.size_bytes == SMALL
    assert min(facts.disk.read_bytes_s, facts.disk.write_bytes_s) > 0
    assert facts.restore is not None and facts.restore.right
    assert facts.restore.size_bytes == SMALL and facts.restore.ratio > 0 and facts.restore.rounds >= 1
    assert facts.direct is not None and (not facts.direct.works or facts.direct.align_bytes)
    assert facts.place is not None and facts.place.state == "ready" and facts.place.filesystem
    assert (
        facts.system is not None
        and facts.system.packages["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    )
    assert facts.memory is not None and facts.memory.arena_huge_share is not None
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (tmp_path / "mine").read_text() == "kept"


def test_json_is_the_last_line_and_parses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = called("--json", "--directory", str(tmp_path), "--device", "cpu", "--size", "16MiB")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and report["usable"] is True
    assert report["engine"]["name"] == "posix" and report["engine"]["reason"]
    assert report["restore"]["ratio"] == pytest.approx(
        report["restore"]["measured_ns"] / report["restore"]["predicted_ns"], abs=0.001
    )
    assert all(set(finding) == {"severity", "subject", "text", "remedy"} for finding in report["findings"])


def test_text_ends_with_the_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--directory", str(tmp_path / "none"), "--device", "cpu", "--size", "16MiB", "--token-bytes", "178")
    code, _ = called(*words)
    out = capsys.readouterr().out
    assert code == 0 and "engine" not in out
    assert out.index("\n  padding") < out.index("problem: directory: ")
    assert out.index("note: block size: ") > out.index("problem: directory: ")
    assert all(len(line) < 200 for line in out.splitlines())


def test_missing_directory_is_not_made(tmp_path: Path) -> None:
    facts, findings = examined(tmp_path / "a" / "b")
    assert facts.place is not None and facts.place.state == "missing" and facts.disk is None
    assert any("mkdir -p" in finding.remedy for finding in findings) and "unusable" not in severities(findings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "file/below", "file/below/more"])
def test_file_in_the_way_is_unusable(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("kept")
    code, _ = called("--json", "--directory", str(tmp_path / name), "--size", "16MiB")
    report = json.loads(capsys.readouterr().out)
    assert code == 1 and report["usable"] is False and report["disk"] is None
    assert report["findings"][0]["severity"] == "unusable" and report["findings"][0]["subject"] == "directory"
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("name", ["/proc/self/no", "/sys/no", "x" * 300, "a\nb", "\0"])
def test_odd_directories_give_a_report(tmp_path: Path, name: str) -> None:
    facts, findings = examined(tmp_path / name)
    assert facts.disk is None and findings
    assert not list(tmp_path.iterdir())


def test_directory_without_permission(tmp_path: Path) -> None:
    home = tmp_path / "closed"
    home.mkdir(mode=0o500)
    facts, findings = examined(home)
    assert facts.place is not None
    if facts.place.state == "ready":
        pytest.skip("this user may write anywhere")
    assert facts.place.state == "denied" and "unusable" in severities(findings) and facts.disk is None


def test_directory_of_a_running_store_is_measured_beside_it(tmp_path: Path) -> None:
    capacity = CapacityConfig(dram_bytes_max=0, ssd_bytes_max=MiB, pool_file_bytes=MiB, ssd_free_bytes_min=0)
    kv = PagedKV.of_layers([torch.zeros(4, 2, 16, 2, 64)], page_tokens=16)
    identity = Identity(model="m", revision="r", kv_dtype="f32", layout="l", block_tokens=16)
    config = StoreConfig(directories=(str(tmp_path),), device="cpu", capacity=capacity)
    with flatcake.open(config, identity, kv) as store:
        before = sorted(path.name for path in tmp_path.iterdir())
        facts, findings = examined(tmp_path)
        assert store.save("s", np.arange(32), np.arange(2)).published(30)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert facts.place is not None and "flatcake-pool pid" in (facts.place.holder or "")
    assert facts.restore is not None and "unusable" not in severities(findings)
    assert any("in use by" in finding.text for finding in findings)
    again, _ = examined(tmp_path)
    assert again.place is not None and again.place.holder is None


def test_settings_are_those_of_the_store(tmp_path: Path) -> None:
    request = Request(size_bytes=SMALL)
    settings = {
        **TINY,
        "directories": [str(tmp_path)],
        "device": "cpu",
        "io": {"engine": "posix", "slot_bytes": "1MiB"},
    }
    facts, _ = examine(request, settings, files=Files(), clock=MonotonicClock())
    assert facts.place is not None and facts.place.path == str(tmp_path.resolve())
    assert facts.engine is not None and facts.engine.reason == "posix: asked for"
    assert facts.engine.slot_bytes == MiB


@pytest.mark.parametrize(
    ("settings", "subject"),
    [({"io": {"engine": "cufile"}}, "a store"), ({"io": {"slot_bytes": 4096}}, "a store"), ({"nmae": "x"}, "settings")],
)
def test_settings_that_cannot_work_are_unusable(tmp_path: Path, settings: dict[str, object], subject: str) -> None:
    _, findings = examined(tmp_path, settings={**TINY, **settings})
    assert ("unusable", subject) in {(finding.severity, finding.subject) for finding in findings}
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_unusable(tmp_path: Path) -> None:
    request = replace(REQUEST, device="cuda", directory=str(tmp_path))
    facts, findings = examine(request, TINY, files=Files(), clock=MonotonicClock())
    assert facts.engine is None
    assert {finding.subject for finding in findings if finding.severity == "unusable"} == {"GPU", "a store"}


@pytest.mark.parametrize("words", [["--size", "1MiB"], ["--size", "x"], ["--device", "tpu"], ["--token-bytes", "-1"]])
def test_words_that_make_no_sense_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        called(*words)
    assert stopped.value.code == 2 and words[0] in capsys.readouterr().err


@pytest.mark.parametrize("error", [RuntimeError("libcufile.so.0"), ImportError("no"), OSError("gone"), KeyError("x")])
def test_kvikio_may_raise_anything(error: Exception) -> None:
    def load() -> object:
        if isinstance(error, KeyError):
            raise error
        raise DeviceError("kvikio cannot be loaded") from error

    facts = read_gpu(Probes(), load)
    assert not facts.kvikio_loads and facts.kvikio.startswith("cannot be loaded") and facts.kvikio_mode is None


def test_kvikio_without_its_defaults_costs_only_the_mode() -> None:
    class Bare:
        __version__ = "26.10"

    probes = Probes()
    facts = read_gpu(probes, Bare)
    assert facts.kvikio_loads and facts.kvikio == "26.10" and facts.kvikio_mode is None
    assert "kvikio mode" in [miss.probe for miss in probes.misses]


def numbers() -> "itertools.chain[int]":
    """Every call up to the first restore, then some of the many that are alike."""
    return itertools.chain(range(1, 36), itertools.count(36, 25))


def test_any_call_may_fail(tmp_path: Path) -> None:
    failed = set()
    for number in numbers():
        files = FailsOnce(number, errno.EIO if number % 2 else errno.ENOSPC)
        facts, _ = examined(tmp_path, files)
        assert not list(tmp_path.iterdir()), (number, files.failed)
        if not files.failed:
            break
        failed.add(files.failed)
        assert facts.system is not None and facts.gpu is not None, (number, files.failed)
    assert failed >= {"read", "write", "map_memory", "allocate", "lock", "free_bytes", "open_file", "real_path"}


def test_nothing_works(tmp_path: Path) -> None:
    facts, findings = examined(tmp_path, FailsOnce(1, errno.EIO, until=1 << 30))
    assert not list(tmp_path.iterdir())
    assert facts.engine is None and facts.system is not None
    assert ("unusable", "a store") in {(finding.severity, finding.subject) for finding in findings}


def test_probe_keeps_one_short_line_of_any_error() -> None:
    def fails(error: Exception) -> Callable[[], int]:
        def call() -> int:
            raise error

        return call

    probes = Probes()
    assert probes.get("a", lambda: 3) == 3
    assert probes.get("b", fails(RuntimeError("x" * 1000 + "\nmore"))) is None
    assert probes.get("c", fails(AssertionError())) is None
    assert [miss.probe for miss in probes.misses] == ["b", "c"]
    assert all(len(miss.reason) <= 300 and "\n" not in miss.reason for miss in probes.misses)
