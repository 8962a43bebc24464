"""ChatTemplate: conversations to the text of a prompt, by the model's own Jinja template in a sandbox."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flambeau.llm.errors import BadRequest, TokenizerError
from flambeau.llm.text.chat_budget import Budget, Exhausted, Refused
from flambeau.llm.text.chat_messages import Message, joined_parts

if TYPE_CHECKING:
    from jinja2 import Template

    from flambeau.llm.text.chat_sandbox import Sandbox

MAX_TEMPLATE_CHARACTERS = 256 * 1024


class ChatTemplate:
    """The templates of a model, compiled when first used."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        self._sources = sources
        self._tokens = dict(tokens)
        self._budget = Budget()
        self._sandbox: Sandbox | None = None
        self._compiled: dict[str, tuple[Template, bool]] = {}
        self._lock = threading.Lock()  # the budget belongs to one rendering at a time

    @property
    def shows_tools(self) -> bool:
        """Whether a template has a place for tools; one that has none would leave them out without a word."""
        return any("tools" in source for source in self._sources.values())

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **variables: Any
    ) -> str:
        """The prompt of a conversation. Raises BadRequest for messages that the template refuses."""
        with self._lock:
            template, takes_parts = self._template("tool_use" if tools and "tool_use" in self._sources else "default")
            given = list(messages) if takes_parts else [joined_parts(message) for message in messages]
            known = {"documents": None, **self._tokens, **variables}
            return self._run(template, {**known, "messages": given, "tools": list(tools) if tools else None})

    def _run(self, template: Template, variables: Mapping[str, Any]) -> str:
        self._budget.reset()
        try:
            return "".join(map(self._budget.write, template.generate(variables)))
        except Refused as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", "messages") from None
        except Exhausted as error:
            raise TokenizerError(f"the chat template was stopped: {error}") from None
        except Exception as error:  # a template can fail in any way Python can
            raise TokenizerError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def _template(self, name: str) -> tuple[Template, bool]:
        if name not in self._compiled:
            self._compiled[name] = self._compile(name)
        return self._compiled[name]

    def _compile(self, name: str) -> tuple[Template, bool]:
        source = self._sources.get(name)
        if source is None:
            raise TokenizerError(f"there is no chat template named {name!r}, only {', '.join(self._sources)}")
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise TokenizerError(f"the chat template is longer than {MAX_TEMPLATE_CHARACTERS} characters")
        if self._sandbox is None:
            self._sandbox = open_sandbox(self._budget)
        try:
            return self._sandbox.compile_counted(source)
        except Exception as error:  # a template can be wrong in any way
            raise TokenizerError(f"the chat template is broken: {type(error).__name__}: {error}") from error


def open_sandbox(budget: Budget) -> Sandbox:
    """Jinja, where it is installed."""
    try:
        from flambeau.llm.text.chat_sandbox import Sandbox
    except ImportError as error:
        raise TokenizerError("chat templates need jinja2: pip install flambeau[llm]") from error
    return Sandbox(budget)
