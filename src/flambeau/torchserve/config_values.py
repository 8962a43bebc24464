"""Readers of config values: text → value, or an error that names what was expected."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flambeau.config.server import Address, check_pattern
from flambeau.errors import ConfigError

logger = logging.getLogger(__name__)

Reader = Callable[[str, str], Any]  # (key, text) → value


def invalid(key: str, value: str, expected: str) -> ConfigError:
    return ConfigError(f"{key} is {value!r}; it must be {expected}")


def whole(*, at_least: int = 0, at_most: int | None = None) -> Reader:
    """A reader of whole numbers within bounds."""
    bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"

    def read(key: str, value: str) -> int:
        try:
            number = int(value.strip())
        except ValueError:
            raise invalid(key, value, f"a whole number {bounds}") from None
        if number < at_least or (at_most is not None and number > at_most):
            raise invalid(key, value, f"a whole number {bounds}")
        return number

    return read


def scaled(factor: float, unit: str) -> Reader:
    """A reader of numbers in `unit`, converted to seconds; fractions are allowed."""

    def read(key: str, value: str) -> float:
        try:
            number = float(value.strip())
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise invalid(key, value, f"a number of {unit}")
        return number * factor

    return read


def switch(key: str, value: str) -> bool:
    """True only for `true`, as in TorchServe; a word other than `true` and `false` is logged."""
    word = value.strip().lower()
    if word not in ("true", "false"):
        logger.warning("%s is %r, which counts as false; write true or false", key, value)
    return word == "true"


def opposite(key: str, value: str) -> bool:
    """The negation of a switch, for keys that turn something off."""
    return not switch(key, value)


def address(default_port: int, tls_port: int) -> Reader:
    """A reader of listener addresses; https has its own default port."""

    def read(key: str, value: str) -> Address:
        try:
            return Address.parse(value.strip(), default_port=tls_port if value.startswith("https") else default_port)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None

    return read


def host(key: str, value: str) -> str:
    """A network interface, by name or IP address."""
    if not value.strip() or "/" in value:
        raise invalid(key, value, "a host, such as 127.0.0.1 or 0.0.0.0")
    return value.strip()


def path(key: str, value: str) -> Path:
    """A file or folder, relative to the working folder of the server."""
    if not value:
        raise invalid(key, value, "a path")
    return Path(value)


def text(key: str, value: str) -> str:
    return value


def optional_text(key: str, value: str) -> str | None:
    """Any text; None if it is empty."""
    return value or None


def patterns(key: str, value: str) -> tuple[str, ...]:
    """Regular expressions, separated by commas."""
    return tuple(check_pattern(key, part.strip()) for part in value.split(",") if part.strip())


def names(key: str, value: str) -> tuple[str, ...]:
    """Names, separated by commas."""
    return tuple(part.strip() for part in value.split(",") if part.strip())


def metrics_mode(key: str, value: str) -> str:
    """The target of metrics; as in TorchServe, an unknown word counts as `log`."""
    mode = value.strip().lower()
    if mode in ("log", "prometheus", "legacy", "both"):
        return mode
    logger.error("%s is %r; it may be log, prometheus, legacy or both. Using log", key, value)
    return "log"
