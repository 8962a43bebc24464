"""ONNX files → sessions: opened with a clear word on what is wrong, and callable with tensors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnxruntime

from flambeau.errors import HandlerError

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
ERRORS_ONLY = 3  # onnxruntime's log level: what it warns of at load, nobody who serves the model can change


class OnnxModel(onnxruntime.InferenceSession):  # type: ignore[misc]
    """A session that is called like a torch module: tensors in, tensors out; NumPy arrays in, NumPy arrays out."""

    def __call__(self, *tensors: Any, **named: Any) -> Any:
        """Inputs in the model's order or by name; one output as it is, several as a tuple."""
        inputs = self.name_inputs(tensors, named)
        outputs = self.run(None, {name: to_array(value) for name, value in inputs.items()})
        results = tuple(like(inputs.values(), output) for output in outputs)
        return results[0] if len(results) == 1 else results

    def name_inputs(self, tensors: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
        """Each input under its name; one too many, twice or of an unknown name is an error."""
        names = [spec.name for spec in self.get_inputs()]
        if len(tensors) > len(names):
            raise TypeError(f"{len(tensors)} inputs were given; the model has {len(names)}: {', '.join(names)}")
        inputs = dict(zip(names, tensors, strict=False))
        for name in named:
            if name not in names or name in inputs:
                found = "is given twice" if name in inputs else "is unknown"
                raise TypeError(f"input {name!r} {found}; the model has {', '.join(names)}")
        return inputs | named


def open_session(path: Path, *, use_cuda: bool, threads: int, gpu_id: int = 0) -> OnnxModel:
    """The session of an ONNX file; on a GPU when asked for and this onnxruntime has one, else on the CPU."""
    if not path.is_file():
        raise HandlerError(f"there is no {path.name} in {path.parent}: pack it, or name another file")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    try:
        return OnnxModel(str(path), options, providers=choose_providers(use_cuda=use_cuda, gpu_id=gpu_id))
    except Exception as error:  # onnxruntime has a class of its own for each way a file can be broken
        raise HandlerError(f"{path.name} could not be loaded as ONNX: {error}") from error


def choose_providers(*, use_cuda: bool, gpu_id: int) -> list[Any]:
    """Where a session runs, the preferred place first."""
    if use_cuda and CUDA in onnxruntime.get_available_providers():
        return [(CUDA, {"device_id": gpu_id}), CPU]
    return [CPU]


def is_tensor(value: Any) -> bool:
    """Whether something is a torch tensor; there is none where torch was not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_array(value: Any) -> Any:
    """A tensor's NumPy array, on the CPU; anything else as it is."""
    return value.detach().cpu().numpy() if is_tensor(value) else value


def like(inputs: Any, output: Any) -> Any:
    """An output in the kind, and on the device, of the first tensor among the inputs."""
    first = next((value for value in inputs if is_tensor(value)), None)
    if first is None:
        return output
    import torch

    return torch.from_numpy(output).to(first.device)
