"""Libraries that only some handlers need."""

from __future__ import annotations

import importlib
from types import ModuleType


def need(module: str, remedy: str) -> ModuleType:
    """Import a module, or say what to do so that it can be."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"cannot be imported ({error})"
        raise ImportError(f"this handler needs {library}, which {reason}: {remedy}", name=library) from error
