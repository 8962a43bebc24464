"""OnnxHandler: serves an .onnx file with JSON or NumPy bytes, without code and without torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.device import choose_threads
from flambeau.handlers.onnx.inputs import InputLimits, InputSpec, RequestArrays, read_request_arrays, read_specs
from flambeau.handlers.onnx.npy import Array, write_npy, write_npz
from flambeau.handlers.onnx.session import OnnxModel, open_session, tensor_metadata
from flambeau.handlers.options import read_handler_options, resolve_model_path
from flambeau.handlers.request_rows import is_describe, refuse_explain, value_or_fields
from flambeau.wire.example_requests import Expression, of_inputs, of_shape

if TYPE_CHECKING:
    from flambeau.worker.context import Context

logger = logging.getLogger(__name__)

NPY, NPZ = "application/x-npy", "application/x-npz"
VALUES: dict[str, float | str] = {"f": 0.5, "b": True, "O": "text"}  # of an example, by the kind of its dtype
OPTIONS = {"model_path": str, "allow_nan": bool, "max_unpacked_bytes": int, "batch": bool}
# A first axis with one of these words in its name is not a batch axis: joined requests would change each other.
NOT_BATCH_AXIS = ("seq", "len", "time", "token", "frame", "step")


class OnnxHandler:
    """Serves an ONNX file.

    An input with as many axes as the model declares is a batch, and its reply has a batch axis. An input with one
    axis less is a single example, and its reply has no batch axis.
    """

    def initialize(self, context: Context) -> None:
        options = read_handler_options(context, OPTIONS)
        gpu_id = context.system_properties["gpu_id"]
        path = find_onnx_file(context, options.get("model_path"))
        self.session: OnnxModel = open_session(
            path, use_cuda=gpu_id is not None, threads=choose_threads(), gpu_id=gpu_id or 0
        )
        self.specs: list[InputSpec] = read_specs(self.session.get_inputs())
        self.output_names: list[str] = [output.name for output in self.session.get_outputs()]
        self.limits = InputLimits(
            allow_nan=options.get("allow_nan", False), max_unpacked_bytes=options.get("max_unpacked_bytes", 1 << 28)
        )
        self.example = example_of(self.specs)
        self.joins_requests = options.get("batch", True) and has_batch_axis(self.specs, self.session.get_outputs())

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        began = time.perf_counter()
        if is_describe(context):
            return [self.describe_handle()]
        refuse_explain(context, "onnx")
        examples = [read_request_arrays(value_or_fields(row), self.specs, self.limits) for row in data]
        accepted = [choose_media_type(context.get_request_header(i, "accept") or "") for i in range(len(data))]
        replies = []
        for i, (example, outputs) in enumerate(zip(examples, self.run(examples), strict=True)):
            outputs = [without_batch_axis(output) for output in outputs] if example.is_single else outputs
            replies.append(encode(dict(zip(self.output_names, outputs, strict=True)), accepted[i]))
            if accepted[i]:
                context.set_response_content_type(i, accepted[i])
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return replies

    def run(self, examples: Sequence[RequestArrays]) -> list[list[Any]]:
        """The outputs of each request; requests of equal shapes run together if the model has a batch axis."""
        results: dict[int, list[Any]] = {}
        for indices in group_by_shape(examples) if self.joins_requests else []:
            if len(indices) > 1:
                group = [examples[index] for index in indices]
                parts = split(self.run_session(join(group)), group)
                if parts is None:
                    logger.warning("the outputs do not have one row per example: requests run one by one from now on")
                    self.joins_requests = False
                    break
                results |= zip(indices, parts, strict=True)
        for index in range(len(examples)):
            if index not in results:
                results[index] = self.run_session(examples[index].arrays)
        return [results[index] for index in range(len(examples))]

    def run_session(self, arrays: Mapping[str, Any]) -> list[Any]:
        """All outputs of one call; inputs that onnxruntime rejects are client errors."""
        from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

        try:
            outputs: list[Any] = self.session.run(None, dict(arrays))
        except InvalidArgument as error:
            raise BadRequest(f"the model does not accept these inputs: {error}") from None
        except Fail:
            if clash := find_clash(self.specs, arrays):
                raise BadRequest(f"the model does not accept these inputs: {clash}") from None
            raise
        return outputs

    def tensor_metadata(self) -> Any:
        """The tensors for KServe's metadata."""
        return tensor_metadata(self.session)

    def describe_handle(self) -> Any:
        """Information for `GET /models/NAME?customized=true`."""
        outputs = [{"name": o.name, "type": o.type, "shape": list(o.shape or [])} for o in self.session.get_outputs()]
        inputs = [{"name": spec.name, "type": spec.kind, "shape": list(spec.dims)} for spec in self.specs]
        return {"inputs": inputs, "outputs": outputs, "joinsRequests": self.joins_requests}


