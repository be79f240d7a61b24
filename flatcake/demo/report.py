"""What the demo shows: a row a turn, a table of them, and one JSON object at the end.

Pure.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from flatcake.units import format_bytes

HEAD: tuple[str, ...] = (
    *("session", "turn", "prompt", "restored", "dram", "ssd", "reads", "bytes", "amplification"),
    *("restored ms", "recomputed ms", "max diff", "verdict"),
)
"""Of the table.  Tokens; read commands over all layers; milliseconds to the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Logits of the restored path beside those of a full recompute.

    Keys know their positions and attention is a sum over tokens, so pages that are exchanged within one prefix do
    not show here; everything else does.
    """

    logit_diff: float
    """Largest difference; infinite where one of them is no number."""
    tolerance: float
    """Differences up to this are rounding: the two paths add in another order."""
    same_tokens: bool
    """Whether both would have said the same, ties within the tolerance aside."""

    @property
    def ok(self) -> bool:
        return self.same_tokens and self.logit_diff <= self.tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """One turn of one session."""

    session: str
    turn: int
    prompt_tokens: int
    expected_tokens: int
    """Leading tokens of the prompt that the store was given before, in whole blocks."""
    restored_tokens: int
    dram_tokens: int
    """Of the restored ones, those that lay in DRAM."""
    ssd_tokens: int
    reads: int
    """Read commands, over all layers."""
    read_bytes: int
    block_bytes: int
    """Bytes of the restored blocks, padding included."""
    restored_ms: float
    """From the request to its first token, with the prefix restored."""
    recomputed_ms: float
    """The same with everything recomputed."""
    comparison: Comparison
    reason: str
    """What the store said when it delivered or saved less than all; empty when all is well."""

    @property
    def amplification(self) -> float:
        """Bytes read for each byte of the restored blocks."""
        return self.read_bytes / self.block_bytes if self.block_bytes else 1.0

    @property
    def ok(self) -> bool:
        """The logits agree, and everything that was stored came back."""
        return self.comparison.ok and self.restored_tokens == self.expected_tokens and not self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRow:
    """What became of stored bytes that were flipped on purpose, on one medium."""

    medium: str
    caught: bool
    """With verification off: wrong bytes were delivered, and the comparison of logits failed."""
    refused: bool
    """With verification on: the store delivered nothing from the flipped block on, and the logits agreed."""
    caught_diff: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A whole run; its control is left out when the comparison has failed already."""

    rows: Sequence[TurnRow]
    control: Sequence[ControlRow]
    device: str
    dtype: str
    io_path: Mapping[str, str]
    """By medium, the engine that moved its bytes."""
    io_reason: str

    @property
    def tokens_restored(self) -> int:
        return sum(row.restored_tokens for row in self.rows)

    @property
    def media(self) -> dict[str, int]:
        """Restored tokens by medium."""
        return {"dram": sum(row.dram_tokens for row in self.rows), "ssd": sum(row.ssd_tokens for row in self.rows)}

    @property
    def max_logit_diff(self) -> float:
        return max(row.comparison.logit_diff for row in self.rows)

    @property
    def control_caught(self) -> bool:
        return bool(self.control) and all(row.caught for row in self.control)

    @property
    def control_refused(self) -> bool:
        return bool(self.control) and all(row.refused for row in self.control)

    @property
    def faults(self) -> list[str]:
        """Why the run is not a success; empty when it is."""
        faults = [f"{row.session} turn {row.turn}: {_fault(row)}" for row in self.rows if not row.ok]
        faults += [f"nothing was restored from {name}" for name, tokens in self.media.items() if not tokens]
        faults += [f"control: flipped bytes on {row.medium} went unnoticed" for row in self.control if not row.caught]
        faults += [
            f"control: flipped bytes on {row.medium} were not refused" for row in self.control if not row.refused
        ]
        return faults


def format_json(summary: Summary) -> str:
    """The run as one line of JSON; numbers that are not finite become null."""
    rows = [
        {
            **{name: value for name, value in asdict(row).items() if name != "comparison"},
            "amplification": row.amplification,
            "max_logit_diff": _finite(row.comparison.logit_diff),
            "tolerance": row.comparison.tolerance,
            "same_tokens": row.comparison.same_tokens,
            "ok": row.ok,
        }
        for row in summary.rows
    ]
    fields = {
        "ok": not summary.faults,
        "turns": len(rows),
        "tokens_restored": summary.tokens_restored,
        "max_logit_diff": _finite(summary.max_logit_diff),
        "control_caught": summary.control_caught,
        "control_refused": summary.control_refused,
        "media": summary.media,
        "io_path": dict(summary.io_path),
        "io_reason": summary.io_reason,
        "device": summary.device,
        "dtype": summary.dtype,
        "faults": summary.faults,
        "control": [{**asdict(row), "caught_diff": _finite(row.caught_diff)} for row in summary.control],
        "rows": rows,
    }
    return json.dumps(fields, allow_nan=False)


def format_table(summary: Summary) -> str:
    """The run as text: a line a turn, the control, and the verdict."""
    lines = [HEAD, *(_cells(row) for row in summary.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
    saved = sum(row.recomputed_ms - row.restored_ms for row in summary.rows if row.restored_tokens)
    media = ", ".join(f"{tokens} from {name} by {summary.io_path[name]}" for name, tokens in summary.media.items())
    text += ["", f"{summary.tokens_restored} tokens restored: {media}; {saved:.0f} ms of recomputation saved."]
    for row in summary.control:
        text.append(
            f"Control, one block flipped on {row.medium}: unverified, logits differ by {row.caught_diff:.3g}"
            f" ({'caught' if row.caught else 'NOT caught'}); verified, {'refused' if row.refused else 'NOT refused'}."
        )
    text += [f"FAILED: {fault}" for fault in summary.faults] or [
        f"ok: {len(summary.rows)} turns, the same tokens as a full recompute; "
        f"largest logit difference {summary.max_logit_diff:.2g} on {summary.device} in {summary.dtype}."
    ]
    return "\n".join(text)


def _cells(row: TurnRow) -> tuple[str, ...]:
    numbers = (row.turn, row.prompt_tokens, row.restored_tokens, row.dram_tokens, row.ssd_tokens, row.reads)
    return (
        row.session,
        *map(str, numbers),
        format_bytes(row.read_bytes),
        f"{row.amplification:.2f}",
        f"{row.restored_ms:.1f}",
        f"{row.recomputed_ms:.1f}",
        f"{row.comparison.logit_diff:.1e}",
        "ok" if row.ok else "FAILED",
    )


def _fault(row: TurnRow) -> str:
    if not row.comparison.ok:
        told = "the same tokens" if row.comparison.same_tokens else "other tokens"
        return (
            f"logits differ by {row.comparison.logit_diff:.3g}, {row.comparison.tolerance:.3g} at most expected; {told}"
        )
    return f"{row.restored_tokens} tokens restored, {row.expected_tokens} expected; {row.reason or 'no reason given'}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
