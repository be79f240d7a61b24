import numpy as np

from flatcake.gva import Medium
from flatcake.index import MISS
from flatcake.messages import KeyArray
from flatcake.placement import Decision, TablePlacement, Turn, TurnSignals
from flatcake.prefix import prefix_of
from flatcake.reserve import Reservation, SaveRequest, reserve_turn
from flatcake.scopes import Scope
from flatcake.space import Space
from tests.builders import AGENT, BLOCK_TOKENS, CHAT, ONE_SHOT, make_keys, make_space

TABLE = TablePlacement(agent_tokens_min=1 << 40, short_reply_tokens_limit=512, shared_tokens_max=1 << 30)


class Recorder:
    """A placement that keeps what it was told."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.signals: list[TurnSignals] = []

    def place(self, signals: TurnSignals) -> Decision:
        self.signals.append(signals)
        return self.decision


def request_of(space: Space, session: str, keys: KeyArray, turn: Turn) -> SaveRequest:
    gvas = space.index.lookup(keys)
    stored = np.flatnonzero(gvas != MISS)
    return SaveRequest(session, turn, gvas, prefix_of(gvas[stored], stored, space), BLOCK_TOKENS)


def store(space: Space, session: str, keys: KeyArray, turn: Turn = ONE_SHOT) -> Reservation:
    """Reserve a turn by Table 2 and publish it."""
    request, pinned = request_of(space, session, keys, turn), list[Scope]()
    reserved = reserve_turn(request, space, TABLE, pinned, 0)
    assert reserved is not None
    at = 0
    for part in reserved.slots:
        blocks = reserved.blocks[at : at + part.count]
        at += part.count
        space.index.publish(keys[blocks], space.gvas(part))
        part.scope.record(keys[blocks], space.gvas(part))
    for scope in pinned:
        space.unpin(scope)
    return reserved


def places(reserved: Reservation) -> list[tuple[str | None, str, int]]:
    return [(part.scope.session, part.extent.medium.name, part.count) for part in reserved.slots]


def test_only_missing_blocks_are_reserved_in_their_order() -> None:
    space, keys = make_space(), make_keys("a", 6)
    assert places(store(space, "s", keys[:3])) == [("s", "SSD", 3)]
    reserved = store(space, "s", keys)
    assert reserved.blocks.tolist() == [3, 4, 5] and places(reserved) == [("s", "SSD", 3)]
    assert store(space, "s", keys).slots == []
    space.check()


def test_signals_are_what_is_known_of_the_turn() -> None:
    space, keys = make_space(), make_keys("a", 6)
    store(space, "other", keys[:2])
    placement = Recorder(Decision(0, Medium.SSD, 4))
    turn = Turn(index=3, prior_reply_tokens=7, shared_tokens=4 * BLOCK_TOKENS + 1)
    pinned: list[Scope] = []
    reserve_turn(request_of(space, "s", keys, turn), space, placement, pinned, 0)
    assert placement.signals == [
        TurnSignals(
            turn=3,
            context_tokens=6 * BLOCK_TOKENS,
            prior_reply_tokens=7,
            shared_blocks=4,
            block_tokens=BLOCK_TOKENS,
            dram_free_blocks=7,
        )
    ]
    reserve_turn(request_of(space, "s", keys, Turn(context_tokens=5_000)), space, placement, pinned, 0)
    assert (placement.signals[1].context_tokens, placement.signals[1].shared_blocks) == (5_000, 2)


def test_the_callers_hint_puts_a_first_writers_prompt_into_dram() -> None:
    space = make_space()
    reserved = store(space, "s", make_keys("a", 5), Turn(shared_tokens=2 * BLOCK_TOKENS))
    assert places(reserved) == [(None, "DRAM", 2), ("s", "SSD", 3)]


def test_a_prompt_found_shared_goes_to_dram_once() -> None:
    space, prompt = make_space(), make_keys("prompt", 3)
    first, second = (np.concatenate([prompt, make_keys(name, 2)]) for name in "ab")
    assert places(store(space, "a", first)) == [("a", "SSD", 5)]
    reserved = store(space, "b", second)
    assert places(reserved) == [(None, "DRAM", 3), ("b", "SSD", 2)] and reserved.blocks.tolist() == [0, 1, 2, 3, 4]
    assert places(store(space, "a", np.concatenate([first, make_keys("more", 1)]))) == [("a", "SSD", 1)]


def test_nothing_before_the_first_block_is_written() -> None:
    space, prompt = make_space(), make_keys("prompt", 3)
    first, second = (np.concatenate([prompt, make_keys(name, 4)]) for name in "ab")
    store(space, "a", first[:3])
    reserved = store(space, "b", second, Turn(first_block=5))
    assert places(reserved) == [("b", "SSD", 2)] and reserved.blocks.tolist() == [5, 6]
    reserved = store(space, "b", second, Turn(first_block=1))
    assert places(reserved) == [(None, "DRAM", 2), ("b", "SSD", 2)] and reserved.blocks.tolist() == [1, 2, 3, 4]
    assert places(store(space, "c", second, Turn(first_block=9))) == []


def test_a_session_has_one_scope_a_medium() -> None:
    space, keys = make_space(), make_keys("a", 8)
    for blocks, turn in ((2, ONE_SHOT), (4, CHAT), (6, AGENT), (8, CHAT)):
        store(space, "s", keys[:blocks], turn)
    assert sorted((scope.medium.name, scope.blocks) for scope in space.scopes) == [("DRAM", 4), ("SSD", 4)]


def test_a_turn_spills_to_ssd_when_dram_is_full() -> None:
    space = make_space(dram_files=1, file_bytes=1 << 18)
    store(space, "s", make_keys("a", 20), CHAT)
    reserved = store(space, "t", make_keys("b", 20), CHAT)
    assert reserved.spilled and places(reserved) == [("t", "SSD", 20)]
    assert {scope.session for scope in space.scopes} == {"s", "t"}
    space.check()


def test_a_store_of_one_medium_puts_everything_there_and_reclaims_it() -> None:
    space = make_space(ssd_files=0, file_bytes=1 << 18)
    assert places(store(space, "s", make_keys("a", 20), ONE_SHOT)) == [("s", "DRAM", 20)]
    assert places(store(space, "t", make_keys("b", 20), ONE_SHOT)) == [("t", "DRAM", 20)]
    assert {scope.session for scope in space.scopes} == {"t"}, "the older one made room: there is nowhere to spill to"
    space.check()


def test_no_room_anywhere_takes_nothing() -> None:
    space = make_space(ssd_files=1, file_bytes=1 << 18)
    pinned: list[Scope] = []
    turn = Turn(shared_tokens=4 * BLOCK_TOKENS)
    assert reserve_turn(request_of(space, "s", make_keys("a", 60), turn), space, TABLE, pinned, 0) == "no room"
    assert not sum(table.used_bytes for table in space.tables.values())
    for scope in pinned:
        space.unpin(scope)
    assert not len(space.scopes)
    space.check()
