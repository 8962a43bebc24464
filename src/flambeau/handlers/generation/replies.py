"""The forms of a reply: whole, a stream of text, a stream of events, or pieces for a front end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flambeau.llm.core.outputs import Completion, Output, SequenceCounts, TokenInfo
from flambeau.wire.generation import Piece, Token, encode_pieces

Header = tuple[str, str]
Finish = Callable[[Sequence[int], str], Any]  # the tokens of prompt and text, and the text → what is answered


class Vocabulary(Protocol):
    """What has to be known of a tokenizer to tell of single tokens."""

    def token_text(self, token_id: int) -> str:
        """The text of a token."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes it stands for."""


@dataclass(frozen=True, slots=True)
class Made:
    """What a step has made for one choice of a job."""

    index: int
    output: Output


class Reply(Protocol):
    """Turns what steps make into bodies of parts."""

    @property
    def headers(self) -> list[Header]:
        """Of the response."""

    def take(self, made: Sequence[Made], *, is_over: bool) -> bytes | None:
        """The body of the next part; None: nothing to send yet. When it is over there always is one."""


@dataclass(slots=True)
class Choice:
    """What is known so far of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
    finish_reason: str | None = None
    counts: SequenceCounts | None = None

    def add(self, output: Output) -> None:
        """Append what a step has made."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.tokens += output.tokens or ()
        self.finish_reason, self.counts = output.finish_reason, output.counts


class WholeReply:
    """One JSON document at the end: `{"generated_text": …}`."""

    def __init__(
        self, prompt: str, num_choices: int, vocabulary: Vocabulary, *, details: bool, finish: Finish | None = None
    ) -> None:
        self._prompt = prompt  # empty where it is not wanted
        self._choices = [Choice() for _ in range(num_choices)]
        self._vocabulary = vocabulary
        self._details = details
        self._finish = finish
        self.headers: list[Header] = [("content-type", "application/json")]

    def take(self, made: Sequence[Made], *, is_over: bool) -> bytes | None:
        """The document, when all choices are there."""
        for one in made:
            self._choices[one.index].add(one.output)
        return self._body() if is_over else None

    def _body(self) -> bytes:
        values = [self._value(choice) for choice in self._choices]
        if len(values) == 1 and not isinstance(values[0], str | dict):  # a postprocess of the user's own
            return values[0] if isinstance(values[0], bytes) else to_json(values[0], indent=2)
        document = values[0] if isinstance(values[0], dict) else {"generated_text": values[0]}
        if len(values) > 1:
            document = {**document, "generated_texts": values}
        if self._details:
            details = [details_of(choice, self._vocabulary) for choice in self._choices]
            document = {**document, "details": details[0] if len(details) == 1 else details}
        return to_json(document, indent=2)

    def _value(self, choice: Choice) -> Any:
        text = self._prompt + choice.text
        return text if self._finish is None else self._finish(choice.token_ids, text)


class TextReply:
    """The new text, and nothing else, as it is made."""

    def __init__(self, preamble: str = "") -> None:
        self._preamble = preamble
        self.headers: list[Header] = [("content-type", "text/plain; charset=utf-8")]

    def take(self, made: Sequence[Made], *, is_over: bool) -> bytes | None:
        """What has become certain."""
        text = self._preamble + "".join(one.output.text for one in made)
        self._preamble = ""
        return text.encode() if text or is_over else None


class EventReply:
    """Server-sent events: one for each piece of text, and one at the end of each choice; the last says `done`."""

    def __init__(self, vocabulary: Vocabulary, *, num_choices: int, preamble: str = "") -> None:
        self._vocabulary = vocabulary
        self._many = num_choices > 1
        self._preambles = dict.fromkeys(range(num_choices), preamble) if preamble else {}
        self.headers: list[Header] = [("content-type", "text/event-stream; charset=utf-8")]

    def take(self, made: Sequence[Made], *, is_over: bool) -> bytes | None:
        """The events of a step."""
        events = []
        for one in made:
            output = one.output
            index = {"index": one.index} if self._many else {}
            text = self._preambles.pop(one.index, "") + output.text
            if text or output.tokens:
                tokens = {"tokens": logprobs_of(output.tokens, self._vocabulary)} if output.tokens else {}
                events.append({"text": text, **index, **tokens})
            if output.finish_reason:
                events.append({"done": False, **index, "finish_reason": output.finish_reason, **numbers_of(output)})
        if is_over and events:
            events[-1]["done"] = True
        return b"".join(b"data: %b\n\n" % to_json(event) for event in events) or (b"" if is_over else None)


class PieceReply:
    """Pieces for a front end: as they are made, or one for each choice at the end."""

    def __init__(self, vocabulary: Vocabulary, *, stream: bool, num_choices: int, preambles: Mapping[int, str]) -> None:
        self._vocabulary = vocabulary
        self._preambles = dict(preambles)
        self._whole = None if stream else [Choice(preambles.get(i, "")) for i in range(num_choices)]
        self.headers: list[Header] = []

    def take(self, made: Sequence[Made], *, is_over: bool) -> bytes | None:
        """The pieces of a step."""
        if self._whole is not None:
            for one in made:
                self._whole[one.index].add(one.output)
            if not is_over:
                return None
            return encode_pieces([self._piece(i, choice, choice.text) for i, choice in enumerate(self._whole)])
        pieces = []
        for one in made:
            text = self._preambles.pop(one.index, "") + one.output.text
            if text or one.output.tokens or one.output.finish_reason:
                pieces.append(self._piece(one.index, one.output, text))
        return encode_pieces(pieces) if pieces or is_over else None

    def _piece(self, index: int, part: Output | Choice, text: str) -> Piece:
        tokens = [self._token(info) for info in part.tokens] if part.tokens else None
        counts = part.counts
        if counts is None:
            return Piece(index, text, part.finish_reason, tokens)
        return Piece(
            index,
            text,
            part.finish_reason,
            tokens,
            counts.num_prompt,
            counts.num_generated,
            counts.num_cached,
            counts.num_drafted,
            counts.num_accepted,
        )

    def _token(self, info: TokenInfo) -> Token:
        text, data = self._vocabulary.token_text, self._vocabulary.token_bytes
        top = [(token, text(token), logprob, data(token)) for token, logprob in info.top]
        return Token(info.id, text(info.id), info.logprob, data(info.id), top)


def details_of(choice: Choice, vocabulary: Vocabulary) -> dict[str, Any]:
    """How a choice came about, for those who ask."""
    tokens = {"tokens": logprobs_of(choice.tokens, vocabulary)} if choice.tokens else {}
    return {"finish_reason": choice.finish_reason, **numbers_of(choice), **tokens}


def numbers_of(part: Output | Choice | Completion) -> dict[str, int]:
    """How much a choice took."""
    counts = part.counts
    if counts is None:
        return {}
    return {
        "prompt_tokens": counts.num_prompt,
        "generated_tokens": counts.num_generated,
        "cached_tokens": counts.num_cached,
        "drafted_tokens": counts.num_drafted,
        "accepted_tokens": counts.num_accepted,
    }


def logprobs_of(tokens: Sequence[TokenInfo], vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities."""
    text = vocabulary.token_text
    return [
        {
            "id": info.id,
            "text": text(info.id),
            "logprob": info.logprob,
            **({"top": [{"id": t, "text": text(t), "logprob": p} for t, p in info.top]} if info.top else {}),
        }
        for info in tokens
    ]


def to_json(document: Any, indent: int | None = None) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(document, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace")
