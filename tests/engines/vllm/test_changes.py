"""What is told of stored and removed blocks is what the index holds."""

from pathlib import Path

import pytest

from flatcake.engines.vllm.changes import Changes, Removed, Stored
from flatcake.gva import Medium
from tests.engines.vllm.toy import SIZES, TOKENS, ToyEngine, ToyRequest, hashes, prompt
from tests.fakes import FaultyFiles

pytestmark = pytest.mark.usefixtures("no_leaks")


class Listener(ToyRequest):
    """A request that has its tokens, as vLLM's."""

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens


def listening(directory: Path, **settings: object) -> ToyEngine:
    engine = ToyEngine(directory, **settings)  # type: ignore[arg-type]
    engine.side.saves.changes = Changes(engine.side.coordinator.catalog.space.index, engine.store_tokens)
    return engine


def take(engine: ToyEngine) -> list[Stored | Removed]:
    assert engine.side.saves.changes is not None
    engine.step()  # What is settled is taken with the output of a step.
    return engine.side.saves.changes.take()


def test_a_turn_is_told_as_one_stretch_a_medium(tmp_path: Path) -> None:
    engine = listening(tmp_path)
    tokens = prompt(1, 18)
    engine.run(Listener("1", tokens, session_id="s"))
    (first,) = take(engine)
    assert first == Stored(
        medium=Medium.SSD, digests=hashes(tokens), parent=None, tokens=tokens[:16], session="s", adapter=None
    )
    longer = tokens + prompt(2, 14)
    engine.run(Listener("2", longer, session_id="s"))
    (second,) = take(engine)
    assert isinstance(second, Stored) and second.medium is Medium.DRAM
    assert second.parent == hashes(longer)[3] and second.digests == hashes(longer)[4:] and second.tokens == longer[16:]
    engine.close()


def test_what_moves_to_dram_leaves_ssd(tmp_path: Path) -> None:
    engine = listening(tmp_path)
    shared = prompt(1, 16)
    for name in "abc":
        engine.run(Listener(name, shared + prompt(ord(name), 8), session_id=name))
    changes = take(engine)
    moved = [each.digests for each in changes if isinstance(each, Stored) and each.medium is Medium.DRAM]
    assert moved and moved[0] == hashes(shared)
    assert Removed(medium=Medium.SSD, digests=hashes(shared)) in changes
    engine.close()


def test_what_is_forgotten_is_told_once(tmp_path: Path) -> None:
    engine = listening(tmp_path)
    tokens = prompt(1, 18)
    engine.run(Listener("1", tokens))
    take(engine)
    engine.side.reset()
    assert take(engine) == [Removed(medium=Medium.SSD, digests=hashes(tokens))]
    engine.run(Listener("2", tokens))
    assert [type(each) for each in take(engine)] == [Stored]
    engine.close()


def test_a_save_that_failed_is_not_told_and_not_remembered(tmp_path: Path) -> None:
    files = FaultyFiles()
    engine = listening(tmp_path, files=files)
    files.fail("write", *[28] * 50)
    engine.run(Listener("1", prompt(1, 18)))
    assert take(engine) == [] and engine.side.saves.changes is not None and not engine.side.saves.changes._known
    engine.close()


def test_memory_is_bounded_by_what_is_stored(tmp_path: Path) -> None:
    engine = listening(tmp_path, capacity=SIZES | {"ssd_bytes_max": "4MiB"})
    for number in range(40):
        engine.run(Listener(f"{number}", prompt(number, 60)))
    stored: set[tuple[Medium, bytes]] = set()
    for change in take(engine):
        each = {(change.medium, digest) for digest in change.digests}
        stored = stored | each if isinstance(change, Stored) else stored - each
    index = engine.side.coordinator.catalog.space.index
    assert engine.side.saves.changes is not None
    assert len(stored) == len(index) == len(engine.side.saves.changes._known)
    assert len(index) < 40 * 60 // TOKENS, "nothing was reclaimed"
    engine.close()
