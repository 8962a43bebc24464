"""Envelopes: what is around a handler's input and output on the wire, taken off before it and put on after it."""

from __future__ import annotations

import abc
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.envelopes.documents import decode_bytes, document_of, list_in
from flambeau.handlers.envelopes.requests_v2 import read_request
from flambeau.handlers.envelopes.tensors_v2 import read_input, to_output

if TYPE_CHECKING:
    from flambeau.worker.context import Context


class BaseEnvelope(abc.ABC):
    """Wraps a handler's entry point; subclasses take input apart and put output together."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Context | None = None

    def handle(self, data: Any, context: Context) -> Any:
        """Unwrap, call the handler, wrap; an awaitable for an `async def` handler, and streams as they are."""
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
        """The rows of a batch → what the handler gets."""

    @abc.abstractmethod
    def format_output(self, data: Any) -> Any:
        """What the handler returned → one reply per request."""


class BodyEnvelope(BaseEnvelope):
    """The handler gets the bodies themselves."""

    def parse_input(self, data: Sequence[Mapping[str, Any]]) -> Any:
        """Rows → what each holds under `data` or `body`."""
        return [row.get("data") or row.get("body") for row in data]

    def format_output(self, data: Any) -> Any:
        """Results as they are."""
        return data


class SharedEnvelope(BaseEnvelope):
    """For documents that hold many instances: all of a batch go to the handler in one list, and are parted again."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any]) -> None:
        super().__init__(handle_fn)
        self._lengths: list[int] = []

    def parse_input(self, data: Sequence[Any]) -> list[Any]:
        """Rows → the instances of all of them, one after another."""
        shares = [self.read_document(document) for document in self.documents(data)]
        self._lengths = [len(share) for share in shares]
        if not all(self._lengths):
            raise BadRequest("the request holds nothing to predict: its list is empty")
        return [*chain.from_iterable(shares)]

    def documents(self, data: Sequence[Any]) -> list[Mapping[str, Any]]:
        """The JSON object of each request."""
        return [document_of(row) for row in data]

    def part(self, results: Any) -> list[Any]:
        """The results of each request; the only request of a batch gets them all, however many."""
        if len(self._lengths) == 1:
            return [results]
        if len(results) != sum(self._lengths):
            raise HandlerError(f"the handler gave {len(results)} results for {sum(self._lengths)} instances")
        remaining = iter(results)
        return [[next(remaining) for _ in range(length)] for length in self._lengths]

    @abc.abstractmethod
    def read_document(self, document: Mapping[str, Any]) -> list[Any]:
        """The instances of one request."""


class JSONEnvelope(SharedEnvelope):
    """`{"instances": […]}` → `{"predictions": […]}`; `{"b64": "…"}` stands for bytes."""

    def read_document(self, document: Mapping[str, Any]) -> list[Any]:
        """The instances of one request, with their bytes decoded."""
        return [decode_bytes(instance) for instance in list_in(document, "instances")]

    def format_output(self, data: Any) -> list[str]:
        """Results → a JSON text per request."""
        return [json.dumps({"predictions": share}) for share in self.part(data)]


class KServeEnvelope(SharedEnvelope):
    """KServe's first protocol: `{"instances": […]}` → `{"predictions": […]}` or `{"explanations": […]}`."""

    def read_document(self, document: Mapping[str, Any]) -> list[Any]:
        """The instances of one request."""
        return list_in(document, "instances")

    def format_output(self, data: Any) -> list[dict[str, Any]]:
        """Results → an object per request."""
        assert self.context is not None
        is_explain = self.context.get_request_header(0, "explain") == "True"
        return [{"explanations" if is_explain else "predictions": share} for share in self.part(data)]


class InstancesEnvelope(KServeEnvelope):
    """KServe's first protocol around a handler that expects rows: each instance is one, under `data`."""

    def read_document(self, document: Mapping[str, Any]) -> list[Any]:
        """The instances of one request, as rows; `{"b64": "…"}` stands for bytes."""
        instances = [decode_bytes(instance) for instance in super().read_document(document)]
        return [row if isinstance(row, dict) and row.keys() & {"data", "body"} else {"data": row} for row in instances]


class KServev2Envelope(SharedEnvelope):
    """KServe's second protocol: named tensors in, and out under the names they came in by."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any]) -> None:
        super().__init__(handle_fn)
        self._ids: list[str] = []
        self._names: list[list[str]] = []

    def parse_input(self, data: Sequence[Any]) -> list[Any]:
        """Rows → the inputs of all of them; the context tells their names."""
        assert self.context is not None
        vars(self.context).pop("input_request_id", None)  # of a call that failed
        self._ids, self._names = [], []
        inputs = super().parse_input(data)
        self.context.input_names = [name for names in self._names for name in names]  # type: ignore[attr-defined]
        if self._ids[0]:
            self.context.input_request_id = self._ids[0]  # type: ignore[attr-defined]
        return inputs

    def documents(self, data: Sequence[Any]) -> list[Mapping[str, Any]]:
        """The JSON object of each request, with the binary data that follows it put in."""
        assert self.context is not None
        return [read_request(row, self.context, i) for i, row in enumerate(data)]

    def read_document(self, document: Mapping[str, Any]) -> list[Any]:
        """The inputs of one request, with their data in shape."""
        inputs = [read_input(entry) for entry in list_in(document, "inputs")]
        self._ids.append(str(document.get("id") or "").strip())
        self._names.append([entry["name"] for entry in inputs])
        return inputs

    def format_output(self, data: Any) -> list[dict[str, Any]]:
        """Results → an inference response per request."""
        assert self.context is not None
        for name in ("input_names", "input_request_id"):
            vars(self.context).pop(name, None)
        model = ((self.context.manifest or {}).get("model")) or {}
        return [
            {
                "id": self._ids[i] or self.context.get_request_id(i),
                "model_name": model.get("modelName", self.context.model_name),
                "model_version": model.get("modelVersion"),
                "outputs": to_outputs(results, self._names[i]),
            }
            for i, results in enumerate(self.part(data))
        ]


def to_outputs(results: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Each result as a tensor under the name of the input at its place."""
    if len(results) > len(names):
        raise HandlerError(f"the handler gave {len(results)} results for {len(names)} inputs")
    return [to_output(name, result) for name, result in zip(names, results, strict=False)]


def is_describe(data: Sequence[Any], context: Context) -> bool:
    """Whether this is a request to describe the model, which comes without a body."""
    return not data[0] and context.get_request_header(0, "describe") == "True"
