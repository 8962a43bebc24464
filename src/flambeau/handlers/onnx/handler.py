"""OnnxHandler: any .onnx file behind JSON or NumPy bytes, with no code and without torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.loading.threads import choose_threads
from flambeau.handlers.onnx.batches import group_alike, has_batch_axis, join, split, without_batch_axis
from flambeau.handlers.onnx.inputs import Example, InputLimits, InputSpec, read_example, read_specs
from flambeau.handlers.onnx.npy import write_npy, write_npz
from flambeau.handlers.onnx.session import OnnxModel, open_session
from flambeau.handlers.options import read_handler_options, resolve_model_path
from flambeau.handlers.requests import is_describe, refuse_explain, value_or_fields

if TYPE_CHECKING:
    from flambeau.worker.context import Context

logger = logging.getLogger(__name__)

NPY, NPZ = "application/x-npy", "application/x-npz"
OPTIONS = {"model_path": str, "allow_nan": bool, "max_unpacked_bytes": int, "batch": bool}


class OnnxHandler:
    """Serves an ONNX file.

    An input with as many axes as the model declares is a batch of the client's own, and is answered with its first
    axis; one axis less is a single example, and is answered without it.
    """

    def initialize(self, context: Context) -> None:
        """Open the session and learn what the model takes."""
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
        self.joins_requests = options.get("batch", True) and has_batch_axis(self.specs, self.session.get_outputs())

    def handle(self, data: Sequence[Mapping[str, Any]], context: Context) -> list[Any]:
        """The whole way for one batch; the server calls this."""
        began = time.perf_counter()
        if is_describe(context):
            return [self.describe_handle()]
        refuse_explain(context, "onnx")
        examples = [read_example(value_or_fields(row), self.specs, self.limits) for row in data]
        accepted = [choose_media_type(context.get_request_header(i, "accept") or "") for i in range(len(data))]
        replies = []
        for i, (example, outputs) in enumerate(zip(examples, self.run(examples), strict=True)):
            outputs = [without_batch_axis(output) for output in outputs] if example.is_single else outputs
            replies.append(encode(dict(zip(self.output_names, outputs, strict=True)), accepted[i]))
            if accepted[i]:
                context.set_response_content_type(i, accepted[i])
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return replies

    def run(self, examples: Sequence[Example]) -> list[list[Any]]:
        """The outputs of each example, computed together where the model allows."""
        results: dict[int, list[Any]] = {}
        for places in group_alike(examples) if self.joins_requests else []:
            if len(places) > 1:
                group = [examples[place] for place in places]
                parts = split(self.run_session(join(group)), group)
                if parts is None:
                    logger.warning("an output has not one row per example: requests will run one by one")
                    self.joins_requests = False
                    break
                results |= zip(places, parts, strict=True)
        for place in range(len(examples)):
            if place not in results:
                results[place] = self.run_session(examples[place].arrays)
        return [results[place] for place in range(len(examples))]

    def run_session(self, arrays: Mapping[str, Any]) -> list[Any]:
        """Every output; what onnxruntime refuses because of the values is the client's error."""
        from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument

        try:
            outputs: list[Any] = self.session.run(None, dict(arrays))
        except InvalidArgument as error:
            raise BadRequest(f"the model cannot take these inputs: {error}") from None
        except Fail:
            if clash := find_clash(self.specs, arrays):
                raise BadRequest(f"the model cannot take these inputs: {clash}") from None
            raise
        return outputs

    def describe_handle(self) -> Any:
        """What the model takes and gives, for `describe?customized=true`."""
        outputs = [{"name": o.name, "type": o.type, "shape": list(o.shape or [])} for o in self.session.get_outputs()]
        inputs = [{"name": spec.name, "type": spec.kind, "shape": list(spec.dims)} for spec in self.specs]
        return {"inputs": inputs, "outputs": outputs, "joinsRequests": self.joins_requests}


def find_onnx_file(context: Context, model_path: str | None) -> Path:
    """The file to serve: the one that is named, else the only one in the model's folder."""
    folder = Path(context.system_properties["model_dir"])
    serialized = ((context.manifest or {}).get("model") or {}).get("serializedFile")
    path = resolve_model_path(folder, model_path or serialized)
    if not path.is_dir():
        return path
    files = sorted(path.glob("*.onnx"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "no .onnx file"
        raise HandlerError(f"{path} has {found}; name one with --serialized-file, or with model_path in the YAML")
    return files[0]


def find_clash(specs: Sequence[InputSpec], arrays: Mapping[str, Any]) -> str:
    """Two inputs that disagree about a dimension of one name, in words; nothing when they agree."""
    sizes: dict[str, tuple[str, int]] = {}
    for spec in specs:
        for dim, size in zip(spec.dims, arrays[spec.name].shape, strict=False):
            if isinstance(dim, str) and sizes.setdefault(dim, (spec.name, size))[1] != size:
                other, other_size = sizes[dim]
                return f"{dim} is {other_size} in input {other} and {size} in input {spec.name}"
    return ""


def choose_media_type(accept: str) -> str:
    """The first kind of reply the client names that differs from JSON; empty for JSON."""
    for part in accept.split(","):
        media_type = part.partition(";")[0].strip().lower()
        if media_type in (NPY, NPZ):
            return media_type
        if media_type == "application/json":
            break
    return ""


def encode(outputs: Mapping[str, Any], media_type: str) -> Any:
    """The reply of one request in the kind it asked for."""
    if not media_type:
        plain = {name: to_plain(value) for name, value in outputs.items()}
        return next(iter(plain.values())) if len(plain) == 1 else plain
    odd = [name for name, value in outputs.items() if not is_array(value)]
    if odd or (media_type == NPY and len(outputs) > 1):
        reason = f"output {odd[0]} is no tensor of numbers: ask for application/json" if odd else f"ask for {NPZ}"
        raise BadRequest(f"the outputs {', '.join(outputs)} do not fit {media_type}; {reason}")
    return write_npy(next(iter(outputs.values()))) if media_type == NPY else write_npz(outputs)


def is_array(value: Any) -> bool:
    """Whether NumPy can write a value without pickling; a row of a vector is a scalar of its own."""
    return isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject


def to_plain(value: Any) -> Any:
    """What JSON can carry: arrays as nested lists, also inside the sequences and maps some models give."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    return {str(key): to_plain(item) for key, item in value.items()} if isinstance(value, dict) else value
