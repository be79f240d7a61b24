"""Whose turn a request is, and which: what is said, and what stands in where nothing is."""

from typing import Any

from flatcake.engines.vllm.signals import Sessions
from tests.engines.vllm.toy import TOKENS, ToyRequest, prompt


def ask(name: str, tokens: list[int], **more: Any) -> ToyRequest:
    return ToyRequest(name, tokens, **more)


def finish(sessions: Sessions, request: ToyRequest, reply: int = 5) -> str:
    request.num_output_tokens = reply
    session = sessions.name(request)
    sessions.finish(session, request, request.num_tokens // TOKENS)
    return session


def test_what_a_request_says_wins() -> None:
    sessions = Sessions(10)
    tokens = prompt(1, 12)
    assert sessions.name(ask("1", tokens, session_id="s")) == "s"
    assert sessions.name(ask("1", tokens, kv_transfer_params={"session_id": "p"})) == "p"
    assert sessions.name(ask("1", tokens, session_id="s", kv_transfer_params={"session_id": "p"})) == "s"
    said = ask("1", tokens, session_id="s", kv_transfer_params={"turn": 7, "shared_tokens": 8})
    turn = sessions.turn("s", said, 12)
    assert (turn.index, turn.shared_tokens, turn.context_tokens, turn.prior_reply_tokens) == (7, 8, 12, None)


def test_nonsense_in_hints_is_ignored() -> None:
    for value in (0, -1, "2", 1.5, True, None):
        said = ask("1", prompt(1, 12), kv_transfer_params={"turn": value, "shared_tokens": value})
        turn = Sessions(10).turn("s", said, 12)
        assert (turn.index, turn.shared_tokens) == (1, 0)


def test_turns_and_replies_are_counted_by_session() -> None:
    sessions = Sessions(10)
    for turn, reply in enumerate((5, 600, 3), 1):
        request = ask(f"{turn}", prompt(1, 12), session_id="s")
        found = sessions.turn("s", request, 12)
        assert found.index == turn and found.prior_reply_tokens == (None, 5, 600)[turn - 1]
        finish(sessions, request, reply)


def test_a_request_that_begins_with_a_finished_one_continues_it() -> None:
    sessions = Sessions(10)
    first = prompt(1, 14)
    session = finish(sessions, ask("a", first))
    second = first + prompt(2, 10)
    assert sessions.name(ask("b", second)) == session
    assert finish(sessions, ask("b", second)) == session
    assert sessions.turn(session, ask("c", second + prompt(3, 4)), 28).index == 3
    assert sessions.name(ask("d", first[:8] + prompt(4, 10))) == "request d", "a shared prompt is no continuation"
    assert sessions.name(ask("e", second, cache_salt="other")) == "request e"


def test_tenants_that_name_their_sessions_alike_stay_apart_and_the_salt_is_not_shown() -> None:
    sessions = Sessions(10)
    names = {sessions.name(ask("1", prompt(1, 8), session_id="1", cache_salt=salt)) for salt in ("secret a", "b", None)}
    assert len(names) == 3 and not any("secret" in name for name in names)


def test_what_is_remembered_is_bounded() -> None:
    sessions = Sessions(3)
    for number in range(10):
        finish(sessions, ask(f"{number}", prompt(number, 12)))
    assert len(sessions._sessions) == len(sessions._ends) == 3
    assert sessions.name(ask("x", prompt(9, 16)[:12])) == "request 9"
    assert sessions.name(ask("x", prompt(1, 12))) == "request x"
