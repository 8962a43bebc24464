"""What a model-config.yaml tells a built-in handler, under `handler:`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flambeau.errors import ConfigError


def handler_options(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The `handler` section; empty when there is none."""
    section = (config or {}).get("handler")
    return section if isinstance(section, Mapping) else {}


def read_count(options: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number of at least one."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"handler: {name} must be a whole number of at least 1, not {value!r}")
    return value


def read_number(options: Mapping[str, Any], name: str, default: float) -> float:
    """Any number."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"handler: {name} must be a number, not {value!r}")
    return value


def read_flag(options: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or false."""
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise ConfigError(f"handler: {name} must be true or false, not {value!r}")
    return value
