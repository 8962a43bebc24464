"""FieldType: checks one JSON value of a request, names the field that is wrong, and gives its OpenAPI schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.http.openapi import Schema

MAX_INTEGER = 2**31 - 1
MAX_SHOWN = 60  # characters of an invalid value in its error message
NOUNS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    bool: "true or false",
    dict: "object",
    type(None): "null",
}
Check = Callable[[Any, str], Any]  # value, place in the request → the value to use


@dataclass(frozen=True, slots=True)
class FieldType:
    """What a field may hold. `check` returns the value to use, or raises InvalidField."""

    accepts: frozenset[type]  # exact types of decoded JSON
    noun: str
    schema: Schema
    limits: Check | None = None  # checks beyond the type

    def check(self, value: Any, place: str) -> Any:
        if type(value) not in self.accepts:
            raise InvalidField(place, f"{place}: expected {self.noun}, got {NOUNS[type(value)]}")
        return value if self.limits is None else self.limits(value, place)

    def then(self, step: Check) -> FieldType:
        """The same type with one more step after its checks."""
        before = self.limits
        if before is None:
            return replace(self, limits=step)
        return replace(self, limits=lambda value, place: step(before(value, place), place))

    def described(self, text: str) -> FieldType:
        return replace(self, schema={**self.schema, "description": text})


def _of(kind: type, schema: Schema, limits: Check | None = None) -> FieldType:
    return FieldType(frozenset({kind}), NOUNS[kind], schema, limits)


FLAG = _of(bool, {"type": "boolean"})
TEXT = _of(str, {"type": "string"})
OBJECT = _of(dict, {"type": "object"})
ANYTHING = FieldType(frozenset(NOUNS), "anything", {})


def integer(low: int | None = None, high: int = MAX_INTEGER) -> FieldType:
    """A whole number; without `low`, any."""
    if low is None:
        return _of(int, {"type": "integer"})
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return _of(int, schema, within(low, high, NOUNS[int]))


def number(low: float, high: float, *, excludes_low: bool = False) -> FieldType:
    schema: dict[str, Any] = {"type": "number", "minimum": low, "maximum": high}
    if excludes_low:
        schema["exclusiveMinimum"] = True
    limits = within(low, high, NOUNS[float], excludes_low=excludes_low)
    return FieldType(frozenset({int, float}), NOUNS[float], schema, limits)


def within(low: float, high: float, noun: str, *, excludes_low: bool = False) -> Check:
    def check(value: Any, place: str) -> Any:
        if value < low or (excludes_low and value == low):
            raise InvalidField(place, f"{place}: expected {noun} {'>' if excludes_low else '>='} {low}")
        if value > high:
            raise InvalidField(place, f"{place}: expected {noun} <= {high}")
        return value

    return check


def text(min_length: int) -> FieldType:
    def check(value: str, place: str) -> str:
        if len(value) < min_length:
            raise InvalidField(place, f"{place}: expected text of length >= {min_length}")
        return value

    return _of(str, {"type": "string", "minLength": min_length}, check)


def one_of(*values: str) -> FieldType:
    def check(value: str, place: str) -> str:
        if value not in values:
            raise InvalidField(place, f"{place}: expected {' or '.join(values)}, not {shown(value)}")
        return value

    return _of(str, {"type": "string", "enum": [*values]}, check)


def array(item: FieldType, *, min_length: int = 0, max_length: int | None = None) -> FieldType:
    schema: dict[str, Any] = {"type": "array", "items": item.schema}
    if min_length:
        schema["minItems"] = min_length  # for readers of the schema; the endpoint words the error
    if max_length is not None:
        schema["maxItems"] = max_length

    def check(value: list[Any], place: str) -> list[Any]:
        if max_length is not None and len(value) > max_length:
            raise InvalidField(place, f"{place}: expected a list of length <= {max_length}")
        if item.limits is None and item.accepts.issuperset(map(type, value)):
            return value
        return [item.check(one, f"{place}[{i}]") for i, one in enumerate(value)]

    return _of(list, schema, check)


def mapping(item: FieldType) -> FieldType:
    def check(value: dict[str, Any], place: str) -> dict[str, Any]:
        where = f"{place}[...]"
        return {key: item.check(one, where) for key, one in value.items()}

    return _of(dict, {"type": "object", "additionalProperties": item.schema}, check)


def either(first: FieldType, second: FieldType) -> FieldType:
    """One of two types that differ in their JSON type."""

    def check(value: Any, place: str) -> Any:
        return (first if type(value) in first.accepts else second).check(value, place)

    noun = f"{first.noun} or {second.noun}"
    return FieldType(first.accepts | second.accepts, noun, {"oneOf": [first.schema, second.schema]}, check)


def refused(remedy: str) -> FieldType:
    """A field of OpenAI's API that this server does not support."""

    def check(value: Any, place: str) -> Any:
        raise InvalidField(place, f"{place} is not supported; {remedy}")

    return replace(ANYTHING, limits=check)


def check_token_ids(value: list[Any], place: str) -> list[int]:
    # A prompt may have a million ids: look for the wrong one only if there is one.
    if value and ({*map(type, value)} != {int} or min(value) < 0 or max(value) > MAX_INTEGER):
        for i, token in enumerate(value):
            TOKEN_ID.check(token, f"{place}[{i}]")
    return value


TOKEN_ID = integer(0)
TOKEN_IDS = _of(list, {"type": "array", "items": {"type": "integer"}}, check_token_ids)


def shown(value: Any) -> str:
    """A value in an error message."""
    return "nothing" if value is None else repr(value)[:MAX_SHOWN]
