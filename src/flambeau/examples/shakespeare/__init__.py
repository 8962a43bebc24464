"""An example language model: a small Llama trained on Shakespeare, with a draft model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

NAME = "shakespeare"
FOLDER = Path(__file__).parent
NEEDED = ("torch", "safetensors", "sentencepiece")


def missing() -> list[str]:
    """The packages that must be installed to serve it."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]
