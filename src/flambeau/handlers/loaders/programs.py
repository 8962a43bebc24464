"""Loads files that hold a whole model, architecture and weights, as a callable."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from flambeau.errors import HandlerError
from flambeau.handlers.device import choose_threads
from flambeau.handlers.loaders.formats import DATA, ModelFormat, recognize
from flambeau.handlers.loaders.torch_export import load_exported
from flambeau.handlers.loaders.weights import load_module
from flambeau.handlers.options import accepts_data_only

KSERVE_TYPES = {"bool": "BOOL", "uint8": "UINT8", "bfloat16": "BF16"}
KSERVE_TYPES |= {f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)}
KSERVE_TYPES |= {f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)}
TOO_FEW_ROWS = re.compile(r"dim value is too small at 0, expected it to be >= (\d+)")


def load_whole(path: Path, device: torch.device, *, weights_only: bool = True) -> Any:
    """Load a file that holds its own architecture; a file of bare weights is an error."""
    kind = recognize(path)
    if accepts_data_only():
        check_is_data(path, kind)
        weights_only = True
    if kind in (ModelFormat.PICKLE, ModelFormat.SAFETENSORS):
        return load_module(path, kind, device, weights_only=weights_only)
    try:
        if kind is ModelFormat.EXPORTED:
            return load_exported(path, device, weights_only=weights_only)
        return _LOADERS[kind](path, device)
    except ImportError as error:
        raise HandlerError(
            f"{path.name} is {kind.value}, and {error.name} is not installed; {_remedy(kind)}"
        ) from error
    except HandlerError:
        raise
    except Exception as error:
        raise HandlerError(f"{path.name} looks like {kind.value}, but could not be loaded: {error}") from error


def check_is_data(path: Path, kind: ModelFormat) -> None:
    """Raise unless a format is data that a library of this server interprets, or a graph without code of its own."""
    if kind not in DATA:
        raise HandlerError(
            f"{path.name} is {kind.value}, which can run code, and the server does not accept that (safe_weights). "
            "Save safetensors or torch.save(model.state_dict(), …) with a model file, or ONNX"
        )


def load_torchscript(path: Path, device: torch.device) -> torch.nn.Module:
    return torch.jit.load(str(path), map_location=device)  # type: ignore[no-any-return, no-untyped-call]


class PaddedProgram:
    """A compiled program with a minimum batch size, often 2; smaller batches are padded with their first row."""

    def __init__(self, program: Callable[..., Any]) -> None:
        self._program = program
        self._rows = 0

    def __call__(self, *inputs: torch.Tensor) -> Any:
        given = inputs[0].shape[0] if inputs and inputs[0].dim() else 0
        if given >= self._rows:
            try:
                return self._program(*inputs)
            except RuntimeError as error:
                if (found := TOO_FEW_ROWS.search(str(error))) is None or not given:
                    raise
                self._rows = int(found[1])
        padded = [torch.cat([tensor, *[tensor[:1]] * (self._rows - given)]) for tensor in inputs]
        return tree_map(lambda output: output[:given], self._program(*padded))


def load_package(path: Path, device: torch.device) -> Callable[..., Any]:
    """An AOTInductor package; the variable makes it check its inputs."""
    os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
    from torch._inductor import aoti_load_package

    index = device.index if device.type != "cpu" and device.index is not None else -1
    return PaddedProgram(aoti_load_package(str(path), device_index=index))


def load_library(path: Path, device: torch.device) -> Callable[..., Any]:
    """An AOTInductor library, the predecessor of packages."""
    os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    from torch._export import aot_load

    return PaddedProgram(aot_load(str(path), device.type))


def load_onnx(path: Path, device: torch.device) -> Any:
    """An onnxruntime session that can be called with tensors."""
    from flambeau.handlers.onnx.session import open_session

    return open_session(path, use_cuda=device.type == "cuda", threads=choose_threads(), gpu_id=device.index or 0)


def program_tensors(model: Any) -> dict[str, list[dict[str, Any]]] | None:
    """The inputs and outputs of one example, as an exported program or an ONNX file declares them."""
    if isinstance(model, torch.fx.GraphModule):
        inputs = [node for node in model.graph.nodes if node.op == "placeholder"]
        results = next(node for node in model.graph.nodes if node.op == "output").args[0]
        outputs = [*results] if isinstance(results, (tuple, list)) else [results]
        if not all(is_described(node) for node in (*inputs, *outputs)):
            return None
        return {"inputs": [*map(describe_node, inputs)], "outputs": [*map(describe_node, outputs)]}
    if type(model).__name__ == "OnnxModel":  # by name: onnxruntime may not be installed
        from flambeau.handlers.onnx.session import tensor_metadata

        return tensor_metadata(model, with_batch_axis=False)
    return None


def is_described(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def describe_node(node: torch.fx.Node) -> dict[str, Any]:
    value: torch.Tensor = node.meta["val"]
    name = str(value.dtype).removeprefix("torch.")
    shape = [size if isinstance(size, int) else -1 for size in value.shape[1:]]
    return {"name": str(node.name), "datatype": KSERVE_TYPES.get(name, "BYTES"), "shape": shape}


def setup_ort_session(model_pt_path: str, map_location: str | None) -> Any:
    """The function behind `ts.torch_handler.base_handler.setup_ort_session`."""
    return load_onnx(Path(model_pt_path), torch.device(map_location or "cpu"))


_LOADERS: Mapping[ModelFormat, Callable[[Path, torch.device], Any]] = {
    ModelFormat.TORCHSCRIPT: load_torchscript,
    ModelFormat.AOTI_PACKAGE: load_package,
    ModelFormat.LIBRARY: load_library,
    ModelFormat.ONNX: load_onnx,
}


def _remedy(kind: ModelFormat) -> str:
    return "pip install 'flambeau[onnx]'" if kind is ModelFormat.ONNX else "install it"
