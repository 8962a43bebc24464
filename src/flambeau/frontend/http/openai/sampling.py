"""A request's fields → the settings of a generation (pure)."""

from __future__ import annotations

from typing import Any

from flambeau.errors import InvalidField
from flambeau.frontend.http.openai.requests import ChatRequest, CompletionRequest, Sampling

# What a request does not say is left to the model's configuration, and to the engine where that says nothing.
SAME = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "n",
)
COMPLETION_TOKENS = 16  # where a completion names no limit, as OpenAI's API has it


def sampling_of_chat(request: ChatRequest) -> dict[str, Any]:
    """How a chat is sampled."""
    sampling = sampling_of(request)
    most = request.max_completion_tokens
    if most is not None:
        if request.max_tokens not in (None, most):
            raise InvalidField("max_tokens", "max_tokens and max_completion_tokens differ; leave max_tokens out")
        sampling["max_tokens"] = most
    if request.logprobs:
        sampling["logprobs"] = request.top_logprobs or 0
    elif request.top_logprobs:
        raise InvalidField("top_logprobs", "top_logprobs needs logprobs to be true")
    return sampling


def sampling_of_completion(request: CompletionRequest) -> dict[str, Any]:
    """How completions are sampled."""
    sampling = {"max_tokens": COMPLETION_TOKENS, **sampling_of(request)}
    if request.logprobs is not None:
        sampling["logprobs"] = request.logprobs
    return sampling


def sampling_of(request: Sampling) -> dict[str, Any]:
    """What chat and completions have in common."""
    sampling = {name: value for name in SAME if (value := getattr(request, name)) is not None}
    if request.top_k is not None:
        sampling["top_k"] = max(0, request.top_k)
    if request.stop:
        sampling["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.include_stop_str_in_output:
        sampling["include_stop"] = True
    if request.logit_bias:
        sampling["logit_bias"] = {token_id(key): bias for key, bias in request.logit_bias.items()}
    if request.stream_options is not None and not request.stream:
        raise InvalidField("stream_options", "stream_options needs stream to be true")
    if request.min_tokens and request.max_tokens and request.min_tokens > request.max_tokens:
        raise InvalidField("min_tokens", f"min_tokens must be at most max_tokens ({request.max_tokens})")
    return sampling


def token_id(key: str) -> int:
    """A key of `logit_bias`."""
    if not (key.isascii() and key.isdecimal() and len(key) < 11):
        raise InvalidField("logit_bias", f"logit_bias: its keys must be token ids, not {key[:40]!r}")
    return int(key)
