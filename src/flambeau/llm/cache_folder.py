"""Where compiled code is kept from one start to the next."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """FLAMBEAU_CACHE, or the user's cache folder."""
    named = os.environ.get("FLAMBEAU_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flambeau"
