"""The requests of OpenAI's API, field by field. Unknown fields are rejected, since ignored ones would seem to work."""

# ruff: noqa: RUF009  (the defaults are dataclass fields that carry their FieldType)

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar

import msgspec

from flambeau.errors import BadRequest, InvalidField, explain_json, suggest
from flambeau.frontend.http.openapi import Schema
from flambeau.frontend.openai.fields import (
    ANYTHING,
    FLAG,
    NOUNS,
    OBJECT,
    TEXT,
    TOKEN_IDS,
    FieldType,
    array,
    check_token_ids,
    either,
    integer,
    one_of,
    refused,
    text,
)
from flambeau.frontend.openai.priorities import PRIORITY
from flambeau.frontend.openai.sampling_fields import OTHERS, SAMPLING, RequestField
from flambeau.llm.sampling_params import STRUCTURE_FIELDS, InvalidRequest, read_structure

ALTERNATIVES = integer(0, 20)
MAX_NAME = 100  # characters of an unknown field in its error message
Object = dict[str, Any]
Requested = TypeVar("Requested")


def required(kind: FieldType) -> Any:
    return field(metadata={"type": kind})


def optional(kind: FieldType, *, is_listed: bool = True) -> Any:
    """A field that may be absent or null; the API description leaves out fields that are not listed."""
    return field(default=None, metadata={"type": kind, "is_listed": is_listed})


def ignored() -> Any:
    """A field of OpenAI's API that has no effect here."""
    return optional(ANYTHING, is_listed=False)


def unsupported(remedy: str) -> Any:
    return optional(refused(remedy), is_listed=False)


# ---- the requests ----


@dataclass(slots=True, kw_only=True)
class StreamOptions:
    include_usage: bool | None = optional(FLAG)
    include_obfuscation: bool | None = ignored()  # padding against eavesdroppers


@dataclass(slots=True, kw_only=True)
class ModelRequest:
    """The fields of every endpoint."""

    model: str | None = optional(TEXT.described("A registered model: its name, or name@version."))
    user: Any = optional(replace(ANYTHING, schema=TEXT.schema))  # without effect, so any value


@dataclass(slots=True, kw_only=True)
class TextRequest(ModelRequest):
    """The fields that chat and completions share."""

    sampling: Mapping[str, Any] = field(default_factory=dict)  # what the request gives, by the engine's names
    stream: bool | None = optional(FLAG.described("Answer with server-sent events."))
    stream_options: StreamOptions | None = optional(
        OBJECT.then(lambda value, place: read_object(value, StreamOptions, place))
    )
    max_completion_tokens: int | None = optional(integer(1))
    response_format: Object | None = optional(OBJECT)
    guided_json: Object | str | None = optional(either(OBJECT, TEXT))
    guided_regex: str | None = optional(TEXT)
    guided_choice: list[str] | None = optional(array(text(1)))
    guided_grammar: str | None = optional(TEXT)
    truncate_prompt_tokens: int | None = optional(
        integer(-1).described("Keep so many of a prompt's last tokens; -1: as many as there is room for.")
    )
    add_special_tokens: bool | None = optional(FLAG.described("Begin a text with the tokenizer's special tokens."))
    cache_salt: str | None = optional(
        text(1).described("Only requests with the same text share cached beginnings of prompts.")
    )
    return_token_ids: bool | None = optional(FLAG.described("Return the ids of the prompt and of the new tokens."))
    priority: int | None = optional(PRIORITY)
    return_tokens_as_token_ids: bool | None = optional(
        FLAG.described("Name the tokens of log-probabilities by their ids, like token_id:7.")
    )
    spaces_between_special_tokens: bool | None = optional(FLAG, is_listed=False)
    verbosity: Any = ignored()
    prediction: Any = ignored()  # a hint at the answer; speculative decoding needs none
    store: Any = ignored()
    metadata: Any = ignored()
    service_tier: Any = ignored()
    safety_identifier: Any = ignored()
    prompt_cache_key: Any = ignored()
    prompt_cache_retention: Any = ignored()

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of a reply, by either of its names; None: not given."""
        most: int | None = self.sampling.get("max_tokens", self.max_completion_tokens)
        if self.max_completion_tokens not in (None, most):
            raise InvalidField("max_tokens", "max_tokens and max_completion_tokens differ; leave max_tokens out")
        return most

    @property
    def structured_outputs(self) -> dict[str, Any] | None:
        """The form that the text must have, by whichever of its names; None: free text."""
        own = {name: getattr(self, name) for name in STRUCTURE_FIELDS if name not in SAMPLING}
        if not any(value is not None for value in own.values()) and "structured_outputs" not in self.sampling:
            return None
        try:
            return read_structure({**own, **self.sampling})
        except InvalidRequest as error:
            raise InvalidField(error.parameter, str(error)) from None

    @property
    def names(self) -> dict[str, str]:
        """The client's names of fields by those that a worker has in errors."""
        fields = {name: getattr(self, name) for name in STRUCTURE_FIELDS if name not in SAMPLING} | dict(self.sampling)
        given = [name for name in STRUCTURE_FIELDS if fields.get(name) is not None]
        return {"response_format": given[-1]} if given else {}

    @property
    def prompt_options(self) -> dict[str, Any]:
        """What `Generate` takes of the fields about prompts, ids and the cache."""
        return {
            "truncate": self.truncate_prompt_tokens,
            "add_special": self.add_special_tokens is not False,
            "cache_salt": self.cache_salt or "",
            "returns_ids": bool(self.return_token_ids),
        }

    @property
    def has_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        number: int = self.sampling.get("n", 1)
        return number


