"""The cases of `bench_gpu`: each returns named figures."""

import itertools
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import bench_scatter
import numpy as np
import torch
from gpu_store import (
    CHAT,
    DEVICE,
    GQA,
    MLA,
    BareWrite,
    LargeRead,
    Model,
    opened,
    pinned_copy,
    restore_once,
    seconds,
    sequence,
)

import flatcake
from flatcake.kernels.kvtable import Tuning
from flatcake.units import DIRECT_BYTES, GiB, MiB, align_up


def spin_case(root: str, rounds: int) -> dict[str, float]:
    """What a thread that only counts loses while 32 K tokens are restored, and what the restore loses to it.

    Its progress is its processor time in a second, since it waits for nothing but the interpreter; what it counts in a
    second also depends on how fast the processor is at the moment, which differs by a third.  Each restore is held
    against the mean of the times before and after it, whose differences are the noise.
    """
    tokens, stop = 32_768, threading.Event()

    def spin() -> None:
        counted = 0
        while not stop.is_set():
            counted += 1

    def progress(work: Callable[[], object]) -> float:
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        used_s, started = time.clock_gettime(clock), time.perf_counter()
        work()
        return (time.clock_gettime(clock) - used_s) / (time.perf_counter() - started)

    with opened(root, GQA, tokens) as (store, _):
        pages = torch.randperm(tokens // GQA.page_tokens).numpy()
        assert store.save("s", sequence(tokens), pages).published()
        match = store.match(sequence(tokens))
        took: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds):
            restore_once(store, match, len(pages), took)
        alone_s = statistics.median(took["restore"][1:])
        thread = threading.Thread(target=spin)
        thread.start()
        spun = defaultdict[str, list[float]](list)
        free, busy = [progress(lambda: time.sleep(0.3))], []
        for _ in range(2 * rounds + 1):
            busy.append(progress(lambda: restore_once(store, match, len(pages), spun)))
            free.append(progress(lambda: time.sleep(0.3)))
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(usual_s / 10)
        eager = defaultdict[str, list[float]](list)
        for _ in range(rounds):
            restore_once(store, match, len(pages), eager)
        sys.setswitchinterval(usual_s)
        stop.set()
        thread.join()
    around = list(itertools.pairwise(free))
    return {
        "spinner_loses": statistics.median(1 - 2 * used / sum(pair) for used, pair in zip(busy, around, strict=True)),
        "noise": statistics.median(abs(1 - after / before) for before, after in around),
        "restore_alone_ms": alone_s * 1e3,
        "restore_beside_spinner_ms": statistics.median(spun["restore"]) * 1e3,
        "restore_beside_spinner_switching_faster_ms": statistics.median(eager["restore"]) * 1e3,
    }


