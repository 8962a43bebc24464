"""Reads JSON files beside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flambeau.llm.errors import LLMError


def read_object(path: Path, error: type[LLMError]) -> dict[str, Any]:
    """The object in a file; raises `error` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=constant)
    except (OSError, ValueError) as reason:
        raise error(f"{path} is not JSON: {reason}") from reason
    if not isinstance(content, dict):
        raise error(f"{path} must hold an object, not {type(content).__name__}")
    return content


def constant(name: str) -> float:
    """The value of a constant that is no JSON; some models have limits of Infinity."""
    if name == "NaN":
        raise ValueError("it has NaN, which is no number, as a value")
    return float(name)
