"""The engine: text generation with PyTorch, step by step. It imports no other part of the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flambeau.llm.config import EngineConfig
    from flambeau.llm.engine import Engine
    from flambeau.llm.sampling_params import SamplingParams

__all__ = ["Engine", "EngineConfig", "SamplingParams"]

_HOMES = {"Engine": "engine", "EngineConfig": "config", "SamplingParams": "sampling_params"}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used: torch takes seconds, and sampling_params needs none of it.

    Python does not look for reference cycles meanwhile: torch has 160,000 objects, and none is garbage.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import gc
    import importlib

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    finally:
        if was_enabled:
            gc.enable()