def concurrent_case(root: str, count: int, rounds: int) -> dict[str, float]:
    """`count` restores of 2 K tokens at once, in all against one after another."""
    tokens = 2_048
    with opened(root, GQA, tokens * count) as (store, _):
        order = np.random.default_rng(0).permutation(tokens * count // GQA.page_tokens)
        tables = np.split(order, count)
        prompts = [np.random.default_rng(100 + i).integers(0, 32_000, tokens) for i in range(count)]
        for i, (prompt, table) in enumerate(zip(prompts, tables, strict=True)):
            assert store.save(f"s{i}", prompt, table).published()
        leases = [store.lease(store.match(prompt), hold_ns=10**12) for prompt in prompts]

        def together() -> None:
            for restore in [store.restore(lease, table) for lease, table in zip(leases, tables, strict=True)]:
                assert restore.result().tokens == tokens

        def in_turn() -> None:
            for lease, table in zip(leases, tables, strict=True):
                assert store.restore(lease, table).result().tokens == tokens

        pairs = [(seconds(together), seconds(in_turn)) for _ in range(rounds + 2)][2:]
        return {
            "gb_s": tokens * count * GQA.token_bytes * GQA.layers / statistics.median(a for a, _ in pairs) / 1e9,
            "to_one_at_a_time": statistics.median(b / a for a, b in pairs),
            "window_mib": store.stats().window_bytes / MiB,
        }


def restore_case(
    root: str, model: Model, tokens: int, rounds: int, *, dram: bool = False, is_disk: bool = False, **io: object
) -> dict[str, float]:
    """One sequence restored into shuffled pages, against the ceilings."""
    tokens = tokens // model.block_tokens * model.block_tokens
    with opened(root, model, tokens, dram, **io) as (store, _):
        pages = torch.randperm(tokens // model.page_tokens).numpy()
        result = store.save("s", sequence(tokens), pages, CHAT if dram else flatcake.Turn()).result()
        assert result is not None and not result.reason, result
        match = store.match(sequence(tokens))
        assert match.tokens == tokens, match.tokens
        large = None if dram else LargeRead(root, match.size_bytes)
        copy = pinned_copy()
        took: dict[str, list[float]] = defaultdict(list)
        for _ in range(rounds + 2):
            if large is not None and not is_disk:  # See `LargeRead.SETTINGS`.
                restore_once(store, match, len(pages), defaultdict(list))
            restore_once(store, match, len(pages), took)
            took["copy"].append(seconds(copy))
            if large is not None:
                took["large"].append(large.seconds(warm=not is_disk))
        figures = {
            "restore_gb_s": match.size_bytes / statistics.median(took["restore"][2:]) / 1e9,
            "copy_gb_s": GiB / statistics.median(took["copy"][2:]) / 1e9,
            "first_layer_ms": statistics.median(took["first_layer"][2:]) * 1e3,
            "pump_us_a_tile": statistics.median(took["pump_tile"][2:]) * 1e6,
            "window_mib": store.stats().window_bytes / MiB,
        }
        figures["to_copy"] = figures["restore_gb_s"] / figures["copy_gb_s"]
        if large is not None:
            figures["large_gb_s"] = match.size_bytes / statistics.median(took["large"][2:]) / 1e9
            pairs = zip(took["large"][2:], took["restore"][2:], strict=True)
            figures["to_large_read"] = statistics.median(a / b for a, b in pairs)
            large.close()
        print(f"# io_path {store.stats().io_path} ({store.stats().io_reason})", file=sys.stderr)
        return figures


def turns_case(root: str, rounds: int) -> dict[str, float]:
    """A session of 251 turns of 871 tokens: lanes against a segment for each turn, and against kvikio's bare reads.

    The store packs many small reads in one copy to the GPU; bare, each of them is read straight to the GPU.  Segments
    are read as in the paper, each by itself, which a bound below a slot brings about; and as the store does otherwise.
    """
    turns, turn_tokens = 251, 871
    tokens = turns * turn_tokens // MLA.block_tokens * MLA.block_tokens
    figures: dict[str, float] = {}
    alone = {"read_bytes_max": 8 * MiB}
    kinds = ("lanes", "lanes", {}), ("segments", "segments", alone), ("segments_at_once", "segments", {})
    for kind, layout, io in kinds:
        with opened(root, MLA, tokens, layout=layout, **io) as (store, _):
            pages = torch.randperm(tokens // MLA.page_tokens).numpy()
            for turn in range(1, turns + 1):
                prefix = sequence(tokens)[: turn * turn_tokens]
                assert store.save("s", prefix, pages, flatcake.Turn(index=turn)).published()
            match, took = store.match(sequence(tokens)), defaultdict[str, list[float]](list)
            assert match.tokens == tokens, match.tokens
            for _ in range(rounds + 1):
                restore_once(store, match, len(pages), took)
            figures[f"{kind}_gb_s"] = match.size_bytes / statistics.median(took["restore"][1:]) / 1e9
            figures[f"{kind}_reads"] = took["reads"][-1]
    figures["lanes_to_segments"] = figures["lanes_gb_s"] / figures["segments_gb_s"]
    part_bytes = align_up(turn_tokens * MLA.token_bytes, DIRECT_BYTES)
    bare = LargeRead(root, part_bytes * turns * MLA.layers)
    took_s = statistics.median([bare.each_seconds(part_bytes) for _ in range(rounds + 1)][1:])
    bare.close()
    figures["bare_read_a_segment_gb_s"] = bare.size_bytes / took_s / 1e9
    figures["lanes_to_bare_reads"] = figures["lanes_gb_s"] / figures["bare_read_a_segment_gb_s"]
    return figures


def matmul_case(root: str, rounds: int, percent: int) -> dict[str, float]:
    """What a large matmul loses while restores run beside it, against the spread of the matmul alone."""
    tokens, size, repeats = 32_768, 8_192, 24
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(a, b)

    with opened(root, GQA, tokens, scatter_sm_percent=percent) as (store, _):
        pages = torch.randperm(tokens // GQA.page_tokens).numpy()
        assert store.save("s", sequence(tokens), pages).published()
        match, stop = store.match(sequence(tokens)), threading.Event()

        def restore() -> None:
            while not stop.is_set():
                with store.lease(match) as lease:
                    assert store.restore(lease, pages, stream=torch.cuda.Stream()).result().tokens == tokens

        def beside() -> float:
            stop.clear()
            thread = threading.Thread(target=restore)
            thread.start()
            time.sleep(0.05)
            started = time.perf_counter()
            multiply()
            torch.cuda.current_stream().synchronize()
            took_s = time.perf_counter() - started
            stop.set()
            thread.join()
            return took_s

        multiply()
        found = [(seconds(multiply), beside(), seconds(multiply)) for _ in range(rounds)]
    return {
        "beside_restores": statistics.median(2 * b / (a + c) for a, b, c in found) - 1,
        "noise": statistics.median(abs(2 * (a - c) / (a + c)) for a, _, c in found),
        "matmul_ms": statistics.median(a for a, _, _ in found) * 1e3,
    }


def save_case(root: str, rounds: int, tokens: int, *, dram: bool = False) -> dict[str, float]:
    """Saves, against a pinned copy of as many bytes from the device, and for files against a bare write of them."""
    rounds, size_bytes = min(rounds, 4), tokens * GQA.token_bytes * GQA.layers
    with opened(root, GQA, tokens * (rounds + 1), dram) as (store, _):
        pages = torch.randperm(tokens // GQA.page_tokens).numpy()
        bare = BareWrite(root, size_bytes, 1 if dram else rounds + 1)
        took: dict[str, list[float]] = defaultdict(list)
        for number in range(rounds + 1):
            prompt = np.random.default_rng(number).integers(0, 32_000, tokens)
            found: list[object] = []

            def save(prompt: np.ndarray = prompt, found: list[object] = found, number: int = number) -> None:
                turn = CHAT if dram else flatcake.Turn()
                found.append(store.save(f"s{number}", prompt, pages, turn).result())

            took["save"].append(seconds(save))
            assert found[0] is not None and not found[0].reason, found  # type: ignore[attr-defined]
            took["copy"].append(seconds(bare.copy))
            if not dram:
                took["write"].append(seconds(bare.write))
        bare.close()
    rate = {name: size_bytes / statistics.median(values[1:]) / 1e9 for name, values in took.items()}
    figures = {"save_gb_s": rate["save"], "d2h_gb_s": rate["copy"]}
    if dram:
        figures["to_d2h"] = rate["save"] / rate["copy"]
    else:
        figures["write_gb_s"] = rate["write"]
        figures["to_write"] = rate["save"] / rate["write"]
    return figures


def scatter_case(page_bytes: int, rounds: int) -> dict[str, float]:
    """Kernels against a device copy of 1 GiB."""
    sizes = bench_scatter.Sizes(
        page_bytes=page_bytes,
        row_bytes=page_bytes,
        slot_bytes=bench_scatter.SLOT_MIB * MiB,
        slots=bench_scatter.SLOTS,
        components=bench_scatter.COMPONENTS,
    )
    setup = bench_scatter.Setup(sizes, Tuning(), 0, DEVICE)
    rows = bench_scatter.measure(setup, rounds, True, "", ("", ""))
    return {f"{row.provider.strip()} of_copy": row.ratio for row in rows}
