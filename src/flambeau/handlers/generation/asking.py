"""What a client asks of a language model: a request's row → prompt, sampling and the form of the reply."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flambeau.errors import BadRequest
from flambeau.llm.config import SamplingParams
from flambeau.llm.errors import InvalidRequest as Refused

PROMPTS = ("data", "prompt", "body", "messages")
SAMPLING = {  # field of a request → field of SamplingParams
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_tokens": "min_tokens",
    **{
        name: name
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "seed",
            "stop",
            "stop_token_ids",
            "include_stop",
            "ignore_eos",
            "n",
            "logprobs",
            "speculate",
        )
    },
}
WHOLE = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
FLAGS = ("include_stop", "ignore_eos", "speculate")
FORMS = ("stream", "return_full_text", "details")
KNOWN = (*PROMPTS, *SAMPLING, *FORMS)
LIKENESS = 0.85  # how like a known field another must be, to be taken for a misspelling of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, read and checked; its prompt is text, token ids or the messages of a chat."""

    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    has_events: bool = False  # a stream of server-sent events, rather than of plain text
    full_text: bool | None = None  # the prompt before the text; None: in a whole reply, but not in a stream
    details: bool = False
    given: tuple[str, ...] = ()  # the fields that the request has


def read_ask(
    row: Any, defaults: SamplingParams, *, streams: bool = False, accept: str = "", content_type: str = ""
) -> Ask:
    """What a request asks for; raises BadRequest with the field and its limits."""
    is_json = content_type.startswith("application/json")
    fields = fields_of(row, is_json=is_json)
    refuse_misspelt(fields)
    refuse_two_prompts(fields)
    has_events = "text/event-stream" in accept.lower()
    stream = flag(fields, "stream")
    messages = fields.get("messages")
    return Ask(
        prompt="" if messages is not None else prompt_of(fields, is_json=is_json),
        messages=check_messages(messages) if messages is not None else None,
        params=read_sampling(fields, defaults),
        stream=(streams or has_events) if stream is None else stream,
        has_events=has_events,
        full_text=flag(fields, "return_full_text"),
        details=flag(fields, "details") or fields.get("logprobs") is not None,
        given=tuple(name for name, value in fields.items() if value is not None),
    )


def refuse_beyond(ask: Ask, known: Collection[str], defaults: SamplingParams, who: str) -> None:
    """Name the first field that would change the reply and that `who` does not know: only `known` settings reach it."""
    forms = {"stream": ask.stream, "return_full_text": ask.full_text is False, "details": ask.details}
    for name in ask.given:
        setting = SAMPLING.get(name, "speculate")  # which changes how a text is made, and not the text
        is_known = setting in known or setting == "speculate"
        changes = not is_known and getattr(ask.params, setting) != getattr(defaults, setting)
        if changes or forms.get(name, False):
            names = ", ".join(field for field, setting in SAMPLING.items() if setting in known)
            raise BadRequest(f"{name} is not known to {who}; leave it out: of the settings it takes {names}")


def fields_of(row: Any, *, is_json: bool = False) -> Mapping[str, Any]:
    """The fields of a request, whatever it came as: JSON, plain text, bytes of either, or a form."""
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
    """A body that came as bytes: JSON if it says so or is an object, else a prompt as it stands."""
    if not is_json and not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if is_json:
            raise BadRequest(f"the body is not valid JSON: {error}") from None
        return text


def prompt_of(fields: Mapping[str, Any], *, is_json: bool = False) -> str | list[int]:
    """The prompt, by the first of its names."""
    name = next(iter(prompt_names(fields)), None)
    if name is None:
        given = [key for key in fields if key != "body"]
        found = ", ".join(repr(str(key)[:40]) for key in given[:5]) or "nothing"
        hint = ". curl sends a form unless it is told the type: add -H 'content-type: application/json'"
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
    """The names under which there is a prompt; an empty one counts only where there is no other."""
    names = [name for name in PROMPTS if fields.get(name) is not None]
    return [name for name in names if fields[name] not in ("", b"")] or names


