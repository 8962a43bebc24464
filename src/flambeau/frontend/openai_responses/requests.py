"""The requests of OpenAI's Responses API, and the chats that they become."""

# ruff: noqa: RUF009  (the defaults are dataclass fields that carry their FieldType)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.openai.chat_translation import read_chat
from flambeau.frontend.openai.fields import (
    ANYTHING,
    FLAG,
    OBJECT,
    TEXT,
    array,
    either,
    integer,
    number,
    one_of,
    shown,
)
from flambeau.frontend.openai.file_parts import FilePart, check_detail, check_file, check_url, image_part
from flambeau.frontend.openai.priorities import PRIORITY
from flambeau.frontend.openai.requests import (
    ChatRequest,
    ModelRequest,
    Object,
    check_names,
    ignored,
    optional,
    registered,
    required,
    unsupported,
)

TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = ("user", "assistant", "system", "developer")
# Names of chats in errors → the names that the client used.
CLIENT_NAMES = {
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
TEXT_FIELDS = ("format", "verbosity")
FORMAT_FIELDS = ("type", "name", "description", "schema", "strict")
REASONING_FIELDS = ("effort", "summary", "generate_summary", "context", "mode")
TOOL_FIELDS = ("name", "description", "parameters", "strict")
OTHER_TOOL_FIELDS = ("type", "allowed_callers", "defer_loading", "output_schema")  # without effect
ALONE = "this server keeps no such thing; send the input itself"
INCLUDABLE = ("reasoning.encrypted_content",)  # thoughts are returned as text in any case


@registered
@dataclass(slots=True, kw_only=True)
class ResponsesRequest(ModelRequest):
    """`POST /v1/responses`."""

    input: str | list[Object] = required(either(TEXT, array(OBJECT)))
    instructions: str | None = optional(TEXT)
    max_output_tokens: int | None = optional(integer(1))
    temperature: float | None = optional(number(0, 2))
    top_p: float | None = optional(number(0, 1, excludes_low=True))
    stream: bool | None = optional(FLAG.described("Answer with server-sent events."))
    stream_options: Any = ignored()  # padding against eavesdroppers
    tools: list[Object] | None = optional(array(OBJECT))
    tool_choice: str | Object | None = optional(either(TEXT, OBJECT))
    parallel_tool_calls: bool | None = optional(FLAG)
    text: Object | None = optional(OBJECT)
    reasoning: Object | None = optional(OBJECT)
    store: bool | None = optional(FLAG.described("Keep the response for a while; true by default."))
    previous_response_id: str | None = optional(TEXT)
    metadata: Object | None = optional(OBJECT)
    priority: int | None = optional(PRIORITY)
    truncation: str | None = optional(one_of("disabled"))
    include: list[str] | None = optional(array(one_of(*INCLUDABLE)))
    background: bool | None = optional(FLAG, is_listed=False)
    max_tool_calls: Any = ignored()  # of tools that the server calls itself: it has none
    service_tier: Any = ignored()
    safety_identifier: Any = ignored()
    prompt_cache_key: Any = ignored()
    prompt_cache_retention: Any = ignored()
    prompt_cache_options: Any = ignored()
    conversation: Any = unsupported(ALONE)
    prompt: Any = unsupported(ALONE)
    context_management: Any = unsupported("send the input that the model is to read")
    top_logprobs: Any = optional(ANYTHING, is_listed=False)
    messages: Any = unsupported("/v1/chat/completions takes it; send input here")

    @property
    def is_stored(self) -> bool:
        return self.store is not False


def to_chat(request: ResponsesRequest, messages: Sequence[Object]) -> ChatRequest:
    """The chat of a request whose whole conversation is `messages`; InvalidField names the client's own fields."""
    if request.background:
        raise InvalidField("background", "background is not supported; leave it out and wait for the response")
    if request.top_logprobs:
        raise InvalidField("top_logprobs", "top_logprobs is not supported here; use /v1/chat/completions")
    check_names(request.text, "text", TEXT_FIELDS)
    check_names(request.reasoning, "reasoning", REASONING_FIELDS)
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    chat: Object = {
        "model": request.model,
        "messages": [*system, *messages],
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "parallel_tool_calls": request.parallel_tool_calls,
        "tools": [tool_of(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())] or None,
        "tool_choice": tool_choice_of(request.tool_choice),
        "response_format": format_of((request.text or {}).get("format")),
        "reasoning_effort": effort_of(request.reasoning or {}),
        "stream": request.stream,
    }
    if request.stream:
        chat["stream_options"] = {"include_usage": True}
    return read_chat(chat, CLIENT_NAMES)


# ---- input items → the messages of a chat ----


def items_of(request: ResponsesRequest) -> list[Object]:
    """The input as items."""
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": request.input}]}]
    return request.input


def messages_of(items: Sequence[Object]) -> list[Object]:
    """Thoughts, text and calls of one turn of the model are one message."""
    messages: list[Object] = []
    for i, item in enumerate(items):
        place = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "message":
            add_message(messages, item, place)
        elif kind == "function_call":
            turn_of(messages).setdefault("tool_calls", []).append(call_of(item, place))
        elif kind == "function_call_output":
            messages.append(output_of(item, place))
        elif kind == "reasoning":
            messages.append({"role": "assistant", "content": "", "reasoning_content": thought_of(item)})
        else:
            raise InvalidField(f"{place}.type", f"{place}.type is {shown(kind)}: this server does not know such items")
    return messages


def add_message(messages: list[Object], item: Object, place: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidField(f"{place}.role", f"{place}.role must be one of {', '.join(ROLES)}, not {shown(role)}")
    take = content_of if role == "user" else text_of
    content = take(item.get("content"), f"{place}.content")
    last = messages[-1] if messages else {}
    if role == "assistant" and "reasoning_content" in last and not last["content"] and "tool_calls" not in last:
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def turn_of(messages: list[Object]) -> Object:
    """The message of the model that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def call_of(item: Object, place: str) -> Object:
    values = [item.get(name) for name in ("call_id", "name", "arguments")]
    if not all(isinstance(value, str) for value in values):
        raise InvalidField(place, f"{place} must have a call_id, a name and arguments, which are texts")
    call_id, name, arguments = values
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def output_of(item: Object, place: str) -> Object:
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise InvalidField(f"{place}.call_id", f"{place}.call_id is required: the id of the call")
    return {"role": "tool", "tool_call_id": call_id, "content": text_of(item.get("output"), f"{place}.output")}


def thought_of(item: Object) -> str:
    parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
    return "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def content_of(content: Any, place: str) -> str | list[Object]:
    """The text of a content, or its parts if there are files among them."""
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content or ()]
    if not isinstance(content, list) or FILE_PARTS.keys().isdisjoint(kinds):
        return text_of(content, place)
    return [
        FILE_PARTS[kind](part, f"{place}[{i}]")
        if kind in FILE_PARTS
        else {"type": "text", "text": text_of([part], f"{place}", first=i)}
        for i, (kind, part) in enumerate(zip(kinds, content, strict=True))
    ]


def image_of(part: Object, place: str) -> Object:
    if part.get("file_id") is not None:
        raise InvalidField(f"{place}.file_id", f"{place}.file_id is not supported; send the image as an image_url")
    check_detail(part.get("detail"), f"{place}.detail")
    return image_part(check_url(part.get("image_url"), f"{place}.image_url"), place)


def sound_of(part: Object, place: str) -> Object:
    check_file(part, place)
    return FilePart(part, place)


FILE_PARTS = {"input_image": image_of, "input_audio": sound_of}


def text_of(content: Any, place: str, *, first: int = 0) -> str:
    """The texts of a content, one on each line; `first` is the number of its first part."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidField(place, f"{place} must be text, or a list of text parts")
    texts = []
    for i, part in enumerate(content, first):
        kind = part.get("type") if isinstance(part, dict) else None
        found = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in (*TEXT_PARTS, "refusal") or not isinstance(found, str):
            where = f"{place}[{i}]"
            raise InvalidField(
                where,
                f"{where} must be a text part, or an input_image or input_audio in a message of the user, not "
                f"{shown(kind)}",
            )
        texts.append(found)
    return "\n".join(texts)


# ---- tools and the form of the answer ----


def tool_of(tool: Object, place: str) -> Object:
    kind, name = tool.get("type"), tool.get("name")
    if kind != "function":
        raise InvalidField(f"{place}.type", f"{place}.type is {shown(kind)}: this server has no tools of its own")
    if not isinstance(name, str) or not name:
        raise InvalidField(f"{place}.name", f"{place}.name is required")
    check_names(tool, place, (*TOOL_FIELDS, *OTHER_TOOL_FIELDS))
    known = {key: tool[key] for key in TOOL_FIELDS if tool.get(key) is not None}
    return {"type": "function", "function": known}


def tool_choice_of(choice: str | Object | None) -> str | Object | None:
    if choice is None or isinstance(choice, str):
        return choice
    name = choice.get("name")
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InvalidField(
            "tool_choice", "tool_choice must be auto, none, required, or have the type function and a name"
        )
    return {"type": "function", "function": {"name": name}}


def format_of(form: Any) -> Object | None:
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    check_names(form, "text.format", FORMAT_FIELDS if kind == "json_schema" else ("type",))
    if kind in ("text", "json_object"):
        return {"type": kind}
    if kind != "json_schema" or not isinstance(form.get("schema"), dict):
        raise InvalidField("text.format", "text.format.type must be text, json_object, or json_schema with a schema")
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


def effort_of(reasoning: Object) -> str | None:
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidField("reasoning.effort", "reasoning.effort must be text, such as low or high")
    return effort
