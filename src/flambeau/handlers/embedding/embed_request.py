"""EmbedRequest: the texts and options of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flambeau.errors import BadRequest, InvalidField
from flambeau.handlers.request_rows import parse_json_bytes

TEXT_KEYS = ("text", "input", "inputs")
OPTION_KEYS = ("normalize", "prompt_name", "input_type", "encoding_format", "dimensions", "usage")
IGNORED_KEYS = ("model", "user")  # sent by OpenAI clients
INPUT_TYPES: Mapping[str, Sequence[str]] = {  # what a text is → the names of its prompt, as folders have them
    "query": ("query", "search_query"),
    "document": ("document", "passage", "corpus", "search_document"),
}
TYPE_NAMES = {"passage": "document", "search_query": "query", "search_document": "document"}  # of other servers
REMEDY = 'send "text", ["text", …], {"input": …} or a text/plain body'


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedRequest:
    """The texts of one request; `is_one` if it was a single text, not a list."""

    texts: Sequence[str]
    is_one: bool
    normalize: bool | None = None  # None: the model's default
    prompt_name: str | None = None
    input_type: str | None = None  # a key of INPUT_TYPES
    encoding_format: str = "float"  # or base64, of little-endian float32
    dimensions: int | None = None  # None: as many as the model has
    usage: bool = False  # whether the reply has the number of tokens
    has_pairs: bool = False  # the texts are pairs, one after another, whose similarity is asked for
    truncates: bool = True  # of pairs, the second texts may be cut at the model's limit


def read_embed_request(value: Any, max_texts: int) -> EmbedRequest:
    """Read a request's value; BadRequest says what is wrong with it."""
    if isinstance(value, (bytes, bytearray)):
        value = decode(value)
    if not isinstance(value, Mapping):
        return check(
            EmbedRequest(texts=value if isinstance(value, list) else [value], is_one=isinstance(value, str)), max_texts
        )
    if "pairs" in value:
        return check(read_pairs(value), 2 * max_texts)
    keys = [key for key in TEXT_KEYS if key in value]
    if len(keys) != 1:
        found = f"has {' and '.join(keys)}" if keys else "has no text"
        raise BadRequest(f"the request {found}; give one of {', '.join(TEXT_KEYS)}")
    texts = value[keys[0]]
    if isinstance(texts, (bytes, bytearray)):
        texts = decode(texts)
    return check(
        EmbedRequest(
            texts=texts if isinstance(texts, list) else [texts],
            is_one=isinstance(texts, str),
            **read_options(value, keys[0]),
        ),
        max_texts,
        keys[0],
    )


def read_pairs(value: Mapping[str, Any]) -> EmbedRequest:
    """A request from a front end for the similarity of pairs of texts."""
    pairs = value["pairs"]
    is_valid = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if "instruction" in value:
        raise InvalidField("instruction", "the model embeds, so it takes no instruction; leave it out")
    if not is_valid or value.keys() - {"pairs", "truncation"}:
        raise BadRequest("pairs must be a list of lists of two texts, and nothing else may be beside it")
    texts = [text for pair in pairs for text in pair]
    truncates = bool(value.get("truncation"))
    return EmbedRequest(texts=texts, is_one=False, usage=True, has_pairs=True, truncates=truncates)


def read_options(value: Mapping[str, Any], text_key: str) -> dict[str, Any]:
    """Read the options; unknown ones are rejected, so that a misspelled one is not ignored silently."""
    options = {key: value[key] for key in OPTION_KEYS if value.get(key) is not None}
    unknown = sorted(map(str, value.keys() - {text_key, *OPTION_KEYS, *IGNORED_KEYS}))
    if unknown:
        raise BadRequest(f"unknown options: {', '.join(unknown)}; known: {', '.join(OPTION_KEYS)}")
    for key in ("normalize", "usage"):
        if not isinstance(options.get(key, True), bool):
            raise InvalidField(key, f"{key} must be true or false, not {options[key]!r}")
    if not isinstance(options.get("prompt_name", ""), str):
        raise InvalidField("prompt_name", f"prompt_name must be text, not {options['prompt_name']!r}")
    if "input_type" in options:
        given = options["input_type"]
        if not isinstance(given, str) or given not in (*INPUT_TYPES, *TYPE_NAMES):
            known = ", ".join((*INPUT_TYPES, *TYPE_NAMES))
            raise InvalidField("input_type", f"input_type must be one of {known}, not {given!r}")
        if "prompt_name" in options:
            raise InvalidField("input_type", "input_type and prompt_name both choose a prompt; send one of them")
        options["input_type"] = TYPE_NAMES.get(given, given)
    if options.get("encoding_format", "float") not in ("float", "base64"):
        raise InvalidField("encoding_format", "encoding_format must be float or base64")
    if type(options.get("dimensions", 1)) is not int or options.get("dimensions", 1) < 1:
        raise InvalidField("dimensions", f"dimensions must be a whole number from 1, not {options['dimensions']!r}")
    return options


def decode(raw: bytes | bytearray) -> Any:
    """Bytes without a content type: JSON if they look like it, else UTF-8 text."""
    if raw.lstrip()[:1] in (b"{", b"[", b'"'):
        return parse_json_bytes(raw, "or send it as text/plain")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the text is not UTF-8: {error.reason} at byte {error.start}; {REMEDY}") from None


def check(request: EmbedRequest, max_texts: int, field: str = "") -> EmbedRequest:
    """Reject a request without texts, with too many, or with texts that cannot be embedded; `field` has them."""
    if (problem := problem_of(request.texts, max_texts)) is not None:
        raise InvalidField(field, problem) if field else BadRequest(problem)
    return request


def problem_of(texts: Sequence[Any], max_texts: int) -> str | None:
    if not texts:
        return f"there is no text to embed; {REMEDY}"
    if len(texts) > max_texts:
        return f"the request has {len(texts)} texts; the limit is {max_texts} (max_texts)"
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {i} is {type(text).__name__}, not text; {REMEDY}"
        if not text.strip():
            return f"text {i} is empty; leave it out or send some text"
        if not is_unicode(text):
            return f"text {i} has half a surrogate pair, which is not a character; send valid Unicode"
    return None


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8; JSON escapes allow lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
