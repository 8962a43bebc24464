"""Readers of config values: text → value, or an error that names what was expected."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flambeau.config.server import Address, brief, check_pattern, is_host
from flambeau.errors import ConfigError

logger = logging.getLogger(__name__)

LARGEST = 2**31 - 1
Reader = Callable[[str, str], Any]  # (key, text) → value


def invalid(key: str, value: str, expected: str) -> ConfigError:
    return ConfigError(f"{key} is {brief(value)}; it must be {expected}")


def whole(*, at_least: int = 0, at_most: int = LARGEST) -> Reader:
    """A reader of whole numbers within bounds."""
    bounds = f"from {at_least} to {at_most}"

    def read(key: str, value: str) -> int:
        try:
            number = int(value.strip())
        except ValueError:
            raise invalid(key, value, f"a whole number {bounds}") from None
        if not at_least <= number <= at_most:
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
        if not 0 <= number <= LARGEST:
            raise invalid(key, value, f"a number of {unit} from 0 to {LARGEST}")
        return number * factor

    return read


def switch(key: str, value: str) -> bool:
    """True only for `true`, as in TorchServe; a word other than `true` and `false` is logged."""
    word = value.strip().lower()
    if word not in ("true", "false"):
        logger.warning("%s is %.80r, which counts as false; write true or false", key, value)
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
    if not is_host(value.strip()):
        raise invalid(key, value, "a host, such as 127.0.0.1 or 0.0.0.0")
    return value.strip()


def path(key: str, value: str) -> Path:
    """A file or folder, relative to the working folder of the server."""
    if not value or "\0" in value:
        raise invalid(key, value, "a path")
    return Path(value)


def text(key: str, value: str) -> str:
    """Any text without control characters."""
    if any(character < " " for character in value):
        raise invalid(key, value, "text without control characters")
    return value


def optional_text(key: str, value: str) -> str | None:
    """As `text`; None if it is empty."""
    return text(key, value) or None


def header_name(key: str, value: str) -> str:
    """The name of an HTTP header."""
    if re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", value) is None:  # RFC 9110, 5.6.2
        raise invalid(key, value, "the name of a header")
    return value


def header_value(key: str, value: str) -> str:
    """The value of an HTTP header."""
    if not value.isprintable() or not value.isascii():
        raise invalid(key, value, "the value of a header: printable ASCII")
    return value


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
    logger.error("%s is %.80r; it may be log, prometheus, legacy or both. Using log", key, value)
    return "log"
