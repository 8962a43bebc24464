"""GateLimits: the largest gates of feed-forward layers and experts, and the largest numbers that they gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.family import Config

# Of gates before their activation (Hy 4, DeepSeek V4); or after it (Step); or with the activation of gpt-oss.
LimitKind = Literal["gates", "activated", "swiglu"]
Limits = tuple[float | None, ...]  # one of each layer, or one of all; empty: there are none


class GateLimit(NamedTuple):
    """That of one layer."""

    kind: LimitKind
    size: float
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """Gates are at most a limit, and what they gate is within it."""

    kind: LimitKind
    experts: Limits = ()  # that a router chooses
    others: Limits = ()  # feed-forward layers and shared experts
    alpha: float = 1.702  # of swiglu

    def of_experts(self, layer: int) -> GateLimit | None:
        return self._of(self.experts, layer)

    def of_others(self, layer: int) -> GateLimit | None:
        return self._of(self.others, layer)

    @property
    def is_swiglu_of_experts(self) -> bool:
        """Whether only experts have a limit, with the activation of gpt-oss."""
        return self.kind == "swiglu" and not self.others

    def _of(self, limits: Limits, layer: int) -> GateLimit | None:
        size = limits[layer if len(limits) > 1 else 0] if limits else None
        return None if size is None else GateLimit(self.kind, size, self.alpha)


def swiglu_limits(config: Config, *, everywhere: bool = False) -> GateLimits:
    """Those of gpt-oss, of experts or of all feed-forward layers."""
    limit = (float(config["swiglu_limit"]),)
    alpha = float(config["swiglu_alpha"])
    return GateLimits(kind="swiglu", experts=limit, others=limit if everywhere else (), alpha=alpha)


def limits_before_activation(config: Config, *, everywhere: bool = False) -> GateLimits:
    """One limit, which has to be positive, of experts or of all feed-forward layers."""
    limit = config["swiglu_limit"]
    if not isinstance(limit, int | float) or limit <= 0:
        raise CheckpointError(f"swiglu_limit {limit!r} is not supported; it must be a number above 0")
    return GateLimits(kind="gates", experts=(float(limit),), others=(float(limit),) if everywhere else ())


def limits_of_layers(config: Config, experts: str, others: str) -> GateLimits | None:
    """Those that each layer has of its own, by their keys; None: there are none."""
    found = GateLimits(kind="activated", experts=limits_of(config, experts), others=limits_of(config, others))
    return found if found.experts or found.others else None


def limits_of(config: Config, key: str) -> Limits:
    """The limit of each layer; 0 means that there is none."""
    given = config.get(key) or []
    if given and len(given) != config["num_hidden_layers"]:
        raise CheckpointError(f"{key} must have a number for each layer")
    found = tuple(float(one) if one else None for one in given)
    return found if any(found) else ()
