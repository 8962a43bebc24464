"""POST /v1/completions: prompts and sampling → a generation request, and the shape of the responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.http.bodies import take_bytes
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.openai.chat import check_combination
from flambeau.frontend.openai.models import choose_generator
from flambeau.frontend.openai.priorities import apply_priority
from flambeau.frontend.openai.requests import CompletionRequest, read_request
from flambeau.frontend.openai.responses import (
    LEAST_LOGPROB,
    ResponseChoice,
    ResponseHead,
    ResponseWriter,
    TokenName,
    Work,
    encode,
    finite,
    generate,
    members,
    own_name,
    prompt_fields,
)
from flambeau.serving.model import Model
from flambeau.serving.server import Server
from flambeau.wire.generation import Generate, Piece, SamplingOptions, Token

MAX_CHOICES = 1024  # the limit of a worker
MAX_TOKENS = 1_000_000  # of a prompt
DEFAULT_TOKENS = 16  # OpenAI's limit for a completion that names none


def create_completion(server: Server, exchange: Exchange) -> Work:
    request = read_request(take_bytes(exchange), CompletionRequest)
    apply_priority(exchange, request.priority)
    generation = generation_of(request)
    model, version, generation = choose_generator(server.registry, exchange, request.model, "generate", generation)
    if request.suffix:
        check_infill(model)
    head = ResponseHead.new("cmpl-", model, request.model)
    writer = CompletionWriter(
        head,
        request.num_generated,
        num_kept=request.num_choices,
        has_logprobs=request.logprobs is not None,
        has_usage=request.has_usage,
        names=request.names,
        shows_ids=bool(request.return_tokens_as_token_ids),
    )
    return generate(server, exchange, model, version, generation, writer)


def check_infill(model: Model) -> None:
    """Reject a suffix for a model that writes behind a prompt only; what it can do is unknown until it is loaded."""
    if model.pool.has_loaded and "infill" not in model.abilities:
        raise InvalidField(
            "suffix",
            f"The model {model.name!r} cannot fill in a text before a suffix: its vocabulary has no tokens for it, as "
            "Qwen2.5-Coder, StarCoder2, CodeLlama, DeepSeek-Coder, Codestral and Granite have; send the prompt alone.",
        )


def generation_of(request: CompletionRequest) -> Generate:
    prompts, num_choices = prompts_of(request.prompt), request.num_generated
    if request.suffix and request.echo:
        raise InvalidField("echo", "echo is not supported with a suffix; put the texts together yourself")
    if request.suffix and request.truncate_prompt_tokens is not None:
        raise InvalidField(
            "truncate_prompt_tokens", "truncate_prompt_tokens is not supported with a suffix; shorten the prompt"
        )
    if num_choices < request.num_choices:
        raise InvalidField("best_of", f"best_of must be at least n ({request.num_choices})")
    if num_choices > request.num_choices and request.stream:
        raise InvalidField("best_of", "best_of above n comes with whole replies only; leave stream out")
    if len(prompts) * num_choices > MAX_CHOICES:
        raise InvalidField(
            "prompt", f"{len(prompts)} prompts of {num_choices} choices are more than {MAX_CHOICES}; send fewer at once"
        )
    check_combination(request)
    sampling = {**request.sampling, "max_tokens": request.max_tokens or DEFAULT_TOKENS}
    if (structure := request.structured_outputs) is not None:
        sampling["structured_outputs"] = structure
    if num_choices > request.num_choices:
        sampling["n"], sampling["logprobs"] = num_choices, 0
    if request.logprobs is not None:
        sampling["logprobs"] = request.logprobs
    return Generate(
        prompts=prompts,
        sampling=SamplingOptions(**sampling),
        stream=bool(request.stream),
        echo=bool(request.echo),
        suffix=request.suffix or "",
        **request.prompt_options,
    )


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """One prompt or several, each text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if len(prompt) > MAX_TOKENS:
        raise InvalidField("prompt", f"prompt has {len(prompt)} items; {MAX_TOKENS} are more than any model reads")
    kinds = {*map(type, prompt)}
    if kinds == {int}:
        return [prompt]
    if kinds == {str} or (kinds == {list} and all(prompt)):
        return prompt
    what = "must not be empty" if not kinds or kinds == {list} else "must not mix texts and token ids"
    raise InvalidField("prompt", f"prompt {what}; send a text, token ids, or a list of either")


