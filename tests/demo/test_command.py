"""The demo: its parts, and the whole of it with a store that works and with stores that do not."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flatcake
from flatcake.cli import Command, main
from flatcake.demo import command as demo
from flatcake.demo.control import Flipped, judge
from flatcake.demo.model import Model, ModelSize
from flatcake.demo.pages import PagedLayer, PagedMemory
from flatcake.demo.report import Comparison, ControlRow, Summary, TurnRow, format_json, format_table
from flatcake.demo.sessions import AGENT, CHAT, REPLY_TOKENS, SYSTEM_TOKENS, Script
from flatcake.gva import Medium
from flatcake.placement import Decision, TurnSignals

TINY = ["demo", "--sessions", "2", "--turns", "2", "--device", "cpu"]

GOOD = TurnRow(
    session="agent-1",
    turn=2,
    prompt_tokens=100,
    expected_tokens=96,
    restored_tokens=96,
    dram_tokens=32,
    ssd_tokens=64,
    reads=4,
    read_bytes=4096,
    block_bytes=4096,
    restored_ms=1.0,
    recomputed_ms=2.0,
    comparison=Comparison(logit_diff=1e-6, tolerance=1e-3, same_tokens=True),
    reason="",
)
WRONG = Comparison(logit_diff=float("inf"), tolerance=1e-3, same_tokens=False)
CAUGHT = ControlRow(medium="ssd", caught=True, refused=True, caught_diff=3.0)


def summary(*rows: TurnRow, control: tuple[ControlRow, ...] = (CAUGHT,)) -> Summary:
    paths = {"dram": "dram", "ssd": "posix"}
    return Summary(rows=rows, control=control, device="cpu", dtype="float32", io_path=paths, io_reason="")


# -- the report


def test_summary_of_good_rows_has_no_fault() -> None:
    assert summary(GOOD).faults == []
    assert "ok: 1 turns" in format_table(summary(GOOD))


@pytest.mark.parametrize(
    ("bad", "control", "says"),
    [
        (replace(GOOD, comparison=WRONG), CAUGHT, "logits differ by inf"),
        (replace(GOOD, comparison=replace(GOOD.comparison, same_tokens=False)), CAUGHT, "other tokens"),
        (replace(GOOD, comparison=replace(GOOD.comparison, logit_diff=2e-3)), CAUGHT, "logits differ by 0.002"),
        (replace(GOOD, restored_tokens=64, reason="checksum"), CAUGHT, "64 tokens restored, 96 expected; checksum"),
        (replace(GOOD, reason="no room"), CAUGHT, "no room"),
        (replace(GOOD, dram_tokens=0), CAUGHT, "nothing was restored from dram"),
        (replace(GOOD, ssd_tokens=0), CAUGHT, "nothing was restored from ssd"),
        (GOOD, replace(CAUGHT, caught=False), "flipped bytes on ssd went unnoticed"),
        (GOOD, replace(CAUGHT, refused=False), "flipped bytes on ssd were not refused"),
    ],
)
def test_summary_names_every_fault(bad: TurnRow, control: ControlRow, says: str) -> None:
    result = summary(bad, control=(control,))
    assert len(result.faults) == 1 and says in result.faults[0]
    assert f"FAILED: {result.faults[0]}" in format_table(result)
    line = json.loads(format_json(result))
    assert line["ok"] is False and line["faults"] == result.faults


def test_json_is_one_strict_line() -> None:
    text = format_json(summary(GOOD, replace(GOOD, comparison=WRONG)))
    assert "\n" not in text and "Infinity" not in text and "NaN" not in text
    line = json.loads(text)
    assert line["max_logit_diff"] is None and line["tokens_restored"] == 192
    assert line["media"] == {"dram": 64, "ssd": 128}
    assert [row["max_logit_diff"] for row in line["rows"]] == [1e-6, None]


def test_judge_asks_for_wrong_bytes_unverified_and_for_a_miss_verified() -> None:
    wrong = Flipped(replace(GOOD, comparison=WRONG), good_tokens=64, was_ok=True)
    missed = Flipped(replace(GOOD, restored_tokens=64, reason="checksum"), good_tokens=64, was_ok=True)
    verdict = judge(Medium.SSD, wrong, missed)
    assert verdict.medium == "ssd" and verdict.caught and verdict.refused
    unnoticed = judge(Medium.SSD, wrong._replace(row=GOOD), missed._replace(row=GOOD))
    assert not unnoticed.caught and not unnoticed.refused
    before = judge(Medium.SSD, wrong._replace(was_ok=False), missed._replace(was_ok=False))
    assert not before.caught and not before.refused
    assert not judge(Medium.SSD, wrong, missed._replace(good_tokens=32)).refused
    assert not judge(Medium.SSD, missed, wrong).caught
    absent = judge(Medium.DRAM, None, None)
    assert absent.medium == "dram" and not absent.caught and not absent.refused


# -- sessions and pages


def test_script_keeps_agents_longer_than_chats_and_within_bounds() -> None:
    script = Script(5, 12, vocab=100, seed=1)
    for _ in range(script.turns):
        for session in script.order():
            prompt = script.ask(session)
            session.tokens += [1] * REPLY_TOKENS
            session.stored = session.tokens[:-1]
            assert len(session.tokens) <= script.context_tokens_max
            assert (len(prompt) > script.chat_tokens_max) == (session.kind is not CHAT)
            assert script.stored_tokens(session.tokens) == len(session.tokens) - 1
    first, child = script.sessions[0], script.sessions[2]
    assert child.parent is first and first.kind is AGENT
    assert len({tuple(session.tokens[:SYSTEM_TOKENS]) for session in script.sessions}) == 1
    assert script.stored_tokens([*child.tokens[: SYSTEM_TOKENS + 300], 101]) == SYSTEM_TOKENS + 300
    assert script.stored_tokens([101]) == 0


def test_paged_layer_gives_back_what_lies_in_the_pages() -> None:
    memory = PagedMemory(
        (2, 3, 8), page_count=20, page_tokens=4, dtype=torch.float32, device=torch.device("cpu"), seed=0
    )
    assert all(tensor.isnan().all() for tensor in memory.tensors)
    table = memory.take(30)
    assert len(table) == 8 == len(set(table.tolist()))
    data = torch.randn(2, 1, 3, 30, 8)
    waits: list[int] = []
    layer = PagedLayer(memory.tensors[1], memory.slots(table), 0, lambda: waits.append(1))
    for first, end in ((0, 11), (11, 12), (12, 30)):
        keys, values = layer.update(data[0, :, :, first:end], data[1, :, :, first:end])
        assert layer.get_seq_length() == end and waits == [1]
        assert torch.equal(keys, data[0, :, :, :end]) and torch.equal(values, data[1, :, :, :end])
    again = PagedLayer(memory.tensors[1], memory.slots(table), 29, lambda: None)
    assert torch.equal(again.update(data[0, :, :, 29:], data[1, :, :, 29:])[0], data[0])
    others = sorted(set(range(20)) - set(table.tolist()))
    assert memory.tensors[1][:, others].isnan().all() and memory.tensors[0].isnan().all()
    memory.poison()
    assert memory.tensors[1].isnan().all()


# -- the whole


class LeavesPoison:
    """A store that says that it restored, and did not touch the pages."""

    def __init__(self, store: flatcake.Store) -> None:
        self.inner = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def restore(self, lease: flatcake.Lease, pages: Any) -> flatcake.Restore:
        return self.inner.restore(lease, np.full_like(pages, -1))


class LosesOnePage(LeavesPoison):
    """A store that brings all bytes but one page of one layer's values, which are zeros."""

    def restore(self, lease: flatcake.Lease, pages: Any) -> flatcake.Restore:
        restore = self.inner.restore(lease, pages)
        restore.result()
        self.inner.plane.kv.tensors[0][1].tensor[int(pages[1])] = 0
        return restore


