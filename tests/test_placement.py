"""Table 2, row by row."""

import dataclasses

import pytest

from flatcake.gva import Medium
from flatcake.placement import Decision, TablePlacement, TurnSignals

TABLE = TablePlacement(agent_tokens_min=32_768, short_reply_tokens_limit=512, shared_tokens_max=1_024)
FIRST = TurnSignals(
    turn=1, context_tokens=2_000, prior_reply_tokens=None, shared_blocks=0, block_tokens=16, dram_free_blocks=1_000
)
CHAT = dataclasses.replace(FIRST, turn=2, prior_reply_tokens=100)


def place(signals: TurnSignals, **changes: int | None) -> Decision:
    return TABLE.place(dataclasses.replace(signals, **changes))  # type: ignore[arg-type]


def test_row_1_puts_leading_shared_blocks_into_dram() -> None:
    assert place(FIRST, shared_blocks=10) == Decision(10, Medium.SSD, 4)
    assert place(CHAT, shared_blocks=10) == Decision(10, Medium.DRAM, 3)
    assert place(FIRST, shared_blocks=10, context_tokens=40_000) == Decision(10, Medium.SSD, 2)


def test_row_1_is_capped_by_tokens_and_by_room_in_dram() -> None:
    assert place(FIRST, shared_blocks=65).shared_dram_blocks == 1_024 // 16
    assert place(FIRST, shared_blocks=10, dram_free_blocks=4).shared_dram_blocks == 4
    assert place(FIRST, shared_blocks=10, dram_free_blocks=0) == Decision(0, Medium.SSD, 4)


@pytest.mark.parametrize(("context_tokens", "rule"), [(32_767, 3), (32_768, 2), (1_000_000, 2)])
def test_row_2_takes_long_contexts_to_ssd(context_tokens: int, rule: int) -> None:
    assert place(CHAT, context_tokens=context_tokens).rule == rule


@pytest.mark.parametrize(("reply", "rule", "medium"), [(0, 3, 0), (511, 3, 0), (512, 2, 1), (9_000, 2, 1)])
def test_rows_2_and_3_part_at_the_length_of_the_last_reply(reply: int, rule: int, medium: int) -> None:
    assert place(CHAT, prior_reply_tokens=reply) == Decision(0, Medium(medium), rule)


def test_row_2_comes_before_rows_3_and_4() -> None:
    assert place(FIRST, prior_reply_tokens=512).rule == 2
    assert place(FIRST, context_tokens=32_768).rule == 2
    assert place(CHAT, context_tokens=32_768).rule == 2


def test_row_4_takes_one_shots_to_ssd() -> None:
    assert place(FIRST) == Decision(0, Medium.SSD, 4)
    assert place(FIRST, prior_reply_tokens=100) == Decision(0, Medium.SSD, 4)


def test_row_4_takes_turns_with_an_unknown_reply_to_ssd() -> None:
    assert place(CHAT, prior_reply_tokens=None) == Decision(0, Medium.SSD, 4)


@pytest.mark.parametrize(("shared", "free"), [(0, 0), (10, 10), (10, 3)])
def test_row_4_takes_chat_to_ssd_when_dram_is_full(shared: int, free: int) -> None:
    assert place(CHAT, shared_blocks=shared, dram_free_blocks=free) == Decision(min(shared, free), Medium.SSD, 4)
