"""config.properties in TorchServe's spelling → ServerConfig."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flambeau.config.server import Address, ServerConfig
from flambeau.errors import ConfigError

logger = logging.getLogger(__name__)

_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_PAIR = re.compile(r"((?:\\.|[^\\\s=:])*)\s*[=:\s]?\s*(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """What a config.properties asks for: a server, and the models it starts with."""

    server: ServerConfig
    load_models: str | None = None
    default_workers: int = 0  # of a model that names no number; 0: one


def parse(text: str) -> dict[str, str]:
    """Read Java's properties format: comments, continued lines, escapes; `$$NAME$$` is an environment variable."""
    properties = {}
    for line in _logical_lines(text):
        match = _PAIR.fullmatch(line)
        assert match is not None
        key, value = (_unescape(part) for part in match.groups())
        properties[key] = re.sub(r"\$\$(.*?)\$\$", _from_environment, value)
    return properties


def _logical_lines(text: str) -> list[str]:
    lines: list[str] = []
    continued = ""
    for raw in text.splitlines():
        line = continued + raw.lstrip()
        if not continued and (not line or line[0] in "#!"):
            continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            continued = line[:-1]
            continue
        lines.append(line)
        continued = ""
    return [*lines, continued] if continued else lines


def _unescape(text: str) -> str:
    def replacement(match: re.Match[str]) -> str:
        code, letter = match.groups()
        return chr(int(code, 16)) if code else _ESCAPES.get(letter, letter)

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", replacement, text)


def _from_environment(match: re.Match[str]) -> str:
    name = match.group(1)
    if name not in os.environ:
        raise ConfigError(f"Invalid Environment Variable {name}")
    return os.environ[name]


def _integer(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{key} must be a whole number, not {value!r}") from None


def _boolean(key: str, value: str) -> bool:
    return value.strip().lower() == "true"


def _address(default_port: int) -> Callable[[str, str], Address]:
    return lambda key, value: Address.parse(value, default_port=default_port)


def _path(key: str, value: str) -> Path:
    return Path(value)


def _text(key: str, value: str) -> str:
    return value


_FIELDS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "inference_address": ("inference", _address(80)),
    "management_address": ("management", _address(8081)),
    "metrics_address": ("metrics", _address(8082)),
    "model_store": ("model_store", _path),
    "job_queue_size": ("job_queue_size", _integer),
    "max_request_size": ("max_request_bytes", _integer),
    "max_response_size": ("max_response_bytes", _integer),
    "default_response_timeout": ("default_response_timeout_s", _integer),
    "default_startup_timeout": ("default_startup_timeout_s", _integer),
    "unregister_model_timeout": ("unregister_timeout_s", _integer),
    "number_of_gpu": ("number_of_gpus", _integer),
    "default_service_handler": ("default_handler", _text),
    "service_envelope": ("service_envelope", _text),
    "decode_input_request": ("decode_input_request", _boolean),
    "limit_max_image_pixels": ("limit_max_image_pixels", _boolean),
    "initial_worker_port": ("first_worker_id", _integer),
    "blacklist_env_vars": ("hidden_env", _text),
}
_OTHERS = ("load_models", "default_workers_per_model", "enable_metrics_api")
# They steer a Java process, or a part of the server that is not there yet; each is named once in the log.
_WITHOUT_EFFECT = frozenset(
    (
        "vmargs",
        "plugins_path",
        "number_of_netty_threads",
        "netty_client_threads",
        "prefer_direct_buffer",
        "use_native_io",
        "io_ratio",
        "async_logging",
        "cpp_log_config",
        "grpc_inference_address",
        "grpc_management_address",
        "grpc_inference_port",
        "grpc_management_port",
        "disable_token_authorization",
        "enable_model_api",
        "install_py_dep_per_model",
        "allowed_urls",
        "metrics_config",
        "metrics_mode",
        "model_metrics_auto_detect",
        "disable_system_metrics",
        "workflow_store",
        "cors_allowed_origin",
        "cors_allowed_methods",
        "cors_allowed_headers",
        "enable_envvars_config",
        "models",
        "model_snapshot",
        "version",
        "python",
        "tsConfigFile",
    )
)


def to_properties(given: Mapping[str, str], base: ServerConfig) -> Properties:
    """The settings these properties ask for; a key that is not known is named with the nearest one that is."""
    changes: dict[str, Any] = {}
    for key, value in given.items():
        if key in _FIELDS:
            name, read = _FIELDS[key]
            changes[name] = read(key, value)
        elif key in _WITHOUT_EFFECT:
            logger.info("config.properties: %s has no effect here", key)
        elif key not in _OTHERS:
            nearest = difflib.get_close_matches(key, [*_FIELDS, *_OTHERS, *_WITHOUT_EFFECT], 1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            logger.warning("config.properties: %s is not a known key%s", key, hint)
    if not _boolean("enable_metrics_api", given.get("enable_metrics_api", "true")):
        changes["metrics"] = None
    workers = _integer("default_workers_per_model", given.get("default_workers_per_model", "0"))
    server = replace(base, default_workers=workers, **changes)
    return Properties(server=server, load_models=given.get("load_models"), default_workers=workers)


def read_properties(path: Path, base: ServerConfig) -> Properties:
    """Read a config.properties file."""
    try:
        text = path.read_text(encoding="iso-8859-1")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return to_properties(parse(text), base)
