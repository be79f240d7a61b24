"""The adapter's two sides under a toy engine: every block that a request runs on is compared."""

import errno
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatcake.gva import Medium
from tests.engines.vllm.engine import flip_files
from tests.engines.vllm.toy import BLOCKS, IO, LAYERS, TOKENS, ToyEngine, ToyRequest, prompt
from tests.fakes import FaultyFiles

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ToyEngine]:
    made = ToyEngine(tmp_path)
    yield made
    made.close()


def ask(name: str, tokens: list[int], session: str = "", **more: object) -> ToyRequest:
    return ToyRequest(name, list(tokens), session_id=session or None, **more)  # type: ignore[arg-type]


def test_first_turn_comes_back_from_ssd_between_steps(engine: ToyEngine) -> None:
    engine.run(ask("1", prompt(1, 18), "s"))
    again = ask("2", prompt(1, 18), "s")
    engine.add(again)
    engine.step()
    assert again.state in ("waiting", "loading")
    engine.settle()
    assert again.loaded_tokens == 16


def test_later_turn_comes_back_from_dram_in_its_step(engine: ToyEngine) -> None:
    engine.run(ask("1", prompt(2, 3), "s"))
    engine.run(ask("2", prompt(1, 18), "s"))
    again = ask("3", prompt(1, 18), "s")
    engine.add(again)
    engine.step()
    assert again.state == "ended" and again.loaded_tokens == 16
    engine.settle()


def test_a_session_of_both_media_and_one_token_that_vllm_must_compute(engine: ToyEngine) -> None:
    engine.run(ask("1", prompt(1, 16), "s"))
    engine.run(ask("2", prompt(1, 32), "s"))
    found = engine.side.coordinator.match(engine.side.block_keys.keys(ask("x", prompt(1, 32)), 8))
    assert (found.tokens_on(Medium.SSD), found.tokens_on(Medium.DRAM)) == (16, 16)
    again = ask("3", prompt(1, 32), "s")
    engine.run(again)
    assert again.loaded_tokens == 28


def test_blocks_of_the_store_can_be_larger(tmp_path: Path) -> None:
    engine = ToyEngine(tmp_path, engine={"block_tokens": 3 * TOKENS})
    engine.run(ask("1", prompt(1, 40), "s"))
    again = ask("2", prompt(1, 40), "s")
    engine.run(again)
    assert again.loaded_tokens == 36
    engine.close()


def test_tenants_do_not_meet(engine: ToyEngine) -> None:
    engine.run(ask("1", prompt(1, 16), "s", cache_salt="a"))
    other, same = ask("2", prompt(1, 16), "s", cache_salt="b"), ask("3", prompt(1, 16), "s", cache_salt="a")
    engine.run(other, same)
    assert (other.loaded_tokens, same.loaded_tokens) == (0, 12)


def test_a_damaged_block_is_computed_and_forgotten(engine: ToyEngine, tmp_path: Path) -> None:
    engine.run(ask("1", prompt(1, 26), "s"))
    flip_files(str(tmp_path))
    damaged = ask("2", prompt(1, 26), "s")
    engine.run(damaged)
    assert damaged.loaded_tokens == 0
    again = ask("3", prompt(1, 26), "s")
    engine.run(again)
    assert again.loaded_tokens == 24


@pytest.mark.parametrize(("call", "error"), [("read", errno.EIO), ("write", errno.ENOSPC)])
def test_a_storage_fault_costs_hits_alone(tmp_path: Path, call: str, error: int) -> None:
    files = FaultyFiles()
    engine = ToyEngine(tmp_path, files=files)
    if call == "write":
        files.fail("write", *[error] * 50)
    engine.run(ask("1", prompt(1, 26), "s"))
    if call == "read":
        files.fail("read", *[error] * 50)
    again = ask("2", prompt(1, 26), "s")
    engine.run(again)
    assert again.loaded_tokens == 0
    assert any(f"errno {error}" in name for name in engine.workers[0].counters())
    engine.close()


