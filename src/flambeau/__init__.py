"""Flambeau, a model server for PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flambeau.client.async_client import AsyncClient as AsyncClient
    from flambeau.client.client import Client as Client
    from flambeau.client.local_server import LocalServer as LocalServer
    from flambeau.client.local_server import serve as serve

__version__ = "0.1.0"

# Loaded on first use: servers and workers import this package too, and need none of them.
_EXPORTS = {
    "AsyncClient": "flambeau.client.async_client",
    "Client": "flambeau.client.client",
    "LocalServer": "flambeau.client.local_server",
    "serve": "flambeau.client.local_server",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_EXPORTS]
