"""The end of the interpreter: with transfers stuck, threads alive, and nobody who closed anything."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WAIT_S = 120
"""Far beyond what an end takes; reaching it is a hang."""

SCRIPT = """
import sys
from flatcake.gva import Medium
from flatcake.io.memory import Fault
from tests.stores import TURNS, Memory, make_config, make_store, make_tokens, memory_engine, save, shuffled
from tests.stores import simple_layout

how, directory = sys.argv[1:]
memory = Memory(simple_layout())
store = make_store(memory, make_config(memory, [directory] if how == "idle" else ()))
tokens = make_tokens("a", 6)
assert save(store, memory, "s", tokens, TURNS[Medium.SSD]).written_blocks == 6
if how != "idle":
    engine = memory_engine(store, Medium.SSD)
    engine.inject(Fault(kind="hang"))
    lease = store.lease(store.match(tokens))
    handle = store.restore(lease, shuffled(memory, 6))
    while not engine.held:
        pass
if how == "closed":
    assert not store.close(), "a close with a stuck read cannot be clean"
    assert handle.result().reason == "closed"
print("over", flush=True)
if how == "raises":
    raise RuntimeError("the engine's own")
"""


@pytest.mark.parametrize("how", ["idle", "stuck", "closed", "raises"])
def test_the_interpreter_ends(how: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, str(tmp_path)],
        cwd=ROOT,
        timeout=WAIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "over" in done.stdout, done.stderr
    assert (done.returncode == 0) == (how != "raises"), done.stderr
