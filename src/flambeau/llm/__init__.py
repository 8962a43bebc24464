"""The engine: text generation with PyTorch, step by step. It knows nothing of servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flambeau.llm.config import EngineConfig, SamplingParams
    from flambeau.llm.engine import Engine

__all__ = ["Engine", "EngineConfig", "SamplingParams"]

_HOMES = {"Engine": "engine", "EngineConfig": "config", "SamplingParams": "config"}


def __getattr__(name: str) -> Any:
    """The engine's names, loaded when used: torch takes seconds, and settings need none of it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
