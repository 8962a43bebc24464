"""An example model for handwritten digits, as a folder: a network, its weights and a handler."""

from __future__ import annotations

import sys
from pathlib import Path

from flambeau.archive.packages import find_missing

NAME = "digits"
FOLDER = Path(__file__).parent
NEEDED = ("torch", "numpy")


def missing() -> list[str]:
    """The modules that must be installed to serve it, and are not."""
    return find_missing(NEEDED, sys.path)