@dataclass(slots=True, kw_only=True)
class ChatRequest(TextRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Object] = required(array(OBJECT, min_length=1))
    logprobs: bool | None = optional(FLAG)
    top_logprobs: int | None = optional(ALTERNATIVES)
    tools: list[Object] | None = optional(array(OBJECT))
    tool_choice: str | Object | None = optional(either(TEXT, OBJECT))
    parallel_tool_calls: bool | None = optional(FLAG)
    reasoning_effort: str | None = optional(TEXT)
    max_reasoning_tokens: int | None = optional(integer(0))
    thinking_token_budget: int | None = optional(integer(0).described("vLLM's name of max_reasoning_tokens."))
    add_generation_prompt: bool | None = optional(FLAG.described("End the prompt where the model's answer begins."))
    continue_final_message: bool | None = optional(FLAG.described("Continue the text of the last message."))
    documents: list[Object] | None = optional(array(OBJECT).described("Texts that the chat template shows."))
    echo: Any = unsupported("put the text before the answer yourself")
    best_of: Any = unsupported("send n, and choose among the choices")
    chat_template_kwargs: Object | None = optional(OBJECT)
    modalities: list[str] | None = optional(array(one_of("text")), is_listed=False)
    functions: Any = unsupported("send tools instead")
    function_call: Any = unsupported("send tool_choice instead")
    audio: Any = unsupported("this server answers in text")
    web_search_options: Any = unsupported("this server searches nothing")
    prompt: Any = unsupported("/v1/completions takes it; send messages here")
    input: Any = unsupported("/v1/embeddings takes it; send messages here")

    @property
    def names(self) -> dict[str, str]:
        has_other = self.max_reasoning_tokens is None and self.thinking_token_budget is not None
        budget = {"max_reasoning_tokens": "thinking_token_budget"} if has_other else {}
        return super(ChatRequest, self).names | budget


def _check_prompts(value: list[Any], place: str) -> list[Any]:
    kinds = {*map(type, value)}
    if kinds == {int}:
        return check_token_ids(value, place)
    for i, one in enumerate(value if kinds != {str} else ()):
        where = f"{place}[{i}]"
        if type(one) is list:
            check_token_ids(one, where)
        elif type(one) is not str and type(one) is not int:
            raise InvalidField(where, f"{where}: expected text, a whole number or a list, got {NOUNS[type(one)]}")
    return value


