"""The exceptions of handler metrics, under the names that handlers may catch."""

from __future__ import annotations

from typing import Any


class GeneralMetricsCacheError(Exception):
    """An error without a class of its own."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Generic error: {message}")


class MetricsCacheIOError(IOError):
    """The metrics configuration cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(f"Error reading file: {message}")


class MetricsCacheTypeError(TypeError):
    pass


class MetricsCacheValueError(ValueError):
    pass


class MetricsCacheKeyError(KeyError):
    """No such metric, or no such key in the metrics configuration."""


def __getattr__(name: str) -> Any:
    """Create MetricsCachePyYamlError on first use: its base is PyYAML's, which few workers load."""
    if name != "MetricsCachePyYamlError":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import yaml

    class MetricsCachePyYamlError(yaml.YAMLError):
        """The metrics configuration is not YAML."""

        def __init__(self, message: str) -> None:
            super().__init__(f"Error parsing file: {message}")

    globals()[name] = MetricsCachePyYamlError
    return MetricsCachePyYamlError
