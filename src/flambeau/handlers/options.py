"""The `handler:` section of a model-config.yaml."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.errors import HandlerError, suggest

if TYPE_CHECKING:
    from flambeau.worker.context import Context

logger = logging.getLogger(__name__)

MODEL_KEYS = ("pt2", "dtype", "weights_only", "model_class", "handler")  # what handlers read beside their section
MIN_SIMILARITY = 0.8
WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number of at least 1",
    str: "text",
    dict: "keys and values",
}
Kinds = Mapping[str, type | tuple[type, ...]]


class HandlerOptions:
    """The options of a handler that knows all its keys: unknown keys and wrong types are errors at load."""

    def __init__(self, section: Mapping[str, Any], known: Kinds) -> None:
        unknown = sorted(map(str, section.keys() - known.keys()))
        if unknown:
            raise HandlerError(
                f"unknown options in the handler section of model-config.yaml: {', '.join(unknown)}; "
                f"known: {', '.join(known)}"
            )
        for key, value in section.items():
            kind = known[key]
            kinds = kind if isinstance(kind, tuple) else (kind,)
            if type(value) not in kinds or (type(value) is int and value < 1):
                wanted = " or ".join(WORDS[one] for one in kinds)
                raise HandlerError(f"{key} in the handler section must be {wanted}, not {value!r}")
        self._section = section

    def get(self, key: str, default: Any = None) -> Any:
        return self._section.get(key, default)


def read_handler_options(context: Context, known: Kinds) -> HandlerOptions:
    section = context.model_yaml_config.get("handler") or {}
    if isinstance(section, str):  # `handler: NAME` has no options
        section = {}
    if not isinstance(section, Mapping):
        raise HandlerError(f"the handler section of model-config.yaml must hold keys and values, not {section!r}")
    return HandlerOptions({key: value for key, value in section.items() if key != "name"}, known)


def resolve_model_path(folder: Path, model_path: str | None) -> Path:
    """`model_path` relative to the model's folder; the folder itself if there is none."""
    return folder if model_path is None else folder / Path(model_path).expanduser()


def handler_options(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The `handler` section of a model-config; empty if there is none."""
    section = (config or {}).get("handler")
    if section is not None and not isinstance(section, (str, Mapping)):
        raise HandlerError(
            f"handler in model-config.yaml must hold keys and values, not {section!r}; write them below it, indented"
        )
    return section if isinstance(section, Mapping) else {}


def check_options(config: Mapping[str, Any] | None, known: Collection[str], who: str, *, is_own: bool) -> None:
    """Reject a misspelled key of the `handler` section, and warn of other unknown ones.

    A subclass (`is_own`) may read keys of its own, so that only a likely misspelling is worth a warning.
    """
    known = (*known, "profile")  # `timed` reads it, in every handler
    for key in map(str, handler_options(config)):
        if key in known or key == "name":
            continue
        near = suggest(key, known, cutoff=MIN_SIMILARITY if is_own else 0.6)
        hint = f"did you mean {near}?" if near else f"it reads {', '.join(known)}"
        text = f"the handler section of model-config.yaml has {key}, which {who} does not read; {hint}"
        if near and not is_own:
            raise HandlerError(text)
        if near or not is_own:
            logger.warning("%s", text)


def warn_of_misspelled_keys(config: Mapping[str, Any]) -> None:
    """Warn of keys beside the `handler` section that are nearly those of a built-in handler."""
    for key in config:
        if isinstance(key, str) and key not in MODEL_KEYS:
            near = suggest(key, MODEL_KEYS, cutoff=MIN_SIMILARITY)
            if near is not None and near not in config:
                logger.warning("model-config.yaml has %s, which has no effect; did you mean %s?", key, near)


def read_count(options: Mapping[str, Any], name: str, default: int) -> int:
    """Read an integer of at least 1."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HandlerError(f"handler: {name} must be a whole number of at least 1, not {value!r}")
    return value


def read_number(options: Mapping[str, Any], name: str, default: float) -> float:
    """Read an integer or a float."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise HandlerError(f"handler: {name} must be a number, not {value!r}")
    return value


def read_weights_only(options: Mapping[str, Any]) -> bool:
    """Whether weight files are loaded without running code: the model's setting, else the server's, else true."""
    weights_only = read_flag(options, "weights_only", os.environ.get("FLAMBEAU_WEIGHTS_ONLY", "true") != "false")
    if not weights_only and accepts_data_only():
        raise HandlerError(
            "weights_only is false, which lets a file run code, and the server does not accept that (safe_weights); "
            "remove weights_only, and save torch.save(model.state_dict(), …) or safetensors"
        )
    return weights_only


def accepts_data_only() -> bool:
    """Whether the server rejects every model file that can run code: its setting `safe_weights`."""
    return os.environ.get("FLAMBEAU_SAFE_WEIGHTS") == "true"


def read_flag(options: Mapping[str, Any], name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise HandlerError(f"handler: {name} must be true or false, not {value!r}")
    return value