def refuse_two_prompts(fields: Mapping[str, Any]) -> None:
    """A request with two prompts would be answered for one of them, and nobody could say which was meant."""
    first, *others = prompt_names(fields) or [""]
    for other in others:
        if fields[first] != fields[other]:
            raise BadRequest(f"{first} and {other} are both a prompt, and they differ; send one of them")


def check_text(text: str, name: str) -> str:
    """Text that can be written in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"{name} is no valid text: half of a surrogate pair at character {error.start}") from None
    return text


def text_of(raw: bytes | bytearray) -> str:
    """Text that came as bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"the prompt is not UTF-8: {error.reason} at byte {error.start}") from None


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a chat."""
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise BadRequest('messages must be a list of at least one {"role": …, "content": …}')
    return messages


def read_sampling(fields: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    """How to sample: what the request says over what the model's settings do."""
    names = {SAMPLING[name]: name for name, value in fields.items() if name in SAMPLING and value is not None}
    given = {meaning: sampling_value(name, meaning, fields[name]) for meaning, name in names.items()}
    try:
        return replace(defaults, **given)
    except Refused as error:  # in the client's own words
        name = names.get(error.parameter, error.parameter)
        raise BadRequest(name + str(error).removeprefix(error.parameter)) from None


def sampling_value(name: str, meaning: str, value: Any) -> Any:
    """A value as SamplingParams takes it; what came in a form is text."""
    if isinstance(value, bytes | bytearray):
        value = parsed_field(text_of(value), meaning)
    if meaning in WHOLE:
        return whole_number(name, value)
    if meaning in NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise BadRequest(f"{name} must be a number, not {kind_of(value)}")
    if meaning == "stop":
        return (value,) if isinstance(value, str) else tuple(items_of(name, value))
    if meaning == "stop_token_ids":
        return tuple(items_of(name, value))
    if meaning == "logit_bias":
        return read_bias(name, value)
    if meaning in FLAGS and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, not {kind_of(value)}")
    return value


def whole_number(name: str, value: Any) -> int:
    """A whole number, also where it is written 7.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if type(value) is not int:
        raise BadRequest(f"{name} must be a whole number, not {kind_of(value)}")
    return value


def parsed_field(text: str, meaning: str) -> Any:
    """A field of a form: a number or a list where it is written like one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if meaning == "stop" and not isinstance(value, list) else value


def items_of(name: str, value: Any) -> list[Any]:
    """The elements of a list."""
    if not isinstance(value, list | tuple):
        raise BadRequest(f"{name} must be a list, not {kind_of(value)}")
    return [*value]


def read_bias(name: str, value: Any) -> dict[int, float]:
    """Token ids and what is added to their logits; JSON's keys are text."""
    if not isinstance(value, Mapping):
        raise BadRequest(f"{name} must be an object of token ids and numbers, not {kind_of(value)}")
    try:
        return {int(token): bias for token, bias in value.items()}
    except (TypeError, ValueError):
        raise BadRequest(f"{name} must be an object of token ids and numbers") from None


def flag(fields: Mapping[str, Any], name: str) -> bool | None:
    """True, false, or not said."""
    value = fields.get(name)
    if isinstance(value, bytes | bytearray):
        value = {"true": True, "1": True, "false": False, "0": False}.get(text_of(value).lower(), value)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, not {kind_of(value)}")
    return value


def refuse_misspelt(fields: Mapping[str, Any]) -> None:
    """Name near misses of known fields; any other field is ignored, as TorchServe does."""
    for name in fields:
        if name not in KNOWN:
            near = difflib.get_close_matches(str(name).lower().replace("-", "_"), KNOWN, 1, cutoff=LIKENESS)
            if near and near[0] not in fields:
                raise BadRequest(f"{str(name)[:80]!r} is not a field of this request; did you mean {near[0]!r}?")


def kind_of(value: Any) -> str:
    """What a value is, in few words."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)[:80]
    return f"a {type(value).__name__}"
