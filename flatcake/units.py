"""Sizes and durations: constants, and text such as ``"64GiB"`` or ``"1.5ms"`` to integers and back.

Sizes are `int` bytes, durations `int` nanoseconds, everywhere.
"""

import re
from collections.abc import Mapping
from fractions import Fraction

from flatcake.errors import ConfigError

KiB = 1 << 10
MiB = 1 << 20
GiB = 1 << 30
TiB = 1 << 40

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000

DIRECT_BYTES = 4 * KiB
"""Alignment of every offset, size and buffer that O_DIRECT and cuFile see."""

_SIZES = {
    **{"": 1, "b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "tib": TiB},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
_TIMES = {"": 1, "ns": 1, "us": US, "ms": MS, "s": SECOND, "min": 60 * SECOND, "h": 3600 * SECOND}
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str) -> int:
    """Read a size such as ``4096``, ``"64GiB"`` or ``"1.5 MB"`` as whole bytes.

    Raises:
        ConfigError: Not a size, negative, or not a whole number of bytes.
    """
    return _parse(value, _SIZES, "a size such as 64GiB")


def parse_ns(value: int | str) -> int:
    """Read a duration such as ``"500ms"`` as nanoseconds; a bare integer is nanoseconds.

    Raises:
        ConfigError: Not a duration, negative, or not a whole number of nanoseconds.
    """
    return _parse(value, _TIMES, "a duration such as 500ms")


def format_bytes(size_bytes: int) -> str:
    """Write a size in the largest binary unit that keeps it at 1 or more, e.g. ``"1.5 GiB"``."""
    for name, scale in (("TiB", TiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {name}"
    return f"{size_bytes} B"


def align_up(value: int, step: int) -> int:
    """Round `value` up to a multiple of `step`."""
    return -(-value // step) * step


def _parse(value: int | str, scales: Mapping[str, int], expected: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"{value}: expected {expected}, 0 or more")
        return value
    match = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    scale = scales.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ConfigError(f"{value!r}: expected {expected}")
    exact = Fraction(match[1]) * scale
    if exact.denominator != 1:
        raise ConfigError(f"{value!r}: expected {expected}, a whole number of the smallest unit")
    return int(exact)
