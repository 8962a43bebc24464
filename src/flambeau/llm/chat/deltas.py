"""ChatDelta: the next piece of what a model says in a chat, with reasoning, answer and tool calls apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a tool call: the first one has the call's name, the others continue its arguments (JSON text)."""

    index: int  # which of the calls
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ChatDelta:
    """What a piece of text adds."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def add(self, other: ChatDelta) -> None:
        self.text += other.text
        if other.reasoning or other.calls:
            self.reasoning += other.reasoning
            self.calls += other.calls

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls)


@dataclass(slots=True)
class ParsedCall:
    """A whole call."""

    name: str
    arguments: str


class ChatParser(Protocol):
    """Reads the text of one choice as it is generated. However a text is divided, all deltas together are the same."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""

    @property
    def has_called(self) -> bool: ...

    @property
    def ends_in_call(self) -> bool:
        """Whether the text so far ends within the arguments of a call."""

    def take(self, text: str) -> ChatDelta:
        """What is decided now; the rest is held back."""

    def finish(self) -> ChatDelta:
        """What was held back, at the end of the text."""


def whole_calls(deltas: Sequence[CallDelta]) -> list[ParsedCall]:
    """The calls that pieces make up."""
    calls: list[ParsedCall] = []
    for delta in deltas:
        if delta.index == len(calls):
            calls.append(ParsedCall(delta.name, ""))
        calls[delta.index].arguments += delta.arguments
    return calls
