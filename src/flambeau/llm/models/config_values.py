"""Values of config.json, which are rejected by name if they are of another kind."""

from __future__ import annotations

import math
from collections.abc import Mapping

from flambeau.llm.errors import InvalidConfig
from flambeau.llm.models.families.family import Config


def section(config: Config, key: str) -> Config:
    """The object under a key; empty if there is none."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise InvalidConfig(f"config.json has {value!r} for {key}, which must be an object")
    return value


def token_ids(value: object) -> tuple[int, ...]:
    """One token id, a list of them, or none."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int))


def integer(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """An integer of at least `least`, required unless there is a default."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidConfig(f"config.json needs {key}, a whole number from {least}, not {value!r}")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A number above 0, required unless there is a default."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InvalidConfig(f"config.json needs {key}, a finite number above 0, not {value!r}")
    return float(value)
