"""Messages of a conversation: checked, and in the form that chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.llm.errors import BadRequest

Message = Mapping[str, Any]


def read_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A copy of a conversation in the form templates expect; refuses what no template can use."""
    if not isinstance(messages, list | tuple) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    return [read_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def read_message(message: Message, name: str) -> dict[str, Any]:
    """One message, checked."""
    if not isinstance(message, Mapping):
        raise BadRequest(f"{name} must be an object with role and content", name)
    role = message.get("role")
    if not isinstance(role, str) or not re.fullmatch(r"[\w.-]{1,64}", role):
        raise BadRequest(f"{name}.role must be a word such as user, assistant or system, not {role!r}", f"{name}.role")
    content = message.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            check_part(part, f"{name}.content[{number}]")
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise BadRequest(f"{name}.content must be a text or a list of text parts", f"{name}.content")
    copy = dict(message)
    if message.get("tool_calls"):
        copy["tool_calls"] = [with_read_arguments(call) for call in message["tool_calls"]]
    return copy


def check_part(part: Any, name: str) -> None:
    """Refuse a part that is no text."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise BadRequest(f"{name} has type {kind!r}; this model reads text parts only", name)


def with_read_arguments(call: Any) -> Any:
    """A tool call whose arguments are an object, as templates expect, where a client sent them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str) or not isinstance(function, Mapping):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments)}}
    except (ValueError, RecursionError):
        return call


def joined_parts(message: Message) -> Message:
    """A message whose content is one text: parts become lines."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def plain_text(messages: Sequence[Message]) -> str:
    """A conversation for a model without a template: what was said, line after line, for the model to continue."""
    texts = [joined_parts(message).get("content") for message in read_messages(messages)]
    return "\n".join(text for text in texts if isinstance(text, str))
