"""Good requests, and what bad ones a stranger might send in their place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from flambeau.wire.messages import Request

NESTED = 400
HUGE_BYTES = 2_000_000
JSON, BINARY = "application/json", "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Sample:
    """A request body with its content type, and what to call it."""

    name: str
    content_type: str
    body: bytes

    def to_request(self, number: int = 0) -> Request:
        """As a client would send it."""
        return Request(number, f"check-{number}", [("content-type", self.content_type)], self.body)


def hostile_samples(good: Sample) -> Iterator[Sample]:
    """What is no answerable request, each in one way; some of it depends on what a good one looks like."""
    noise = random.Random(0).randbytes(1000)
    other_type = BINARY if good.content_type == JSON else JSON
    yield Sample("empty body", good.content_type, b"")
    yield Sample("random bytes", BINARY, noise)
    yield Sample(f"random bytes as {good.content_type}", good.content_type, noise)
    yield Sample("JSON null", JSON, b"null")
    yield Sample("JSON []", JSON, b"[]")
    yield Sample("JSON {}", JSON, b"{}")
    yield Sample("JSON NaN", JSON, b"NaN")
    yield Sample("deeply nested JSON", JSON, b'{"a":' * NESTED + b"1" + b"}" * NESTED)
    yield Sample("huge string", JSON, b'"' + b"x" * HUGE_BYTES + b'"')
    yield Sample(f"a good body as {other_type}", other_type, good.body)
    if len(good.body) > 1:
        yield Sample("truncated sample", good.content_type, good.body[: len(good.body) // 2])
