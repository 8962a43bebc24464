"""BaseEnvelope, and the envelopes for plain bodies and JSON instances."""

from __future__ import annotations

import abc
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.envelopes.request_documents import decode_bytes, document_of, list_in

if TYPE_CHECKING:
    from flambeau.worker.context import Context


class BaseEnvelope(abc.ABC):
    """Wraps a handler's entry point; subclasses convert its input and output."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Context | None = None

    def handle(self, data: Any, context: Context) -> Any:
        """Parse the input, call the handler, format its output.

        Returns an awaitable for an `async def` handler. Streams are not formatted.
        """
        self.context = context
        if data and is_describe(data, context):
            return self._handle_fn(data, context)
        if data:
            data = self.parse_input(data)
        result = self._handle_fn(data, context)
        return self._finish_later(result) if inspect.isawaitable(result) else self._finish(result)

    async def _finish_later(self, result: Awaitable[Any]) -> Any:
        return self._finish(await result)

    def _finish(self, result: Any) -> Any:
        if inspect.isgenerator(result) or inspect.isasyncgen(result):
            return result
        return self.format_output(result) if result is not None and len(result) else result

    @abc.abstractmethod
    def parse_input(self, data: Any) -> Any:
        """The rows of a batch → the handler's input."""

    @abc.abstractmethod
    def format_output(self, data: Any) -> Any:
        """The handler's results → one reply per request."""


class BodyEnvelope(BaseEnvelope):
    """Passes the values under `data` or `body` to the handler."""

    def parse_input(self, data: Sequence[Mapping[str, Any]]) -> Any:
        return [row.get("data") or row.get("body") for row in data]

    def format_output(self, data: Any) -> Any:
        return data


class MultiInstanceEnvelope(BaseEnvelope):
    """For documents with many instances each: the handler gets all instances of a batch in one list."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any]) -> None:
        super().__init__(handle_fn)
        self._lengths: list[int] = []  # instances of each request

    def parse_input(self, data: Sequence[Any]) -> list[Any]:
        shares = [self.read_document(document) for document in self.documents(data)]
        self._lengths = [len(share) for share in shares]
        if not all(self._lengths):
            raise BadRequest("the request holds nothing to predict: its list is empty")
        return [*chain.from_iterable(shares)]

    def documents(self, data: Sequence[Any]) -> list[Mapping[str, Any]]:
        """The JSON object of each request."""
        return [document_of(row) for row in data]

    def split(self, results: Any) -> list[Any]:
        """The results of each request. The only request of a batch gets all results, however many."""
        if len(self._lengths) == 1:
            return [results]
        if len(results) != sum(self._lengths):
            raise HandlerError(f"the handler returned {len(results)} results for {sum(self._lengths)} instances")
        remaining = iter(results)
        return [[next(remaining) for _ in range(length)] for length in self._lengths]

    @abc.abstractmethod
    def read_document(self, document: Mapping[str, Any]) -> list[Any]:
        """The instances of one request."""


class JSONEnvelope(MultiInstanceEnvelope):
    """`{"instances": […]}` → `{"predictions": […]}`; `{"b64": "…"}` stands for bytes."""

    def read_document(self, document: Mapping[str, Any]) -> list[Any]:
        return [decode_bytes(instance) for instance in list_in(document, "instances")]

    def format_output(self, data: Any) -> list[str]:
        return [json.dumps({"predictions": share}) for share in self.split(data)]


def is_describe(data: Sequence[Any], context: Context) -> bool:
    """Whether this is a describe request, which has no body."""
    return not data[0] and context.get_request_header(0, "describe") == "True"