class Forgets(LeavesPoison):
    """A store that finds nothing."""

    def match(self, tokens: object) -> flatcake.Match:
        return self.inner.match([])


class OnlySsd:
    """A placement that never uses DRAM."""

    def place(self, signals: TurnSignals) -> Decision:
        return Decision(0, Medium.SSD, 4)


def open_with(kind: type[LeavesPoison]) -> Any:
    return lambda config, identity, kv: kind(flatcake.open(config, identity, kv))


def open_on_ssd(config: flatcake.StoreConfig, identity: flatcake.Identity, kv: flatcake.PagedKV) -> flatcake.Store:
    return flatcake.open(config, identity, kv, placement=OnlySsd())


@pytest.fixture(scope="module")
def model() -> Model:
    pytest.importorskip("transformers")
    return Model(ModelSize(layers=2), seed=0, dtype=torch.float32, device=torch.device("cpu"))


def faults(model: Model, where: Path, open_store: Any) -> list[str]:
    options = demo.Options(
        directory=str(where), device="cpu", dtype="float32", sessions=2, turns=2, seed=0, settings={}
    )
    rows, _ = demo.serve_all(options, model, open_store, lambda: None)
    return summary(*rows).faults


def test_demo_succeeds_and_says_so_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main([*TINY, "--json", "--directory", str(tmp_path / "new" / "pool")], environ={}) == 0
    out = capsys.readouterr().out
    line = json.loads(out)
    assert out.count("\n") == 1
    assert line["ok"] and line["control_caught"] and line["control_refused"] and line["faults"] == []
    assert line["turns"] == len(line["rows"]) == 4 and line["device"] == "cpu"
    assert line["tokens_restored"] == sum(row["restored_tokens"] for row in line["rows"]) > 0
    assert line["media"]["dram"] > 0 and line["media"]["ssd"] > 0 and line["io_path"]["ssd"]
    assert 0 <= line["max_logit_diff"] <= min(row["tolerance"] for row in line["rows"])
    assert {row["medium"] for row in line["control"]} == {"dram", "ssd"}
    for row in line["rows"]:
        assert row["dram_tokens"] + row["ssd_tokens"] == row["restored_tokens"] == row["expected_tokens"]
        assert row["amplification"] == 1.0 and (row["reads"] > 0) == (row["restored_tokens"] > 0)


