"""The messages and tools of a chat, checked; what a template makes of them is the worker's business (pure)."""

from __future__ import annotations

from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.http.openai.requests import ChatRequest, Object

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PLAIN = ("user", "assistant", "system")
MAX_MESSAGES = 10_000


def messages_of(request: ChatRequest) -> list[Object]:
    """The messages of a chat."""
    messages = request.messages
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidField("messages", f"messages must hold 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    return [
        message if is_plain(message) else message_of(message, f"messages[{i}]") for i, message in enumerate(messages)
    ]


def is_plain(message: Object) -> bool:
    """Whether a message is as most are, and needs no further look."""
    return message.get("role") in PLAIN and type(message.get("content")) is str and "tool_calls" not in message


def message_of(message: Object, place: str) -> Object:
    """One message; a developer is who templates call `system`."""
    role = message.get("role")
    if role not in ROLES:
        raise InvalidField(f"{place}.role", f"{place}.role must be one of {', '.join(ROLES)}, not {shown(role)}")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is not None:
        check_content(content, f"{place}.content")
    elif not calls:
        raise InvalidField(f"{place}.content", f"{place}.content is required; send text")
    if calls:
        check_calls(calls, f"{place}.tool_calls")
    return {**message, "role": "system"} if role == "developer" else message


def check_content(content: Any, place: str) -> None:
    """Refuse what is no text; pictures and sounds are not."""
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise InvalidField(place, f"{place} must be text, or a list of text parts")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            where = f"{place}[{i}]"
            raise InvalidField(where, f"{where} must be a text part, not {shown(kind)}: this server reads text only")


def check_calls(calls: Any, place: str) -> None:
    """Refuse what is no list of calls that the model made earlier."""
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidField(place, f"{place} must be a list of calls, each with a function that has a name")


def tools_of(request: ChatRequest) -> list[Object] | None:
    """The tools that the template shows to the model; what would force it to use one is refused."""
    choice = request.tool_choice
    if not (choice is None or choice in ("auto", "none")):
        raise InvalidField(
            "tool_choice",
            f"tool_choice may be auto or none, not {shown(choice)}: no model can be made to call a tool; ask for it "
            "in a message, and check the answer",
        )
    tools = request.tools or []
    for i, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str) or not name:
            raise InvalidField(f"tools[{i}]", f"tools[{i}] must have the type function, and a function with a name")
    return tools if tools and choice != "none" else None


def shown(value: Any) -> str:
    """A value in a message for its sender."""
    return "nothing" if value is None else repr(value)[:60]
