"""The `handler:` section of a model-config.yaml."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.errors import HandlerError

if TYPE_CHECKING:
    from flambeau.worker.context import Context

WORDS: Mapping[type, str] = {bool: "true or false", int: "a whole number of at least 1", str: "text"}


class HandlerOptions:
    """The options of a handler that knows all its keys: unknown keys and wrong types are errors at load."""

    def __init__(self, section: Mapping[str, Any], known: Mapping[str, type]) -> None:
        unknown = sorted(map(str, section.keys() - known.keys()))
        if unknown:
            raise HandlerError(
                f"unknown options in the handler section of model-config.yaml: {', '.join(unknown)}; "
                f"known: {', '.join(known)}"
            )
        for key, value in section.items():
            kind = known[key]
            if type(value) is not kind or (type(value) is int and value < 1):
                raise HandlerError(f"{key} in the handler section must be {WORDS[kind]}, not {value!r}")
        self._section = section

    def get(self, key: str, default: Any = None) -> Any:
        return self._section.get(key, default)


def read_handler_options(context: Context, known: Mapping[str, type]) -> HandlerOptions:
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
    return section if isinstance(section, Mapping) else {}


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
