"""Reads YAML files from archives, with limits that protect the server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flambeau.errors import ConfigError
from flambeau.small_files import read_small

logger = logging.getLogger(__name__)

MAX_YAML_BYTES = 1 << 20
MAX_YAML_DEPTH = 100
MAX_YAML_NODES = 50_000  # values, keys and references
MAX_MERGED = 10_000  # entries added by all merge keys (<<) of a file
MAX_SHOWN = 60  # characters of a line in an error message
MAX_REPEATED = 10  # warnings of keys that are set twice
MAX_DIGITS = 1000  # of a number: one in base 60 takes quadratic time


def read_options(path: Path) -> dict[str, Any]:
    """The mapping in a model-config.yaml; empty for an empty file."""
    content = _read(path, path.name)
    document = load_yaml(content, path.name)
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path.name} must hold a mapping of settings, not {type(document).__name__}")
    return document


def _read(path: Path, name: str) -> bytes:
    try:
        return read_small(path, MAX_YAML_BYTES)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:  # not a valid file name
        raise ConfigError(f"{name} cannot be read: {error}") from None


@dataclass(frozen=True, slots=True)
class LinedMapping:
    """A mapping of YAML, and the lines where its keys are."""

    values: Mapping[str, Any]
    node: Any

    def line_of(self, *keys: str | int) -> int:
        """The line, from 1, of the value that these keys and positions lead to; of the last one that exists."""
        node, line = self.node, 1
        for key in keys:
            if isinstance(key, int):
                items = [(None, item) for item in node.value] if isinstance(node.value, list) else []
                found = items[key : key + 1]
            else:
                found = [(name, item) for name, item in node.value if name.value == key]
            if not found:
                break
            name, node = found[0]
            line = (name or node).start_mark.line + 1
        return line


def read_lined(path: Path) -> LinedMapping:
    """The mapping in a configuration file of the server; a key that is there twice is an error."""
    import yaml

    content = _read(path, str(path))
    document = load_yaml(content, str(path))
    if document is None:
        return LinedMapping({}, None)
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold settings, such as `port: 8080`, and not {type(document).__name__}")
    node = yaml.compose(content, Loader=_loader())
    _refuse_repeated(node, path)
    return LinedMapping(document, node)


def _refuse_repeated(root: Any, path: Path) -> None:
    import yaml

    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))  # references may lead to a node many times
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            waiting.append(value)
            line, name = key.start_mark.line + 1, str(key.value)
            if name in lines:
                raise ConfigError(f"{path}, line {line}: {name} is already in line {lines[name]}; keep one of them")
            lines[name] = line


def load_yaml(content: bytes, name: str) -> Any:
    """Parse untrusted YAML; raises ConfigError, which names the file."""
    import yaml  # loaded only for models with a YAML file

    try:
        _check_shape(content, name)
        loader = _loader()(content)
        try:
            document = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {_place_of(error, content)}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{name} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{name} is not valid YAML: its references are nested too deeply") from None
    for key, first, last in loader.repeated[:MAX_REPEATED]:
        logger.warning(
            "%s: %s is set in line %d and again in line %d, which counts; delete one", name, key, first, last
        )
    return document


def _place_of(error: Any, content: bytes) -> str:
    """The problem that the parser reports, with its line and column, and where the part with it begins."""
    text = " ".join((error.problem or error.context or "it cannot be parsed").split())
    mark = error.problem_mark or error.context_mark
    if not mark:
        return text
    text = f"{text} (line {mark.line + 1}, column {mark.column + 1})"
    lines = content.decode("utf-8", "replace").splitlines()
    if mark.line < len(lines) and (line := lines[mark.line].strip()):
        text += f" in `{line[:MAX_SHOWN]}`"
    before = lines[mark.line][: mark.column + 1] if mark.line < len(lines) else ""
    if "tab character" in text or (before.isspace() and "\t" in before):
        text += "; it is indented with a tab: indent with spaces"
    if error.context and error.context_mark and error.context_mark.line != mark.line:
        text += f", {error.context} that begins at line {error.context_mark.line + 1}"
    return text


def _check_shape(content: bytes, name: str) -> None:
    """Reject files that are too long or too deep: the parser is recursive."""
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
        """A safe loader with limits on merge keys and numbers, which could expand a few hundred bytes to billions."""

        _depth = 0
        _num_merged = 0

        def __init__(self, content: bytes) -> None:
            super().__init__(content)
            self.repeated: list[tuple[str, int, int]] = []  # keys that are set twice, with both lines

        def flatten_mapping(self, node: Any) -> None:
            if not self._depth:
                self._note_repeated(node)
            self._depth += 1
            super().flatten_mapping(node)  # recurses into each merged mapping before copying its entries
            self._depth -= 1
            if self._depth:
                self._num_merged += len(node.value)
                if self._num_merged > MAX_MERGED:
                    text = f"its merge keys (<<) add more than {MAX_MERGED} entries"
                    raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)

        def _note_repeated(self, node: Any) -> None:
            lines: dict[str, int] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    line = key.start_mark.line + 1
                    if key.value in lines:
                        self.repeated.append((key.value[:MAX_SHOWN], lines[key.value], line))
                    lines[key.value] = line

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (yaml.YAMLError, RecursionError):
                raise
            except Exception:  # whatever the parser stumbles over, such as the text x for !!timestamp
                tag = node.tag.removeprefix("tag:yaml.org,2002:")
                text = f"a value is not a valid {tag}"
                raise yaml.constructor.ConstructorError(None, None, text, node.start_mark) from None

        def construct_yaml_int(self, node: Any) -> Any:
            if len(node.value) > MAX_DIGITS:
                text = f"a number has more than {MAX_DIGITS} digits"
                raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
            return super().construct_yaml_int(node)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    return Loader
