"""Model files → a module ready to call: eager classes with a state dict, and TorchScript."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from flambeau.errors import HandlerError
from flambeau.importing import import_file


def load_torchscript(path: Path, device: torch.device) -> torch.nn.Module:
    """A TorchScript archive."""
    try:
        return torch.jit.load(str(path), map_location=device)  # type: ignore[no-any-return, no-untyped-call]
    except RuntimeError as error:
        raise HandlerError(f"{path.name} could not be loaded as TorchScript: {error}") from error


def load_eager(model_file: Path, weights: Path | None, device: torch.device) -> torch.nn.Module:
    """An instance of the one class in a Python file, with its state dict."""
    if not model_file.is_file():
        raise RuntimeError(f"Missing the model.py file: there is no {model_file.name} in the archive")
    model = the_model_class(model_file)()
    if weights is not None:
        model.load_state_dict(load_state_dict(weights, device))
    return model  # type: ignore[no-any-return]


def load_state_dict(path: Path, device: torch.device) -> dict[str, Any]:
    """A state dict that was saved with torch.save; nothing in it is executed."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        raise HandlerError(
            f"{path.name} could not be loaded as a state dict: {error}; save it with torch.save(model.state_dict(), …)"
        ) from error
    return state


def the_model_class(model_file: Path) -> type[Any]:
    """The one class that a model file defines."""
    module = import_file(model_file)
    classes = [v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == module.__name__]
    if len(classes) != 1:
        raise ValueError(f"Expected only one class as model definition. {[c.__name__ for c in classes]}")
    return classes[0]
