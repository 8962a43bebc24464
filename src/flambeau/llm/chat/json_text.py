"""JSON in generated text, read as it comes, and values as JSON text."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

OUTSIDE = re.compile(r'[^"{}\[\]]*')
INSIDE = re.compile(r'[^"\\\x00-\x1f]*')
SCALAR_END = re.compile(r"[,\]}\s]")
LITERALS = {"true": True, "false": False, "null": None, "none": None}
MAX_LITERAL = 100_000  # characters of a Python value


class JsonScanner:
    """Follows one JSON object, array or string to its end; line breaks within strings become escapes."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self.is_done = False

    def read(self, text: str, at: int) -> tuple[str, int]:
        """The next piece of the value, and where it ends in the text."""
        pieces = []
        while at < len(text) and not self.is_done:
            if self._is_escaped:
                pieces.append(text[at])
                self._is_escaped = False
                at += 1
                continue
            plain = (INSIDE if self._is_string else OUTSIDE).match(text, at)
            assert plain is not None
            pieces.append(plain[0])
            at = plain.end()
            if at < len(text):
                pieces.append(self._take(text[at]))
                at += 1
        return "".join(pieces), at

    def _take(self, character: str) -> str:
        if self._is_string:
            self._is_escaped = character == "\\"
            if character < " ":
                return json.dumps(character)[1:-1]
            self._is_string = character != '"'
        elif character == '"':
            self._is_string = True
        else:
            self._depth += 1 if character in "{[" else -1
        self.is_done = self._depth <= 0 and not self._is_string
        return character


def escape_text(text: str) -> str:
    """Text as it is within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def to_json(value: Any) -> str:
    """JSON that can be encoded as UTF-8: an unpaired surrogate stays an escape. Raises ValueError."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def json_or_text(text: str) -> str:
    """A value in JSON, as it is; anything else as a string of JSON."""
    try:
        return to_json(json.loads(text, strict=False))
    except (ValueError, RecursionError):
        return to_json(text)


def python_to_json(text: str) -> str:
    """A Python or JSON value as JSON. Raises ValueError."""
    if len(text) > MAX_LITERAL:
        raise ValueError("the value is too long")
    try:
        return to_json(json.loads(text))  # what both could be, such as "\\/", is JSON
    except (ValueError, RecursionError):
        pass
    try:
        return to_json(_value_of(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"no Python value: {error}") from None


def _value_of(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name.lower() in LITERALS:
            return LITERALS[name.lower()]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value_of(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {str(_value_of(key)): _value_of(value) for key, value in zip(keys, values, strict=True) if key}
    raise ValueError("an expression")
