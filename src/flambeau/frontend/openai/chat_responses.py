"""ChatWriter and ToolChatWriter: the responses of chats, without and with tools."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from flambeau.frontend.openai.responses import ResponseChoice, ResponseHead, ResponseWriter, encode, finite
from flambeau.frontend.openai.tool_calls import ToolCall, ToolCallParser, parse_tool_calls
from flambeau.wire.generation import Piece, Token


class ChatWriter(ResponseWriter):
    """Writes chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: ResponseHead, num_choices: int, *, has_logprobs: bool, has_usage: bool) -> None:
        super().__init__(head, num_choices, has_logprobs=has_logprobs, has_usage=has_usage)
        self._begun: set[int] = set()  # choices whose role was sent

    def choice(self, choice: ResponseChoice) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.tokens) if self._has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def events(self, piece: Piece) -> bytes:
        """The role comes before the first text, the finish reason after the last."""
        events = self._role(piece.index)
        if piece.text or piece.tokens:
            events += self._event(piece.index, content(piece.text), self._logprobs(piece.tokens))
        return events + self._last(piece, piece.finish_reason)

    def _role(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._event(index, b'{"role":"assistant","content":"","refusal":null}')

    def _logprobs(self, tokens: Sequence[Token] | None) -> bytes:
        return encode(chat_logprobs(tokens)) if tokens and self._has_logprobs else b"null"

    def _last(self, piece: Piece, reason: str | None) -> bytes:
        if reason is None:
            return b""
        self._usage.add(piece)
        return self._event(piece.index, b"{}", reason=encode(reason))

    def _event(self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start,
            index,
            delta,
            logprobs,
            reason,
            self._end,
        )


class ToolChatWriter(ChatWriter):
    """Writes chats with tools: a tool call in the text is held back until it is complete, and sent as one."""

    def __init__(
        self, head: ResponseHead, num_choices: int, names: Collection[str], *, has_logprobs: bool, has_usage: bool
    ) -> None:
        super().__init__(head, num_choices, has_logprobs=has_logprobs, has_usage=has_usage)
        self._names = names
        self._parsers: defaultdict[int, ToolCallParser] = defaultdict(lambda: ToolCallParser(names))
        self._num_calls: defaultdict[int, int] = defaultdict(int)
        self._unsent: defaultdict[int, list[Token]] = defaultdict(list)  # tokens of text that is held back

    def choice(self, choice: ResponseChoice) -> dict[str, Any]:
        plain, calls = parse_tool_calls(choice.text, self._names)
        document = super().choice(choice)
        if calls:
            document["message"] |= {"content": plain or None, "tool_calls": [call_document(call) for call in calls]}
            document["finish_reason"] = reason_of(choice.finish_reason, has_called=True)
        return document

    def events(self, piece: Piece) -> bytes:
        """The text, each tool call as a whole, and the finish reason after the last."""
        index, is_over = piece.index, piece.finish_reason is not None
        parser, unsent = self._parsers[index], self._unsent[index]
        unsent += piece.tokens or ()
        plain, calls = parser.take(piece.text)
        if is_over:
            last_plain, last_calls = parser.finish()
            plain, calls = plain + last_plain, calls + last_calls
        deltas = [content(plain)] if plain or (is_over and unsent and not calls) else []
        deltas += [self._call(index, call) for call in calls]
        events = self._role(index)
        for delta in deltas:
            events += self._event(index, delta, self._logprobs(unsent))
            unsent.clear()
        return events + self._last(piece, reason_of(piece.finish_reason, has_called=parser.has_called))

    def _call(self, index: int, call: ToolCall) -> bytes:
        number, self._num_calls[index] = self._num_calls[index], self._num_calls[index] + 1
        return encode({"tool_calls": [{"index": number, **call_document(call)}]})


def content(text: str) -> bytes:
    return b'{"content":%b}' % encode(text)


def call_document(call: ToolCall) -> dict[str, Any]:
    call_id = f"call_{random.getrandbits(96):024x}"  # distinct, not secret
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def reason_of(reason: str | None, *, has_called: bool) -> str | None:
    """The finish reason of a choice; one that was cut short keeps its reason."""
    return "tool_calls" if has_called and reason == "stop" else reason


def chat_logprobs(tokens: Sequence[Token]) -> dict[str, Any]:
    return {"content": [_entry(token) for token in tokens], "refusal": None}


def _entry(token: Token) -> dict[str, Any]:
    top = [_alternative(text, logprob, data) for _, text, logprob, data in token.top]
    return {**_alternative(token.text, token.logprob, token.data), "top_logprobs": top}


def _alternative(text: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(data or text.encode())}
