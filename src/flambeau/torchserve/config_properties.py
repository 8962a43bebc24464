"""config.properties, TS_* variables and flags → ServerConfig."""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flambeau.config.server import Address, GrpcConfig, KeysConfig, MetricsConfig, ServerConfig, with_field
from flambeau.errors import ConfigError, json_problem
from flambeau.small_files import read_small
from flambeau.torchserve.config_keys import (
    CONTROL_KEYS,
    CORS,
    KEYS,
    SNAPSHOT_KEYS,
    WITHOUT_EFFECT,
    known_keys,
    variable_of,
)
from flambeau.torchserve.config_values import header_value, invalid, switch
from flambeau.torchserve.java_properties import MAX_PROPERTIES_BYTES
from flambeau.torchserve.java_properties import parse as parse

logger = logging.getLogger(__name__)

DEFAULT_URLS = ("file://.*", "https?://.*")  # private and metadata addresses need allow_private_urls as well
# TorchServe's defaults: gRPC and keys are on, registering models over the APIs is off.
TORCHSERVE = ServerConfig(
    server_name="Torchserve",  # existing clients match it
    grpc=GrpcConfig(inference=Address(port=7070), management=Address(port=7071), is_optional=True),
    keys=KeysConfig(is_on=True, expiry_s=3600),
    model_api=False,
    strict_calls=False,
    error_details=False,  # error documents have TorchServe's exact text; causes are logged
    measure=MetricsConfig(mode="both"),
    log_folder=Path("logs"),
    metrics_log_folder=Path("logs"),
)
_VARIABLES: dict[str, str] = {name: key for key in known_keys() if (name := variable_of(key)) is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """The contents of a config.properties: the server's settings and the models it starts with."""

    server: ServerConfig
    load_models: str | None = None
    model_snapshot: str | None = None  # overrides load_models
    given: Mapping[str, str] = field(default_factory=dict)  # every key as text, for snapshots


def merge_settings(
    file: Mapping[str, str], flags: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Merge the settings: flags override the file; the environment overrides both, if the file allows it."""
    given = {**file, **flags}
    variables = {name: key for name, key in _VARIABLES.items() if name in environment}
    if not _is_on(file, "enable_envvars_config"):
        variables.pop("TS_OPEN_INFERENCE_PROTOCOL", None)  # it is read without permission
        # More protection needs no permission.
        if environment.get("TS_DISABLE_TOKEN_AUTHORIZATION", "").strip().lower() == "false":
            given["disable_token_authorization"] = "false"
            del variables["TS_DISABLE_TOKEN_AUTHORIZATION"]
        if variables:
            logger.info("%s not read: the config file has no enable_envvars_config=true", _are(sorted(variables)))
        return given
    if "TS_ALLOWED_URLS" in variables and not _is_on(file, "use_env_allowed_urls"):
        del variables["TS_ALLOWED_URLS"]
        logger.info("TS_ALLOWED_URLS is not read: the config file has no use_env_allowed_urls=true")
    for name in environment:
        if name.startswith("TS_") and name not in _VARIABLES and (near := _nearest(name, _VARIABLES)):
            logger.warning("%s is not a known variable; did you mean %s?", name, near)
    return given | {key: environment[name] for name, key in variables.items()}


def to_properties(
    given: Mapping[str, str], base: ServerConfig, environment: Mapping[str, str] = os.environ
) -> Properties:
    """Read the settings; for an unknown key, a warning names the nearest known one."""
    server = base
    for key, value in given.items():
        if key in KEYS:
            server = with_field(server, KEYS[key].field_path, KEYS[key].read(key, value))
        elif key in WITHOUT_EFFECT:
            logger.info("%s has no effect here: %s", key, WITHOUT_EFFECT[key])
        elif key not in CORS and key not in CONTROL_KEYS and key not in SNAPSHOT_KEYS:
            near = _nearest(key, known_keys())
            logger.warning("%.200s is not a known key%s", key, f"; did you mean {near}?" if near else "")
    if not switch("enable_metrics_api", given.get("enable_metrics_api", "true")):
        server = replace(server, metrics=None)
    if any(key.startswith("grpc_") for key in given):  # set explicitly, so a missing grpcio is an error
        server = with_field(server, "grpc.is_optional", False)
    if "allowed_urls" not in given and manages_safely(server):
        # They are for those who register models, and anybody may send chats.
        server = replace(server, allowed_urls=DEFAULT_URLS, files_from_urls=False)
    if server.keys.is_on is False:  # set explicitly, as many existing containers do
        server = replace(server, allow_unprotected=True)
    if protocol := environment.get("TS_OPEN_INFERENCE_PROTOCOL"):
        server = replace(server, open_inference=protocol == "oip")
    cors = tuple((header, header_value(key, given[key])) for key, header in CORS.items() if given.get(key))
    return Properties(
        server=replace(server, cors=cors, models=read_models(given.get("models"))),
        load_models=given.get("load_models"),
        model_snapshot=given.get("model_snapshot"),
        given=given,
    )


def manages_safely(server: ServerConfig) -> bool:
    """Whether only this machine, or a caller with the key, can register models."""
    listeners = (server.management, server.grpc.management)
    return server.needs_keys or all(address is None or address.is_loopback for address in listeners)


def read_file(path: Path) -> dict[str, str]:
    try:
        return parse(read_small(path, MAX_PROPERTIES_BYTES).decode("iso-8859-1"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def load_properties(file_path: str) -> dict[str, str]:
    """`read_file` with the signature of `ts.model_server`."""
    return read_file(Path(file_path))


def read_models(text: str | None) -> dict[str, dict[str, dict[str, Any]]]:
    """Parse the property `models`: settings by model name and version."""
    if not text or not text.strip():
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid("models", text, f"JSON ({json_problem(error)})") from None
    expected = 'a JSON object such as {"name": {"1.0": {"batchSize": 4}}}'
    if not isinstance(document, dict):
        raise invalid("models", text, expected)
    for versions in document.values():
        if not isinstance(versions, dict) or not all(isinstance(one, dict) for one in versions.values()):
            raise invalid("models", text, expected)
    return document


def _is_on(given: Mapping[str, str], key: str) -> bool:
    return given.get(key, "").strip().lower() == "true"


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff=0.8)), None)


def _are(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
