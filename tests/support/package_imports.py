"""The imports of all modules of the package, read once for the tests of a process."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from house import House  # noqa: E402


@cache
def read_house() -> House:
    return House(ROOT / "src" / "flambeau")
