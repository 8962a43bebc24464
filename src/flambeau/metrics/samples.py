"""Samples: a handler's measurements on their way from its worker to the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# name, kind, unit, value, dimensions, the ids of the requests it was taken for
Sample = tuple[str, str, str, float, list[tuple[str, str]], str]


class HasRequestId(Protocol):
    @property
    def request_id(self) -> str: ...


class SampleSource:
    """The part of `context.metrics` that the worker uses.

    A plain base class instead of a protocol, because `isinstance` runs once per batch.
    """

    def follow(self, requests: Sequence[HasRequestId]) -> None:
        """Record later samples for these requests."""
        raise NotImplementedError

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        raise NotImplementedError
