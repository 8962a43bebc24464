"""Request bodies for checks: the author's samples, and malformed ones made from them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from flambeau.wire.messages import Request

NESTED_LEVELS = 400
HUGE_BYTES = 2_000_000
JSON, BINARY = "application/json", "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Sample:
    """A request body and its content type; verdicts show the name."""

    name: str
    content_type: str
    body: bytes

    def to_request(self, number: int = 0) -> Request:
        return Request(number, f"check-{number}", [("content-type", self.content_type)], self.body)


def malformed_samples(good: Sample) -> Iterator[Sample]:
    """Requests that a handler should reject or survive, each wrong in one way."""
    noise = random.Random(0).randbytes(1000)
    other_type = BINARY if good.content_type == JSON else JSON
    yield Sample("empty body", good.content_type, b"")
    yield Sample("random bytes", BINARY, noise)
    yield Sample(f"random bytes as {good.content_type}", good.content_type, noise)
    yield Sample("JSON null", JSON, b"null")
    yield Sample("JSON []", JSON, b"[]")
    yield Sample("JSON {}", JSON, b"{}")
    yield Sample("JSON NaN", JSON, b"NaN")
    yield Sample("deeply nested JSON", JSON, b'{"a":' * NESTED_LEVELS + b"1" + b"}" * NESTED_LEVELS)
    yield Sample("huge string", JSON, b'"' + b"x" * HUGE_BYTES + b'"')
    yield Sample(f"a good body as {other_type}", other_type, good.body)
    if len(good.body) > 1:
        yield Sample("truncated sample", good.content_type, good.body[: len(good.body) // 2])
