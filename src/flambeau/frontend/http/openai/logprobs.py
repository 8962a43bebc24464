"""Log-probabilities of tokens, in the two ways that OpenAI's API shows them (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flambeau.wire.generation import Token

LEAST = -9999.0  # JSON has no infinity


def of_chat(tokens: Sequence[Token]) -> dict[str, Any]:
    """The `logprobs` of a choice of a chat."""
    return {"content": [_entry(token) for token in tokens], "refusal": None}


def _entry(token: Token) -> dict[str, Any]:
    top = [_alternative(text, logprob, data) for _, text, logprob, data in token.top]
    return {**_alternative(token.text, token.logprob, token.data), "top_logprobs": top}


def _alternative(text: str, logprob: float, data: bytes) -> dict[str, Any]:
    return {"token": text, "logprob": finite(logprob), "bytes": list(data or text.encode())}


def of_completion(tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """The `logprobs` of a choice of a completion, whose tokens begin at that place of its text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "text_offset": offsets,
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "tokens": [token.text for token in tokens],
        "top_logprobs": [_likeliest(token) for token in tokens],
    }


def _likeliest(token: Token) -> dict[str, float]:
    """The alternatives by their text, and the token itself, which need not be among them."""
    found = {text: finite(logprob) for _, text, logprob, _ in reversed(token.top)}  # of equal texts the likeliest
    likeliest = dict(reversed(found.items()))
    likeliest.setdefault(token.text, finite(token.logprob))
    return likeliest


def finite(logprob: float) -> float:
    """A log-probability that JSON can tell."""
    return logprob if logprob > LEAST else LEAST  # also of what is not a number
