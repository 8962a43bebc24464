"""The types of settings: text of a flag or variable, or a value of YAML → value, or ValueError."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flambeau.errors import json_problem, suggest

LARGEST = 2**31 - 1
MAX_SHOWN = 80  # characters of a value in an error
ON, OFF = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class ValueType(Protocol):
    """Reads one type of value; `expected` completes "it must be …" in an error."""

    @property
    def expected(self) -> str: ...

    @property
    def metavar(self) -> str:
        """The placeholder of the value in the help."""

    def read(self, value: object) -> Any:
        """The value; ValueError, with a reason or none, if it is not of this type."""

    def show(self, value: Any) -> str:
        """The value as a variable would hold it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A whole number within bounds."""

    at_least: int = 0
    at_most: int = LARGEST
    metavar: str = "INTEGER"

    @property
    def expected(self) -> str:
        return f"a whole number from {self.at_least} to {self.at_most}"

    def read(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        try:
            number = int(value)
        except ValueError:  # its own text would repeat the value
            raise ValueError from None
        if not self.at_least <= number <= self.at_most:
            raise ValueError
        return number

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number within bounds; fractions are allowed."""

    at_least: float = 0
    at_most: float = LARGEST
    metavar: str = "NUMBER"

    @property
    def expected(self) -> str:
        return f"a number from {self.at_least:g} to {self.at_most}"

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        try:
            number = float(value)
        except ValueError:
            raise ValueError from None
        if not self.at_least <= number <= self.at_most or math.isnan(number):
            raise ValueError
        return int(number) if number.is_integer() else number

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off."""

    expected: str = "true or false"
    metavar: str = ""

    def read(self, value: object) -> bool:
        word = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
        if word not in (*ON, *OFF):
            raise ValueError
        return word in ON

    def show(self, value: Any) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Any text in one line; `pattern` restricts it."""

    expected: str = "text in one line"
    metavar: str = "TEXT"
    pattern: str = r"[^\x00-\x1f]*"

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("write it in quotes" if isinstance(value, bool | int | float) else "")
        if re.fullmatch(self.pattern, value) is None:
            raise ValueError
        return value

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterManager:
    """What manages the machines of a cluster, and where."""

    expected: str = "ray, ray=HOST:PORT, join, or local=NUMBER for a trial on this machine"
    metavar: str = "ray[=HOST:PORT]"

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError
        if "ray://" in value:
            raise ValueError(
                "ray:// is the address of Ray Client, another protocol; name the head of the cluster instead, "
                "--cluster ray=HOST:6379, or --cluster ray with the address in RAY_ADDRESS"
            )
        if re.fullmatch(r"ray(=[^=/\s]+:\d+)?|join|local=\d+(x\d+){0,2}", value) is None:
            raise ValueError
        return value

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegularExpression:
    expected: str = "a regular expression"
    metavar: str = "PATTERN"

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
        return value

    def show(self, value: Any) -> str:
        return str(value)


def read_model_path(text: str | Path) -> Path:
    """The path of a model. `./a/b` and `a/b/` become absolute: pathlib shortens them to `a/b`, a name of the hub."""
    is_path = isinstance(text, str) and (text.startswith("./") or text.endswith("/"))
    return Path.cwd() / text if is_path else Path(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePath:
    """A file or folder."""

    expected: str = "a path"
    metavar: str = "PATH"
    is_model: bool = False  # or a name of the Hugging Face hub

    def read(self, value: object) -> Path:
        if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
            raise ValueError
        return read_model_path(value) if self.is_model else Path(value)

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.words)}"

    @property
    def metavar(self) -> str:
        return "|".join(self.words)

    def read(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError
        return value

    def show(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class Several:
    """Values of one type: a repeated flag, a variable with commas, a list in YAML."""

    item: ValueType

    @property
    def expected(self) -> str:
        return f"a list, and each item {self.item.expected}"

    @property
    def metavar(self) -> str:
        return self.item.metavar

    def read(self, value: object) -> tuple[Any, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise ValueError
        return tuple(self.item.read(one) for one in value)

    def show(self, value: Any) -> str:
        return ",".join(map(self.item.show, value))


class InvalidEntry(ValueError):
    """A value inside of a list or mapping is invalid; `keys` lead to it."""

    def __init__(self, keys: tuple[str | int, ...], message: str) -> None:
        super().__init__(message)
        self.keys = keys


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model to serve, and the settings that apply to it alone."""

    path: Path
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelList:
    """Paths of models; in YAML an entry may be a mapping of `path` and settings, whose types are `types`."""

    types: Mapping[str, ValueType]
    expected: str = "a list of paths, or of mappings with a path"
    metavar: str = "PATH"

    def read(self, value: object) -> tuple[ModelEntry, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise ValueError
        return tuple(self._read_entry(i, entry) for i, entry in enumerate(value))

    def _read_entry(self, i: int, entry: object) -> ModelEntry:
        if isinstance(entry, str | Path) and str(entry):
            return ModelEntry(read_model_path(entry))
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            raise InvalidEntry((i,), "a model is a path, or a mapping with a path")
        own = {key: value for key, value in entry.items() if key != "path"}
        return ModelEntry(read_model_path(entry["path"]), read_entry(i, own, self.types))

    def show(self, value: Any) -> str:
        return ",".join(str(entry.path) for entry in value)


@dataclass(frozen=True, slots=True)
class ModelDefaults:
    """Settings by model name, as a mapping or as JSON; `types` has the settings."""

    types: Mapping[str, ValueType]
    expected: str = "a mapping from names of models to mappings of settings"
    metavar: str = "JSON"

    def read(self, value: object) -> dict[str, dict[str, Any]]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"as JSON: {json_problem(error)}") from None
        if not isinstance(value, dict) or not all(isinstance(entry, dict) for entry in value.values()):
            raise ValueError
        return {str(name): read_entry(name, entry, self.types) for name, entry in value.items()}

    def show(self, value: Any) -> str:
        return json.dumps(value)


def read_entry(place: str | int, entry: Mapping[Any, Any], types: Mapping[str, ValueType]) -> dict[str, Any]:
    """The settings in a mapping; `place` is its key or position in errors."""
    settings: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in types:
            raise InvalidEntry((place, key), unknown(str(key), types, "a setting of a model"))
        try:
            settings[key] = types[key].read(value)
        except ValueError as error:
            raise InvalidEntry((place, key), mismatch(key, value, types[key], error)) from None
    return settings


def mismatch(name: str, value: object, expected: ValueType, error: ValueError) -> str:
    """The message for a value of a wrong type."""
    reason = f" ({error})" if str(error) else ""
    return f"{name} is {brief(value)}; it must be {expected.expected}{reason}"


def unknown(name: str, known: Iterable[str], what: str) -> str:
    """The message for a name that is not known, with the nearest known one."""
    near = suggest(name, known)
    return f"{name[:MAX_SHOWN]} is not {what}" + (f"; did you mean {near}?" if near else "")


def brief(value: object) -> str:
    text = {True: "true", False: "false", None: "empty"}.get(value) if isinstance(value, bool | None) else repr(value)
    text = text or ""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
