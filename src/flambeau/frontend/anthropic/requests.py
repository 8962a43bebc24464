"""The requests of Anthropic's API, and the chats that they become."""

# ruff: noqa: RUF009  (the defaults are dataclass fields that carry their FieldType)

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.openai.chat_translation import read_chat
from flambeau.frontend.openai.fields import FLAG, OBJECT, TEXT, array, either, integer, number, shown, text
from flambeau.frontend.openai.file_parts import FilePart, check_url, image_part
from flambeau.frontend.openai.requests import (
    FIELDS,
    ChatRequest,
    Object,
    check_names,
    ignored,
    optional,
    registered,
    required,
    unsupported,
)

MAX_STOPS = 16
MEDIA_TYPE = re.compile(r"image/[\w.+-]{1,40}")
KNOWN_BLOCKS = "send text, or an image in a message of the user"
# Names of chats in errors → the names that the client used.
CLIENT_NAMES = {
    "response_format": "output_config.format",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "max_reasoning_tokens": "thinking.budget_tokens",
}
TOOL_FIELDS = ("name", "input_schema", "description", "strict", "type")
OTHER_TOOL_FIELDS = (  # without effect
    "cache_control",
    "allowed_callers",
    "defer_loading",
    "eager_input_streaming",
    "input_examples",
)
# Where the chat endpoint has it, the number of tokens that a model may think.
BUDGET = "max_reasoning_tokens"


@registered
@dataclass(slots=True, kw_only=True)
class CountTokensRequest:
    """`POST /v1/messages/count_tokens`: the fields that make a prompt."""

    model: str | None = optional(TEXT.described("A registered model: its name, or name@version."))
    messages: list[Object] = required(array(OBJECT, min_length=1))
    system: str | list[Object] | None = optional(either(TEXT, array(OBJECT)))
    tools: list[Object] | None = optional(array(OBJECT))
    tool_choice: Object | None = optional(OBJECT)
    thinking: Object | None = optional(OBJECT)
    output_config: Object | None = optional(OBJECT)
    cache_control: Any = ignored()  # prompts are cached by themselves
    context_management: Any = unsupported("send the messages that the model is to read")
    mcp_servers: Any = unsupported("this server calls no others; call the tools yourself")
    container: Any = unsupported("this server runs no code")


@registered
@dataclass(slots=True, kw_only=True)
class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: int = required(integer(1))
    stop_sequences: list[str] | None = optional(array(text(1), max_length=MAX_STOPS))
    stream: bool | None = optional(FLAG.described("Answer with server-sent events."))
    temperature: float | None = optional(number(0, 2))
    top_p: float | None = optional(number(0, 1, excludes_low=True))
    top_k: int | None = optional(integer(0))
    metadata: Any = ignored()
    service_tier: Any = ignored()
    speed: Any = ignored()
    inference_geo: Any = ignored()


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """The chat that a request means; InvalidField names the client's own fields."""
    if not request.messages:
        raise InvalidField("messages", "messages must not be empty; send a message of the user")
    chat: Object = {"model": request.model, "messages": messages_of(request), **tools_of(request)}
    chat |= thinking_of(request.thinking, "thinking")
    chat |= output_of(request.output_config or {})
    if request.messages[-1].get("role") == "assistant":  # the model continues it
        chat["chat_template_kwargs"] = {**chat.get("chat_template_kwargs", {}), "continue_final_message": True}
    if isinstance(request, MessagesRequest):
        chat |= {
            "max_completion_tokens": request.max_tokens,
            "stop": request.stop_sequences or None,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "stream": request.stream,
        }
        if request.stream:
            chat["stream_options"] = {"include_usage": True}
    return read_chat(chat, CLIENT_NAMES)


# ---- messages ----


def messages_of(request: CountTokensRequest) -> list[Object]:
    messages = []
    if request.system:
        messages.append({"role": "system", "content": text_of(request.system, "system")})
    for i, message in enumerate(request.messages):
        messages += message_of(message, f"messages[{i}]")
    return messages


