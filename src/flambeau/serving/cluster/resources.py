"""What a worker asks of a machine, in numbers and in words; and the variables that it takes along. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Of the server's variables, a worker on another machine gets only these: the rest describes the server's machine.
PORTABLE = (
    "TS_",
    "FLAMBEAU_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "TORCHELASTIC_",
    "PYTORCH_",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "HF_",
    "TOKENIZERS_",
    "RANK",
    "ROLE_",
    "WORLD_SIZE",
    "LOGLEVEL",
)
NOT_PORTABLE = ("FLAMBEAU_START_FOLDER", "FLAMBEAU_MODEL_CACHE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one machine must have for a worker, or for its share of a group."""

    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = []
        if self.gpus:
            parts.append(f"{self.gpus:g} GPU{'s' if self.gpus > 1 else ''}")
        if self.cpus and (not self.gpus or self.cpus != 1):
            parts.append(f"{self.cpus:g} CPU{'s' if self.cpus > 1 else ''}")
        parts += [f"{amount:g} {name}" for name, amount in self.resources.items()]
        return " and ".join(parts) or "nothing in particular"


def waiting_in_words(demand: Demand, num_nodes: int, waited_s: float, reason: str = "") -> str:
    """What a worker waits for, such as "waiting for a node with 1 GPU, 40 s"."""
    nodes = "a node" if num_nodes == 1 else f"{num_nodes} nodes"
    each = "" if num_nodes == 1 else " each"
    text = f"waiting for {nodes} with {demand}{each}, {waited_s:.0f} s"
    return f"{text}: {reason}" if reason else text


def node_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that a worker takes along to another machine."""
    return {name: value for name, value in variables.items() if name.startswith(PORTABLE) and name not in NOT_PORTABLE}
