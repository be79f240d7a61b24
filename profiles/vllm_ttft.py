"""Time to first token of vLLM on the CPU for one long prompt: computed, and restored from DRAM and from SSD.

    .venv-engines/bin/python profiles/vllm_ttft.py --directory DIR --record

Run from the root, in the venv of `make test-engines`.  The engine runs in processes of its own, as by default.  The
three take turns, so that whatever else the machine does hits all of them.  vLLM's own prefix cache is emptied before
each.  The model is small and its weights are random: the ratio says what the path costs, not what a real model gains.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engines.vllm.engine import ENVIRONMENT, engine_options, make_model, words

BIG = {"ssd_bytes_max": "1GiB", "pool_file_bytes": "256MiB", "dram_bytes_max": "512MiB"}


class Engine:
    """vLLM, asked one request at a time."""

    def __init__(self, model: str, directory: str, tokens: int) -> None:
        from vllm import LLM

        options = engine_options(directory, capacity=BIG) | {"max_model_len": tokens + 64}
        self._llm = LLM(model=model, **options)

    def first_token(self, tokens: list[int], session: str = "", salt: str = "") -> tuple[float, int]:
        """Seconds until the first token, and the tokens that came from the store."""
        from vllm import SamplingParams

        while not self._llm.reset_prefix_cache():  # Blocks are held until they are saved.
            time.sleep(0.01)
        extra = {"kv_transfer_params": {"session_id": session}} if session else None
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args=extra)
        prompt = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
        begin_s = time.perf_counter()
        (output,) = self._llm.generate([prompt], [params], use_tqdm=False)
        return time.perf_counter() - begin_s, output.num_cached_tokens or 0


def measure(engine: Engine, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    ssd, dram = words(1, tokens), words(2, tokens)
    engine.first_token(ssd, "ssd")
    engine.first_token(words(3, 5), "dram")  # A short first turn: the second one goes to DRAM.
    engine.first_token(dram, "dram")
    cases: dict[str, Callable[[int], tuple[float, int]]] = {
        "computed": lambda turn: engine.first_token(ssd, salt=f"salt {turn}"),
        "from DRAM": lambda _: engine.first_token(dram, "dram"),
        "from SSD": lambda _: engine.first_token(ssd, "ssd"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(-1, rounds):  # The first round only warms up.
        for name, ask in cases.items():
            taken_s, cached = ask(turn)
            assert (cached > 0.9 * tokens) == (name != "computed"), (name, cached)
            if turn >= 0:
                seconds[name].append(taken_s)
    base = statistics.median(seconds["computed"])
    return {
        name: {"median_ms": statistics.median(each) * 1e3, "ratio": statistics.median(each) / base}
        for name, each in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="for the store and the model; on the disk to be measured")
    parser.add_argument("--tokens", type=int, default=2049, help="prompt length")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--record", action="store_true", help="append rows to profiles/results/vllm_ttft.csv")
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != ENVIRONMENT["OMP_NUM_THREADS"]:  # Read when torch is loaded: start anew.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    model = f"{args.directory}/model-{args.layers}-{args.hidden}"
    if not Path(model).exists():
        make_model(model, layers=args.layers, hidden=args.hidden)
    figures = measure(Engine(model, f"{args.directory}/store", args.tokens), args.tokens, args.rounds)
    if args.record:
        from common import append_rows, device_name

        append_rows("vllm_ttft", f"python profiles/vllm_ttft.py --tokens {args.tokens}", device_name(), figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
