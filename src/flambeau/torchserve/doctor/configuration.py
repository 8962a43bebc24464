"""Checks a config.properties: invalid values, missing files, and settings that mean something else here."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flambeau.cli.doctor import Finding
from flambeau.config.server import ServerConfig
from flambeau.errors import ConfigError
from flambeau.torchserve.config_keys import WITHOUT_EFFECT
from flambeau.torchserve.config_properties import TORCHSERVE, Properties, read_file, to_properties


def check_config(path: Path, store: Path) -> tuple[list[Finding], ServerConfig]:
    """The findings about a configuration, and its settings."""
    try:
        given = read_file(path)
    except ConfigError as error:
        return [Finding("problem", path.name, str(error))], TORCHSERVE
    wrong = {key: text for key, value in given.items() if (text := error_of(key, value))}
    with warnings_of("flambeau.torchserve.config_properties") as warnings:
        properties = to_properties({key: value for key, value in given.items() if key not in wrong}, TORCHSERVE)
    findings = [Finding("problem", path.name, text) for text in wrong.values()]
    findings += [Finding("note", path.name, text) for text in warnings]
    findings += [*missing_files(path.name, properties.server)]
    findings += [Finding("note", path.name, f"{k}: {WITHOUT_EFFECT[k]}") for k in given if k in WITHOUT_EFFECT]
    findings += [*differences(path.name, properties), *missing_models(path.name, properties, store)]
    return findings or [Finding("ok", path.name, f"{len(given)} settings, all understood")], properties.server


def error_of(key: str, value: str) -> str:
    """The error for an invalid value; empty if it is valid."""
    try:
        with warnings_of("flambeau.torchserve.config_properties"):
            to_properties({key: value}, TORCHSERVE)
    except ConfigError as error:
        return str(error)
    return ""


def missing_files(name: str, server: ServerConfig) -> Iterator[Finding]:
    """Files and folders that the configuration names and that do not exist."""
    tls = server.tls
    for key, path in (
        ("metrics_config", server.measure.file),
        ("certificate_file", tls.certificate_file),
        ("private_key_file", tls.private_key_file),
        ("keystore", tls.keystore),
        ("client_ca_file", tls.client_ca_file),
    ):
        if path is not None and not path.is_file():
            yield Finding("problem", name, f"{key}: there is no file {path}")
    if tls.keystore is not None and tls.keystore_type.upper() == "JKS":
        yield Finding(
            "problem", name, "keystore_type JKS is not supported; keytool -importkeystore converts it to PKCS12"
        )
    if server.workflow_store is not None and not server.workflow_store.is_dir():
        yield Finding("note", name, f"workflow_store: {server.workflow_store} is not a folder")


def differences(name: str, properties: Properties) -> Iterator[Finding]:
    """Settings that do something else here than in TorchServe."""
    server = properties.server
    if server.needs_keys:
        yield Finding("note", name, f"calls need a key from {server.keys.file}, as in TorchServe")
    if not server.model_api:
        yield Finding("note", name, "the APIs cannot register models; enable_model_api=true allows it")
    if importlib.util.find_spec("grpc") is None:
        yield Finding("note", name, "the gRPC ports stay closed: pip install 'flambeau[grpc]'")
    if not server.allowed_urls:
        text = "models cannot be downloaded: allowed_urls is not set, and any machine may register models without a key"
        yield Finding("note", name, text)
    if "default_workers_per_model" not in properties.given:
        yield Finding("note", name, "a model starts with one worker per GPU, or one; default_workers_per_model sets it")


def missing_models(name: str, properties: Properties, store: Path) -> Iterator[Finding]:
    """The startup models that are not in the store."""
    for file in snapshot_files(properties) if properties.model_snapshot else load_files(properties):
        if not (store / file).exists() and not Path(file).exists():
            yield Finding("problem", name, f"startup model {file} is not in {store}")


def load_files(properties: Properties) -> Iterator[str]:
    """The files that `load_models` names."""
    for value in filter(None, (properties.load_models or "").split(",")):
        file = value.rpartition("=")[2]
        if file.lower() != "all" and "://" not in file:
            yield file


def snapshot_files(properties: Properties) -> Iterator[str]:
    """The files that a snapshot names; an unreadable snapshot yields its error."""
    try:
        models = json.loads(properties.model_snapshot or "{}").get("models", {})
        yield from {settings["marName"] for versions in models.values() for settings in versions.values()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        yield f"an unreadable model_snapshot ({error})"


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """Collect the warnings of a logger and its children instead of writing them."""
    messages: list[str] = []

    class WarningHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                messages.append(record.getMessage())

    logger, collector = logging.getLogger(name), WarningHandler()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagates
