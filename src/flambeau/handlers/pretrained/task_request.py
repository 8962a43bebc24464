"""TaskRequest: the inputs and parameters of one request, in the form of Hugging Face's inference API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flambeau.errors import BadRequest, suggest
from flambeau.handlers.embedding.embed_request import decode, is_unicode

# "count": a whole number of at least 1; "some": one of at least 0; "texts": a list of texts, or one text.
Kind = Literal["count", "some", "number", "flag", "text", "texts"] | tuple[str, ...]
FORM_HINT = "curl sends a form unless it has a content type: -H 'content-type: application/json'"
IGNORED = ("options", "model")  # sent by clients of the inference API; nothing here depends on them
WORDS = {
    "count": "a whole number of at least 1",
    "some": "a whole number of at least 0",
    "number": "a number",
    "flag": "true or false",
    "text": "text",
    "texts": "a list of texts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRequest:
    """What one request asks for; `inputs` is as the client sent it."""

    inputs: Any
    parameters: Mapping[str, Any] = field(default_factory=dict)
    transcription: Mapping[str, Any] | None = None  # what /v1/audio asks for; see docs/handlers.md
    speech: Mapping[str, Any] | None = None  # the same, of a task that speaks

    @property
    def is_many(self) -> bool:
        return isinstance(self.inputs, list)

    @property
    def items(self) -> Sequence[Any]:
        """The inputs as a list."""
        if not isinstance(self.inputs, list):
            return [self.inputs]
        if not self.inputs:
            raise BadRequest("the list of inputs is empty; send at least one")
        return self.inputs


def read_task_request(
    row: Mapping[str, Any],
    known: Mapping[str, Kind],
    *,
    fields: Sequence[str] = (),
    is_binary: bool = False,
    speaks: bool = False,
) -> TaskRequest:
    """Read a row: a plain value, or an object with `inputs` and `parameters`.

    `fields` are the keys of an input that may stand at the top level instead (`question` and `context`).
    `is_binary`: bytes are the input itself, an image or a sound. `speaks`: the task has the ability.
    """
    if "transcription" in row and "file" in row and is_binary:
        return TaskRequest(inputs=row["file"], transcription=json.loads(row["transcription"]))
    if "speech" in row and speaks:
        return TaskRequest(inputs="", speech=json.loads(row["speech"]))
    value = next((row[key] for key in ("data", "body") if row.get(key) is not None), None)
    if value is None:
        if "body" in row or "data" in row or not row:
            raise BadRequest('the request is empty; send {"inputs": …}')
        value = dict(row)  # a form
    outer = row.get("parameters") if "data" in row else None  # from an envelope
    if "data" in row and "datatype" in row and not isinstance(value, list):
        value = [value]  # KServe's tensor of one element: its reply is a list, as for several
    if isinstance(value, (bytes, bytearray)) and not is_binary:
        value = decode(value)
    if not isinstance(value, Mapping):
        return TaskRequest(inputs=value, parameters=check_parameters(outer or {}, known))
    given = {str(key): item for key, item in value.items() if key not in IGNORED}
    for key, item in given.items():
        if isinstance(item, (bytes, bytearray)):  # a field of a form
            is_input = key in ("inputs", *fields)
            given[key] = item if is_input and is_binary else decode(item) if is_input else read_field(item)
    parameters = given.pop("parameters", None)
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise BadRequest(f"parameters must be an object, not {kind_of(parameters)}")
    if "inputs" in given:
        inputs = given.pop("inputs")
        if given:  # parameters beside the inputs: an easy slip, with one meaning
            parameters = {**given, **parameters}
    elif set(given) & set(fields):
        inputs = {key: given.pop(key) for key in fields if key in given}
        parameters = {**given, **parameters}
    else:
        found = ", ".join(map(repr, [*given][:5])) or "nothing"
        hint = "" if "body" in row or "data" in row else f"; {FORM_HINT}"
        raise BadRequest(f'the request has {found}, but no inputs; send {{"inputs": …, "parameters": {{…}}}}{hint}')
    return TaskRequest(inputs=inputs, parameters=check_parameters({**(outer or {}), **parameters}, known))


def read_field(value: bytes | bytearray) -> Any:
    """A parameter in a form: a number, a flag, JSON, else text."""
    try:
        number = json.loads(value)
    except (ValueError, RecursionError):
        return decode(value)
    return number if isinstance(number, (int, float)) else decode(value)


def check_parameters(parameters: Mapping[str, Any], known: Mapping[str, Kind]) -> dict[str, Any]:
    """The parameters that are not null; an unknown name or a wrong type is a 400."""
    checked: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in known:
            near = suggest(name, [*known])
            hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
            raise BadRequest(f"unknown parameter {name[:60]!r}; {hint}")
        kind = known[name]
        if value is None:
            checked[name] = None
            continue
        if not fits(value, kind):
            wanted = f"one of {', '.join(kind)}" if isinstance(kind, tuple) else WORDS[kind]
            raise BadRequest(f"{name} must be {wanted}, not {shorten(value)}")
        checked[name] = [value] if kind == "texts" and isinstance(value, str) else value
    return checked


def fits(value: Any, kind: Kind) -> bool:
    if isinstance(kind, tuple):
        return value in kind
    if kind in ("count", "some"):
        return type(value) is int and value >= (kind == "count")
    if kind == "number":
        return type(value) in (int, float) and value == value and abs(value) != float("inf")
    if kind == "flag":
        return isinstance(value, bool)
    if kind == "text":
        return isinstance(value, str) and is_unicode(value)
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and bool(texts) and all(isinstance(t, str) and is_unicode(t) for t in texts)


def read_text(value: Any, what: str = "the input") -> str:
    """A text that a tokenizer can read; KServe's binary tensors hold it as bytes."""
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "surrogateescape")  # what is not UTF-8 is rejected below
    if not isinstance(value, str):
        raise BadRequest(f"{what} must be text, not {kind_of(value)}")
    if not value.strip():
        raise BadRequest(f"{what} is empty; leave it out or send some text")
    if not is_unicode(value):
        raise BadRequest(f"{what} has half a surrogate pair, which is not a character; send valid Unicode")
    return value


def read_texts(value: Any, name: str) -> list[str]:
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name} must be a list of texts, not {kind_of(value) if value != [] else 'an empty list'}")
    return [read_text(text, f"{name}[{i}]") for i, text in enumerate(value)]


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", bytes: "bytes"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def check_keys(item: Mapping[str, Any], known: Sequence[str]) -> None:
    """Reject an input object with a key that is not known, so that a misspelled one is not ignored."""
    for key in item:
        if key not in known:
            near = suggest(str(key), [*known])
            hint = f"did you mean {near}?" if near else f"it may have {', '.join(known)}"
            raise BadRequest(f"an input has the unknown key {str(key)[:60]!r}; {hint}")


def only_of(value: Any) -> Any:
    """The element of a tensor with one element, as KServe's clients send a text; other values unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
