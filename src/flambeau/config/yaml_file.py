"""Reads the YAML files that archives bring along, none of which may harm the server."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from flambeau.errors import ConfigError

MAX_YAML_BYTES = 1 << 20
MAX_YAML_DEPTH = 100
MAX_YAML_NODES = 50_000  # values, keys and references
MAX_MERGED = 10_000  # entries that all merge keys (<<) of a file bring in
MAX_DIGITS = 1000  # of a number, which may be written in base 60, and then takes the square of its length


def read_options(path: Path) -> dict[str, Any]:
    """The mapping a model-config.yaml holds; an empty file is an empty mapping."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path.name} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a name that no file system takes
        raise ConfigError(f"{path.name} cannot be read: {error}") from None
    document = load_yaml(content, path.name)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path.name} must hold a mapping of settings, not {type(document).__name__}")
    return document


def load_yaml(content: bytes, name: str) -> Any:
    """The value of a YAML file that somebody else wrote; raises ConfigError, with its name, for one that is no good."""
    import yaml  # only models that ship a YAML file pay for it

    try:
        _check_shape(content, name)
        return yaml.load(content, Loader=_loader())
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as a number with thousands of digits
        raise ConfigError(f"{name} is not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} is not valid YAML: its references lead too deep") from None


def _check_shape(content: bytes, name: str) -> None:
    """Refuse what is too long or too deep: the parser is recursive, and an archive must not bring the server down."""
    import yaml

    if len(content) > MAX_YAML_BYTES:
        raise ConfigError(f"{name} is longer than {MAX_YAML_BYTES >> 20} MiB; keep data in files of its own")
    depth = num_nodes = 0
    for event in yaml.parse(content, Loader=_loader()):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        num_nodes += isinstance(event, yaml.NodeEvent)
        if depth > MAX_YAML_DEPTH:
            raise ConfigError(f"{name} is nested more than {MAX_YAML_DEPTH} levels deep")
        if num_nodes > MAX_YAML_NODES:
            raise ConfigError(f"{name} holds more than {MAX_YAML_NODES} values; keep data in files of its own")


@cache
def _loader() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]
        """A safe loader whose merge keys and numbers are bounded: a few hundred bytes could ask for billions."""

        _depth = 0
        _num_merged = 0

        def flatten_mapping(self, node: Any) -> None:
            self._depth += 1
            super().flatten_mapping(node)  # calls this for each mapping that is merged, before it copies the entries
            self._depth -= 1
            if self._depth:
                self._num_merged += len(node.value)
                if self._num_merged > MAX_MERGED:
                    text = f"its merge keys (<<) bring in more than {MAX_MERGED} entries"
                    raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)

        def construct_yaml_int(self, node: Any) -> Any:
            if len(node.value) > MAX_DIGITS:
                text = f"a number has more than {MAX_DIGITS} digits"
                raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
            return super().construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    return Loader
