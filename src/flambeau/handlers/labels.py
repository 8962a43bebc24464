"""Class indices → labels."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flambeau.errors import HandlerError

logger = logging.getLogger(__name__)


def load_label_mapping(mapping_file_path: str | Path) -> dict[str, str] | None:
    """The labels in an index_to_name.json by class index; None if there is no such file."""
    path = Path(mapping_file_path)
    if not path.is_file():
        logger.warning("%s is missing. Inference output will not include class name.", path)
        return None
    try:
        mapping = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise HandlerError(
            f"{path} is not valid JSON, line {error.lineno}, column {error.colno}: {error.msg}; "
            'it has "class": "label" pairs'
        ) from None
    except UnicodeDecodeError as error:
        raise HandlerError(f"{path} is not UTF-8, byte {error.start}: {error.reason}") from None
    if not isinstance(mapping, dict):
        raise TypeError(f'{path.name} must hold an object of "class": "label" pairs')
    names = mapping.get("object_type_names")
    if isinstance(names, list):
        return {str(i): name for i, name in enumerate(names)}
    for key, value in mapping.items():
        label = value[-1] if isinstance(value, list) else value
        if not isinstance(label, str):
            raise TypeError(f"labels in {path.name} must be text; {key!r} has {label!r}")
        mapping[key] = label
    return mapping


def map_class_to_label(
    probs: Sequence[Sequence[float]],
    mapping: dict[str, str] | None = None,
    lbl_classes: Sequence[Sequence[Any]] | None = None,
) -> list[dict[str, float]]:
    """One dict of label → probability per row."""
    classes = lbl_classes if lbl_classes is not None else [range(len(row)) for row in probs]
    return [
        {
            (mapping.get(str(c), str(c)) if mapping is not None else str(c)): p
            for c, p in zip(row_classes, row, strict=False)
        }
        for row_classes, row in zip(classes, probs, strict=False)
    ]
