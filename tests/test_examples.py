"""The examples run, do what they say, and stay short enough to be copied."""

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
COPIED_LINES_MAX = 40


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_lines(source: str, names: set[str]) -> int:
    """Lines of some top-level definitions, blank ones and docstrings apart."""
    count, lines = 0, source.splitlines()
    for node in ast.parse(source).body:
        if getattr(node, "name", "") in names:
            names = names - {node.name}  # type: ignore[attr-defined]
            docs = {
                line
                for inner in ast.walk(node)
                if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)
                for line in range(inner.lineno, (inner.end_lineno or inner.lineno) + 1)
            }
            body = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            count += sum(bool(lines[line - 1].strip()) and line not in docs for line in body)
    assert not names, f"the example lacks {names}"
    return count


def test_the_serving_loop_serves_every_request_and_restores_what_was_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restored = load("serving_loop").main(str(tmp_path))
    # Four sessions of 200 + 32 n tokens that grow by 64 a turn, in blocks of 32: turns two and three find all before.
    assert restored == sum((200 + 32 * n + 64 * turn) // 32 * 32 for n in range(4) for turn in (0, 1))
    assert capsys.readouterr().out == f"12 requests served; {restored} tokens came from the store\n"


def test_the_serving_loop_is_short_enough_to_copy() -> None:
    source = (EXAMPLES / "serving_loop.py").read_text()
    assert code_lines(source, {"FreePages", "serve_next"}) <= COPIED_LINES_MAX


def test_the_stand_in_notices_a_wrong_prefix() -> None:
    example = load("serving_loop")
    pool = example.torch.zeros(example.LAYERS, 2, 8, example.PAGE_TOKENS, example.HEADS, example.DIM)
    forward = example.stand_in(pool)
    forward(0, [3, 4, 5], 0, [7])
    forward(0, [3, 4, 5, 6], 3, [7])
    with pytest.raises(AssertionError, match="not my prefix"):
        forward(0, [3, 9, 5, 6], 3, [7])
