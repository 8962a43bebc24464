"""KServe's version 2 around any handler: a request becomes one row, a result becomes named tensors."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.envelopes.base import BaseEnvelope
from flambeau.handlers.envelopes.request_documents import HEADER, list_in, read_request
from flambeau.handlers.envelopes.v2_tensors import DATATYPES, datatype_of, flatten, pack_elements, read_input

if TYPE_CHECKING:
    from flambeau.worker.context import Context

Tensor = dict[str, Any]
TRANSPORT_PARAMETERS = ("binary_data_size", "binary_data_output")  # not passed to the handler
ALL_DATATYPES = {**DATATYPES, "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """The outputs that a request asks for, and its id."""

    id: str
    input_names: Sequence[str]
    outputs: Mapping[str, bool]  # name → whether as binary data; empty: all outputs
    is_binary: bool  # outputs that are not named


class OpenInferenceEnvelope(BaseEnvelope):
    """The handler gets a single input under `data`, several under their names."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any], declared: Mapping[str, str] | None = None) -> None:
        super().__init__(handle_fn)
        self._declared = declared or {}  # outputs that the handler declares, name → datatype
        self._output_specs: list[OutputSpec] = []

    def parse_input(self, data: Sequence[Any]) -> list[Any]:
        assert self.context is not None
        documents = [read_request(row, self.context, i) for i, row in enumerate(data)]
        self._output_specs = [read_output_spec(document) for document in documents]
        return [to_row(document) for document in documents]

    def format_output(self, data: Any) -> list[Any]:
        assert self.context is not None
        specs = self._output_specs
        results = [data] if len(specs) == 1 and len(data) != 1 else data
        if len(results) != len(specs):
            raise HandlerError(f"the handler returned {len(results)} results for {len(specs)} requests")
        return [self._reply(i, spec, results[i]) for i, spec in enumerate(specs)]

    def _reply(self, i: int, spec: OutputSpec, result: Any) -> Any:
        context = self.context
        assert context is not None
        model = ((context.manifest or {}).get("model")) or {}
        tensors = to_tensors(result, spec, self._declared)
        document = {
            "model_name": context.model_name,
            "model_version": str(model.get("modelVersion") or "1.0"),
            "id": spec.id or context.get_request_id(i),
            "outputs": tensors,
        }
        binary = [tensor for tensor in tensors if spec.outputs.get(tensor["name"], spec.is_binary)]
        rest = b"".join(detach_binary_data(tensor) for tensor in binary)
        for tensor in tensors:
            if "data" in tensor:
                tensor["data"] = [as_text(value) for value in tensor["data"]]
        if not binary:
            context.set_response_content_type(i, "application/json")
            return document
        head = json.dumps(document).encode()
        context.set_response_content_type(i, "application/octet-stream")
        context.set_response_header(i, HEADER, str(len(head)))
        return head + rest


def read_output_spec(document: Mapping[str, Any]) -> OutputSpec:
    asked = document.get("outputs") or []
    if not isinstance(asked, list) or not all(isinstance(o, Mapping) and isinstance(o.get("name"), str) for o in asked):
        raise BadRequest("the outputs of a request must be a list of objects with a name")
    is_binary = parameters_of(document).get("binary_data_output") is True
    return OutputSpec(
        id=str(document.get("id") or "").strip(),
        input_names=[str(entry.get("name")) for entry in list_in(document, "inputs") if isinstance(entry, Mapping)],
        outputs={o["name"]: bool(parameters_of(o).get("binary_data", is_binary)) for o in asked},
        is_binary=is_binary,
    )


def parameters_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    found = document.get("parameters")
    return found if isinstance(found, Mapping) else {}


def to_row(document: Mapping[str, Any]) -> dict[str, Any]:
    """The handler's row: a single input with `data`, `shape` and `datatype`, or each input under its name."""
    inputs = [read_input(entry, whole=True) for entry in list_in(document, "inputs")]
    if not inputs:
        raise BadRequest("the request holds nothing to predict: its list of inputs is empty")
    if len(inputs) == 1:
        parameters = {**parameters_of(document), **parameters_of(inputs[0])}
        return {
            **inputs[0],
            "parameters": {key: parameters[key] for key in parameters if key not in TRANSPORT_PARAMETERS},
        }
    return {entry["name"]: entry["data"] for entry in inputs}


def to_tensors(result: Any, spec: OutputSpec, declared: Mapping[str, str]) -> list[Tensor]:
    """A result as named tensors: a mapping by its keys, anything else under the declared or the input's name.

    The name that a request asks for comes first.
    """
    if isinstance(result, Mapping) and result:
        named = {str(name): value for name, value in result.items()}
    else:
        own = [*declared] if len(declared) == 1 else []
        only = [*spec.outputs] or own or ([*spec.input_names] if len(spec.input_names) == 1 else ["output"])
        named = {only[0]: result}
    if missing := [name for name in spec.outputs if name not in named]:
        raise BadRequest(f"the model has no output {missing[0]!r}; it has {', '.join(named)}")
    wanted = {name: value for name, value in named.items() if not spec.outputs or name in spec.outputs}
    return [to_tensor(name, value, declared.get(name)) for name, value in wanted.items()]


def to_tensor(name: str, value: Any, declared: str | None = None) -> Tensor:
    """A value as a tensor; one without a tensor's shape becomes one BYTES element with its JSON text.

    Numbers without a dtype have the declared datatype, or the narrowest that holds them.
    """
    if hasattr(value, "detach"):
        value = value.detach()
    kind = ALL_DATATYPES.get(str(getattr(value, "dtype", "")).removeprefix("torch."))
    if hasattr(value, "tolist"):
        shape: list[int] | None = [*value.shape]
        value = value.tolist()
    else:
        shape = shape_of(value)
    if shape is None:
        value, shape, kind = json.dumps(value, default=str), [], "BYTES"
    flat = [*flatten(value)]
    kind = kind or declared_kind(datatype_of(flat), declared)
    data = [float(element) for element in flat] if kind.startswith("FP") else flat
    return {"name": name, "datatype": kind, "shape": shape or [1], "data": data}


def declared_kind(found: str, declared: str | None) -> str:
    """The declared datatype where numbers may have it: a float stays a float."""
    same = declared is not None and (found.startswith("FP"), found == "BYTES") == (declared.startswith("FP"), False)
    return declared if declared is not None and same else found


def shape_of(value: Any) -> list[int] | None:
    """The shape of nested lists; None if they are uneven or hold other values than a tensor."""
    if not isinstance(value, (list, tuple)):
        return [] if isinstance(value, (bool, int, float, str, bytes)) else None
    inner = [shape_of(item) for item in value]
    if not inner:
        return [0]
    return None if inner[0] is None or any(shape != inner[0] for shape in inner) else [len(inner), *inner[0]]


def detach_binary_data(tensor: Tensor) -> bytes:
    """Remove a tensor's data from its document, which keeps the size, and return it packed."""
    raw = pack_elements(tensor.pop("data"), tensor["datatype"])
    tensor["parameters"] = {"binary_data_size": len(raw)}
    return raw


def as_text(value: Any) -> Any:
    """An element for JSON; bytes that are not UTF-8 as base64."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()
