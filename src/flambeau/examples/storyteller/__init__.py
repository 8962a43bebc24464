"""An example language model: a small Llama that tells tales, with a draft model."""

from __future__ import annotations

import sys
from pathlib import Path

from flambeau.archive.packages import LLM, find_missing

NAME = "storyteller"
FOLDER = Path(__file__).parent
NEEDED = (*LLM.modules, "sentencepiece")


def missing() -> list[str]:
    """The modules that must be installed to serve it, and are not."""
    return find_missing(NEEDED, sys.path)