TEXTS: Schema = {"type": "array", "items": TEXT.schema}
PROMPTS = FieldType(
    frozenset({str, list}),
    "text or a list",
    {"oneOf": [TEXT.schema, TEXTS, TOKEN_IDS.schema, {"type": "array", "items": TOKEN_IDS.schema}]},
    lambda value, place: value if type(value) is str else _check_prompts(value, place),
)


@dataclass(slots=True, kw_only=True)
class CompletionRequest(TextRequest):
    """`POST /v1/completions`."""

    prompt: str | list[Any] = required(PROMPTS)
    logprobs: int | None = optional(ALTERNATIVES)
    echo: bool | None = optional(FLAG)
    suffix: str | None = optional(TEXT.described("The text behind the completion, where the model fills in."))
    best_of: int | None = optional(
        integer(1, 128).described(
            "Generate so many choices of each prompt, and return the likeliest n by their tokens' mean."
        )
    )
    parallel_tool_calls: Any = ignored()
    messages: Any = unsupported("/v1/chat/completions takes it; send a prompt here")

    @property
    def num_generated(self) -> int:
        """The choices of each prompt, of which the best are returned."""
        return self.num_choices if self.best_of is None else self.best_of

    input: Any = unsupported("/v1/embeddings takes it; send a prompt here")


@dataclass(slots=True, kw_only=True)
class EmbeddingRequest(ModelRequest):
    """`POST /v1/embeddings`."""

    input: str | list[Any] = required(either(TEXT, array(ANYTHING)))
    encoding_format: str | None = optional(one_of("float", "base64"))
    dimensions: int | None = optional(integer(1))
    priority: int | None = optional(PRIORITY)
    prompt_name: str | None = optional(text(1).described("A prompt of the model, which stands before each text."))
    input_type: str | None = optional(
        one_of("query", "document", "passage", "search_query", "search_document").described(
            "What the texts are: the model's prompt for them stands before each."
        )
    )
    prompt: Any = unsupported("/v1/completions takes it; send input here")
    messages: Any = unsupported("/v1/chat/completions takes it; send input here")


@dataclass(slots=True, kw_only=True)
class TokenizeRequest(ModelRequest):
    """`POST /tokenize`, in vLLM's format: a prompt, or the messages of a chat."""

    prompt: str | None = optional(TEXT)
    messages: list[Object] | None = optional(array(OBJECT, min_length=1))
    tools: list[Object] | None = optional(array(OBJECT))
    add_special_tokens: bool | None = optional(FLAG.described("Begin a prompt with the tokenizer's special tokens."))
    add_generation_prompt: bool | None = optional(FLAG)
    continue_final_message: bool | None = optional(FLAG)
    return_token_strs: bool | None = optional(FLAG.described("Also return the text of each token."))
    chat_template_kwargs: Object | None = optional(OBJECT)
    chat_template: Any = unsupported("the model's own chat template is used")


@dataclass(slots=True, kw_only=True)
class DetokenizeRequest(ModelRequest):
    """`POST /detokenize`, in vLLM's format."""

    tokens: list[int] = required(TOKEN_IDS)


@dataclass(slots=True, kw_only=True)
class PoolingRequest(ModelRequest):
    """The fields that scores and classes share."""

    truncate_prompt_tokens: int | None = optional(integer(-1).described("-1: cut long texts at the model's limit."))
    priority: int | None = optional(PRIORITY)


@dataclass(slots=True, kw_only=True)
class RerankRequest(PoolingRequest):
    """`POST /v1/rerank`."""

    query: str = required(text(1))
    documents: list[Any] = required(array(either(TEXT, OBJECT), min_length=1))
    top_n: int | None = optional(integer(0).described("How many of the best documents; 0: all."))
    return_documents: bool | None = optional(FLAG.described("Whether the results have the texts; true by default."))
    instruction: str | None = optional(text(1).described("What the query asks for, in the model's prompt."))
    max_tokens_per_doc: Any = unsupported("send truncate_prompt_tokens: -1 to cut long texts at the model's limit")


