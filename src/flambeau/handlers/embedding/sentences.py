"""A request's value → the texts to embed and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flambeau.errors import BadRequest
from flambeau.handlers.requests import parse_json_bytes

TEXT_KEYS = ("text", "input", "inputs")
OPTION_KEYS = ("normalize", "prompt_name", "encoding_format", "dimensions", "usage")
IGNORED_KEYS = ("model", "user")  # what OpenAI's clients send besides
REMEDY = 'send "text", ["text", …], {"input": …} or a text/plain body'


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The texts of one request; `is_one` when they came without a list around them."""

    texts: Sequence[str]
    is_one: bool
    normalize: bool | None = None  # None: as the model does
    prompt_name: str | None = None
    encoding_format: str = "float"  # or base64, of little-endian float32
    dimensions: int | None = None  # fewer than the model gives
    usage: bool = False  # whether the reply tells how many tokens were read


def read_ask(value: Any, max_texts: int) -> Ask:
    """What one request asks for; BadRequest tells what is wrong with it."""
    if isinstance(value, (bytes, bytearray)):
        value = decode(value)
    if not isinstance(value, Mapping):
        return check(Ask(texts=value if isinstance(value, list) else [value], is_one=isinstance(value, str)), max_texts)
    keys = [key for key in TEXT_KEYS if key in value]
    if len(keys) != 1:
        found = f"has {' and '.join(keys)}" if keys else "has no text"
        raise BadRequest(f"the request {found}; give one of {', '.join(TEXT_KEYS)}")
    texts = value[keys[0]]
    if isinstance(texts, (bytes, bytearray)):
        texts = decode(texts)
    return check(
        Ask(
            texts=texts if isinstance(texts, list) else [texts],
            is_one=isinstance(texts, str),
            **read_options(value, keys[0]),
        ),
        max_texts,
    )


def read_options(value: Mapping[str, Any], text_key: str) -> dict[str, Any]:
    """The options beside the texts; unknown ones are refused, since a misspelt one would be ignored silently."""
    options = {key: value[key] for key in OPTION_KEYS if value.get(key) is not None}
    unknown = sorted(map(str, value.keys() - {text_key, *OPTION_KEYS, *IGNORED_KEYS}))
    if unknown:
        raise BadRequest(f"the request has {', '.join(unknown)}; beside the texts it may have {', '.join(OPTION_KEYS)}")
    for key in ("normalize", "usage"):
        if not isinstance(options.get(key, True), bool):
            raise BadRequest(f"{key} must be true or false, not {options[key]!r}")
    if not isinstance(options.get("prompt_name", ""), str):
        raise BadRequest(f"prompt_name must be text, not {options['prompt_name']!r}")
    if options.get("encoding_format", "float") not in ("float", "base64"):
        raise BadRequest("encoding_format may only be float or base64")
    if type(options.get("dimensions", 1)) is not int or options.get("dimensions", 1) < 1:
        raise BadRequest(f"dimensions must be a whole number from 1, not {options['dimensions']!r}")
    return options


def decode(raw: bytes | bytearray) -> Any:
    """Bytes that came without a type, or with a wrong one: JSON when they look so, else text."""
    if raw.lstrip()[:1] in (b"{", b"[", b'"'):
        return parse_json_bytes(raw, "or send it as text/plain")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the text is not UTF-8: {error.reason} at byte {error.start}; {REMEDY}") from None


def check(ask: Ask, max_texts: int) -> Ask:
    """Refuse what cannot be embedded."""
    if not ask.texts:
        raise BadRequest(f"there is no text to embed; {REMEDY}")
    if len(ask.texts) > max_texts:
        raise BadRequest(f"there are {len(ask.texts)} texts; at most {max_texts} (max_texts) may come in one request")
    for i, text in enumerate(ask.texts):
        if not isinstance(text, str):
            raise BadRequest(f"text {i} is {type(text).__name__}, not text; {REMEDY}")
        if not text.strip():
            raise BadRequest(f"text {i} is empty; leave it out or send some text")
        if not is_unicode(text):
            raise BadRequest(f"text {i} has half a surrogate pair, which is no character; send whole characters")
    return ask


def is_unicode(text: str) -> bool:
    """Whether a text can be written in UTF-8; JSON can escape what cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
