"""Messages of a conversation: validated, and in the form that chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from flambeau.llm.errors import InvalidRequest

Message = Mapping[str, Any]


def read_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A validated copy of a conversation in the form that templates expect."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", "messages")
    return [read_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def read_message(message: Message, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{name} must be an object with role and content", name)
    role = message.get("role")
    if not isinstance(role, str) or not re.fullmatch(r"[\w.-]{1,64}", role):
        raise InvalidRequest(
            f"{name}.role must be a word such as user, assistant or system, not {role!r}", f"{name}.role"
        )
    content = message.get("content")
    if isinstance(content, list):
        for number, part in enumerate(content):
            check_part(part, f"{name}.content[{number}]")
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise InvalidRequest(f"{name}.content must be a text or a list of text parts", f"{name}.content")
    copy = dict(message)
    if message.get("tool_calls"):
        copy["tool_calls"] = [with_parsed_arguments(call) for call in message["tool_calls"]]
    return copy


def check_part(part: Any, name: str) -> None:
    """Reject a part that is not text."""
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{name} has type {kind!r}; this model reads text parts only", name)


def with_parsed_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object, as templates expect; clients send them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str) or not isinstance(function, Mapping):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments)}}
    except (ValueError, RecursionError):
        return call


def joined_parts(message: Message) -> Message:
    """A message with its content as one text: parts become lines."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part["text"] for part in content)}


def plain_text(messages: Sequence[Message]) -> str:
    """A conversation for a model without a template: the contents of all messages, one per line."""
    texts = [joined_parts(message).get("content") for message in read_messages(messages)]
    return "\n".join(text for text in texts if isinstance(text, str))
