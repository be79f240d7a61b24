"""Settings from wherever a user keeps them: a file, a mapping of an engine's, the environment.

One order for every way in: the environment over the mapping over the file over the defaults.  `config` says what
the keys mean; here they are only gathered, and unknown ones are refused by name.
"""

import difflib
import json
import logging
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from flatcake.config import StoreConfig
from flatcake.errors import ConfigError
from flatcake.fields import build, dump

log = logging.getLogger(__name__)

PREFIX = "FLATCAKE_"
CONFIG_VARIABLE = "FLATCAKE_CONFIG"
"""Names the settings file."""
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "FLATCAKE_NIGHTLY", "FLATCAKE_COMMIT", "FLATCAKE_SEED"})
"""Variables that are no settings: those of the tests and benchmarks as well."""
ADAPTER_KEY = "engine"
"""Key of the settings of an engine's adapter, which only that adapter knows."""
FILE_KEY = "config_file"
"""Key of an engine's mapping that names a settings file."""

T = TypeVar("T", bound=StoreConfig)


def gather(cls: type[T], mapping: Mapping[str, object], environ: Mapping[str, str]) -> T:
    """Build a configuration from all that a user has said.

    Args:
        cls: `StoreConfig`, or an engine's extension of it.
        mapping: What was given to the program, nested as `config.from_mapping` takes it; its `config_file`, or else
            `$FLATCAKE_CONFIG`, names a settings file.
        environ: The environment.  `FLATCAKE_CAPACITY_SSD_BYTES_MAX=100GiB` is `capacity.ssd_bytes_max`; a list is
            separated by `;`.

    Raises:
        ConfigError: A file cannot be read, a key is unknown (names the nearest one), or a value is refused.
    """
    given = dict(mapping)
    path = given.pop(FILE_KEY, None) or environ.get(CONFIG_VARIABLE)
    if path is not None and not isinstance(path, str):
        raise ConfigError(f"{FILE_KEY}={path!r}: expected the path of a settings file")
    merged = merge(read_settings(path) if path else {}, given)
    return build(cls, merge(merged, from_environment(cls, environ)))


def without_adapter(
    settings: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, str]]:
    """A file and an environment that an adapter shares with the commands, without what only the adapter knows."""
    file = {key: value for key, value in settings.items() if key != ADAPTER_KEY or not isinstance(value, Mapping)}
    prefix = f"{PREFIX}{ADAPTER_KEY.upper()}_"
    return file, {name: text for name, text in environ.items() if not name.startswith(prefix)}


def merge(under: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Lay one nested mapping over another."""
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = merge(below, value)
        merged[key] = value
    return merged


def from_environment(cls: type[StoreConfig], environ: Mapping[str, str]) -> dict[str, object]:
    """The settings that the environment names, as a nested mapping.

    Raises:
        ConfigError: A variable begins with `FLATCAKE_` and is neither a setting nor otherwise known, or its text is
            no value of the setting's type.
    """
    known = {f"{PREFIX}{'_'.join(path).upper()}": (path, hint) for path, hint in _leaves(cls, ())}
    found: dict[str, object] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        if name not in known:
            near = [other for other, (path, _) in known.items() if path[-1].upper() == name.removeprefix(PREFIX)]
            near = near or difflib.get_close_matches(name, [*known, CONFIG_VARIABLE], n=1)
            hint = f"did you mean {near[0]}?" if near else "unset it"
            raise ConfigError(f"{name}: unknown setting in the environment; {hint}")
        path, hint = known[name]
        at = found
        for part in path[:-1]:
            at = at.setdefault(part, {})  # type: ignore[assignment]
        at[path[-1]] = _value(name, text, hint)
    return found


def describe(config: object) -> str:
    """The effective configuration as one line of JSON, for a log."""
    return json.dumps(dump(config), sort_keys=False)


def read_settings(path: str) -> dict[str, object]:
    """Read a TOML, JSON or YAML file as the nested mapping that `config.from_mapping` takes.

    Raises:
        ConfigError: No such file, no permission, another suffix, not valid, or not a mapping.
    """
    suffix = path.rpartition(".")[2].lower()
    try:
        text = Path(path).read_text(encoding="utf-8")
        if suffix == "toml":
            return tomllib.loads(text)
        if suffix in ("yaml", "yml"):
            settings = _parse_yaml(path, text)
        elif suffix == "json":
            settings = json.loads(text)
        else:
            raise ConfigError(f"{path}: expected a settings file that ends in .toml, .json, .yaml or .yml")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the settings: {error.strerror}") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid {suffix.upper()}: {error}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found a {type(settings).__name__}")
    return settings


def _parse_yaml(path: str, text: str) -> object:
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"{path}: YAML needs the package PyYAML; install it, or write TOML or JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


def _leaves(cls: type, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, hint in get_type_hints(cls).items():
        if is_dataclass(hint):
            yield from _leaves(hint, (*path, name))  # type: ignore[arg-type]
        else:
            yield (*path, name), hint


def _value(name: str, text: str, hint: Any) -> object:
    """What the text of a variable stands for; sizes and times with units are left to `fields`."""
    if get_origin(hint) is tuple:
        return [part for part in text.split(";") if part]
    try:
        if hint is float:
            return float(text)
        if hint is int and text.strip().lstrip("-").isdigit():
            return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}: expected a number") from None
    if hint is bool:
        if text.lower() not in ("0", "1", "false", "true"):
            raise ConfigError(f"{name}={text!r}: expected true or false")
        return text.lower() in ("1", "true")
    return text