class CompletionWriter(ResponseWriter):
    """Writes text completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, head: ResponseHead, num_choices: int, *, num_kept: int | None = None, **options: Any) -> None:
        """Of each prompt's choices the `num_kept` likeliest are kept; None: all."""
        super().__init__(head, num_choices, **options)
        self._num_choices, self._num_kept = num_choices, num_kept or num_choices
        self._offsets: dict[int, int] = {}  # of the next token of a choice, in its text

    def choice(self, choice: ResponseChoice) -> dict[str, Any]:
        logprobs = completion_logprobs(choice.tokens, 0, self._name) if self._has_logprobs else None
        document = {"text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}
        return {**document, **prompt_fields(choice), **id_fields(choice)}

    def chosen(self, found: Mapping[int, ResponseChoice]) -> Sequence[tuple[int, ResponseChoice]]:
        choices = super().chosen(found)
        if self._num_kept == self._num_choices:
            return choices
        best: list[ResponseChoice] = []
        for _, of_prompt in groupby(choices, lambda each: each[0] // self._num_choices):
            ranked = sorted((choice for _, choice in of_prompt), key=likelihood, reverse=True)
            best += ranked[: self._num_kept]
        return [*enumerate(best)]

    def events(self, piece: Piece) -> bytes:
        if not (piece.text or piece.tokens or piece.finish_reason or piece.token_ids):
            return b""
        reason = b"null"
        if piece.finish_reason is not None:
            self._usage.add(piece)
            reason = encode(piece.finish_reason)
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}%b' % (
            self._start,
            piece.index,
            encode(piece.text),
            self._logprobs(piece) if piece.tokens and self._has_logprobs else b"null",
            reason,
            members(id_fields(piece)),
            self._end,
        )

    def _logprobs(self, piece: Piece) -> bytes:
        tokens = piece.tokens or ()
        offset = self._offsets.get(piece.index, 0)
        self._offsets[piece.index] = offset + sum(len(token.text) for token in tokens)
        return encode(completion_logprobs(tokens, offset, self._name))


def likelihood(choice: ResponseChoice) -> float:
    """The mean log-probability of the tokens that were generated."""
    if not choice.num_tokens:
        return LEAST_LOGPROB
    return sum(finite(token.logprob) for token in choice.tokens[-choice.num_tokens :]) / choice.num_tokens


def id_fields(part: ResponseChoice | Piece) -> dict[str, Any]:
    """The ids of a choice, or of a piece of it, if they are asked for."""
    return {
        **({} if part.prompt_ids is None else {"prompt_token_ids": part.prompt_ids}),
        **({} if part.token_ids is None else {"token_ids": part.token_ids}),
    }


def completion_logprobs(tokens: Sequence[Token], offset: int, name: TokenName = own_name) -> dict[str, Any]:
    """The `logprobs` of a choice; `offset` is the place of the first token in its text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
        "tokens": [name(token.id, token.text) for token in tokens],
        "top_logprobs": [_likeliest(token, name) for token in tokens],
    }


def _likeliest(token: Token, name: TokenName) -> dict[str, float] | None:
    """The alternatives by their text, and the token itself, which need not be among them."""
    if token.logprob is None:
        return None
    # Of equal texts the likeliest.
    found = {name(token_id, text): finite(logprob) for token_id, text, logprob, _ in reversed(token.top)}
    likeliest = dict(reversed(found.items()))
    likeliest.setdefault(name(token.id, token.text), finite(token.logprob))
    return likeliest
