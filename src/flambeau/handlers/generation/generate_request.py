"""GenerateRequest: prompt, sampling and form of the reply, read from a prediction request."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flambeau.errors import BadRequest, InvalidField, json_problem, suggest
from flambeau.llm.errors import InvalidRequest as Refused
from flambeau.llm.sampling_params import (
    SAMPLING_FIELDS,
    STRUCTURE_FIELDS,
    SamplingField,
    SamplingKind,
    SamplingParams,
    read_structure,
)

PROMPTS = ("data", "prompt", "body", "messages")
SAMPLING = {name: known for known in SAMPLING_FIELDS.values() for name in (*known.aliases, known.name)}
FORMS = ("stream", "return_full_text", "details")
STRUCTURED = "structured_outputs"
KNOWN = (*PROMPTS, *SAMPLING, *STRUCTURE_FIELDS, *FORMS)
CHAT_ONLY = ("tools", "tool_choice")  # fields of /v1/chat/completions that change the text
SCORES = ("logprobs", "prompt_logprobs")  # part of the details of a reply
LIKENESS = 0.85  # similarity from which an unknown field is taken for a misspelled one


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One validated request. The prompt is text, token ids or the messages of a chat."""

    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    has_events: bool = False  # a stream of server-sent events, rather than of plain text
    full_text: bool | None = None  # include the prompt; None: in a whole reply, but not in a stream
    details: bool = False
    given: tuple[str, ...] = ()  # names of the fields in the request


def read_generate_request(
    row: Any, defaults: SamplingParams, *, streams: bool = False, accept: str = "", content_type: str = ""
) -> GenerateRequest:
    """Raises BadRequest with the name of an invalid field and its limits."""
    is_json = content_type.startswith("application/json")
    fields = fields_of(row, is_json=is_json)
    refuse_misspelled(fields)
    refuse_chat_fields(fields)
    refuse_two_prompts(fields)
    has_events = "text/event-stream" in accept.lower()
    stream = flag(fields, "stream")
    messages = fields.get("messages")
    return GenerateRequest(
        prompt="" if messages is not None else prompt_of(fields, is_json=is_json),
        messages=check_messages(messages) if messages is not None else None,
        params=read_sampling(fields, defaults),
        stream=(streams or has_events) if stream is None else stream,
        has_events=has_events,
        full_text=flag(fields, "return_full_text"),
        details=flag(fields, "details") or any(fields.get(name) is not None for name in SCORES),
        given=tuple(name for name, value in fields.items() if value is not None),
    )


def refuse_unsupported(request: GenerateRequest, known: Collection[str], defaults: SamplingParams, who: str) -> None:
    """Reject the first field that would change the reply and that `who` does not support."""
    forms = {"stream": request.stream, "return_full_text": request.full_text is False, "details": request.details}
    for name in request.given:
        parameter = STRUCTURED if name in STRUCTURE_FIELDS else SAMPLING[name].name if name in SAMPLING else ""
        # Speculation changes how a text is computed, not the text.
        is_ignored = parameter not in ("", "speculate", *known)
        changes = is_ignored and getattr(request.params, parameter) != getattr(defaults, parameter)
        if changes or forms.get(name, False):
            names = ", ".join(field for field, one in SAMPLING.items() if one.name in known)
            raise BadRequest(f"{name} is not known to {who}; leave it out: of the settings it takes {names}")


def fields_of(row: Any, *, is_json: bool = False) -> Mapping[str, Any]:
    """The fields of a request that is JSON, plain text, bytes of either, or a form."""
    if not isinstance(row, Mapping):
        row = {"body": row}
    body = row.get("body") if row.keys() == {"body"} else row.get("data") if row.keys() == {"data"} else None
    if isinstance(body, bytes | bytearray):
        text = text_of(body)
        body = parsed(text, is_json=is_json)
    if isinstance(body, Mapping):
        return body
    return dict(row) if body is None else {"data": body}


def parsed(text: str, *, is_json: bool) -> Any:
    """A body of bytes is JSON if its content type says so or it is an object; else it is the prompt."""
    if not is_json and not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if is_json:
            raise BadRequest(f"the body is not valid JSON: {json_problem(error)}") from None
        return text


