"""Reads the YAML files that archives bring along, none of which may harm the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flambeau.errors import ConfigError

MAX_YAML_BYTES = 1 << 20
MAX_YAML_DEPTH = 100


def read_options(path: Path) -> dict[str, Any]:
    """The mapping a model-config.yaml holds; an empty file is an empty mapping."""
    import yaml  # only models that ship a YAML file pay for it

    try:
        with path.open("rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
        _check_shape(content, path.name)
        document = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError) as error:  # such as a number with thousands of digits
        raise ConfigError(f"{path.name} is not valid YAML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path.name} must hold a mapping of settings, not {type(document).__name__}")
    return document


def _check_shape(content: bytes, name: str) -> None:
    """Refuse what is too long or too deep: the parser is recursive, and an archive must not bring the server down."""
    import yaml

    if len(content) > MAX_YAML_BYTES:
        raise ConfigError(f"{name} is longer than {MAX_YAML_BYTES >> 20} MiB; keep data in files of its own")
    depth = 0
    for event in yaml.parse(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise ConfigError(f"{name} is nested more than {MAX_YAML_DEPTH} levels deep")
