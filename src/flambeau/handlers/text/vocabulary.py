"""A file of words → the numbers a text model knows them by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flambeau.errors import HandlerError

UNKNOWN = "<unk>"
PADDING = "<pad>"


def load_vocabulary(path: Path, *, weights_only: bool = True) -> Any:
    """A dict of token → index, or whatever else was saved if the model's owner allows to run it."""
    try:
        vocabulary = torch.load(path, map_location="cpu", weights_only=weights_only)
    except Exception as error:
        remedy = (
            "save a dict of token → index with torch.save, or, if you trust the file, "
            "set weights_only: false in model-config.yaml"
        )
        raise HandlerError(f"the vocabulary {path.name} cannot be loaded: {error}; {remedy}") from error
    if isinstance(vocabulary, (list, tuple)):
        return {token: index for index, token in enumerate(vocabulary)}
    if isinstance(vocabulary, Mapping) or not weights_only:
        return vocabulary
    raise HandlerError(
        f"the vocabulary {path.name} holds {type(vocabulary).__name__}, not a dict of token → index or a list of tokens"
    )


def index_of(vocabulary: Any, token: str) -> int | None:
    """The number of a token, or that of `<unk>`; None when the vocabulary has neither."""
    found = look_up(vocabulary, token)
    return found if found is not None else look_up(vocabulary, UNKNOWN)


def reference_index(vocabulary: Any) -> int:
    """A token that says nothing: padding, else the unknown one, else the first."""
    found = look_up(vocabulary, PADDING)
    return found if found is not None else index_of(vocabulary, UNKNOWN) or 0


def look_up(vocabulary: Any, token: str) -> int | None:
    """The number of a token in a dict, or in an object that can be indexed or has a `lookup` method."""
    if isinstance(vocabulary, Mapping):
        found = vocabulary.get(token)
    else:
        ask = vocabulary.__getitem__ if hasattr(vocabulary, "__getitem__") else vocabulary.lookup
        try:
            found = ask(token)
        except (LookupError, RuntimeError):  # torchtext's compiled vocabulary raises the latter
            return None
    return None if found is None else int(found)