def example_of(specs: Sequence[InputSpec]) -> Expression | None:
    """A request for one example; None if the model leaves a size open, apart from that of the batch."""
    inputs = {}
    for spec in specs:
        sizes = [dim for dim in spec.dims[spec.may_lack_batch_axis :] if isinstance(dim, int)]
        if len(sizes) < len(spec.dims) - spec.may_lack_batch_axis:
            return None
        inputs[spec.name] = of_shape(sizes, VALUES.get(spec.dtype.kind, 0))
    return of_inputs(inputs)


def find_onnx_file(context: Context, model_path: str | None) -> Path:
    """The configured file, else the only .onnx file in the model's folder."""
    folder = Path(context.system_properties["model_dir"])
    serialized = ((context.manifest or {}).get("model") or {}).get("serializedFile")
    path = resolve_model_path(folder, model_path or serialized)
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.onnx"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "no .onnx file"
        raise HandlerError(f"{path} has {found}; select one with --serialized-file or with model_path in the YAML")
    return files[0]


def find_clash(specs: Sequence[InputSpec], arrays: Mapping[str, Any]) -> str:
    """Describe two inputs with different sizes for a dimension of the same name; empty if there are none."""
    sizes: dict[str, tuple[str, int]] = {}
    for spec in specs:
        for dim, size in zip(spec.dims, arrays[spec.name].shape, strict=False):
            if isinstance(dim, str) and sizes.setdefault(dim, (spec.name, size))[1] != size:
                other, other_size = sizes[dim]
                return f"{dim} is {other_size} in input {other} and {size} in input {spec.name}"
    return ""


def choose_media_type(accept: str) -> str:
    """The NumPy media type that an Accept header prefers; empty for JSON."""
    for part in accept.split(","):
        media_type = part.partition(";")[0].strip().lower()
        if media_type in (NPY, NPZ):
            return media_type
        if media_type == "application/json":
            break
    return ""


def encode(outputs: Mapping[str, Any], media_type: str) -> Any:
    """The reply to one request in the media type it accepts."""
    if not media_type:
        plain = {name: to_plain(value) for name, value in outputs.items()}
        return next(iter(plain.values())) if len(plain) == 1 else plain
    odd = [name for name, value in outputs.items() if not is_array(value)]
    if odd or (media_type == NPY and len(outputs) > 1):
        reason = f"output {odd[0]} is not a tensor of numbers: accept application/json" if odd else f"accept {NPZ}"
        raise BadRequest(f"the outputs {', '.join(outputs)} do not fit {media_type}; {reason}")
    return write_npy(next(iter(outputs.values()))) if media_type == NPY else write_npz(outputs)


def is_array(value: Any) -> bool:
    """Whether NumPy can write a value without pickling; one row of a vector is a NumPy scalar."""
    return isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject


def to_plain(value: Any) -> Any:
    """A value for JSON: arrays become nested lists, also inside of sequences and maps."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    return {str(key): to_plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def has_batch_axis(specs: Sequence[InputSpec], outputs: Sequence[Any]) -> bool:
    """Whether the first axis of every input and output is a batch axis of variable length."""
    firsts = [spec.dims[0] if spec.dims else 0 for spec in specs]
    if not firsts or any(isinstance(first, int) for first in firsts) or len(set(firsts)) > 1:
        return False
    if any(word in str(firsts[0]).lower() for word in NOT_BATCH_AXIS):
        return False
    return all(o.type.startswith("tensor") and o.shape and not isinstance(o.shape[0], int) for o in outputs)


def group_by_shape(examples: Sequence[RequestArrays]) -> list[list[int]]:
    """Group requests, by index, whose shapes are equal except for the number of rows."""
    groups: dict[object, list[int]] = {}
    for i, example in enumerate(examples):
        rows = {array.shape[0] for array in example.arrays.values()}
        alike = tuple(array.shape[1:] for array in example.arrays.values())
        groups.setdefault(alike if len(rows) == 1 else i, []).append(i)
    return list(groups.values())


def join(examples: Sequence[RequestArrays]) -> dict[str, Array]:
    """The arrays of several requests as one batch."""
    return {name: np.concatenate([example.arrays[name] for example in examples]) for name in examples[0].arrays}


def split(outputs: Sequence[Any], examples: Sequence[RequestArrays]) -> list[list[Any]] | None:
    """The rows of each request in each output; None if an output does not have one row per input row."""
    counts = [len(next(iter(example.arrays.values()))) for example in examples]
    if any(not isinstance(output, np.ndarray) or output.shape[:1] != (sum(counts),) for output in outputs):
        return None
    ends = np.cumsum(counts).tolist()
    return [[output[end - count : end] for output in outputs] for end, count in zip(ends, counts, strict=True)]


def without_batch_axis(output: Any) -> Any:
    """Remove a batch axis of length 1; other outputs are returned unchanged."""
    has_one = output.shape[:1] == (1,) if isinstance(output, np.ndarray) else isinstance(output, list)
    return output[0] if has_one and len(output) == 1 else output
