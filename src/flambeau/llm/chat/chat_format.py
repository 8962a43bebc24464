"""ChatFormat: how one model writes in a chat. ChatTurn: one reply of it, with its tools and limits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flambeau.llm.chat import harmony
from flambeau.llm.chat.formats import (
    ANY_TOOLS,
    OFF,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    find_reasoning_format,
    find_tool_format,
)
from flambeau.llm.chat.stream_parser import MARK, ParserOptions, StreamParser, ThoughtMarkers

logger = logging.getLogger(__name__)

MAX_TAIL = 24  # tokens at the end of a prompt that show whether it opens a thought
AUTO = "auto"


class ChatTokenizer(Protocol):
    """The part of a tokenizer that formats need."""

    @property
    def template_text(self) -> str: ...

    @property
    def shows_tools(self) -> bool: ...

    def special_id(self, text: str) -> int | None: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The formats of a model's family, and the ids of the markers that are special tokens of its vocabulary."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    thinks: bool  # the model is known to reason, rather than only read as if it might
    special: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: ChatTokenizer, tools: str = AUTO, reasoning: str = AUTO) -> ChatFormat:
        """By the chat template, or by names of the table."""
        template = tokenizer.template_text
        tool_format = find_tool_format(template) if tools == AUTO else TOOL_FORMATS[tools]
        if tools == AUTO and tool_format.name == ANY_TOOLS and tokenizer.shows_tools:
            logger.warning(
                "the chat template shows tools, and no known notation of calls; JSON is read as a call, and calls in "
                "another notation stay in the text. If you know it, set tool_parser to one of %s",
                ", ".join(TOOL_FORMATS),
            )
        found = find_reasoning_format(template) if reasoning == AUTO else REASONING_FORMATS.get(reasoning)
        # A reply that begins with <think> is a thought, whatever the template says.
        default = REASONING_FORMATS["think"] if reasoning == AUTO else None
        thinks = (found is not None or tool_format.has_channels) and reasoning != OFF
        markers = [*tool_format.markers]
        if (used := found or default) is not None:
            markers += [used.markers.open, used.markers.close]
        special = {text: i for text in markers if (i := tokenizer.special_id(text)) is not None}
        return cls(tools=tool_format, reasoning=used, thinks=thinks, special=special)

    def describe(self, *, shows_tools: bool) -> str:
        """How replies are read, for the log; empty if the template shows neither tools nor reasoning."""
        parts = []
        if shows_tools or self.tools.name != ANY_TOOLS:
            parts.append(f"tool calls are read as {self.tools.name}")
        if self.thinks:
            how = "channels" if self.tools.has_channels or self.reasoning is None else self.reasoning.name
            parts.append(f"reasoning is read as {how}")
        return ", ".join(parts)

    @property
    def thought(self) -> ThoughtMarkers | None:
        return self.reasoning.markers if self.reasoning is not None and not self.tools.has_channels else None

    @property
    def marker_texts(self) -> dict[int, str]:
        """Special tokens that are part of the text that a parser reads."""
        return {token: MARK + text for text, token in self.special.items()}

    def turn(
        self,
        tokenizer: ChatTokenizer,
        prompt_ids: Sequence[int],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        must_call: bool = False,
        is_parallel: bool = True,
        max_reasoning_tokens: int | None = None,
    ) -> ChatTurn:
        tail = b"".join(map(tokenizer.token_bytes, prompt_ids[-MAX_TAIL:])).decode("utf-8", "replace").rstrip()
        is_open, is_closed = False, False
        if (thought := self.thought) is not None:
            is_open = tail.endswith((thought.open, f"{thought.open}{thought.label}"))
            is_closed = tail.endswith(thought.close)
        return ChatTurn(
            format=self,
            tools=tools,
            must_call=must_call,
            is_parallel=is_parallel,
            starts_in_thought=is_open,
            may_think=self.thinks and not is_closed,
            max_reasoning_tokens=max_reasoning_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """One reply."""

    format: ChatFormat
    tools: Sequence[Mapping[str, Any]] = ()  # those that may be called, as in OpenAI's API
    must_call: bool = False
    is_parallel: bool = True
    starts_in_thought: bool = False
    may_think: bool = False
    max_reasoning_tokens: int | None = None

    @property
    def has_grammar(self) -> bool:
        """Whether the calls are more than what the model likes to write."""
        return bool(self.tools) and (self.must_call or not self.is_parallel or any(map(is_strict, self.tools)))

    def is_thinking(self, text: str) -> bool:
        """Whether a reply that begins with this text is within a thought; special tokens are there by name."""
        if self.format.tools.has_channels:
            return text.lstrip().startswith(f"{harmony.CHANNEL}analysis") and harmony.END not in text
        thought = self.format.thought
        assert thought is not None
        has_begun = self.starts_in_thought or text.lstrip().startswith(thought.open)
        return has_begun and thought.close not in text

    def thought_texts(self, *, with_answer: bool) -> tuple[str, str]:
        """What begins a thought, unless the prompt does; and what ends it, up to the answer itself if asked."""
        if self.format.tools.has_channels:
            answer = "" if self.tools or not with_answer else f"{harmony.CHANNEL}final{harmony.MESSAGE}"
            start = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}"
            return start, f"{harmony.END}{harmony.START}assistant{answer}"
        thought = self.format.thought
        assert thought is not None
        return "" if self.starts_in_thought else thought.open, thought.close

    def without_thought(self) -> ChatTurn:
        """The reply after its thought has ended."""
        return replace(self, starts_in_thought=False, may_think=False, max_reasoning_tokens=None)

    def parser(self) -> StreamParser:
        options = ParserOptions(
            tools={tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools},
            thought=self.format.thought,
            starts_in_thought=self.starts_in_thought,
            special=frozenset(self.format.special),
        )
        has_parser = self.tools or self.format.tools.has_channels
        return self.format.tools.parser(options) if has_parser else StreamParser(options)


def is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True
