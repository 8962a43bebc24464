"""Bytes → a request, or what is wrong with it, by the name of the field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from flambeau.errors import BadRequest, InvalidField

Asked = TypeVar("Asked", bound=msgspec.Struct)

_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?:the key of )?`(?P<place>[^`]*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_TYPE = re.compile(r"\b(int|float|str|array|bool)\b")
_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "array": "a list", "bool": "true or false"}
MAX_SHOWN = 100


def read_json(body: bytes, decoder: msgspec.json.Decoder[Asked]) -> Asked:
    """The request in a body; what cannot be one is refused with the reason."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error), decoder.type.__struct_encode_fields__) from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: {error.reason} in one of its texts") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None


def invalid(told: str, fields: Iterable[str]) -> BadRequest:
    """The refusal of a request, from what the decoder says about it."""
    match = _PLACE.fullmatch(told)
    assert match is not None
    what, place = match["what"], (match["place"] or "").removeprefix("$").removeprefix(".")
    if unknown := _UNKNOWN.fullmatch(what):
        return unknown_field(unknown[1][:MAX_SHOWN], place, fields)
    if missing := _MISSING.fullmatch(what):
        where = f"{place}.{missing[1]}" if place else missing[1]
        return InvalidField(where, f"{where} is required")
    if not place:
        return BadRequest(f"the body is no request: {in_words(what)}")
    return InvalidField(place, f"{place}: {in_words(what)}")


def unknown_field(name: str, place: str, fields: Iterable[str]) -> InvalidField:
    """The refusal of a field nobody knows: one that is ignored would seem to work."""
    close = difflib.get_close_matches(name, fields, 1) if not place else []
    where = f"{place}.{name}" if place else name
    return InvalidField(where, f"unknown field {where}; " + (f"did you mean {close[0]}?" if close else "leave it out"))


def in_words(what: str) -> str:
    """What the decoder says, without the names of Python's types."""
    words = _TYPE.sub(lambda found: _WORDS[found[1]], what.replace("`", "").replace(" | null", ""))
    return words[:1].lower() + words[1:].replace(" | ", " or ")
