"""Samples: measurements of a handler, on their way from its worker to the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# name, kind, unit, value, dimensions, the ids of the requests it was taken for
Sample = tuple[str, str, str, float, list[tuple[str, str]], str]


class HasRequestId(Protocol):
    @property
    def request_id(self) -> str: ...


class SampleSource:
    """What a worker needs of `context.metrics`.

    A plain base class, not a protocol: the worker checks for it once a batch, and `isinstance` is cheap.
    """

    def follow(self, requests: Sequence[HasRequestId]) -> None:
        """Take later samples for these requests."""
        raise NotImplementedError

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        raise NotImplementedError
