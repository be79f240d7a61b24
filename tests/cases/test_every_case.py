"""All twenty cases are there, each under its own name."""

import re
from pathlib import Path

CASES = 20


def test_every_case_has_a_test() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert set(re.findall(r"^def test_b(\d\d)_", text, re.M)) == {f"{number:02d}" for number in range(1, CASES + 1)}
