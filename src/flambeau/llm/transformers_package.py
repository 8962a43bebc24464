"""The transformers package, which may be absent: its import, its silence, and the weights that it did not find."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flambeau.llm.errors import CheckpointError

logger = logging.getLogger(__name__)

INSTALL = "pip install 'flambeau[transformers]'"
TORCHVISION = "; if torchvision does not fit torch, `flambeau doctor` prints the line that installs both anew"
NAMED_KEYS = 8  # in a message


def import_transformers(purpose: str = "which may have it") -> Any:
    """The package; its parts are imported when they are used."""
    try:
        transformers = importlib.import_module("transformers")
        importlib.import_module("transformers.modeling_utils")
    except ImportError as error:
        missing = importlib.util.find_spec("transformers") is None
        what = f"is not installed: {INSTALL}" if missing else f"cannot be imported: {first_lines(error)}"
        raise CheckpointError(f"the transformers package, {purpose}, {what}") from error
    except RuntimeError as error:  # a torchvision that does not fit torch
        raise CheckpointError(
            f"the transformers package, {purpose}, cannot be imported: {first_lines(error)}{TORCHVISION}"
        ) from error
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own progress bars and reports, which are for notebooks; errors are raised."""
    settings = importlib.import_module("transformers.utils.logging")
    level, had_bar = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(level)
        if had_bar:
            settings.enable_progress_bar()


def check_weights(path: Path, info: Mapping[str, Any]) -> None:
    """Raise if a weight is not in the files; name those that nothing reads."""
    check_present(path, info)
    if more := sorted(info["unexpected_keys"]):
        logger.warning("%s has weights that the network does not use: %s", path, some_of(more))


def check_present(path: Path, info: Mapping[str, Any]) -> None:
    """Raise if a weight is not in the files: transformers would make up random ones."""
    absent = sorted({*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])})
    if absent:
        raise CheckpointError(
            f"{path} has no weights that fit {some_of(absent)}; check that config.json belongs to them"
        )


def some_of(names: list[str]) -> str:
    more = len(names) - NAMED_KEYS
    return ", ".join(names[:NAMED_KEYS]) + (f" and {more} more" if more > 0 else "")


def first_lines(error: BaseException) -> str:
    """An error of transformers may have pages."""
    return " ".join(str(error).split())[:400]
