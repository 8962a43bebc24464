"""Reply formats: a JSON document, a stream of text, a stream of events, or pieces for a front end."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from flambeau.llm.chat.deltas import ChatDelta, ChatParser
from flambeau.llm.core.outputs import Completion, Output, TokenInfo
from flambeau.wire.generation import CallPiece, Piece, Token, encode_pieces

Header = tuple[str, str]
Finish = Callable[[Sequence[int], str], Any]  # new tokens, and the text → the value of the reply


class TokenDecoder(Protocol):
    """The part of a tokenizer that formats need to show single tokens."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)  # not frozen: one is made for each token, and that would take longer
class ChoiceOutput:
    """The output of a step for one choice of a job."""

    index: int
    output: Output


class ReplyFormat(Protocol):
    """Turns the outputs of steps into bodies of parts."""

    scores_prompt: bool  # it has the log-probabilities of the prompt's tokens

    @property
    def headers(self) -> list[Header]: ...

    def take(self, outputs: Sequence[ChoiceOutput], *, is_over: bool) -> bytes | None:
        """The body of the next part; None if there is nothing to send yet. The last one always has a body."""


class JsonFormat:
    """One JSON document at the end: `{"generated_text": …}`."""

    scores_prompt = False

    def __init__(
        self, prompt: str, num_choices: int, decoder: TokenDecoder, *, details: bool, finish: Finish | None = None
    ) -> None:
        self._prompt = prompt  # put before the text; empty: only the new text
        self._choices = [Completion() for _ in range(num_choices)]
        self._decoder = decoder
        self._details = details
        self._finish = finish
        self.headers: list[Header] = [("content-type", "application/json")]

    def take(self, outputs: Sequence[ChoiceOutput], *, is_over: bool) -> bytes | None:
        for choice in outputs:
            self._choices[choice.index].add(choice.output)
        return self._body() if is_over else None

    def _body(self) -> bytes:
        values = [self._value(choice) for choice in self._choices]
        if len(values) == 1 and not isinstance(values[0], str | dict):  # from a subclass's own postprocess
            return values[0] if isinstance(values[0], bytes) else to_json(values[0], indent=2)
        document = values[0] if isinstance(values[0], dict) else {"generated_text": values[0]}
        if len(values) > 1:
            document = {**document, "generated_texts": values}
        if self._details:
            details = [details_of(choice, self._decoder) for choice in self._choices]
            document = {**document, "details": details[0] if len(details) == 1 else details}
        return to_json(document, indent=2)

    def _value(self, choice: Completion) -> Any:
        text = self._prompt + choice.text
        return text if self._finish is None else self._finish(choice.token_ids, text)


class TextFormat:
    """The new text of each step, and nothing else."""

    scores_prompt = False

    def __init__(self, preamble: str = "") -> None:
        self._preamble = preamble
        self.headers: list[Header] = [("content-type", "text/plain; charset=utf-8")]

    def take(self, outputs: Sequence[ChoiceOutput], *, is_over: bool) -> bytes | None:
        text = self._preamble + "".join(choice.output.text for choice in outputs)
        self._preamble = ""
        return text.encode() if text or is_over else None


class EventFormat:
    """Server-sent events: one for each piece of text and one at the end of each choice; the last has `done: true`."""

    scores_prompt = False

    def __init__(self, decoder: TokenDecoder, *, num_choices: int, preamble: str = "") -> None:
        self._decoder = decoder
        self._many = num_choices > 1
        self._preambles = dict.fromkeys(range(num_choices), preamble) if preamble else {}
        self.headers: list[Header] = [("content-type", "text/event-stream; charset=utf-8")]

    def take(self, outputs: Sequence[ChoiceOutput], *, is_over: bool) -> bytes | None:
        events = []
        for choice in outputs:
            output = choice.output
            index = {"index": choice.index} if self._many else {}
            text = self._preambles.pop(choice.index, "") + output.text
            if text or output.tokens:
                tokens = {"tokens": logprobs_of(output.tokens, self._decoder)} if output.tokens else {}
                events.append({"text": text, **index, **tokens})
            if output.finish_reason:
                events.append({"done": False, **index, "finish_reason": output.finish_reason, **numbers_of(output)})
        if is_over and events:
            events[-1]["done"] = True
        return b"".join(b"data: %b\n\n" % to_json(event) for event in events) or (b"" if is_over else None)