def prompt_of(fields: Mapping[str, Any], *, is_json: bool = False) -> str | list[int]:
    name = next(iter(prompt_names(fields)), None)
    if name is None:
        given = [key for key in fields if key != "body"]
        found = ", ".join(repr(str(key)[:40]) for key in given[:5]) or "nothing"
        hint = ". curl sends a form by default: add -H 'content-type: application/json'"
        raise BadRequest(
            f'the request has no prompt: send it as "data" or "prompt"; it has {found}{"" if is_json else hint}'
        )
    prompt = fields[name]
    if isinstance(prompt, bytes | bytearray):
        prompt = text_of(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise BadRequest(f"{name} must be text or a list of token ids, not {kind_of(prompt)}")
    if not prompt:
        raise BadRequest(f"{name} is empty; a prompt has at least one character")
    return check_text(prompt, name)


def prompt_names(fields: Mapping[str, Any]) -> list[str]:
    """The fields that hold a prompt; an empty one counts only if there is no other."""
    names = [name for name in PROMPTS if fields.get(name) is not None]
    return [name for name in names if fields[name] not in ("", b"")] or names


def refuse_two_prompts(fields: Mapping[str, Any]) -> None:
    """Reject two different prompts: the reply could answer only one of them."""
    first, *others = prompt_names(fields) or [""]
    for other in others:
        if fields[first] != fields[other]:
            raise BadRequest(f"{first} and {other} are both a prompt, and they differ; send one of them")


def refuse_chat_fields(fields: Mapping[str, Any]) -> None:
    """Reject fields of chat requests that have no effect here, though a client expects one."""
    for name in CHAT_ONLY:
        if fields.get(name) not in (None, [], "none", {"type": "text"}):
            raise BadRequest(f"{name} has no effect on predictions; leave it out, or use /v1/chat/completions")


def check_text(text: str, name: str) -> str:
    """Reject text that cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name} is no valid text: half of a surrogate pair at character {error.start}") from None
    return text


def text_of(raw: bytes | bytearray) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"the prompt is not UTF-8: {error.reason} at byte {error.start}") from None


def check_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise BadRequest('messages must be a list of at least one {"role": …, "content": …}')
    return messages


def read_sampling(fields: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """The sampling parameters of a request over the model's defaults."""
    names = {SAMPLING[name].name: name for name, value in fields.items() if name in SAMPLING and value is not None}
    names.pop(STRUCTURED, None)
    given = {parameter: sampling_value(name, SAMPLING[name], fields[name]) for parameter, name in names.items()}
    if any(fields.get(name) is not None for name in STRUCTURE_FIELDS):
        given[STRUCTURED] = structure_of(fields)
    return with_defaults(given, defaults, names)


def structure_of(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """The form that the text must have, in the spelling of OpenAI or of vLLM."""
    given = {name: parsed_structure(fields[name]) for name in STRUCTURE_FIELDS if fields.get(name) is not None}
    try:
        return read_structure(given)
    except Refused as error:
        raise BadRequest(str(error)) from None


def parsed_structure(value: Any) -> Any:
    """The fields of a form are text: JSON if it is an object or a list, else itself."""
    if isinstance(value, bytes | bytearray):
        text = text_of(value)
        return parsed_field(text, "structure") if text.lstrip()[:1] in ("{", "[") else text
    return value


def with_defaults(
    given: Mapping[str, Any], defaults: SamplingParams, names: Mapping[str, str] | None = None
) -> SamplingParams:
    """Parameters over defaults; an error uses the client's own name of the field."""
    try:
        return replace(defaults, **given)
    except Refused as error:
        name = (names or {}).get(error.parameter, error.parameter)
        raise InvalidField(name, name + str(error).removeprefix(error.parameter)) from None


def sampling_value(name: str, known: SamplingField, value: Any) -> Any:
    """A value as SamplingParams takes it; the fields of a form are text."""
    if isinstance(value, bytes | bytearray):
        value = parsed_field(text_of(value), known.kind)
    return READERS[known.kind](name, value)


def parsed_field(text: str, kind: SamplingKind) -> Any:
    """A form field: JSON if it is valid JSON, else text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if kind == "texts" and not isinstance(value, list) else value


def read_integer(name: str, value: Any) -> int:
    """A whole number; 7.0 is one."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise BadRequest(f"{name} must be a whole number, not {kind_of(value)}")
    return value


def read_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{name} must be a number, not {kind_of(value)}")
    return value


def read_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, not {kind_of(value)}")
    return value


def read_texts(name: str, value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) else read_items(name, value)


def read_items(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise BadRequest(f"{name} must be a list, not {kind_of(value)}")
    return tuple(value)


def read_biases(name: str, value: Any) -> dict[int, float]:
    """Token ids and biases; the keys of a JSON object are text."""
    if not isinstance(value, Mapping):
        raise BadRequest(f"{name} must be an object of token ids and numbers, not {kind_of(value)}")
    try:
        return {int(token): bias for token, bias in value.items()}
    except (TypeError, ValueError):
        raise BadRequest(f"{name} must be an object of token ids and numbers") from None


READERS: dict[SamplingKind, Callable[[str, Any], Any]] = {
    "integer": read_integer,
    "number": read_number,
    "flag": read_flag,
    "texts": read_texts,
    "token_ids": read_items,
    "biases": read_biases,
    "structure": lambda name, value: value,  # `structure_of` reads it
}


def flag(fields: Mapping[str, Any], name: str) -> bool | None:
    """None: the request does not have the field."""
    value = fields.get(name)
    if isinstance(value, bytes | bytearray):
        value = {"true": True, "1": True, "false": False, "0": False}.get(text_of(value).lower(), value)
    return None if value is None else read_flag(name, value)


def refuse_misspelled(fields: Mapping[str, Any]) -> None:
    """Reject near misses of known fields. Other unknown fields are ignored, as existing clients expect."""
    for name in fields:
        if name not in KNOWN:
            near = suggest(str(name), KNOWN, cutoff=LIKENESS)
            if near and near not in fields:
                raise BadRequest(f"{str(name)[:80]!r} is not a field of this request; did you mean {near!r}?")


def kind_of(value: Any) -> str:
    """A value in an error message: itself if it is short, else its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    return f"a {type(value).__name__}"
