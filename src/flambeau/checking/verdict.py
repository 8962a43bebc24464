"""Verdict: what one check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that was looked at: fine, or worth knowing, or wrong."""

    level: Level
    what: str
    text: str
