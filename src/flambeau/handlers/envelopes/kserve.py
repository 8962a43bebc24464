"""KServe's protocols, version 1 and 2, around a handler that expects their documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flambeau.errors import HandlerError
from flambeau.handlers.envelopes.base import MultiInstanceEnvelope
from flambeau.handlers.envelopes.request_documents import decode_bytes, list_in, read_request
from flambeau.handlers.envelopes.v2_tensors import read_input, to_output

if TYPE_CHECKING:
    from flambeau.worker.context import Context


class KServeEnvelope(MultiInstanceEnvelope):
    """Version 1: `{"instances": […]}` → `{"predictions": […]}` or `{"explanations": […]}`."""

    def read_document(self, document: Mapping[str, Any]) -> list[Any]:
        return list_in(document, "instances")

    def format_output(self, data: Any) -> list[dict[str, Any]]:
        assert self.context is not None
        is_explain = self.context.get_request_header(0, "explain") == "True"
        return [{"explanations" if is_explain else "predictions": share} for share in self.split(data)]


class InstancesEnvelope(KServeEnvelope):
    """Version 1 around a handler that expects rows: each instance becomes a row with `data`."""

    def read_document(self, document: Mapping[str, Any]) -> list[Any]:
        instances = [decode_bytes(instance) for instance in super().read_document(document)]
        return [row if isinstance(row, dict) and row.keys() & {"data", "body"} else {"data": row} for row in instances]


class KServev2Envelope(MultiInstanceEnvelope):
    """Version 2: named tensors; each result has the name of the input at its index."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any]) -> None:
        super().__init__(handle_fn)
        self._ids: list[str] = []
        self._names: list[list[str]] = []

    def parse_input(self, data: Sequence[Any]) -> list[Any]:
        """The inputs of all requests. Handlers read `context.input_names` and `context.input_request_id`."""
        assert self.context is not None
        vars(self.context).pop("input_request_id", None)  # left by a call that failed
        self._ids, self._names = [], []
        inputs = super().parse_input(data)
        self.context.input_names = [name for names in self._names for name in names]  # type: ignore[attr-defined]
        if self._ids[0]:
            self.context.input_request_id = self._ids[0]  # type: ignore[attr-defined]
        return inputs

    def documents(self, data: Sequence[Any]) -> list[Mapping[str, Any]]:
        assert self.context is not None
        return [read_request(row, self.context, i) for i, row in enumerate(data)]

    def read_document(self, document: Mapping[str, Any]) -> list[Any]:
        inputs = [read_input(entry) for entry in list_in(document, "inputs")]
        self._ids.append(str(document.get("id") or "").strip())
        self._names.append([entry["name"] for entry in inputs])
        return inputs

    def format_output(self, data: Any) -> list[dict[str, Any]]:
        assert self.context is not None
        for name in ("input_names", "input_request_id"):
            vars(self.context).pop(name, None)
        model = ((self.context.manifest or {}).get("model")) or {}
        return [
            {
                "id": self._ids[i] or self.context.get_request_id(i),
                "model_name": model.get("modelName") or getattr(self.context, "model_name", None),
                "model_version": model.get("modelVersion"),
                "outputs": to_outputs(results, self._names[i]),
            }
            for i, results in enumerate(self.split(data))
        ]


def to_outputs(results: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    if len(results) > len(names):
        raise HandlerError(f"the handler returned {len(results)} results for {len(names)} inputs")
    return [to_output(name, result) for name, result in zip(names, results, strict=False)]
