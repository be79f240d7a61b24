"""Checks of what a caller hands to a store, so that a wrong kind of thing is named before anything is begun.

Pure.
"""

from numbers import Integral

from flatcake.errors import ConfigError


def expect(name: str, value: object, kind: type, origin: str) -> None:
    """Refuse a value of another kind.

    Raises:
        ConfigError: Says the argument, what it is, and where to get what was expected.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name}={_shown(value)}: expected {origin}")


def expect_whole(name: str, value: object, low: int | None, what: str, *, or_none: bool = True) -> None:
    """Refuse what is not a whole number, of at least `low` if that is one, nor None where that is allowed.

    Raises:
        ConfigError: Says the argument, its value, and what was expected.
    """
    if value is None and or_none:
        return
    if type(value) is bool or not isinstance(value, Integral) or (low is not None and int(value) < low):
        number = "a whole number of" if low is None else f"{low} or more"
        raise ConfigError(f"{name}={_shown(value)}: expected {number} {what}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"
