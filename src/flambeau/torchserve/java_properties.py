"""Reads and writes Java's properties format."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from flambeau.config.server import brief
from flambeau.errors import ConfigError

MAX_PROPERTIES_BYTES = 64 << 20  # a snapshot holds the settings of every model
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_LETTERS = {value: letter for letter, value in _ESCAPES.items()}
_PAIR = re.compile(r"((?:\\.|[^\\\s=:])*)[ \t\f]*[=:]?[ \t\f]*(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$\$([^$]+)\$\$")


def parse(text: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Parse comments, continued lines and escapes; `$$NAME$$` is replaced by an environment variable."""
    properties = {}
    for line in _logical_lines(text):
        match = _PAIR.fullmatch(line)
        assert match is not None
        key, value = (_unescape(part) for part in match.groups())
        properties[key] = _VARIABLE.sub(lambda found: _variable(found.group(1), environment), value)
    return properties


def dump(properties: Mapping[str, str], comment: str) -> str:
    """Write one key per line, sorted."""
    lines = [f"#{comment}", *(f"{_escape(key, is_key=True)}={_escape(properties[key])}" for key in sorted(properties))]
    return "\n".join([*lines, ""])


def _logical_lines(text: str) -> list[str]:
    lines: list[str] = []
    continued: str | None = None
    for raw in re.split(r"\r\n|\r|\n", text):
        line = (continued or "") + raw.lstrip(" \t\f")
        if continued is None and (not line or line[0] in "#!"):
            continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            continued = line[:-1]
            continue
        lines.append(line)
        continued = None
    return [*lines, continued] if continued else lines


def _unescape(text: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        code, letter = match.groups()
        if letter == "u":  # Java refuses the whole file
            raise ConfigError(f"Malformed \\uxxxx encoding: write four hexadecimal digits after \\u in {brief(text)}")
        return chr(int(code, 16)) if code else _ESCAPES.get(letter, letter)

    plain = re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", replacement, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins surrogate pairs


def _escape(text: str, *, is_key: bool = False) -> str:
    def replacement(match: re.Match[str]) -> str:
        character = match.group()
        if letter := _LETTERS.get(character):
            return f"\\{letter}"
        if character in "\\=:#! ":
            return f"\\{character}"
        # Java writes characters beyond 16 bits as surrogate pairs.
        units = character.encode("utf-16-be")
        return "".join(f"\\u{units[i]:02X}{units[i + 1]:02X}" for i in range(0, len(units), 2))

    blanks = " " if is_key else r"\A "
    return re.sub(rf"[\\=:#!\t\n\r\f]|[^ -~]|{blanks}", replacement, text)


def _variable(name: str, environment: Mapping[str, str]) -> str:
    if name not in environment:
        raise ConfigError(f"Invalid Environment Variable {name}")
    return environment[name]
