"""Writers of chats: plain ones, and those in which the model may call tools."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from flambeau.frontend.http.openai import logprobs
from flambeau.frontend.http.openai.tool_calls import Call, CallReader, read_calls
from flambeau.frontend.http.openai.writing import Choice, Head, Writer, encode
from flambeau.wire.generation import Piece, Token


class ChatWriter(Writer):
    """Chat completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, head: Head, num_choices: int, *, has_logprobs: bool, has_usage: bool) -> None:
        super().__init__(head, num_choices, has_logprobs=has_logprobs, has_usage=has_usage)
        self._begun: set[int] = set()  # choices whose role has been told

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A message of the assistant."""
        return {
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": logprobs.of_chat(choice.tokens) if self._has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def events(self, piece: Piece) -> bytes:
        """The events of a piece: the role before the first text, the reason after the last."""
        events = self._role(piece.index)
        if piece.text or piece.tokens:
            events += self._event(piece.index, content(piece.text), self._told(piece.tokens))
        return events + self._last(piece, piece.finish_reason)

    def _role(self, index: int) -> bytes:
        if index in self._begun:
            return b""
        self._begun.add(index)
        return self._event(index, b'{"role":"assistant","content":"","refusal":null}')

    def _told(self, tokens: Sequence[Token] | None) -> bytes:
        return encode(logprobs.of_chat(tokens)) if tokens and self._has_logprobs else b"null"

    def _last(self, piece: Piece, reason: str | None) -> bytes:
        if reason is None:
            return b""
        self._usage.add(piece)
        return self._event(piece.index, b"{}", reason=encode(reason))

    def _event(self, index: int, delta: bytes, told: bytes = b"null", reason: bytes = b"null") -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start,
            index,
            delta,
            told,
            reason,
            self._end,
        )


class ToolChatWriter(ChatWriter):
    """Chats with tools: calls in the text are told as such, and held back until they are complete."""

    def __init__(
        self, head: Head, num_choices: int, names: Collection[str], *, has_logprobs: bool, has_usage: bool
    ) -> None:
        super().__init__(head, num_choices, has_logprobs=has_logprobs, has_usage=has_usage)
        self._names = names
        self._readers: defaultdict[int, CallReader] = defaultdict(lambda: CallReader(names))
        self._num_calls: defaultdict[int, int] = defaultdict(int)
        self._untold: defaultdict[int, list[Token]] = defaultdict(list)  # of text that is held back

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A message of the assistant, with its calls."""
        said, calls = read_calls(choice.text, self._names)
        document = super().choice(choice)
        if calls:
            document["message"] |= {"content": said or None, "tool_calls": [call_document(call) for call in calls]}
            document["finish_reason"] = reason_of(choice.finish_reason, has_called=True)
        return document

    def events(self, piece: Piece) -> bytes:
        """The events of a piece: what is said, each call as a whole, and the reason after the last."""
        index, is_over = piece.index, piece.finish_reason is not None
        reader, untold = self._readers[index], self._untold[index]
        untold += piece.tokens or ()
        said, calls = reader.take(piece.text)
        if is_over:
            last_said, last_calls = reader.finish()
            said, calls = said + last_said, calls + last_calls
        deltas = [content(said)] if said or (is_over and untold and not calls) else []
        deltas += [self._call(index, call) for call in calls]
        events = self._role(index)
        for delta in deltas:
            events += self._event(index, delta, self._told(untold))
            untold.clear()
        return events + self._last(piece, reason_of(piece.finish_reason, has_called=reader.has_called))

    def _call(self, index: int, call: Call) -> bytes:
        number, self._num_calls[index] = self._num_calls[index], self._num_calls[index] + 1
        return encode({"tool_calls": [{"index": number, **call_document(call)}]})


def content(text: str) -> bytes:
    """The delta that says something."""
    return b'{"content":%b}' % encode(text)


def call_document(call: Call) -> dict[str, Any]:
    """A call as OpenAI's clients read it."""
    call_id = f"call_{random.getrandbits(96):024x}"  # distinct, not secret
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def reason_of(reason: str | None, *, has_called: bool) -> str | None:
    """Why a choice has ended; one that was cut short says so, whatever it has called."""
    return "tool_calls" if has_called and reason == "stop" else reason
