"""Files that hold a whole model, weights and architecture, in any of their formats → something to call."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from flambeau.errors import HandlerError
from flambeau.handlers.loading.formats import Format, recognize
from flambeau.handlers.loading.threads import choose_threads
from flambeau.handlers.loading.weights import load_module

TOO_FEW_ROWS = re.compile(r"dim value is too small at 0, expected it to be >= (\d+)")


def load_whole(path: Path, device: torch.device, *, weights_only: bool = True) -> Any:
    """A file that holds its own architecture."""
    kind = recognize(path)
    if kind in (Format.PICKLE, Format.SAFETENSORS):
        return load_module(path, kind, device, weights_only=weights_only)
    try:
        return _LOADERS[kind](path, device)
    except ImportError as error:
        raise HandlerError(
            f"{path.name} is {kind.value}, and {error.name} is not installed; {_remedy(kind)}"
        ) from error
    except HandlerError:
        raise
    except Exception as error:
        raise HandlerError(f"{path.name} looks like {kind.value}, but could not be loaded: {error}") from error


def load_torchscript(path: Path, device: torch.device) -> torch.nn.Module:
    """A TorchScript archive."""
    return torch.jit.load(str(path), map_location=device)  # type: ignore[no-any-return, no-untyped-call]


def load_exported(path: Path, device: torch.device) -> torch.nn.Module:
    """A program saved by torch.export.save."""
    program = torch.export.load(str(path))
    if device.type != "cpu":
        from torch.export.passes import move_to_device_pass

        program = move_to_device_pass(program, device)
    return program.module()


class Padded:
    """A compiled program that gets the rows it insists on, often two: the first one is repeated, and dropped again."""

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
    """A package compiled ahead of time; it would not check its inputs, but for this variable."""
    os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
    from torch._inductor import aoti_load_package

    index = device.index if device.type != "cpu" and device.index is not None else -1
    return Padded(aoti_load_package(str(path), device_index=index))


def load_library(path: Path, device: torch.device) -> Callable[..., Any]:
    """A library compiled ahead of time, the older form of a package."""
    os.environ.setdefault("AOTI_RUNTIME_CHECK_INPUTS", "1")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    from torch._export import aot_load

    return Padded(aot_load(str(path), device.type))


def load_onnx(path: Path, device: torch.device) -> Any:
    """An onnxruntime session that can also be called with tensors."""
    from flambeau.handlers.onnx.session import open_session

    return open_session(path, use_cuda=device.type == "cuda", threads=choose_threads(), gpu_id=device.index or 0)


def setup_ort_session(model_pt_path: str, map_location: str | None) -> Any:
    """An onnxruntime session, as TorchServe's handlers ask for one."""
    return load_onnx(Path(model_pt_path), torch.device(map_location or "cpu"))


_LOADERS: Mapping[Format, Callable[[Path, torch.device], Any]] = {
    Format.TORCHSCRIPT: load_torchscript,
    Format.EXPORTED: load_exported,
    Format.AOTI_PACKAGE: load_package,
    Format.LIBRARY: load_library,
    Format.ONNX: load_onnx,
}


def _remedy(kind: Format) -> str:
    return "pip install 'flambeau[onnx]'" if kind is Format.ONNX else "install it"
