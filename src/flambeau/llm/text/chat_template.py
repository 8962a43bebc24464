"""ChatTemplate: conversation → prompt text, by the model's own Jinja template in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flambeau.llm.errors import InvalidRequest, LLMError, TokenizerError
from flambeau.llm.media_kinds import PLACES
from flambeau.llm.text.chat_budget import Budget, BudgetExceeded, TemplateRejection

if TYPE_CHECKING:
    from jinja2 import Template

    from flambeau.llm.text.chat_sandbox import Sandbox

MAX_TEMPLATE_CHARACTERS = 256 * 1024
END_MARK = "\ufdd1 "  # a noncharacter: where the text of a message ends; templates that trim it lose the space
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of what a model thought
USED = ("default", "tool_use")  # other named templates are ignored
TRIAL_NAME = "flambeau_trial"
TRIAL_MESSAGES = ({"role": "system", "content": "a"}, {"role": "user", "content": "b"})
TRIAL_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": TRIAL_NAME,
            "description": "c",
            "parameters": {
                "type": "object",
                "properties": {"d": {"type": "string", "description": "e"}},
                "required": [],
            },
        },
    },
)
_TRIAL, _OTHER = {"content": TRIAL_NAME}, {"role": "user", "content": "b"}
TRIAL_ROLES = {
    "system": ({"role": "system", **_TRIAL}, _OTHER),
    "user": ({"role": "user", **_TRIAL},),
    "assistant": (_OTHER, {"role": "assistant", **_TRIAL}),
}
REMEDY = "copy it again from the model's source, or remove it from tokenizer_config.json or chat_template.jinja"


class ChatTemplate:
    """The templates of a model, compiled at once so that errors show up early."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._tokens = dict(tokens)
        self._budget = Budget()
        self._sandbox = open_sandbox(self._budget)
        names = [name for name in USED if name == "default" or name in sources]
        self._compiled = {name: self._compile(name) for name in names}

    @property
    def text(self) -> str:
        """The templates themselves, which show the family of the model."""
        return "\n".join(self._sources[name] for name in self._compiled)

    @cached_property
    def shows_tools(self) -> bool:
        """Whether tools are shown to the model; otherwise they would be dropped silently.

        Some templates mention tools and read them from elsewhere, such as from the system message (Phi-4-mini).
        """
        if not any("tools" in source for source in self._sources.values()):
            return False
        try:
            return TRIAL_NAME in self.render(TRIAL_MESSAGES, tools=TRIAL_TOOLS, add_generation_prompt=True)
        except LLMError:  # it takes other conversations only
            return True

    @cached_property
    def _roles_with_parts(self) -> frozenset[str]:
        """The roles whose texts a template shows in lists of parts only, and leaves out otherwise (LLaVA, Idefics)."""
        return frozenset(
            role for role, chat in TRIAL_ROLES.items() if not self._shows(chat) and self._shows(chat, True)
        )

    def _shows(self, messages: Sequence[Message], has_parts: bool = False) -> bool:
        template, takes_parts = self._compiled["default"]
        given = [in_parts(message) for message in messages] if has_parts else [*messages]
        try:
            found = self._run(template, {"documents": None, "tools": None, **self._tokens, "messages": given})
        except LLMError:  # it takes other conversations only
            return not has_parts
        return not takes_parts or TRIAL_NAME in found

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """The prompt of a conversation. Raises InvalidRequest if the template rejects the messages."""
        template, takes_parts = self._compiled["tool_use" if tools and "tool_use" in self._compiled else "default"]
        given = [*messages] if takes_parts else [joined_parts(message) for message in messages]
        if takes_parts and (roles := self._roles_with_parts):
            given = [in_parts(message) if message.get("role") in roles else message for message in given]
        known = {"documents": None, **self._tokens, **variables}
        return self._run(template, {**known, "messages": given, "tools": list(tools) if tools else None})

    def _run(self, template: Template, variables: Mapping[str, Any]) -> str:
        self._budget.reset()
        try:
            return "".join(map(self._budget.write, template.generate(variables)))
        except TemplateRejection as error:
            raise InvalidRequest(f"the model's chat template refuses these messages: {error}", "messages") from None
        except BudgetExceeded as error:
            raise TokenizerError(f"the chat template was stopped: {error}") from None
        except Exception as error:  # a template can fail in any way Python can
            raise TokenizerError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def _compile(self, name: str) -> tuple[Template, bool]:
        source = self._sources.get(name)
        if source is None:
            names = ", ".join(self._sources)
            raise TokenizerError(f"there is no chat template named {name!r}, only {names}; give one this name")
        which = "the chat template" if len(self._sources) == 1 else f"the chat template {name!r}"
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TokenizerError(f"{which} is longer than {MAX_TEMPLATE_CHARACTERS} characters; {REMEDY}")
        try:
            return self._sandbox.compile_counted(source)
        except Exception as error:  # a template can be wrong in any way
            raise TokenizerError(f"{which} is broken: {type(error).__name__}: {error}; {REMEDY}") from error


def open_sandbox(budget: Budget) -> Sandbox:
    try:
        from flambeau.llm.text.chat_sandbox import Sandbox
    except ImportError as error:
        raise TokenizerError("chat templates need jinja2: pip install flambeau[llm]") from error
    return Sandbox(budget)


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
    copy = with_reasoning(message)
    if message.get("tool_calls"):
        copy["tool_calls"] = [with_parsed_arguments(call) for call in message["tool_calls"]]
    return copy


def with_reasoning(message: Message) -> dict[str, Any]:
    """A copy with what the model thought under both names that templates read, as in transformers."""
    thought = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return dict(message) if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def check_part(part: Any, name: str) -> None:
    """Reject a part that is neither text nor the place of a file, which is not in the messages."""
    if part in PLACES.values():
        return
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        remedy = "only text parts are read here; chats of the OpenAI API take images, videos and sounds"
        raise InvalidRequest(f"{name} has type {kind!r}; {remedy}", name)


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
    for kind, part in PLACES.items():
        if part in content:
            remedy = "leave them out, or put the model's own chat_template.jinja into its folder"
            raise InvalidRequest(f"the template shows no {kind}s, or the model has none: {remedy}", "messages")
    return {**message, "content": "\n".join(part["text"] for part in content)}


def in_parts(message: Message) -> Message:
    """A message with its text as a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def plain_text(messages: Sequence[Message]) -> str:
    """A conversation for a model without a template: the contents of all messages, one per line."""
    texts = [joined_parts(message).get("content") for message in read_messages(messages)]
    return "\n".join(text for text in texts if isinstance(text, str))


def with_end_mark(messages: Sequence[Message]) -> list[Message]:
    """The messages with a mark after the text of the last one, where a model is to continue it."""
    *others, last = read_messages(messages)
    content = last.get("content")
    if isinstance(content, list) and content and "text" in content[-1]:
        *parts, part = content
        content = [*parts, {**part, "text": part["text"] + END_MARK}]
    elif isinstance(content, str):
        content += END_MARK
    else:
        raise InvalidRequest("the last message has no text that the model could continue", "messages")
    return [*others, {**last, "content": content}]


def up_to_end_mark(text: str) -> str:
    """The text before the mark, without spaces at its end if the template trims messages."""
    before, mark, after = text.rpartition(END_MARK.strip())
    if not mark:
        raise InvalidRequest(
            "the model's chat template does not show the last message as it is, so it cannot be continued; end the "
            "messages with one of the user",
            "messages",
        )
    return before if after.startswith(" ") else before.rstrip()
