"""The embedded language model: a small Llama-shaped network that has read Shakespeare, and a draft for it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

NAME = "shakespeare"
FOLDER = Path(__file__).parent
NEEDED = ("torch", "safetensors", "sentencepiece")


def missing() -> list[str]:
    """What would have to be installed to serve it."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]