def message_of(message: Object, place: str) -> Iterator[Object]:
    """The messages of a chat that one message becomes: each result of a tool is one of its own."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        yield {"role": "system", "content": text_of(content, f"{place}.content")}
    elif role == "assistant":
        yield assistant_message(content, f"{place}.content")
    elif role == "user":
        yield from user_messages(content, f"{place}.content")
    else:
        raise InvalidField(f"{place}.role", f"{place}.role must be user, assistant or system, not {shown(role)}")


def user_messages(content: Any, place: str) -> Iterator[Object]:
    parts: list[Object] = []
    for block, where in blocks_of(content, place):
        kind = block.get("type")
        if kind == "tool_result":
            yield result_message(block, where)
        elif kind == "image":
            parts.append(image_of(block.get("source"), where))
        else:
            parts.append({"type": "text", "text": text_block(block, where)})
    if any(isinstance(part, FilePart) for part in parts):
        yield {"role": "user", "content": parts}
    elif parts:
        yield {"role": "user", "content": "\n".join(part["text"] for part in parts)}


def image_of(source: Any, place: str) -> FilePart:
    """An image as chats have it: its data become a data URL."""
    where = f"{place}.source"
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return image_part(check_url(source.get("url"), f"{where}.url"), place)
    if kind != "base64":
        raise InvalidField(f"{where}.type", f"{where}.type must be base64 or url, not {shown(kind)}")
    media_type, data = source.get("media_type"), source.get("data")
    if not isinstance(media_type, str) or not MEDIA_TYPE.fullmatch(media_type) or not isinstance(data, str):
        raise InvalidField(where, f"{where} must have a media_type, such as image/png, and data in base64")
    return image_part(f"data:{media_type};base64,{data}", place)


def result_message(block: Object, place: str) -> Object:
    call_id, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call_id, str):
        raise InvalidField(f"{place}.tool_use_id", f"{place}.tool_use_id is required: the id of the call")
    result = "" if content is None else text_of(content, f"{place}.content")
    if block.get("is_error"):
        result = f"Error: {result}"
    return {"role": "tool", "tool_call_id": call_id, "content": result}


def assistant_message(content: Any, place: str) -> Object:
    texts, thoughts, calls = [], [], []
    for block, where in blocks_of(content, place):
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(call_of(block, where))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts.append(text_block(block, where))
    message: Object = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def call_of(block: Object, place: str) -> Object:
    name, given = block.get("name"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(given, dict) or not isinstance(block.get("id"), str):
        raise InvalidField(place, f"{place} must have an id, a name and an input that is an object")
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def blocks_of(content: Any, place: str) -> Iterator[tuple[Object, str]]:
    """The blocks of a content, each with its place; a text is one block."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, place
        return
    if not isinstance(content, list) or not content:
        raise InvalidField(place, f"{place} must be text, or a list of content blocks")
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            raise InvalidField(f"{place}[{i}]", f"{place}[{i}] must be an object with a type, such as text")
        yield block, f"{place}[{i}]"


def text_block(block: Object, place: str) -> str:
    kind, found = block.get("type"), block.get("text")
    if kind != "text" or not isinstance(found, str):
        raise InvalidField(place, f"{place} must be a text block, not {shown(kind)}; {KNOWN_BLOCKS}")
    return found


def text_of(content: Any, place: str) -> str:
    """The text of a content that may have text blocks only."""
    return "\n".join(text_block(block, where) for block, where in blocks_of(content, place))


# ---- tools, thinking and the form of the answer ----


def tools_of(request: CountTokensRequest) -> Object:
    tools = [tool_of(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or ())]
    given: Object = {"tools": tools} if tools else {}
    choice = request.tool_choice
    if choice is None:
        return given
    check_names(choice, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    kind = choice.get("type")
    if choice.get("disable_parallel_tool_use"):
        given["parallel_tool_calls"] = False
    if kind in ("auto", "none"):
        return {**given, "tool_choice": kind}
    if kind == "any":
        return {**given, "tool_choice": "required"}
    name = choice.get("name")
    if kind != "tool" or not isinstance(name, str):
        raise InvalidField("tool_choice", "tool_choice.type must be auto, any, none, or tool with a name")
    return {**given, "tool_choice": {"type": "function", "function": {"name": name}}}


def tool_of(tool: Object, place: str) -> Object:
    kind, name, schema = tool.get("type"), tool.get("name"), tool.get("input_schema")
    if kind not in (None, "custom"):
        raise InvalidField(f"{place}.type", f"{place}.type is {shown(kind)}: this server has no tools of its own")
    if not isinstance(name, str) or not name or not isinstance(schema, dict):
        raise InvalidField(place, f"{place} must have a name, and an input_schema that is an object")
    check_names(tool, place, (*TOOL_FIELDS, *OTHER_TOOL_FIELDS))
    function: Object = {"name": name, "parameters": schema}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    if isinstance(tool.get("strict"), bool):
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def thinking_of(thinking: Object | None, place: str) -> Object:
    """Thinking as a variable of the chat template, and its budget where the chat endpoint has one."""
    if thinking is None:
        return {}
    check_names(thinking, place, ("type", "budget_tokens", "display"))
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise InvalidField(f"{place}.type", f"{place}.type must be enabled, disabled or adaptive, not {shown(kind)}")
    given: Object = {} if kind == "adaptive" else {"chat_template_kwargs": {"enable_thinking": kind == "enabled"}}
    if budget is not None:
        if type(budget) is not int or budget < 1:
            raise InvalidField(f"{place}.budget_tokens", f"{place}.budget_tokens must be a whole number >= 1")
        if BUDGET in FIELDS[ChatRequest]:
            given[BUDGET] = budget
    return given


def output_of(config: Object) -> Object:
    check_names(config, "output_config", ("effort", "format"))
    given: Object = {}
    if (effort := config.get("effort")) is not None:
        if not isinstance(effort, str):
            raise InvalidField("output_config.effort", "output_config.effort must be text, such as low or high")
        given["reasoning_effort"] = effort
    form = config.get("format")
    if form is not None:
        check_names(form, "output_config.format", ("type", "schema"))
        schema = form.get("schema") if isinstance(form, dict) else None
        if not isinstance(schema, dict) or form.get("type") != "json_schema":
            raise InvalidField(
                "output_config.format", "output_config.format must have the type json_schema, and a schema"
            )
        given["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return given
