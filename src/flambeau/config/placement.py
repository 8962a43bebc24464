"""PlacementSettings: `cluster:` of a model-config.yaml, what a model's workers need of other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Spread = Literal["nodes", "pack"]
KEYS = ("spread", "here", "cpus", "gpus", "resources", "placementTimeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSettings:
    """Where the workers of a model run in a cluster."""

    spread: Spread = "nodes"
    here: int = 0  # so many of them on the server's own machine
    cpus: float = 1.0  # of each process
    gpus: float | None = None  # of each process; None: 1 where deviceType is gpu
    resources: Mapping[str, float] = field(default_factory=dict)
    timeout_s: float = 600.0  # to wait for a machine


def read_placement(section: object, warn: Callable[..., None]) -> PlacementSettings:
    """The settings of a section; what cannot be used is a warning, and the default is used."""
    if not isinstance(section, Mapping):
        warn("cluster must be keys and values, not %r; the defaults are used", section)
        return PlacementSettings()
    if unknown := [key for key in section if key not in KEYS]:
        warn("cluster: %s is not known; known are %s", ", ".join(map(str, unknown)), ", ".join(KEYS))
    values: dict[str, Any] = {}
    if (spread := section.get("spread", "nodes")) in get_args(Spread):
        values["spread"] = spread
    else:
        warn("cluster: spread is %r; it may be nodes or pack, so nodes is used", spread)
    for key, name in (("here", "here"), ("cpus", "cpus"), ("gpus", "gpus"), ("placementTimeout", "timeout_s")):
        if key not in section:
            continue
        value = section[key]
        if not is_amount(value) or (key == "here" and value != int(value)):
            kind = "a whole number" if key == "here" else "a number"
            warn("cluster: %s must be %s from 0, not %r; the default is used", key, kind, value)
        else:
            values[name] = int(value) if key == "here" else float(value)
    resources = section.get("resources", {})
    if isinstance(resources, Mapping) and all(isinstance(k, str) and is_amount(v) for k, v in resources.items()):
        values["resources"] = {name: float(amount) for name, amount in resources.items()}
    else:
        warn("cluster: resources must be names with numbers, not %r; they are ignored", resources)
    return PlacementSettings(**values)


def is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 31