@dataclass(slots=True)
class ChoicePieces:
    """What was generated for one choice and not sent yet."""

    preamble: str
    parser: ChatParser | None
    unsent: ChatDelta = field(default_factory=ChatDelta)
    num_reasoning: int = 0  # tokens

    def __post_init__(self) -> None:
        self.unsent.text = self.preamble

    def add(self, output: Output) -> None:
        if self.parser is None:
            self.unsent.text += output.text
            return
        was_reasoning = self.parser.is_reasoning
        self.unsent.add(self.parser.take(output.text))
        if was_reasoning or self.parser.is_reasoning:
            self.num_reasoning += len(output.token_ids)
        if output.finish_reason:
            self.unsent.add(self.parser.finish())

    def finish_reason(self, reason: str | None) -> str | None:
        """A choice that was cut short keeps its reason, also where a stop string is within the arguments of a call."""
        parser = self.parser
        has_called = parser is not None and parser.has_called and not parser.ends_in_call
        return "tool_calls" if reason == "stop" and has_called else reason


class PieceFormat:
    """Pieces for a front end: those of each step, or one for each choice at the end.

    In a chat, `parsers` has one for each choice, which separates reasoning, answer and tool calls.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        *,
        stream: bool,
        num_choices: int,
        preambles: Mapping[int, str],
        parsers: Sequence[ChatParser] = (),
        first_tokens: Mapping[int, int] = MappingProxyType({}),
        num_sound_tokens: int = 0,
        num_alternatives: int = 0,
        prompts: Sequence[Sequence[int]] = (),
        num_prompt_alternatives: int | None = None,
        returns_ids: bool = False,
        begun: Collection[int] = (),
    ) -> None:
        """`first_tokens` says that tokens of the prompt are part of those of the text, with `num_alternatives` each;

        `num_prompt_alternatives`, that they are asked for by themselves. `prompts` are needed for these and for ids.
        """
        self._decoder = decoder
        self._num_sound_tokens = num_sound_tokens  # of the prompt
        # Choice → the first token of its prompt, if its prompt's tokens are asked for.
        self._first_tokens = first_tokens
        self.scores_prompt = bool(first_tokens)
        self._num_alternatives, self._num_prompt_alternatives = num_alternatives, num_prompt_alternatives
        self._prompts, self._num_each = prompts, num_choices // len(prompts) if prompts else 1
        # Prompt and number of alternatives → its tokens, which its choices share.
        self._scored: dict[tuple[int, int], list[Token]] = {}
        self._returns_ids = returns_ids
        # Choices whose prompt is still to be sent; another worker has sent those that have begun.
        self._unsent_prompts = {*range(num_choices)} - {*begun} if returns_ids else set[int]()
        self._choices = [
            ChoicePieces(preambles.get(i, ""), parsers[i] if parsers else None) for i in range(num_choices)
        ]
        self._whole = None if stream else [Completion() for _ in range(num_choices)]
        self.headers: list[Header] = []

    def take(self, outputs: Sequence[ChoiceOutput], *, is_over: bool) -> bytes | None:
        for choice in outputs:
            self._choices[choice.index].add(choice.output)
        if self._whole is not None:
            for choice in outputs:
                self._whole[choice.index].add(choice.output)
            if not is_over:
                return None
            return encode_pieces([self._piece(i, choice) for i, choice in enumerate(self._whole)])
        pieces = []
        for choice in outputs:
            output, unsent = choice.output, self._choices[choice.index].unsent
            has_tokens = output.tokens or output.prompt_tokens or (self._returns_ids and output.token_ids)
            if has_tokens or output.finish_reason or unsent.reasoning or unsent.calls:
                pieces.append(self._piece(choice.index, output))
            elif unsent.text:  # like most pieces
                pieces.append(Piece(choice.index, unsent.text))
                unsent.text = ""
        return encode_pieces(pieces) if pieces or is_over else None

    def _piece(self, index: int, part: Output | Completion) -> Piece:
        choice = self._choices[index]
        delta, choice.unsent = choice.unsent, ChatDelta()
        tokens = [self._token(info) for info in part.tokens] if part.tokens else None
        if part.prompt_tokens is not None and index in self._first_tokens:
            first = self._first_tokens[index]
            scored = self._prompt_tokens(index, first, part.prompt_tokens, self._num_alternatives)
            tokens = [*scored, *(tokens or ())]
        further = self._further(index, part)
        counts = part.counts
        reason = choice.finish_reason(part.finish_reason)
        calls = [CallPiece(call.index, call.name, call.arguments) for call in delta.calls]
        if counts is None:
            return Piece(index, delta.text, reason, tokens, reasoning=delta.reasoning, calls=calls, **further)
        return Piece(
            index,
            delta.text,
            reason,
            tokens,
            counts.num_prompt,
            counts.num_generated,
            counts.num_cached,
            counts.num_drafted,
            counts.num_accepted,
            choice.num_reasoning,
            delta.reasoning,
            calls,
            part.stop,
            self._num_sound_tokens,
            **further,
        )

    def _further(self, index: int, part: Output | Completion) -> dict[str, Any]:
        """What few requests ask for: scores of the prompt, and ids."""
        found: dict[str, Any] = {}
        if self._num_prompt_alternatives is not None and part.prompt_tokens is not None:
            first, number = self._prompt_of(index)[0], self._num_prompt_alternatives
            found["prompt_tokens"] = self._prompt_tokens(index, first, part.prompt_tokens, number)
        if self._returns_ids:
            found["token_ids"] = part.token_ids
            if index in self._unsent_prompts:
                self._unsent_prompts.discard(index)
                found["prompt_ids"] = [*self._prompt_of(index)]
        return found

    def _prompt_of(self, index: int) -> Sequence[int]:
        return self._prompts[index // self._num_each]

    def _prompt_tokens(self, index: int, first: int, infos: Sequence[TokenInfo], num_alternatives: int) -> list[Token]:
        """The tokens of a choice's prompt; nothing precedes the first, so it has no log-probability."""
        key = index // self._num_each, num_alternatives
        found = self._scored.get(key)
        if found is None:
            begin = Token(first, self._decoder.token_text(first), None, self._decoder.token_bytes(first))
            found = self._scored[key] = [begin, *(self._token(info, num_alternatives) for info in infos)]
        return found

    def _token(self, info: TokenInfo, num_alternatives: int | None = None) -> Token:
        text, data = self._decoder.token_text, self._decoder.token_bytes
        top = [(token, text(token), logprob, data(token)) for token, logprob in info.top[:num_alternatives]]
        return Token(info.id, text(info.id), info.logprob, data(info.id), top, info.rank)


def details_of(choice: Completion, decoder: TokenDecoder) -> dict[str, Any]:
    tokens = {"tokens": logprobs_of(choice.tokens, decoder)} if choice.tokens else {}
    if choice.prompt_tokens is not None:  # of all its tokens but the first
        tokens["prompt_logprobs"] = logprobs_of(choice.prompt_tokens, decoder)
    return {"finish_reason": choice.finish_reason, **numbers_of(choice), **tokens}


def numbers_of(part: Output | Completion) -> dict[str, int]:
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


def logprobs_of(tokens: Sequence[TokenInfo], decoder: TokenDecoder) -> list[dict[str, Any]]:
    text = decoder.token_text
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
    """JSON in UTF-8; lone surrogates are escaped."""
    return json.dumps(document, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace")
