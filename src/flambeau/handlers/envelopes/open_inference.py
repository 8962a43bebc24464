"""KServe's second protocol around any handler: a request is one row, its reply named tensors in their shapes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.envelopes.binary_v2 import pack
from flambeau.handlers.envelopes.documents import list_in
from flambeau.handlers.envelopes.envelopes import BaseEnvelope
from flambeau.handlers.envelopes.requests_v2 import HEADER, read_request
from flambeau.handlers.envelopes.tensors_v2 import DATATYPES, datatype_of, flatten, read_input

if TYPE_CHECKING:
    from flambeau.worker.context import Context

Tensor = dict[str, Any]
OF_TRANSPORT = ("binary_data_size", "binary_data_output")  # parameters that concern no handler
NARROW = {**DATATYPES, "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How a client wants its answer: under which id and names, and which of them as binary data."""

    id: str
    input_names: Sequence[str]
    outputs: Mapping[str, bool]  # name → as binary data; empty: all of them
    is_binary: bool  # what is not named


class OpenInferenceEnvelope(BaseEnvelope):
    """The handler gets an only input under `data`, several under their names; what it returns becomes tensors."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any]) -> None:
        super().__init__(handle_fn)
        self._wishes: list[Wish] = []

    def parse_input(self, data: Sequence[Any]) -> list[Any]:
        """Rows → rows, with the tensors taken out of their documents."""
        assert self.context is not None
        documents = [read_request(row, self.context, i) for i, row in enumerate(data)]
        self._wishes = [read_wish(document) for document in documents]
        return [to_row(document) for document in documents]

    def format_output(self, data: Any) -> list[Any]:
        """Results → an inference response per request."""
        assert self.context is not None
        wishes = self._wishes
        results = [data] if len(wishes) == 1 and len(data) != 1 else data
        if len(results) != len(wishes):
            raise HandlerError(f"the handler gave {len(results)} results for {len(wishes)} requests")
        return [self._reply(i, wish, results[i]) for i, wish in enumerate(wishes)]

    def _reply(self, i: int, wish: Wish, result: Any) -> Any:
        context = self.context
        assert context is not None
        model = ((context.manifest or {}).get("model")) or {}
        tensors = to_tensors(result, wish)
        document = {
            "model_name": context.model_name,
            "model_version": str(model.get("modelVersion") or "1.0"),
            "id": wish.id or context.get_request_id(i),
            "outputs": tensors,
        }
        binary = [tensor for tensor in tensors if wish.outputs.get(tensor["name"], wish.is_binary)]
        rest = b"".join(move_out(tensor) for tensor in binary)
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


def read_wish(document: Mapping[str, Any]) -> Wish:
    """What a request says about its answer."""
    asked = document.get("outputs") or []
    if not isinstance(asked, list) or not all(isinstance(o, Mapping) and isinstance(o.get("name"), str) for o in asked):
        raise BadRequest("the outputs of a request must be a list of objects with a name")
    is_binary = parameters_of(document).get("binary_data_output") is True
    return Wish(
        id=str(document.get("id") or "").strip(),
        input_names=[str(entry.get("name")) for entry in list_in(document, "inputs") if isinstance(entry, Mapping)],
        outputs={o["name"]: bool(parameters_of(o).get("binary_data", is_binary)) for o in asked},
        is_binary=is_binary,
    )


def parameters_of(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parameters of a request or of an output."""
    found = document.get("parameters")
    return found if isinstance(found, Mapping) else {}


def to_row(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the handler gets: `data` beside its shape and type for an only input, else each input under its name."""
    inputs = [read_input(entry, whole=True) for entry in list_in(document, "inputs")]
    if not inputs:
        raise BadRequest("the request holds nothing to predict: its list of inputs is empty")
    if len(inputs) == 1:
        parameters = {**parameters_of(document), **parameters_of(inputs[0])}
        return {**inputs[0], "parameters": {key: parameters[key] for key in parameters if key not in OF_TRANSPORT}}
    return {entry["name"]: entry["data"] for entry in inputs}


def to_tensors(result: Any, wish: Wish) -> list[Tensor]:
    """A result as named tensors: an object's values under their names, anything else under the one that was asked."""
    if isinstance(result, Mapping) and result:
        named = {str(name): value for name, value in result.items()}
    else:
        only = [*wish.outputs] or ([*wish.input_names] if len(wish.input_names) == 1 else ["output"])
        named = {only[0]: result}
    if missing := [name for name in wish.outputs if name not in named]:
        raise BadRequest(f"the model has no output {missing[0]!r}; it has {', '.join(named)}")
    return [to_tensor(name, value) for name, value in named.items() if not wish.outputs or name in wish.outputs]


def to_tensor(name: str, value: Any) -> Tensor:
    """A value in its shape; what is no tensor is one BYTES element with its JSON text."""
    if hasattr(value, "detach"):
        value = value.detach()
    kind = NARROW.get(str(getattr(value, "dtype", "")).removeprefix("torch."))
    if hasattr(value, "tolist"):
        shape: list[int] | None = [*value.shape]
        value = value.tolist()
    else:
        shape = shape_of(value)
    if shape is None:
        value, shape, kind = json.dumps(value, default=str), [], "BYTES"
    flat = [*flatten(value)]
    kind = kind or datatype_of(flat)
    data = [float(element) for element in flat] if kind == "FP64" else flat
    return {"name": name, "datatype": kind, "shape": shape or [1], "data": data}


def shape_of(value: Any) -> list[int] | None:
    """The lengths of nested lists; None if they are uneven, or hold what no tensor holds."""
    if not isinstance(value, (list, tuple)):
        return [] if isinstance(value, (bool, int, float, str, bytes)) else None
    inner = [shape_of(item) for item in value]
    if not inner:
        return [0]
    return None if inner[0] is None or any(shape != inner[0] for shape in inner) else [len(inner), *inner[0]]


def move_out(tensor: Tensor) -> bytes:
    """Take a tensor's data out of the document; the document keeps its size."""
    raw = pack(tensor.pop("data"), tensor["datatype"])
    tensor["parameters"] = {"binary_data_size": len(raw)}
    return raw


def as_text(value: Any) -> Any:
    """An element that JSON can hold; bytes that are no text as base64."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()
