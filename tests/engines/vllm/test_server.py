"""The OpenAI server with the documented configuration, under concurrent clients.  Run by `make test-engines`."""

import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.engines.vllm.engine import BLOCK, transfer_config, words
from tests.engines.vllm.test_engine import LIMIT_S, ROOT, environment, scenario

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(LIMIT_S),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-engines"),
]
CLIENTS = 6


class Server:
    """One server process, and what its clients do."""

    def __init__(self, model: str, directory: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "float32"]
        command += ["--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "2048"]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--kv-transfer-config", json.dumps(transfer_config(directory))]
        with log.open("w") as out:
            around = environment() | {"VLLM_SERVER_DEV_MODE": "1"}
            self.process = subprocess.Popen(command, cwd=ROOT, env=around, stdout=out, stderr=out)

    def call(self, path: str, body: dict[str, Any] | None = None, *, post: bool = False) -> str:
        data = json.dumps(body or {}).encode() if body is not None or post else None
        request = Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def wait(self) -> None:
        end_s = time.monotonic() + LIMIT_S / 2
        while time.monotonic() < end_s:
            assert self.process.poll() is None, "the server has ended"
            try:
                self.call("/health")
                return
            except URLError:
                threading.Event().wait(0.5)
        raise AssertionError("the server did not come up")

    def complete(self, tokens: list[int], **more: Any) -> tuple[list[str], list[float]]:
        body = {"model": more.pop("model"), "prompt": tokens, "max_tokens": 6, "temperature": 0, "logprobs": 1}
        found = json.loads(self.call("/v1/completions", body | {"ignore_eos": True} | more))
        logprobs = found["choices"][0]["logprobs"]
        return logprobs["tokens"], logprobs["token_logprobs"]

    def metric(self, name: str, label: str = "") -> float:
        text = self.call("/metrics")
        lines = [line for line in text.splitlines() if line.startswith(name + "{") and label in line]
        return sum(float(re.split(r"\s+", line)[-1]) for line in lines)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    path = tmp_path_factory.mktemp("served")
    model = str(path / "model")
    scenario("model", model)
    server = Server(model, str(path / "store"), path / "log")
    try:
        server.wait()
        yield server, model
    finally:
        server.process.terminate()
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.process.kill()
        sys.stdout.write((path / "log").read_text()[-4000:])


def test_concurrent_sessions_are_answered_as_if_computed(server: tuple[Server, str]) -> None:
    served, model = server
    prompts = {f"client {number}": words(60 + number, 130 + number) for number in range(CLIENTS)}

    def turn(session: str) -> tuple[list[str], list[float]]:
        return served.complete(prompts[session], model=model, session_id=session)

    with ThreadPoolExecutor(CLIENTS) as pool:
        expected = dict(zip(prompts, pool.map(turn, prompts), strict=True))
        end_s = time.monotonic() + 60
        while served.metric("vllm:flatcake_events_total", 'event="blocks_saved_ssd"') < 4 * CLIENTS:
            assert time.monotonic() < end_s, "saves were not published"
            served.complete(words(1, 5), model=model)
        served.call("/reset_prefix_cache", post=True)
        found = dict(zip(prompts, pool.map(turn, prompts), strict=True))
    for session in prompts:
        assert found[session][0] == expected[session][0]
        assert all(abs(a - b) < 2e-3 for a, b in zip(found[session][1], expected[session][1], strict=True))
    assert served.metric("vllm:external_prefix_cache_hits_total") >= 128 * CLIENTS
    assert served.metric("vllm:flatcake_events_total", 'event="blocks_delivered_ssd"') >= 4 * CLIENTS
    assert served.metric("vllm:prompt_tokens_cached_by_source_total", 'source="disk"') >= 128 * CLIENTS
