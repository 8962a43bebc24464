"""What handlers import from `ts.utils.util`."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from flambeau.config.model import read_options
from flambeau.errors import PredictionException as PredictionException
from flambeau.handlers.labels import load_label_mapping as load_label_mapping
from flambeau.handlers.labels import map_class_to_label as map_class_to_label
from flambeau.handlers.loaders.compile_backends import PT2Backend as PT2Backend
from flambeau.handlers.loaders.compile_backends import check_valid_pt2_backend as check_valid_pt2_backend
from flambeau.handlers.text.normalization import HTML

CLEANUP_REGEX = HTML

Function = TypeVar("Function", bound=Callable[..., Any])


def list_classes_from_module(module: ModuleType, parent_class: type[Any] | None = None) -> list[type[Any]]:
    """The classes that a module defines itself; with `parent_class`, only those below it."""
    classes = [v for v in vars(module).values() if inspect.isclass(v) and v.__module__ == module.__name__]
    return [c for c in classes if parent_class is None or issubclass(c, parent_class)]


def get_yaml_config(yaml_file_path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    return read_options(Path(yaml_file_path))


def deprecated(
    version: str, replacement: str = "", klass: type[Warning] = PendingDeprecationWarning
) -> Callable[[Function], Function]:
    """Warn at each call of a function that it is going, and where to."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            text = f"{function.__name__} is deprecated in {version}"
            warnings.warn(f"{text} and moved to {replacement}" if replacement else text, klass, stacklevel=2)
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
