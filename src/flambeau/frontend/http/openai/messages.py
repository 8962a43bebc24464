"""The messages and tools of a chat, checked, and as chat templates expect them (pure)."""

from __future__ import annotations

from typing import Any

import msgspec

from flambeau.errors import InvalidField
from flambeau.frontend.http.openai.requests import ChatRequest, Object

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def messages_of(request: ChatRequest) -> list[Object]:
    """The messages of a chat as a template reads them."""
    if not request.messages:
        raise InvalidField("messages", "messages must hold at least one message")
    return [message_of(message, f"messages[{i}]") for i, message in enumerate(request.messages)]


def message_of(message: Object, place: str) -> Object:
    """One message: its content is a text, and a developer is who templates call `system`."""
    role = message.get("role")
    if role not in ROLES:
        raise InvalidField(f"{place}.role", f"{place}.role must be one of {', '.join(ROLES)}, not {shown(role)}")
    found = {**message, "role": "system" if role == "developer" else role}
    if (content := message.get("content")) is not None:
        found["content"] = text_of(content, f"{place}.content")
    elif not message.get("tool_calls"):
        raise InvalidField(f"{place}.content", f"{place}.content is required; send text")
    else:
        found["content"] = ""
    if message.get("tool_calls"):
        found["tool_calls"] = [call_of(call, f"{place}.tool_calls[{i}]") for i, call in items(message, place)]
    return found


def text_of(content: Any, place: str) -> str:
    """A content as one text; its parts are joined by new lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidField(place, f"{place} must be text, or a list of text parts")
    return "\n".join(text_of_part(part, f"{place}[{i}]") for i, part in enumerate(content))


def text_of_part(part: Any, place: str) -> str:
    """The text of one part of a content; pictures and sounds are no text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "refusal"):
        raise InvalidField(place, f"{place}: its type must be text, not {shown(kind)}; this server reads text only")
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidField(f"{place}.{kind}", f"{place}.{kind} must be text, not {shown(text)}")
    return text


def items(message: Object, place: str) -> enumerate[Any]:
    """The calls of a message."""
    calls = message["tool_calls"]
    if not isinstance(calls, list):
        raise InvalidField(f"{place}.tool_calls", f"{place}.tool_calls must be a list")
    return enumerate(calls)


def call_of(call: Any, place: str) -> Object:
    """A call the model made earlier; templates want its arguments as an object, the API has them as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidField(place, f"{place} must have a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            pass  # models make mistakes, and the template may show them
    return {**call, "function": {**function, "arguments": arguments}}


def tools_of(request: ChatRequest) -> list[Object] | None:
    """The tools that the template shows to the model; what would force it to use one is refused."""
    choice = request.tool_choice
    if not (choice is None or choice in ("auto", "none")):
        raise InvalidField(
            "tool_choice", f"tool_choice may be auto or none, not {shown(choice)}: no model can be made to call a tool"
        )
    tools = request.tools or []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            raise InvalidField(f"tools[{i}]", f"tools[{i}] must have the type function, and a function with a name")
    return tools if tools and choice != "none" else None


def shown(value: Any) -> str:
    """A value in a message for its sender."""
    return "nothing" if value is None else repr(value)[:60]
