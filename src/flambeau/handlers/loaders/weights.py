"""Loads weights into modules. On the CPU they are memory-mapped, so that the workers of a model share them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flambeau.errors import HandlerError
from flambeau.file_import import import_file
from flambeau.handlers.loaders.formats import SUPPORTED, ModelFormat, recognize

logger = logging.getLogger(__name__)

_STATE_DICT_KEYS = ("state_dict", "model_state_dict")  # under which training scripts save it
_RANDOM = ("uniform", "normal", "trunc_normal", "xavier", "kaiming", "orthogonal", "sparse")
_PREFIXES = ("module.", "_orig_mod.")  # of DataParallel and torch.compile


def load_module(path: Path, kind: ModelFormat, device: torch.device, *, weights_only: bool) -> torch.nn.Module:
    """A pickled module; needs `weights_only=False`."""
    content = (
        read_safetensors(path, device) if kind is ModelFormat.SAFETENSORS else read_pickle(path, device, weights_only)
    )
    if isinstance(content, torch.nn.Module):
        return content
    raise HandlerError(
        f"{path.name} is {kind.value} and holds {_describe_content(content)}, weights without a model: "
        f"pack it with the Python file of the model's class (--model-file). Without one, expected: {SUPPORTED}"
    )


def load_eager(
    model_file: Path,
    weights: Path | None,
    device: torch.device,
    *,
    weights_only: bool = True,
    class_name: str | None = None,
) -> torch.nn.Module:
    """An instance of the model class in a Python file, with its weights."""
    if not model_file.is_file():
        raise RuntimeError(f"Missing the model.py file: there is no {model_file.name} among the model's files")
    model_class = find_model_class(model_file, class_name)
    check_arguments(model_class, model_file)
    if weights is None:
        return warned_of_random_weights(model_class(), model_file)
    state = read_state_dict(weights, device, weights_only=weights_only)
    with _without_random_weights():
        model: torch.nn.Module = model_class()
    if not isinstance(model, torch.nn.Module):
        raise HandlerError(
            f"the class {model_class.__name__} of {model_file.name} is no torch.nn.Module, so that it cannot take the "
            f"weights in {weights.name}; write class {model_class.__name__}(torch.nn.Module)"
        )
    try:
        _assign(model, state)
    except RuntimeError as error:
        fit = f"{weights.name} does not fit the class {model_class.__name__} of {model_file.name}"
        text = " ".join(str(error).split()).rstrip(".")
        raise HandlerError(f"{fit}: {text}. Pack the class that the weights were saved from") from error
    return model


def check_arguments(model_class: type[Any], model_file: Path) -> None:
    """Raise HandlerError if the class cannot be created without arguments."""
    try:
        signature = inspect.signature(model_class)
        signature.bind()
    except ValueError:  # written in C
        return
    except TypeError as error:
        raise HandlerError(
            f"the class {model_class.__name__} of {model_file.name} cannot be created without arguments: {error}; it "
            f"takes {signature}. Give them defaults, or create it in a handler of your own: override initialize"
        ) from None


def warned_of_random_weights(model: torch.nn.Module, model_file: Path) -> torch.nn.Module:
    """The model; one with weights that nothing has loaded answers at random."""
    if isinstance(model, torch.nn.Module) and next(model.parameters(), None) is not None:
        logger.warning(
            "the model has no file with weights, so that the network of %s keeps those that its __init__ sets, which "
            "are random as a rule. Pack a file of weights: --serialized-file, or a .pth beside the model file",
            model_file.name,
        )
    return model


def _assign(model: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Assign tensors to the model without a copy, except those of another dtype."""
    wanted = model.state_dict()
    fitting = {
        name: value.to(wanted[name].dtype) if name in wanted and isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
    model.load_state_dict(fitting, assign=True)
    model.requires_grad_(False)


@contextmanager
def _without_random_weights() -> Iterator[None]:
    """Skip random initialization, as the weights are replaced anyway; it costs time and memory.

    Constants are still set: a buffer that is not saved may hold one.
    """
    names = [name for name in vars(torch.nn.init) if name.endswith("_") and name.startswith(_RANDOM)]
    kept = {name: getattr(torch.nn.init, name) for name in names}
    try:
        for name in names:
            setattr(torch.nn.init, name, _leave)
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.nn.init, name, function)


def _leave(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def read_state_dict(path: Path, device: torch.device, *, weights_only: bool = True) -> dict[str, Any]:
    """The weights in a file by name; wrappers of training scripts are removed."""
    kind = recognize(path)
    content: Any
    if kind is ModelFormat.SAFETENSORS:
        content = read_safetensors(path, device)
    elif kind is ModelFormat.PICKLE:
        content = read_pickle(path, device, weights_only)
    else:
        raise HandlerError(
            f"{path.name} is {kind.value}, which needs no model file, but there is one: pack it without --model-file, "
            "or save the weights with torch.save(model.state_dict(), …)"
        )
    if isinstance(content, torch.nn.Module):
        return content.state_dict()
    for key in _STATE_DICT_KEYS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    # An empty dict is valid: a network may have no parameters.
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise HandlerError(f"{path.name} holds {_describe_content(content)}; save torch.save(model.state_dict(), …)")
    return without_prefix(content)


def read_safetensors(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file; memory-mapped on the CPU."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise HandlerError(f"{path.name} is a safetensors file; pip install safetensors to read it") from None
    try:
        return load_file(path, device=str(device))
    except SafetensorError as error:
        raise HandlerError(f"{path.name} looks like a safetensors file, but could not be loaded: {error}") from error


def read_pickle(path: Path, device: torch.device, weights_only: bool) -> Any:
    """The content of a torch.save file, memory-mapped on the CPU. It runs no code unless `weights_only` is false."""
    try:
        try:
            return torch.load(path, map_location=device, weights_only=weights_only, mmap=device.type == "cpu")
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(path, map_location=device, weights_only=weights_only)
    except Exception as error:
        if weights_only and "weights_only" in str(error).lower().replace(" ", "_"):
            raise HandlerError(
                f"{path.name} holds more than weights: {rejected_class(error)}. Reading it would run code from the "
                "file. Save torch.save(model.state_dict(), …) instead, or, if you trust the file, put "
                "`weights_only: false` into its model-config.yaml, or weights_only=false into config.properties"
            ) from None
        raise HandlerError(f"{path.name} is a torch.save file, but could not be loaded: {error}") from error


def rejected_class(error: Exception) -> str:
    """The class that torch rejected, from its long message."""
    for line in str(error).splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return line.strip().removeprefix("WeightsUnpickler error: ").partition(" was not an allowed")[0]
    return "objects of Python classes"


def without_prefix(state: dict[str, Any]) -> dict[str, Any]:
    """The same weights without the prefix that a wrapper added to every name."""
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _describe_content(content: Any) -> str:
    if isinstance(content, dict):
        tensors = sum(isinstance(value, torch.Tensor) for value in content.values())
        return (
            f"{tensors} tensors by name" if tensors else f"a dict of {', '.join(map(str, [*content][:5])) or 'nothing'}"
        )
    return f"an object of class {type(content).__name__}"


def find_model_class(model_file: Path, class_name: str | None = None) -> type[Any]:
    """The class that a model file defines; if there are several, `model_class` of the model-config selects one."""
    module = import_file(model_file)
    classes = [v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == module.__name__]
    named = [c for c in classes if c.__name__ == class_name] if class_name else classes
    if len(named) != 1:
        raise ValueError(
            f"Expected only one class as model definition. {[c.__name__ for c in classes]}"
            + (f" has no {class_name}" if class_name else "")
            + f": select one with `model_class: …` in the model-config.yaml of {model_file.name}"
        )
    return named[0]
