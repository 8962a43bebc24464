"""header(): finds a header by its name."""

from __future__ import annotations

from collections.abc import Iterable


def header(headers: Iterable[tuple[str, str]], name: str) -> str | None:
    """The value of the first header of this name, in any case; `name` is in lower case."""
    size = len(name)
    for key, value in headers:
        if len(key) == size and key.lower() == name:
            return value
    return None