def test_requests_are_held_while_a_load_is_stuck(tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = ToyEngine(tmp_path, files=files, engine={"loads_max": 1})
    for name in "abc":
        engine.run(ask(name, prompt(ord(name), 18), name))
    gate = files.hold("read")
    stuck, held, gone = (ask(f"{name}2", prompt(ord(name), 18), name) for name in "abc")
    for request in (stuck, held, gone):
        engine.add(request)
    free = ask("free", prompt(9, 10))
    engine.add(free)
    for _ in range(4):
        engine.step()
    assert (stuck.state, held.state, gone.state) == ("loading", "waiting", "waiting")
    assert free.state == "ended", "it needed no load"
    engine.abort("c2")
    assert "c2" not in engine.requests
    gate.set()
    engine.settle()
    assert stuck.loaded_tokens == held.loaded_tokens == 16
    engine.close()


def test_an_abort_during_a_load_gives_blocks_back_when_nothing_can_land_in_them(tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = ToyEngine(tmp_path, files=files)
    engine.run(ask("1", prompt(1, 18), "s"))
    gate = files.hold("read")
    request = engine.add(ask("2", prompt(1, 18), "s"))
    while request.state != "loading":
        engine.step()
    engine.step()
    assert files.arrived.acquire(timeout=30)
    engine.abort("2")
    for _ in range(4):
        engine.step()
    assert request.tables, "a read may still land in them"
    gate.set()
    engine.settle()
    engine.close()


def test_a_request_held_too_long_is_computed(tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = ToyEngine(tmp_path, files=files, engine={"loads_max": 1, "hold_ns_max": "20ms"})
    for name in "ab":
        engine.run(ask(name, prompt(ord(name), 18), name))
    gate = files.hold("read")
    stuck, held = (engine.add(ask(f"{name}2", prompt(ord(name), 18), name)) for name in "ab")
    free, engine.pool.free = engine.pool.free, []  # vLLM has no blocks for it at first; it is not held once more.
    while "b2" not in engine.side._given_up:
        engine.step()
    assert engine.side.matched(held, 0) == (0, False)
    engine.pool.free = free
    while held.state != "ended":
        engine.step()
    assert held.loaded_tokens == 0 and not engine.side._given_up
    gate.set()
    engine.settle()
    assert stuck.loaded_tokens in (0, 16)  # Its time was up, too, while it was read.
    assert not engine.side.loads._late
    engine.close()


def test_reset_forgets_everything_and_what_is_loaded_is_computed(tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = ToyEngine(tmp_path, files=files)
    engine.run(ask("1", prompt(1, 18), "s"))
    gate = files.hold("read")
    request = engine.add(ask("2", prompt(1, 18), "s"))
    while request.state != "loading":
        engine.step()
    assert engine.side.reset() == 4
    gate.set()
    engine.settle()
    assert request.loaded_tokens == 0
    engine.run(ask("3", prompt(1, 18), "s"))
    last = ask("4", prompt(1, 18), "s")
    engine.run(last)
    assert last.loaded_tokens == 16
    engine.close()


def test_two_ranks_and_a_restart(tmp_path: Path) -> None:
    engine = ToyEngine(tmp_path, ranks=2)
    engine.run(ask("1", prompt(1, 18), "s"))
    engine.run(ask("2", prompt(1, 34), "s"))  # Its second half is in DRAM.
    again = ask("3", prompt(1, 34), "s")
    engine.run(again)
    assert again.loaded_tokens == 32
    engine.close()

    engine = ToyEngine(tmp_path, ranks=2)
    found = ask("4", prompt(1, 34), "s")
    engine.run(found)
    assert found.loaded_tokens == 16, "SSD is kept, DRAM is not"
    engine.close()

    engine = ToyEngine(tmp_path / "other", ranks=2)
    none = ask("5", prompt(1, 34), "s")
    engine.run(none)
    assert none.loaded_tokens == 0
    engine.close()


def test_one_rank_that_lost_its_files_costs_everything(tmp_path: Path) -> None:
    engine = ToyEngine(tmp_path, ranks=2)
    engine.run(ask("1", prompt(1, 18), "s"))
    engine.close()
    for path in (tmp_path / "rank-1").iterdir():
        path.unlink()
    engine = ToyEngine(tmp_path, ranks=2)
    none = ask("2", prompt(1, 18), "s")
    engine.run(none)
    assert none.loaded_tokens == 0
    assert engine.side.coordinator.counters()["reopen: rows of another pool"] == 1
    engine.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("windows", [(0,), (0, 10), (6,), (8, 0, 13)])
def test_random_traffic_runs_on_right_bytes_only(tmp_path: Path, windows: tuple[int, ...], seed: int) -> None:
    """Sessions that grow and share, aborts, preemptions, faults; `ToyEngine` compares every block that a token sees."""
    rng, files = random.Random(seed), FaultyFiles()
    engine = ToyEngine(
        tmp_path,
        ranks=1 + seed % 2,
        files=files,
        windows=windows,
        chunk=(7, 1 << 20)[seed // 2 % 2],
        engine={"loads_max": 2},
    )
    sessions = {f"s{number}": prompt(number % 3, rng.randrange(4, 20)) for number in range(6)}
    loaded = 0
    for turn in range(60):
        name = rng.choice(list(sessions))
        sessions[name] = (sessions[name] + prompt(rng.randrange(4), rng.randrange(1, 12)))[:60]
        request = engine.add(ask(f"{turn}", sessions[name], name if rng.random() < 0.7 else ""))
        if rng.random() < 0.1:
            files.fail(rng.choice(["read", "write"]), rng.choice([errno.EIO, errno.ENOSPC]))
        for _ in range(rng.randrange(12)):
            engine.step()
        if rng.random() < 0.1 and request.request_id in engine.requests and request.state != "ended":
            engine.abort(request.request_id)
        running = [name for name, each in engine.requests.items() if each.state == "running"]
        if running and rng.random() < 0.2:
            engine.preempt(rng.choice(running))
        if rng.random() < 0.3:
            engine.settle()
            loaded += request.loaded_tokens
    engine.settle()
    assert loaded, "nothing was ever loaded"
    engine.close()


# -- windows ----------------------------------------------------------------------------------------------


def windowed(directory: Path, *windows: int, chunk: int = 6, **more: object) -> ToyEngine:
    return ToyEngine(directory, windows=windows or (0, 8), chunk=chunk, **more)  # type: ignore[arg-type]


def test_what_leaves_a_window_is_saved_before(tmp_path: Path) -> None:
    """A prompt of five windows in chunks: all of it hits, and only what is seen is read."""
    engine = windowed(tmp_path)
    request = engine.add(ask("1", prompt(1, 42), "s"))
    saves = 0
    while request.request_id in engine.requests:
        engine.step()
        saves = max(saves, len(engine.side.saves._held))
    assert saves, "nothing was saved while it ran"
    engine.settle()
    again = ask("2", prompt(1, 42), "s")
    engine.run(again)
    assert again.loaded_tokens == 40
    piece = engine.side.coordinator.geometry.block_bytes // LAYERS
    # Layers 0 and 2 see everything; layer 1 the last 7 tokens before the next one, which are in two blocks.
    assert engine.workers[0].counters()["read_bytes"] == 2 * 10 * piece + 2 * piece
    engine.close()


def test_a_prefix_of_a_windowed_prompt_hits_anywhere(tmp_path: Path) -> None:
    engine = windowed(tmp_path)
    engine.run(ask("1", prompt(1, 42), "s"))
    for count in (9, 17, 30):
        branch = ask(f"b{count}", prompt(1, count) + prompt(count, 9), f"b{count}")
        engine.run(branch)
        assert branch.loaded_tokens == count // TOKENS * TOKENS
    engine.close()


@pytest.mark.parametrize("windows", [(0, 8), (8,)])
def test_turns_of_a_windowed_session_go_on(tmp_path: Path, windows: tuple[int, ...]) -> None:
    engine = windowed(tmp_path, *windows)
    tokens: list[int] = []
    for turn in range(5):
        before, tokens = len(tokens) // TOKENS * TOKENS, tokens + prompt(turn, 13)
        request = ask(f"{turn}", tokens, "s")
        engine.run(request)
        assert request.loaded_tokens == before
    engine.close()


def test_a_load_of_several_groups_fails_as_a_request(tmp_path: Path) -> None:
    engine = windowed(tmp_path)
    engine.run(ask("1", prompt(1, 42), "s"))
    flip_files(str(tmp_path))
    damaged = ask("2", prompt(1, 42), "s")
    engine.run(damaged)
    assert damaged.failures and not damaged.loaded_tokens
    again = ask("3", prompt(1, 42), "s")
    engine.run(again)
    assert again.loaded_tokens == 40 and not again.failures
    engine.close()


def test_a_dram_hit_of_several_groups_is_loaded_between_steps(tmp_path: Path) -> None:
    engine = windowed(tmp_path, chunk=1 << 20)
    engine.run(ask("1", prompt(2, 3), "s"))
    engine.run(ask("2", prompt(1, 18), "s"))
    again = engine.add(ask("3", prompt(1, 18), "s"))
    engine.step()
    assert again.state in ("loading", "running") and again.loaded_tokens == 16
    engine.settle()
    engine.close()


def test_what_has_left_its_window_unsaved_is_counted_and_not_saved(tmp_path: Path) -> None:
    engine = windowed(tmp_path)
    request = engine.add(ask("1", prompt(1, 42), "s"))
    engine.step()
    engine.side.saves.forget("1")  # It hears of no further step.
    engine.settle()
    assert request.state == "ended"
    assert engine.side.coordinator.counters()["save_blocks_left_window"] == 2
    again = ask("2", prompt(1, 42), "s")
    engine.run(again)
    assert again.loaded_tokens == 0
    engine.close()


def test_blocks_are_held_until_their_save_is_over(tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = windowed(tmp_path, files=files)
    gate = files.hold("write")
    request = engine.add(ask("1", prompt(1, 42), "s"))
    while request.request_id in engine.requests:
        engine.step()
    held = BLOCKS - 1 - len(engine.pool.free)
    assert held >= 2 * 10, "all blocks of both groups"
    gate.set()
    engine.settle()
    engine.close()


def test_a_save_that_fails_in_the_middle_costs_what_follows(tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = windowed(tmp_path, files=files)
    files.fail("write", errno.EIO)
    engine.run(ask("1", prompt(1, 42), "s"))
    again = ask("2", prompt(1, 42), "s")
    engine.run(again)
    assert again.loaded_tokens < 40
    more = ask("3", prompt(1, 42), "s")
    engine.run(more)
    assert more.loaded_tokens == 40
    engine.close()


def test_what_has_left_its_window_is_counted_once(tmp_path: Path) -> None:
    """A token a step, and no second save while the first is under way: what is behind that cannot be saved."""
    files = FaultyFiles()
    engine = windowed(tmp_path, chunk=1, files=files, io=IO | {"saves_max": 1})
    gate, request = files.hold("write"), engine.add(ask("1", prompt(1, 60), "s"))
    while "1" in engine.requests:
        engine.step()
    counts = engine.side.coordinator.counters()
    gate.set()
    engine.settle()
    saved = engine.side.coordinator.match(engine.side.block_keys.keys(request, 15)).blocks
    assert counts["refused: too many saves under way"] == 1, "the next try comes too late"
    assert saved > 0 and 0 < counts["save_blocks_left_window"] <= 15 - saved
    engine.close()


@pytest.mark.parametrize("windows", [(0,), (0, 8)])
def test_a_load_that_brings_nothing_is_not_tried_for_ever(tmp_path: Path, windows: tuple[int, ...]) -> None:
    """Every load is late, but nothing that is stored is bad: the request is computed."""
    files = FaultyFiles()
    engine = windowed(tmp_path, *windows, files=files, timeouts={"restore_ns": 1})
    engine.run(ask("1", prompt(1, 42), "s"))
    gate, late = files.hold("read"), engine.add(ask("2", prompt(1, 42), "s"))
    while late.state != "ended" and not any(load.restore.dropped for load in engine.workers[0]._loads.values()):
        engine.step()
    gate.set()
    engine.settle()
    assert late.loaded_tokens == 0 and late.failures <= 1
    engine.close()


def test_a_preempted_request_can_be_aborted_while_its_last_step_is_in_flight(engine: ToyEngine) -> None:
    """Then vLLM says that it has computed nothing, has no blocks, and has tokens in flight."""
    request = ask("1", prompt(1, 42), "s", num_in_flight_tokens=6, tables=[[]])
    engine.side.finished(request, request.tables)
    engine.settle()
    assert not engine.side.coordinator.match(engine.side.block_keys.keys(request, 10)).blocks


def test_the_end_of_what_was_saved_is_the_first_that_vllm_takes_back(tmp_path: Path) -> None:
    engine = ToyEngine(tmp_path)
    engine.pool.free.reverse()
    request = engine.add(ask("1", prompt(1, 42), "s"))
    engine.step()
    (held,) = engine.side.saves._held.values()
    order = [block.number for block in held.blocks]
    engine.settle()
    assert len(order) == 10 and order == sorted(order, reverse=True), "in the order of tokens"
    assert engine.pool.free[:10] == order, "each goes to the front"
    assert request.state == "ended"
    engine.close()


def test_what_is_computed_again_after_a_reset_is_saved_again(tmp_path: Path) -> None:
    """As vLLM does when weights have changed: running requests are preempted, and everything is forgotten."""
    files = FaultyFiles()
    engine = windowed(tmp_path, files=files)
    gate = files.hold("write")
    request = engine.add(ask("1", prompt(1, 42), "s"))
    while engine.side.saves.is_idle:
        engine.step()
    held = BLOCKS - 1 - len(engine.pool.free)
    engine.side.reset()
    engine.preempt("1")
    assert 0 < BLOCKS - 1 - len(engine.pool.free) < held, "what is being saved stays until its writes have returned"
    gate.set()
    engine.settle()
    assert request.loaded_tokens == 0
    again = ask("2", prompt(1, 42), "s")
    engine.run(again)
    assert again.loaded_tokens == 40
    engine.close()


def test_a_refused_part_is_tried_again_before_it_leaves_its_window(tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = windowed(tmp_path, 0, 16, chunk=2, files=files, io=IO | {"saves_max": 1})
    gate = files.hold("write")
    engine.add(ask("other", prompt(9, 9), "o"))
    while engine.side.saves.is_idle:
        engine.step()
    request = engine.add(ask("1", prompt(1, 42), "s"))
    while not engine.side.coordinator.counters()["refused: too many saves under way"]:
        engine.step()
    gate.set()
    assert request.state == "running"
    while request.request_id in engine.requests:  # No part meets another one from now on.
        engine.end_saves()
        engine.step()
    engine.settle()
    again = ask("2", prompt(1, 42), "s")
    engine.run(again)
    assert again.loaded_tokens == 40
    engine.close()


@pytest.mark.parametrize("windows", [(0,), (0, 8)])
def test_what_was_computed_before_a_reset_is_not_saved_after_it(tmp_path: Path, windows: tuple[int, ...]) -> None:
    engine = windowed(tmp_path, *windows)
    request = engine.add(ask("1", prompt(1, 42), "s"))
    for _ in range(2):
        engine.step()
    engine.side.reset()
    assert request.state == "running"
    engine.settle()
    for loaded in (0, 40):
        again = ask(f"again {loaded}", prompt(1, 42), "s")
        engine.run(again)
        assert again.loaded_tokens == loaded
    engine.close()
