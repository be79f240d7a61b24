"""Checks and conversions that every configuration dataclass shares; they walk its fields, so none is named here.

Pure.  A field's annotation is a plain type, a `Literal` of words, `tuple[str, ...]`, or another such dataclass.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from flatcake.errors import ConfigError
from flatcake.units import parse_bytes, parse_ns

T = TypeVar("T")

_PARSERS = (
    (re.compile(r"\w+_bytes(_min|_max|_limit)?"), parse_bytes),
    (re.compile(r"\w+_ns(_min|_max|_limit)?"), parse_ns),
)
_WORDS = {int: "a whole number", float: "a fraction such as 0.5", str: "text", bool: "true or false"}


def require(config: object, name: str, holds: bool, expected: str) -> None:
    """Refuse a setting unless `holds`.

    Raises:
        ConfigError: Says the class, the field, its value and what was expected.
    """
    if not holds:
        raise ConfigError(f"{type(config).__name__}.{name}={getattr(config, name)!r}: expected {expected}")


def check_types(config: object) -> None:
    """Refuse a field whose value is not of the annotated type; nothing is coerced.

    Raises:
        ConfigError: Says the class, the field, its value and the type.
    """
    for name, hint in get_type_hints(type(config)).items():
        require(config, name, _is_a(getattr(config, name), hint), _describe(hint))


def build(cls: type[T], mapping: Mapping[str, object]) -> T:
    """Build a `cls` from nested mappings; absent keys keep their defaults.

    Text with a unit is read where the field's name says bytes or ns, a list where it is a tuple, and a whole
    number where it is a fraction.

    Raises:
        ConfigError: An unknown key, a value of another type, or one that `cls` refuses.
    """
    leaves = {name.rpartition(".")[2]: name for name in _dotted_names(cls, "")}
    built: T = _build(cls, mapping, "", leaves)
    return built


def dump(config: Any) -> dict[str, object]:
    """Write a configuration as nested dicts of plain values, such that `build` gives back an equal one."""
    return {entry.name: _plain(getattr(config, entry.name)) for entry in fields(config)}


def _plain(value: object) -> object:
    if is_dataclass(value):
        return dump(value)
    return list(value) if isinstance(value, tuple) else value


def _build(cls: Any, mapping: object, path: str, leaves: Mapping[str, str]) -> Any:
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{path.rstrip('.') or 'configuration'}={mapping!r}: expected a mapping of settings")
    hints = get_type_hints(cls)
    values: dict[str, object] = {}
    for key, value in mapping.items():
        if key not in hints:
            raise ConfigError(f"{path}{key}: unknown setting; {_suggest(str(key), path, list(hints), leaves)}")
        hint = hints[key]
        if is_dataclass(hint):
            values[key] = _build(hint, value, f"{path}{key}.", leaves)
        else:
            values[key] = _convert(key, value, hint, f"{path}{key}")
    return cls(**values)


def _convert(name: str, value: object, hint: Any, dotted: str) -> object:
    if isinstance(value, str) and hint is int:
        for pattern, parse in _PARSERS:
            if pattern.fullmatch(name):
                try:
                    return parse(value)
                except ConfigError as error:
                    raise ConfigError(f"{dotted}={error}") from None
    if isinstance(value, list) and get_origin(hint) is tuple:
        value = tuple(value)
    if type(value) is int and hint is float:
        value = float(value)
    if not _is_a(value, hint):
        raise ConfigError(f"{dotted}={value!r}: expected {_describe(hint)}")
    return value


def _is_a(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(type(item) is get_args(hint)[0] for item in value)
    return type(value) is hint  # `isinstance` would let True pass for a number


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if get_origin(hint) is tuple:
        return "a list of text"
    return _WORDS.get(hint) or f"a {hint.__name__}"


def _suggest(key: str, path: str, siblings: list[str], leaves: Mapping[str, str]) -> str:
    if key in leaves:
        return f"did you mean {leaves[key]}?"
    if near := difflib.get_close_matches(key, siblings, n=1):
        return f"did you mean {path}{near[0]}?"
    if near := difflib.get_close_matches(key, leaves, n=1):
        return f"did you mean {leaves[near[0]]}?"
    return f"known here: {', '.join(siblings)}"


def _dotted_names(cls: Any, path: str) -> Iterator[str]:
    for name, hint in get_type_hints(cls).items():
        yield f"{path}{name}"
        if is_dataclass(hint):
            yield from _dotted_names(hint, f"{path}{name}.")
