"""What became of every stored block: a number each, and what the numbers mean.

Pure.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from flatcake.manifest import Stored
from flatcake.messages import Flags, Int64Array


class Outcome(StrEnum):
    """How a block fared."""

    SKIPPED = "skipped"
    """Its turn is one that the next open leaves out."""
    GOOD = "good"
    UNCHECKED = "unchecked"
    """Readable; there is no checksum to compare it with."""
    BAD = "bad"
    UNREADABLE = "unreadable"


FAILED = (Outcome.BAD, Outcome.UNREADABLE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome and why."""

    outcome: Outcome
    reason: str = ""
    rank: int | None = None
    """On which rank; None where there is but one."""

    @property
    def text(self) -> str:
        """Why, and where."""
        return self.reason if self.rank is None else f"rank {self.rank}: {self.reason}"


CHECKSUM = Verdict(Outcome.BAD, "checksum")
NO_RECORD = Verdict(Outcome.BAD, "no valid checksum record")
NO_FILE = Verdict(Outcome.UNREADABLE, "its file is missing")


class Verdicts:
    """One for each block of a manifest's rows, in their order.  The worst of several counts."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self._first = np.cumsum(stored.block_counts) - stored.block_counts
        self._numbers: npt.NDArray[np.uint16] = np.zeros(len(stored.keys), np.uint16)
        self._known = [Verdict(Outcome.SKIPPED), Verdict(Outcome.GOOD), Verdict(Outcome.UNCHECKED)]

    def give(self, blocks: Int64Array, verdict: Verdict) -> None:
        """Give a verdict on some blocks; one that has failed before keeps what was said first."""
        if not len(blocks):
            return
        if verdict not in self._known:
            self._known.append(verdict)
        number = self._known.index(verdict)
        assert number < 1 << 16, "an errno each, on each rank: there are fewer"
        self._numbers[blocks[~self.failed(blocks)]] = number

    def add(self, other: "Verdicts", rank: int | None) -> None:
        """Take over how the blocks fared on a rank, which is named where they failed: good is what is good on all."""
        for number, verdict in enumerate(other._known):
            if verdict.outcome is not Outcome.SKIPPED:
                named = replace(verdict, rank=rank) if verdict.outcome in FAILED else verdict
                self.give(np.flatnonzero(other._numbers == number), named)

    def failed(self, blocks: slice | Int64Array = slice(None)) -> Flags:
        """bool [blocks]"""
        flags: Flags = np.array([verdict.outcome in FAILED for verdict in self._known])[self._numbers[blocks]]
        return flags

    def failed_rows(self) -> dict[int, Flags]:
        """For each row with failed blocks, by its number in the manifest: which ones."""
        failed = self.failed()
        rows = np.unique(np.searchsorted(self._first, np.flatnonzero(failed), side="right") - 1)
        numbers, counts = self.stored.numbers, self.stored.block_counts
        return {int(numbers[row]): failed[self._first[row] : self._first[row] + counts[row]] for row in rows.tolist()}

    def count(self, blocks: slice | Int64Array = slice(None)) -> dict[Verdict, int]:
        """How many of some blocks fared how."""
        counts = np.bincount(self._numbers[blocks], minlength=len(self._known)).tolist()
        return {verdict: count for verdict, count in zip(self._known, counts, strict=True) if count}

    def blocks_of_scopes(self) -> dict[int, Int64Array]:
        """The blocks of each scope."""
        scopes = np.repeat(self.stored.scopes, self.stored.block_counts)
        order = np.argsort(scopes, kind="stable")
        cuts = np.flatnonzero(np.diff(scopes[order])) + 1
        return {int(scopes[mine[0]]): mine for mine in np.split(order, cuts)} if len(order) else {}


def unreadable(error: int) -> Verdict:
    """A read failed with this errno."""
    return Verdict(Outcome.UNREADABLE, f"read failed (errno {error})")
