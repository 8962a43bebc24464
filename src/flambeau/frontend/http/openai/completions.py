"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openai import logprobs
from flambeau.frontend.http.openai.choosing import choose
from flambeau.frontend.http.openai.generating import generate, take_bytes
from flambeau.frontend.http.openai.reading import read_json
from flambeau.frontend.http.openai.requests import CompletionRequest, completion_decoder
from flambeau.frontend.http.openai.sampling import sampling_of_completion
from flambeau.frontend.http.openai.writing import Choice, Head, Writer, encode
from flambeau.serving.server import Server
from flambeau.wire.generation import Generate, Piece, SamplingOptions

MAX_CHOICES = 1024  # as many as a worker takes

MAX_TOKENS = 1_000_000  # of a prompt


def completions(server: Server, exchange: Exchange) -> None:
    """Answer prompts with what the model writes behind them."""
    request = read_json(take_bytes(exchange), completion_decoder)
    generation = generation_of(request)
    model, version = choose(server.registry, request.model, "generate")
    has_usage = bool(request.stream_options and request.stream_options.include_usage)
    head = Head.new("cmpl-", model, request.model)
    has_logprobs = request.logprobs is not None
    writer = CompletionWriter(head, request.n or 1, has_logprobs=has_logprobs, has_usage=has_usage)
    generate(exchange, model, version, generation, writer, details=server.config.tells_details)


def generation_of(request: CompletionRequest) -> Generate:
    """What the model is asked to generate."""
    prompts, num_choices = prompts_of(request.prompt), request.n or 1
    if request.suffix:
        raise InvalidField("suffix", "suffix is not supported: models here write behind a prompt, not before a text")
    if request.best_of not in (None, num_choices):
        raise InvalidField("best_of", f"best_of may only be n ({num_choices}); choose among the choices yourself")
    if request.echo and request.logprobs is not None:
        raise InvalidField("echo", "echo with logprobs is not supported: a prompt's log-probabilities are not kept")
    if len(prompts) * num_choices > MAX_CHOICES:
        raise InvalidField(
            "prompt", f"{len(prompts)} prompts of {num_choices} choices are more than {MAX_CHOICES}; send fewer at once"
        )
    return Generate(
        prompts=prompts,
        sampling=SamplingOptions(**sampling_of_completion(request)),
        stream=bool(request.stream),
        echo=bool(request.echo),
    )


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """One prompt or several, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if len(prompt) > MAX_TOKENS:
        raise InvalidField("prompt", f"prompt has {len(prompt)} items; {MAX_TOKENS} are more than any model reads")
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds == {str} or (kinds == {list} and all(prompt)):
        return prompt
    what = "must not be empty" if not kinds or kinds == {list} else "must not mix texts and token ids"
    raise InvalidField("prompt", f"prompt {what}; send a text, token ids, or a list of either")


class CompletionWriter(Writer):
    """Completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, head: Head, num_choices: int, *, has_logprobs: bool, has_usage: bool) -> None:
        super().__init__(head, num_choices, has_logprobs=has_logprobs, has_usage=has_usage)
        self._offsets: dict[int, int] = {}  # where the next token of a choice begins in its text

    def choice(self, choice: Choice) -> dict[str, Any]:
        """A text."""
        told = logprobs.of_completion(choice.tokens, 0) if self._has_logprobs else None
        return {"text": choice.text, "logprobs": told, "finish_reason": choice.finish_reason}

    def events(self, piece: Piece) -> bytes:
        """The event of a piece, if it says anything."""
        if not (piece.text or piece.tokens or piece.finish_reason):
            return b""
        reason = b"null"
        if piece.finish_reason is not None:
            self._usage.add(piece)
            reason = encode(piece.finish_reason)
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._start,
            piece.index,
            encode(piece.text),
            self._logprobs(piece) if piece.tokens and self._has_logprobs else b"null",
            reason,
            self._end,
        )

    def _logprobs(self, piece: Piece) -> bytes:
        tokens = piece.tokens or ()
        offset = self._offsets.get(piece.index, 0)
        self._offsets[piece.index] = offset + sum(len(token.text) for token in tokens)
        return encode(logprobs.of_completion(tokens, offset))
