"""Whether a config.properties will be understood, and what it means here that it did not mean before."""

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


def look_at_config(path: Path, store: Path) -> tuple[list[Finding], ServerConfig]:
    """What is to be said about a configuration, and the settings it stands for."""
    try:
        given = read_file(path)
    except ConfigError as error:
        return [Finding("problem", path.name, str(error))], TORCHSERVE
    wrong = {key: text for key, value in given.items() if (text := what_is_wrong(key, value))}
    with warnings_of("flambeau.torchserve.config_properties") as said:
        properties = to_properties({key: value for key, value in given.items() if key not in wrong}, TORCHSERVE)
    findings = [Finding("problem", path.name, text) for text in wrong.values()]
    findings += [Finding("note", path.name, text) for text in said]
    findings += [*missing_files(path.name, properties.server)]
    findings += [Finding("note", path.name, f"{k}: {WITHOUT_EFFECT[k]}") for k in given if k in WITHOUT_EFFECT]
    findings += [*differences(path.name, properties), *missing_models(path.name, properties, store)]
    return findings or [Finding("ok", path.name, f"{len(given)} settings, all understood")], properties.server


def what_is_wrong(key: str, value: str) -> str:
    """Why a server would not start with this value; nothing if it would."""
    try:
        with warnings_of("flambeau.torchserve.config_properties"):
            to_properties({key: value}, TORCHSERVE)
    except ConfigError as error:
        return str(error)
    return ""


def missing_files(name: str, server: ServerConfig) -> Iterator[Finding]:
    """Files and folders that the configuration names and that are not there."""
    tls = server.tls
    for key, path in (
        ("metrics_config", server.measure.file),
        ("certificate_file", tls.certificate_file),
        ("private_key_file", tls.private_key_file),
        ("keystore", tls.keystore),
    ):
        if path is not None and not path.is_file():
            yield Finding("problem", name, f"{key}: there is no file {path}")
    if tls.keystore is not None and tls.keystore_type.upper() == "JKS":
        yield Finding("problem", name, "keystore_type JKS cannot be read: keytool -importkeystore makes a PKCS12 of it")
    if server.workflow_store is not None and not server.workflow_store.is_dir():
        yield Finding("note", name, f"workflow_store: {server.workflow_store} is not a folder, so it has no workflows")


def differences(name: str, properties: Properties) -> Iterator[Finding]:
    """What these settings mean here that they did not mean in TorchServe."""
    server = properties.server
    if server.needs_keys:
        yield Finding("note", name, f"calls need a key from {server.keys.file}, as in TorchServe")
    elif "disable_token_authorization" not in properties.given:
        yield Finding(
            "note", name, "no keys are needed on this loopback address; disable_token_authorization=false asks"
        )
    if not server.model_api:
        yield Finding("note", name, "models are registered at start only; enable_model_api=true opens the calls for it")
    if importlib.util.find_spec("grpc") is None:
        yield Finding("note", name, "gRPC clients will find nobody: pip install 'flambeau[grpc]'")
    if not server.allowed_urls:
        yield Finding("note", name, "models cannot be fetched from URLs until allowed_urls names which")
    if "default_workers_per_model" not in properties.given:
        yield Finding("note", name, "a model starts with one worker per GPU, or one; default_workers_per_model sets it")


def missing_models(name: str, properties: Properties, store: Path) -> Iterator[Finding]:
    """The models that the configuration starts with and the store does not have."""
    for file in snapshot_files(properties) if properties.model_snapshot else load_files(properties):
        if not (store / file).exists() and not Path(file).exists():
            yield Finding("problem", name, f"it starts with {file}, which is not in {store}")


def load_files(properties: Properties) -> Iterator[str]:
    """The files that `load_models` names."""
    for value in filter(None, (properties.load_models or "").split(",")):
        file = value.rpartition("=")[2]
        if file.lower() != "all" and "://" not in file:
            yield file


def snapshot_files(properties: Properties) -> Iterator[str]:
    """The files that a snapshot names; one that cannot be read is told when it is loaded."""
    try:
        models = json.loads(properties.model_snapshot or "{}").get("models", {})
        yield from {settings["marName"] for versions in models.values() for settings in versions.values()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        yield f"an unreadable model_snapshot ({error})"


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """The warnings of a logger and those below it, while this lasts."""
    said: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    logger, collector = logging.getLogger(name), Collector()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield said
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagates
