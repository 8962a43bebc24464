"""Values of a config.json: there and of the right type, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.llm.errors import CheckpointError
from flambeau.llm.json_files import read_object

Config = Mapping[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file of a checkpoint holds."""
    return read_object(path, CheckpointError)


def section(config: Config, key: str) -> Config:
    """The object under a key; an empty one where there is none."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json has {value!r} for {key}, which must be an object")
    return value


def token_ids(value: object) -> tuple[int, ...]:
    """One token id, a list of them, or none."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int))


def whole(config: Config, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number that must be there."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"config.json needs {key}, a whole number from {least}, not {value!r}")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A number above 0 that must be there."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
        raise CheckpointError(f"config.json needs {key}, a number above 0, not {value!r}")
    return float(value)
