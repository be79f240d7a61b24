"""Time to first token of vLLM on the CPU for one long prompt: computed, and restored from DRAM and from SSD.

    .venv-engines/bin/python profiles/vllm_ttft.py --directory DIR --record

Run from the root, in the venv of `make test-engines`.  The three take turns, so that whatever else the machine does
hits all of them.  vLLM's own prefix cache is emptied before each.  The model is small and its weights are random: the
ratio says what the path costs, not what a real model gains.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.engines.vllm.engine import ENVIRONMENT, Ask, Engine, make_model, words

BIG = {"ssd_bytes_max": "1GiB", "pool_file_bytes": "256MiB", "dram_bytes_max": "512MiB"}


def time_first_token(engine: Engine, ask: Ask) -> tuple[float, int]:
    """Seconds until the first token, and the tokens that came from the store."""
    engine.forget()
    begin_s = time.perf_counter()
    (output,) = engine.llm.generate([engine.prompt(ask)], [engine.params(ask)], use_tqdm=False)
    return time.perf_counter() - begin_s, output.num_cached_tokens


def measure(engine: Engine, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    ssd, dram = words(1, tokens), words(2, tokens)
    engine.one(ssd, "ssd", new=1)
    engine.one(words(3, 5), "dram", new=1)  # A short first turn: the second one goes to DRAM.
    engine.one(dram, "dram", new=1)
    cases = {
        "computed": lambda turn: Ask(ssd, salt=f"salt {turn}", new=1),
        "from DRAM": lambda turn: Ask(dram, "dram", new=1),
        "from SSD": lambda turn: Ask(ssd, "ssd", new=1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(-1, rounds):  # The first round only warms up.
        for name, ask in cases.items():
            taken_s, cached = time_first_token(engine, ask(turn))
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
    engine = Engine(model, f"{args.directory}/store", max_model_len=args.tokens + 64, extra={"capacity": BIG})
    figures = measure(engine, args.tokens, args.rounds)
    engine.close()
    if args.record:
        from common import append_rows, device_name

        append_rows("vllm_ttft", f"python profiles/vllm_ttft.py --tokens {args.tokens}", device_name(), figures)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
