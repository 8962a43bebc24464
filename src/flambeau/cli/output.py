"""Output of the commands: tables for readers, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, separated by two spaces."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
