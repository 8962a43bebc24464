"""An example model for handwritten digits, as a folder: a network, its weights and a handler."""

from __future__ import annotations

import importlib.util
from pathlib import Path

NAME = "digits"
FOLDER = Path(__file__).parent
NEEDED = ("torch",)


def missing() -> list[str]:
    """The packages that must be installed to serve it."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]
