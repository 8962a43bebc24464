"""JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flambeau.errors import HandlerError


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """The document in a file; an empty one if there is no such file."""
    if not path.is_file():
        return kind()
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise HandlerError(f"{path.name} is not valid JSON: {error}") from None
    if not isinstance(document, kind):
        raise HandlerError(f"{path.name} must hold a JSON {'object' if kind is dict else 'list'}")
    return document
