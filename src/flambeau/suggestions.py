"""suggest(): the known name that a misspelled one probably means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_CHARACTERS = 100  # comparing is quadratic, and names come from clients


def suggest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name most similar to `name`; None if no similarity (0 to 1) reaches `cutoff`."""
    if len(name) > MAX_CHARACTERS:
        return None
    plain = name.lower().replace("-", "_")
    return next(iter(difflib.get_close_matches(plain, known, 1, cutoff=cutoff)), None)
