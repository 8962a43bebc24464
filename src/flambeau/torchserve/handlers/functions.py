"""Small functions that handlers and scripts import from `ts.utils`, `ts.handler_utils` and `ts.torch_handler`."""

from __future__ import annotations

import functools
import importlib
import inspect
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from flambeau.config.model import read_options

# Flags of `ts.torch_handler.base_handler`.
PROFILER_AVAILABLE = PT2_AVAILABLE = PT230_AVAILABLE = True
XLA_AVAILABLE = find_spec("torch_xla") is not None
IPEX_AVAILABLE = False
ONNX_AVAILABLE = find_spec("onnxruntime") is not None

CHECKPOINT_FILES = ("*.json", "*.pt", "*.bin", "*.txt", "*.model", "*.pth", "*.safetensors", "original/*")

Function = TypeVar("Function", bound=Callable[..., Any])


def import_class(class_name: str, module_prefix: str | None = None) -> Any:
    """Import `package.module.Class`; `module_prefix` goes in front of it."""
    module_name, _, name = class_name.rpartition(".")
    if not name:
        raise ImportError("class name is not defined")
    module_name = ".".join(part for part in (module_prefix, module_name) if part)
    if not module_name:
        raise ImportError(f"module name is not defined: write package.module.{name}, or give a module_prefix")
    found = getattr(importlib.import_module(module_name), name, None)
    if found is None:
        raise ImportError(f"class:{name} not found in module:{module_name}.")
    return found


def list_classes_from_module(module: ModuleType, parent_class: type[Any] | None = None) -> list[type[Any]]:
    """Return the classes that a module defines itself; with `parent_class`, only its subclasses."""
    classes = [v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == module.__name__]
    return [c for c in classes if parent_class is None or issubclass(c, parent_class)]


def get_yaml_config(yaml_file_path: str | Path) -> dict[str, Any]:
    return read_options(Path(yaml_file_path))


def deprecated(
    version: str, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[Function], Function]:
    """Decorate a function so that each call warns that it is deprecated and names its replacement."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            text = f"{function.__name__} is deprecated in {version}"
            warnings.warn(f"{text} and moved to {replacement}" if replacement else text, klass, stacklevel=2)
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate


def timeit(func: Function) -> Function:
    """Decorate a function so that each call prints its wall time and CPU time."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began, began_cpu = time.perf_counter(), time.process_time()
        result = func(*args, **kwargs)
        took, took_cpu = time.perf_counter() - began, time.process_time() - began_cpu
        print(f"func: {func.__name__!r} took a total of {took:.4f} sec to run and {took_cpu:.4f} sec of CPU time")
        return result

    return wrapper  # type: ignore[return-value]


def download_model(
    model_id: str = "meta-llama/Meta-Llama-3.1-8B-Instruct",
    revision: str = "main",
    model_path: str = ".cache",
    use_auth_token: bool | str = True,
) -> str:
    """Download a checkpoint from the Hugging Face hub and return its folder."""
    hub = need("huggingface_hub", "pip install huggingface_hub")
    path: str = hub.snapshot_download(
        repo_id=model_id,
        revision=revision,
        allow_patterns=list(CHECKPOINT_FILES),
        cache_dir=model_path,
        # True: the token of `huggingface-cli login`, if there is one, so that open models need none.
        token=None if use_auth_token is True else use_auth_token,
    )
    return path


def need(module: str, remedy: str) -> ModuleType:
    """Import an optional module; the error names the library and the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise ImportError(f"this handler needs {library}, which {reason}: {remedy}", name=library) from error