def test_demo_fails_when_restores_leave_poison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")

    class Broken:
        add_arguments = staticmethod(demo.add_arguments)

        @staticmethod
        def run(args: Any) -> int:
            return demo.run(args, open_with(LeavesPoison))

    argv = [*TINY, "--directory", str(tmp_path)]
    assert main(argv, {"demo": Command("", Broken)}, {}) == 1
    assert "FAILED: chat-2 turn 1: logits differ by inf" in capsys.readouterr().out


def test_serving_from_a_good_store_has_no_fault(model: Model, tmp_path: Path) -> None:
    assert faults(model, tmp_path, flatcake.open) == []
    assert faults(model, tmp_path, flatcake.open) == [], "a second run finds the first one's files"


def test_one_wrong_page_in_one_layer_changes_the_logits(model: Model, tmp_path: Path) -> None:
    found = faults(model, tmp_path, open_with(LosesOnePage))
    assert len(found) == 3 and all("logits differ" in fault for fault in found)


def test_a_store_that_forgets_fails(model: Model, tmp_path: Path) -> None:
    found = faults(model, tmp_path, open_with(Forgets))
    assert any("0 tokens restored, 128 expected" in fault for fault in found)
    assert "nothing was restored from dram" in found and "nothing was restored from ssd" in found


def test_an_unused_medium_fails(model: Model, tmp_path: Path) -> None:
    assert faults(model, tmp_path, open_on_ssd) == ["nothing was restored from dram"]


@pytest.mark.parametrize("words", [["--sessions", "1"], ["--turns", "0"], ["--device", "tpu"]])
def test_bad_words_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["demo", *words], environ={}) == 2
    assert capsys.readouterr().err.startswith("flatcake demo: ")


def test_without_transformers_the_demo_says_what_to_install() -> None:
    code = "import sys; sys.modules['transformers'] = None; from flatcake.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "pip install 'flatcake[demo]'" in done.stderr
