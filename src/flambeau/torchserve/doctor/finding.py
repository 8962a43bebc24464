"""Finding: one thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: fine, or worth knowing, or wrong."""

    level: Level
    what: str
    text: str
