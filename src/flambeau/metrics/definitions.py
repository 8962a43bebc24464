"""Sample, and metrics.yaml: the metrics with their kinds, units and dimensions."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flambeau.errors import ConfigError
from flambeau.small_files import read_small


class MetricTypes(enum.Enum):
    """The kinds of metric; handlers import the class under this name."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


KINDS = tuple(kind.value for kind in MetricTypes)
BUNDLED = Path(__file__).parent / "metrics.yaml"


@dataclass(frozen=True, slots=True)
class Definition:
    """The name, kind, unit and dimensions of a metric."""

    name: str
    kind: str
    unit: str
    dimensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Definitions:
    """The metrics of a metrics.yaml by name: the server's own, and those of handlers."""

    server: Mapping[str, Definition]
    model: Mapping[str, Definition]


def read_definitions(file: Path | None) -> Definitions:
    """Read a metrics.yaml, or the bundled one."""
    path = file or BUNDLED
    try:
        text = read_small(path).decode()
    except OSError as error:
        raise ConfigError(f"the metrics configuration {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the metrics configuration {path} cannot be read: {error}") from None
    return parse_definitions(text, str(path))


def parse_definitions(text: str, source: str = "metrics.yaml") -> Definitions:
    """Parse the text of a metrics.yaml; errors name the place."""
    document = load_yaml(text, source)
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: a metrics configuration has the sections ts_metrics and model_metrics")
    if not document.get("model_metrics"):
        raise ConfigError(f"{source}: the section model_metrics is missing or empty; workers need it")
    return Definitions(
        server=_section(document.get("ts_metrics"), "ts_metrics", source),
        model=_section(document["model_metrics"], "model_metrics", source),
    )


def load_yaml(text: str, source: str) -> Any:
    import yaml

    try:
        return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not YAML: {' '.join(str(error).split())}") from None
    except (AttributeError, KeyError, TypeError):  # what the parser raises for, say, the text x as a !!timestamp
        raise ConfigError(f"{source} is not YAML: a value does not fit its tag") from None


def _section(section: Any, name: str, source: str) -> dict[str, Definition]:
    if section is None:
        return {}
    if not isinstance(section, dict):
        raise ConfigError(f"{source}: {name} must hold counter, gauge and histogram, each a list of metrics")
    found: dict[str, Definition] = {}
    for kind, entries in section.items():
        if kind not in KINDS:
            raise ConfigError(f"{source}: {name} holds {kind!r}, which is not a kind of metric; use {', '.join(KINDS)}")
        if not isinstance(entries, list):
            raise ConfigError(f"{source}: {name}.{kind} must be a list of metrics")
        for number, entry in enumerate(entries):
            definition = _definition(entry, kind, f"{source}: {name}.{kind}[{number}]")
            found[definition.name] = definition  # of two metrics with one name, the last one counts
    return found


def _definition(entry: Any, kind: str, place: str) -> Definition:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place} is not a metric; write name, unit and dimensions")
    for key in ("name", "unit"):
        if not isinstance(entry.get(key), str) or not entry[key].strip():
            raise ConfigError(f"{place}: {key} is missing or empty")
    if "dimensions" not in entry:
        raise ConfigError(f"{place}: dimensions is missing; write [] for none")
    dimensions = entry["dimensions"] or []
    if not isinstance(dimensions, list) or not all(isinstance(name, str) and name for name in dimensions):
        raise ConfigError(f"{place}: dimensions must be a list of names")
    return Definition(entry["name"], kind, entry["unit"], tuple(dimensions))


# name, kind, unit, value, dimensions, the ids of the requests it was taken for
Sample = tuple[str, str, str, float, list[tuple[str, str]], str]


class HasRequestId(Protocol):
    @property
    def request_id(self) -> str: ...


class SampleSource:
    """The part of `context.metrics` that the worker uses.

    A plain base class instead of a protocol, because `isinstance` runs once per batch.
    """

    def follow(self, requests: Sequence[HasRequestId]) -> None:
        """Record later samples for these requests."""
        raise NotImplementedError

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        raise NotImplementedError