@dataclass(slots=True, kw_only=True)
class ScoreRequest(PoolingRequest):
    """`POST /v1/score`."""

    text_1: str | list[Any] = required(either(TEXT, array(ANYTHING)))
    text_2: str | list[Any] = required(either(TEXT, array(ANYTHING)))
    instruction: str | None = optional(text(1).described("What the query asks for, in the model's prompt."))
    encoding_format: str | None = optional(one_of("float"), is_listed=False)


@dataclass(slots=True, kw_only=True)
class ClassifyRequest(PoolingRequest):
    """`POST /v1/classify`."""

    input: str | list[Any] = required(either(TEXT, array(ANYTHING)))


# ---- reading ----


def _request_fields(kind: type) -> dict[str, RequestField]:
    own: dict[str, RequestField] = {}
    for one in fields(kind):
        if "type" in one.metadata:
            is_required = one.default is MISSING
            own[one.name] = RequestField(
                one.metadata["type"], "", is_required, is_listed=one.metadata.get("is_listed", True)
            )
    return {**OTHERS, **SAMPLING, **own} if issubclass(kind, TextRequest) else own


# The fields of each request by their names in JSON.
FIELDS: dict[Any, dict[str, RequestField]] = {
    kind: _request_fields(kind)
    for kind in (
        StreamOptions,
        ChatRequest,
        CompletionRequest,
        EmbeddingRequest,
        TokenizeRequest,
        DetokenizeRequest,
        RerankRequest,
        ScoreRequest,
        ClassifyRequest,
    )
}
REQUIRED: dict[Any, list[str]] = {
    kind: [name for name, one in known.items() if one.is_required] for kind, known in FIELDS.items()
}


def registered(kind: type[Requested]) -> type[Requested]:
    """A dataclass of another module that `read_request` reads."""
    FIELDS[kind] = _request_fields(kind)
    REQUIRED[kind] = [name for name, one in FIELDS[kind].items() if one.is_required]
    return kind


def read_request(body: bytes, kind: type[Requested]) -> Requested:
    """Raises BadRequest; InvalidField if one field is the reason."""
    try:
        document = msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: {error.reason} in one of its texts") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except msgspec.ValidationError:
        raise BadRequest("a number in the body is out of range") from None
    except msgspec.DecodeError:
        raise BadRequest(f"the body is not valid JSON: {explain_json(body)}") from None
    if type(document) is not dict:
        raise BadRequest(f"the body is no request: expected object, got {NOUNS[type(document)]}")
    return read_object(document, kind)


def read_object(document: Object, kind: type[Requested], place: str = "") -> Requested:
    known = FIELDS[kind]
    values: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    prefix = f"{place}." if place else ""
    for name, value in document.items():
        one = known.get(name)
        if one is None:
            raise unknown_field(name, prefix, [known_name for known_name in known if known[known_name].is_kept])
        if value is None and not one.is_required:
            continue
        checked = one.type.check(value, prefix + name)
        if not one.is_kept:
            continue
        if one.parameter:
            sampling[one.parameter] = checked
        else:
            values[name] = checked
    for name in REQUIRED[kind]:
        if name not in values:
            raise InvalidField(prefix + name, f"{prefix}{name} is required")
    if sampling:
        values["sampling"] = sampling
    return kind(**values)


def unknown_field(name: str, prefix: str, known: Iterable[str]) -> InvalidField:
    near = None if prefix else suggest(name, known)
    where = prefix + name[:MAX_NAME]
    return InvalidField(where, f"unknown field {where}; " + (f"did you mean {near}?" if near else "leave it out"))


def check_names(document: Any, place: str, known: Iterable[str]) -> None:
    """Reject fields of an object within a request that have no meaning."""
    for name in document if isinstance(document, dict) else ():
        if name not in known:
            near = suggest(name, known)
            where = f"{place}.{name[:MAX_NAME]}"
            raise InvalidField(
                where, f"unknown field {where}; " + (f"did you mean {near}?" if near else "leave it out")
            )


def request_schema(kind: type) -> Schema:
    """The OpenAPI schema of a request."""
    known = FIELDS[kind]
    return {
        "type": "object",
        "required": [*dict.fromkeys(("model", *REQUIRED[kind]))],
        "properties": {name: one.type.schema for name, one in known.items() if one.is_listed},
    }
