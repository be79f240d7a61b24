"""Bytes written to the media, and how many more may be: flash wears out by writing.

Pure.  The budget is a token bucket that holds a day's bytes at most and fills at a day's rate.  Both are kept over
restarts, where the wall clock counts: a step back of it refills nothing, a step forward no more than a day's bytes.
"""

import hashlib
import struct
from dataclasses import dataclass

from flatcake.units import SECOND

DAY_S = 24 * 3600
DAY_NS = DAY_S * SECOND
UNKNOWN = -1

_DIGEST_BYTES = 16
_WEAR = struct.Struct("<16sqqqq")
"""Digest, bytes written to DRAM and SSD, budget left or UNKNOWN, wall clock in seconds."""
_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """What a directory's media have taken since it was made, as far as is known."""

    dram_bytes: int = 0
    ssd_bytes: int = 0
    left_bytes: int = UNKNOWN
    """Of the budget; UNKNOWN where there was none."""
    wall_s: int = 0
    """When that was so, in seconds since 1970."""


def encode_wear(wear: Wear) -> bytes:
    body = _WEAR.pack(b"", wear.dram_bytes, wear.ssd_bytes, wear.left_bytes, wear.wall_s)[_DIGEST_BYTES:]
    return _digest(body) + body


def decode_wear(body: object) -> Wear | None:
    """Read what `encode_wear` wrote; None when it is damaged."""
    if not isinstance(body, bytes) or len(body) != _WEAR.size or _digest(body[_DIGEST_BYTES:]) != body[:_DIGEST_BYTES]:
        return None
    _, dram_bytes, ssd_bytes, left_bytes, wall_s = _WEAR.unpack(body)
    if not all(0 <= value < _LIMIT for value in (dram_bytes, ssd_bytes, left_bytes + 1, wall_s)):
        return None
    return Wear(dram_bytes=dram_bytes, ssd_bytes=ssd_bytes, left_bytes=left_bytes, wall_s=wall_s)


class WriteBudget:
    """Bytes that may be written now; full at first.

    Args:
        daily_bytes: What comes in a day, and the most that it holds; 0 for no bound.
    """

    def __init__(self, daily_bytes: int = 0) -> None:
        assert daily_bytes >= 0, daily_bytes
        self.daily_bytes = daily_bytes
        self._state = (daily_bytes * DAY_NS, 0)
        """Level in byte × day / ns, so that nothing is rounded, and the time at which it was so; replaced as one."""

    def left_bytes(self, now_ns: int) -> int | None:
        """Bytes that may be written; None without a bound.  From any thread."""
        return self._level(now_ns) // DAY_NS if self.daily_bytes else None

    def allows(self, size_bytes: int, now_ns: int) -> bool:
        """Whether so many bytes may be written."""
        return not self.daily_bytes or size_bytes * DAY_NS <= self._level(now_ns)

    def spend(self, size_bytes: int, now_ns: int) -> None:
        """Take what `allows` has allowed."""
        assert self.allows(size_bytes, now_ns)
        if self.daily_bytes:
            self._state = (self._level(now_ns) - size_bytes * DAY_NS, max(now_ns, self._state[1]))

    def resume(self, left_bytes: int, idle_s: int, now_ns: int) -> None:
        """Go on where an earlier run has left off, `idle_s` seconds ago; UNKNOWN leaves it full."""
        if self.daily_bytes and left_bytes != UNKNOWN:
            came = self.daily_bytes * max(0, idle_s) // DAY_S
            self._state = (min(self.daily_bytes, max(0, left_bytes) + came) * DAY_NS, now_ns)

    def _level(self, now_ns: int) -> int:
        level, at_ns = self._state
        return min(self.daily_bytes * DAY_NS, level + max(0, now_ns - at_ns) * self.daily_bytes)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES, person=b"flatcake.wear").digest()
