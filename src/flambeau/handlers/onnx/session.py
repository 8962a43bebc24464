"""onnxruntime sessions that can be called with tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from flambeau.errors import HandlerError

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
KINDS = {"float": "FP32", "double": "FP64", "float16": "FP16", "bfloat16": "BF16", "bool": "BOOL"}
KINDS |= {f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)}
ERRORS_ONLY = 3  # onnxruntime's log level; its warnings at load are about the file, not about serving


class OnnxModel(onnxruntime.InferenceSession):  # type: ignore[misc]
    """A session that is called like a torch module. It returns tensors for tensors, and arrays for NumPy arrays."""

    def __call__(self, *tensors: Any, **named: Any) -> Any:
        """Take inputs in the model's order or by name; return one output, or several as a tuple."""
        inputs = self.name_inputs(tensors, named)
        outputs = self.run(None, {name: to_array(value) for name, value in inputs.items()})
        results = tuple(like(inputs.values(), output) for output in outputs)
        return results[0] if len(results) == 1 else results

    def name_inputs(self, tensors: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
        """The inputs by name; surplus, duplicate and unknown inputs are errors."""
        names = [spec.name for spec in self.get_inputs()]
        if len(tensors) > len(names):
            raise TypeError(f"{len(tensors)} inputs were given; the model has {len(names)}: {', '.join(names)}")
        inputs = dict(zip(names, tensors, strict=False))
        for name in named:
            if name not in names or name in inputs:
                found = "is given twice" if name in inputs else "is unknown"
                raise TypeError(f"input {name!r} {found}; the model has {', '.join(names)}")
        return inputs | named


def tensor_metadata(session: OnnxModel, *, with_batch_axis: bool = True) -> dict[str, list[dict[str, Any]]]:
    """The inputs and outputs as KServe names them; a dimension without a fixed size is -1."""

    def describe(spec: Any) -> dict[str, Any]:
        kind = spec.type.removeprefix("tensor(").removesuffix(")")
        shape = [size if isinstance(size, int) else -1 for size in spec.shape or ()]
        datatype = KINDS.get(kind, "BYTES")  # a sequence or a map travels as JSON text
        return {"name": spec.name, "datatype": datatype, "shape": shape if with_batch_axis else shape[1:]}

    return {
        "inputs": [describe(spec) for spec in session.get_inputs()],
        "outputs": [describe(spec) for spec in session.get_outputs()],
    }


def open_session(path: Path, *, use_cuda: bool, threads: int, gpu_id: int = 0) -> OnnxModel:
    """Open an ONNX file. It runs on the GPU if `use_cuda` is set and this onnxruntime supports it, else on the CPU."""
    if not path.is_file():
        raise HandlerError(f"there is no {path.name} in {path.parent}: add it to the archive, or select another file")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    try:
        return OnnxModel(str(path), options, providers=choose_providers(use_cuda=use_cuda, gpu_id=gpu_id))
    except Exception as error:  # onnxruntime has many exception classes for damaged files
        raise HandlerError(f"{path.name} could not be loaded as ONNX: {error}") from error


def choose_providers(*, use_cuda: bool, gpu_id: int) -> list[Any]:
    """Execution providers, the preferred one first."""
    if use_cuda and CUDA in onnxruntime.get_available_providers():
        return [(CUDA, {"device_id": gpu_id}), CPU]
    return [CPU]


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_array(value: Any) -> Any:
    """A tensor as a NumPy array on the CPU; other values unchanged."""
    return value.detach().cpu().numpy() if is_tensor(value) else value


def like(inputs: Any, output: Any) -> Any:
    """An output as a tensor on the device of the first input tensor; unchanged if no input is a tensor."""
    first = next((value for value in inputs if is_tensor(value)), None)
    if first is None:
        return output
    import torch

    return torch.from_numpy(output).to(first.device)
