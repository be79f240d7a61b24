"""Scenarios against a real engine, each in a process of its own: `python -m tests.engines.vllm.scenarios NAME …`.

One prints what it saw as JSON in its last line; it asserts by itself what it can.
"""

import errno
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from flatcake.gva import Medium
from tests.engines.vllm.engine import (
    BLOCK,
    ENVIRONMENT,
    Answer,
    Ask,
    Engine,
    engine_options,
    flip_files,
    make_model,
    pool_files,
    words,
)
from tests.engines.vllm.faulty import FaultyConnector

Report = dict[str, Any]


def model(path: str, with_windows: bool = False) -> Report:
    make_model(path, windows=with_windows)
    return {}


def windows(path: str, directory: str, options: Report) -> Report:
    """Layers with windows, prompts in chunks: equal to recompute, whatever has left the windows meanwhile."""
    make_model(path, windows=True)
    engine = Engine(path, directory, max_num_batched_tokens=96, **options)
    first = words(1, 300)
    engine.one(first, "a")
    engine.forget()
    reads_before = engine.work.counts["read_bytes"]
    second = first + words(2, 60)
    found = engine.one(second, "a")
    assert len(set(found.tokens)) > 1, "its logits are flat"
    geometry = engine.side.coordinator.geometry
    pieces = (engine.work.counts["read_bytes"] - reads_before) // geometry.piece_bytes(0)
    check(engine, found, second, 288)  # On SSD: a session's first turn.
    engine.forget()
    third = second + words(3, 40)
    check(engine, engine.one(third, "a"), third, 352)  # Both media.

    # A prompt that leaves in the middle, where the first one had long left the windows; beside one that hits nothing.
    engine.forget()
    branch, other = first[:150] + words(4, 50), words(5, 200)
    found, alone = engine.ask(Ask(branch, "b"), Ask(other, "c"))
    check(engine, found, branch, 128)
    check(engine, alone, other, 0)

    # A long answer is saved as it goes; vLLM's own cache and the store are joined.
    answer = engine.one(third, "a", new=150)
    engine.forget()
    fourth = third + answer.tokens + words(6, 20)
    engine.one(fourth[:400], "d")
    check(engine, engine.one(fourth, "a"), fourth, len(fourth[:-20]) // 32 * 32)

    # Damaged: computed, and saved anew.
    engine.forget()
    flip_files(directory)
    assert engine.one(branch, "b").agrees(engine.reference(branch))
    assert engine.work.counts["loads short: checksum"] == 1
    engine.forget()
    check(engine, engine.one(branch, "b"), branch, 192)
    engine.assert_idle()
    counts = engine.counts()
    engine.close()
    assert not counts.get("save_blocks_left_window"), counts
    return {"pieces_read": pieces, "counts": counts}


def check(engine: Engine, found: Answer, tokens: list[int], cached: int) -> None:
    """The answer is what a full recompute gives, and so many tokens of it came from the store."""
    expected = engine.reference(tokens)
    assert found.agrees(expected), (found, expected)
    assert found.cached == cached, (found.cached, cached)


def equal(path: str, directory: str, options: Report) -> Report:
    """From SSD between steps, from DRAM layer by layer, from both, behind vLLM's own cache: equal to recompute."""
    engine = Engine(path, directory, **options)
    first = words(1, 70)
    engine.one(first, "a")
    engine.forget()
    loads_before = engine.work.counts["loaded_tokens"]
    second = first + words(2, 60)
    check(engine, engine.one(second, "a"), second, 64)  # On SSD: a session's first turn.
    assert engine.work.counts["loaded_tokens"] == loads_before + 64

    # Turn 2 followed a short reply: DRAM.
    media = stored(engine, second)
    assert media == {Medium.SSD: 2, Medium.DRAM: 2}, media
    engine.forget()
    third = second + words(3, 40)
    check(engine, engine.one(third, "a"), third, 128)  # Both media.

    # vLLM still has what is on SSD; only DRAM is missing: a load within the step.
    engine.forget()
    engine.one(first[:65], "other")
    check(engine, engine.one(second[:110], "a"), second[:110], 96)
    sources = engine.side.loads.scheduler.stats()

    # Another tenant sees nothing.
    engine.forget()
    assert engine.one(third, "a", salt="tenant").cached == 0
    engine.forget()
    assert engine.one(third, "a", salt="tenant").cached > 0

    # Two sessions share a prefix: the second one hits, and the third time it lies in DRAM.
    shared = words(5, 160)
    engine.one(shared + words(6, 40), "b")
    engine.forget()
    other = shared + words(7, 40)
    check(engine, engine.one(other, "c"), other, 160)
    engine.forget()
    again = shared + words(8, 40)
    check(engine, engine.one(again, "d"), again, 160)
    assert stored(engine, shared) == {Medium.DRAM: 5}
    engine.assert_idle()
    counts = engine.counts()
    assert not [name for name in counts if name.startswith(("refused", "saves failed", "loads short"))], counts
    engine.close()
    return {"counts": counts, "sched": sources}


def faults(path: str, directory: str) -> Report:
    """Damaged bytes on both media, EIO and ENOSPC: computed instead, told, and over when the fault is."""
    engine = Engine(path, directory, is_faulty=True)
    files = FaultyConnector.shared
    assert files is not None
    seen: Report = {}

    def note(what: str) -> None:
        seen[what] = {name: count for name, count in engine.counts().items() if ":" in name and "posix" not in name}

    # SSD: a byte of every page is flipped behind the store's back.
    tokens = words(11, 200)
    engine.one(tokens, "a")
    engine.forget()
    flip_files(directory)
    damaged = engine.one(tokens, "a")
    note("flipped on SSD")
    assert damaged.agrees(engine.reference(tokens))
    assert engine.counts()["loads short: checksum"] == 1 and engine.counts()["blocks_dropped"] == 6
    engine.forget()
    check(engine, engine.one(tokens, "a"), tokens, 192)  # Written again, and good.

    # DRAM, in the step itself; the first block is spared, and counts.
    chat = words(12, 70)
    engine.one(chat, "chat")
    engine.forget()
    chat += words(13, 90)
    engine.one(chat, "chat")
    assert stored(engine, chat) == {Medium.SSD: 2, Medium.DRAM: 3}
    engine.forget()
    engine.one(chat[:65], "else")  # vLLM has what is on SSD; the rest is loaded layer by layer.
    arena = engine.work.plane.parts.arena
    arena.array[:] ^= 0x80
    damaged = engine.one(chat, "chat")
    note("flipped in DRAM")
    arena.array[:] ^= 0x80
    assert damaged.agrees(engine.reference(chat))
    assert engine.counts()["loads short: checksum"] == 2

    # Reads fail.
    tokens = words(15, 200)
    engine.one(tokens, "b")
    engine.forget()
    files.fail("read", *[errno.EIO] * 200)
    broken = engine.one(tokens, "b")
    note("EIO")
    files.clear()
    assert broken.agrees(engine.reference(tokens))
    assert any("errno 5" in name for name in engine.counts()), engine.counts()

    # Writes find no space: the request is served, and stored the next time.
    full = words(14, 100)
    files.fail("write", *[errno.ENOSPC] * 200)
    served = engine.one(full, "full")
    note("ENOSPC")
    files.clear()
    assert served.agrees(engine.reference(full)) and not stored(engine, full)
    engine.forget()
    engine.one(full, "full")
    engine.forget()
    check(engine, engine.one(full, "full"), full, 96)
    engine.assert_idle()
    engine.close()
    return {"seen": seen}


def held(path: str, directory: str) -> Report:
    """While a load is stuck on the disk, further ones are held, and those that need none go on; abort is safe."""
    engine = Engine(path, directory, is_faulty=True, extra={"engine": {"loads_max": 1}})
    files = FaultyConnector.shared
    assert files is not None
    slow, second, aborted = words(21, 150), words(22, 150), words(23, 150)
    for name, tokens in (("slow", slow), ("second", second), ("aborted", aborted)):
        engine.one(tokens, name)
    engine.forget()
    expected = [engine.reference(tokens) for tokens in (slow, second, words(24, 50))]

    gate = files.hold("read")
    for name, tokens in (("slow", slow), ("second", second), ("aborted", aborted), ("quick", words(24, 50))):
        ask = Ask(tokens, name)
        engine.llm.llm_engine.add_request(name, engine.prompt(ask), engine.params(ask))
    answers = step_until(engine, {"quick"})
    assert len(engine.side._loading) == 1 and len(engine.side._hits) == 2
    engine.llm.llm_engine.abort_request(["aborted"])
    steps = 0
    while steps < 5:
        engine.llm.llm_engine.step()
        steps += 1
    assert len(engine.side._hits) == 1, "the aborted one is let go at once"
    gate.set()
    files.clear()
    answers |= step_until(engine, {"slow", "second"})
    found = [answers[name] for name in ("slow", "second", "quick")]
    assert all(a.agrees(b) for a, b in zip(found, expected, strict=True)), (found, expected)
    assert [answer.cached for answer in found] == [128, 128, 0]
    stats = engine.side.loads.scheduler.stats()

    # A request is aborted while its own load is stuck.
    engine.forget()
    gate = files.hold("read")
    ask = Ask(slow, "slow")
    engine.llm.llm_engine.add_request("again", engine.prompt(ask), engine.params(ask))
    while not engine.side._loading:
        engine.llm.llm_engine.step()
    assert files.arrived.acquire(timeout=30)
    engine.llm.llm_engine.abort_request(["again"])
    for _ in range(5):
        engine.core.step()
    assert engine.side._loading, "its blocks are not free while a read may still land"
    gate.set()
    files.clear()
    engine.assert_idle()
    engine.forget()
    check(engine, engine.one(slow, "slow"), slow, 128)
    engine.close()
    return {"sched": stats}


def parallel(path: str, directory: str) -> Report:
    """Two tensor-parallel workers in processes of their own, each with its own half of every block."""
    ENVIRONMENT["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    engine = Engine(path, directory, distributed_executor_backend="mp", tensor_parallel_size=2)
    tokens = words(31, 70)
    engine.one(tokens, "a")
    engine.forget()
    tokens += words(32, 80)
    check(engine, engine.one(tokens, "a"), tokens, 64)
    assert stored(engine, tokens) == {Medium.SSD: 2, Medium.DRAM: 2}
    engine.forget()
    tokens += words(33, 40)
    check(engine, engine.one(tokens, "a"), tokens, 128)
    engine.forget()
    engine.one(tokens[:65], "else")
    check(engine, engine.one(tokens, "a"), tokens, 160)  # The step's own load, layer by layer, on both.

    # One rank's bytes are damaged: neither counts.
    ssd = words(34, 100)
    engine.one(ssd, "b")
    engine.forget()
    flip_files(f"{directory}/rank-1")
    damaged = engine.one(ssd, "b")
    assert damaged.agrees(engine.reference(ssd))
    engine.forget()
    check(engine, engine.one(ssd, "b"), ssd, 96)
    engine.assert_idle()
    counts = dict(engine.side.coordinator.counters())
    engine.close()
    return {"counts": counts, "files": [str(path) for path in pool_files(directory)]}


def crowd(path: str, directory: str) -> Report:
    """Many requests at once in few blocks, so that vLLM preempts: twice, and the second time from the store."""
    engine = Engine(path, directory, max_model_len=512, num_gpu_blocks_override=40, extra={"engine": {"loads_max": 2}})
    asks = [Ask(words(50 + number, 100 + 13 * number), f"s{number}", new=40) for number in range(12)]
    expected = [engine.reference(ask.tokens, new=40) for ask in asks]
    engine.forget()
    preemptions = 0
    for rounds in range(2):
        names = {f"{rounds} {ask.session}" for ask in asks}
        for name, ask in zip(sorted(names), sorted(asks, key=lambda ask: ask.session), strict=True):
            engine.llm.llm_engine.add_request(name, engine.prompt(ask), engine.params(ask))
        found: dict[str, Answer] = {}
        while not names <= set(found):
            found |= step_until(engine, set())
            running = engine.core.scheduler.requests.values()
            preemptions = max([preemptions, *(request.num_preemptions for request in running)])
        for ask, reference in zip(asks, expected, strict=True):
            assert found[f"{rounds} {ask.session}"].agrees(reference), (rounds, ask.session)
        engine.forget()
    assert preemptions, "blocks were not scarce enough"
    assert sum(answer.cached for answer in found.values()) >= 32 * 12
    engine.assert_idle()
    counts = engine.counts()
    engine.close()
    return {"counts": counts, "cached": [answer.cached for answer in found.values()], "preemptions": preemptions}


def fill(path: str, directory: str, options: Report) -> Report:
    """An engine as vLLM runs it by default, in processes of its own; to be killed when it has stored a turn."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    llm = LLM(model=path, disable_log_stats=False, **(engine_options(directory) | options))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([{"prompt_token_ids": words(41, 200)}], params, use_tqdm=False)
    end_s, number = time.monotonic() + 60, 0
    while not saved_blocks(llm):  # The engine tells with the answers to others.
        assert time.monotonic() < end_s, "nothing was published"
        llm.generate([{"prompt_token_ids": words(number, 5)}], params, use_tqdm=False)
        number += 1
    sys.stdout.write("\nSTORED\n")
    sys.stdout.flush()
    threading.Event().wait()
    return {}


def saved_blocks(llm: Any) -> int:
    """Blocks that vLLM's own metrics say were published."""
    found = [each for each in llm.get_metrics() if each.name == "vllm:flatcake_events"]
    return sum(each.value for each in found if each.labels["event"] == "blocks_saved_ssd")


def again(path: str, directory: str, cached: int, options: Report) -> Report:
    """Another process over the same directory: so many tokens of that turn are there, and they are right."""
    engine = Engine(path, directory, **options)
    tokens = words(41, 200)
    check(engine, engine.one(tokens), tokens, cached)
    engine.assert_idle()
    counts = engine.counts()
    engine.close()
    return {"counts": counts}


def overlapped(path: str, directory: str) -> Report:
    """vLLM's default processes: damaged bytes, and sessions side by side."""
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    flip_files(directory)  # What `fill` has left.
    llm = LLM(model=path, disable_log_stats=False, **engine_options(directory))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)

    def ask(salt: str) -> list[Answer]:
        prompts = [words(41, 200), *(words(80 + number, 90 + number) for number in range(5))]
        asked = [{"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
        return [Engine.answer(output) for output in llm.generate(asked, params, use_tqdm=False)]

    expected, damaged = ask("reference"), ask("")
    assert all(a.agrees(b) for a, b in zip(damaged, expected, strict=True)), (damaged, expected)
    end_s, number = time.monotonic() + 60, 0
    # vLLM forgets its own blocks when the last save that holds some has been reported, with an answer to another.
    while saved_blocks(llm) < 2 * (6 + 5 * 2) or not llm.reset_prefix_cache():
        assert time.monotonic() < end_s, saved_blocks(llm)
        llm.generate([{"prompt_token_ids": words(number, 5)}], params, use_tqdm=False)
        number += 1
    again = ask("")
    assert all(a.agrees(b) for a, b in zip(again, expected, strict=True)), (again, expected)
    assert [answer.cached for answer in again] == [192, *[64] * 5], again
    failed = {each.labels["event"]: each.value for each in llm.get_metrics() if each.name == "vllm:flatcake_events"}
    assert failed["loads short: checksum"] == 1, failed
    return {"counts": failed}


def step_until(engine: Engine, names: set[str]) -> dict[str, Answer]:
    """Step until these requests have ended."""
    found: dict[str, Answer] = {}
    end_s = time.monotonic() + 60
    while True:
        assert time.monotonic() < end_s, (names, found)
        for output in engine.llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = engine.answer(output)
        if names <= set(found):
            return found


def events(path: str, directory: str) -> Report:
    """What a router hears over vLLM's own publisher."""
    import msgspec
    import zmq

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    heard = zmq.Context.instance().socket(zmq.SUB)
    heard.bind(endpoint)  # vLLM connects to an address without a star.
    heard.setsockopt_string(zmq.SUBSCRIBE, "")
    listening = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": "kv"}
    engine = Engine(path, directory, kv_events_config=listening)
    found: list[Any] = []

    def listen(wanted: str, medium: str, count: int = 5) -> Any:
        """Steps on with prompts of `count` tokens until such events are heard."""
        end_s, number = time.monotonic() + 60, 100
        while time.monotonic() < end_s:
            while heard.poll(200):
                found.extend(msgspec.msgpack.decode(heard.recv_multipart()[-1])[1])
            told = [each for each in found if each["type"] == wanted and each.get("medium") == medium]
            if told:
                return told
            engine.one(words(number, count))  # Events go out with a step.
            number += 1
        raise AssertionError((wanted, medium, found))

    tokens = words(71, 100)
    listen("BlockStored", "STORAGE", BLOCK + 8)  # The first ones may be told before we are connected.
    while heard.poll(200):
        heard.recv_multipart()
    found.clear()
    engine.one(tokens, "s")
    (event,) = listen("BlockStored", "STORAGE")
    assert event["token_ids"] == tokens[:96] and event["session_id"] == "s" and event["block_size"] == BLOCK, event
    assert len(event["block_hashes"]) == 3 and event["parent_block_hash"] is None
    gpu = [hash for each in found if each.get("medium") == "GPU" for hash in each["block_hashes"]]
    assert set(event["block_hashes"]) <= set(gpu), "a block has one hash on every medium"
    found.clear()
    engine.connector.reset_cache()
    removed = [hash for each in listen("BlockRemoved", "STORAGE") for hash in each["block_hashes"]]
    assert set(event["block_hashes"]) <= set(removed)
    engine.assert_idle()
    engine.close()
    return {}


def stored(engine: Engine, tokens: list[int]) -> dict[Medium, int]:
    """Blocks of a sequence by medium, as the catalog knows them; computed from vLLM's own hashes."""
    from vllm.v1.request import Request

    params = engine.params(Ask(tokens))
    request = Request("probe", tokens, params, None, block_hasher=engine.core.request_block_hasher)
    match = engine.side.coordinator.match(engine.side.block_keys.keys(request, len(tokens) // BLOCK))
    found = {medium: match.hit.blocks_on(medium) for medium in (Medium.SSD, Medium.DRAM)}
    return {medium: count for medium, count in found.items() if count}


ALL = (model, equal, faults, held, parallel, crowd, fill, again, overlapped, events, windows)
SCENARIOS = {each.__name__: each for each in ALL}


def main() -> None:
    name, *arguments = sys.argv[1:]
    begin = time.monotonic()
    report = SCENARIOS[name](*[json.loads(argument) for argument in arguments])
    report["seconds"] = round(time.monotonic() - begin, 1)
    assert threading.main_thread().is_alive()
    sys.stdout.write(f"\n{json.dumps(report)}\n")


if __name__ == "__main__":
    main()
