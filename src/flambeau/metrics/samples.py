"""A measurement as it travels from a worker to its server."""

from __future__ import annotations

# name, kind, unit, value, dimensions, the ids of the requests it was taken for
Sample = tuple[str, str, str, float, list[tuple[str, str]], str]
