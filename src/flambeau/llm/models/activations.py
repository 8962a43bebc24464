"""The activations of feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.models.architecture import Activation
from flambeau.llm.models.families.gate_limits import GateLimit
from flambeau.llm.models.vision_architecture import VisionActivation

Activate = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[Activation, Activate] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "xielu": lambda x: x,  # has parameters: see XieluMLP
}
VISION_ACTIVATIONS: dict[VisionActivation, Activate] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": ACTIVATIONS["gelu_tanh"],
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def gated(gate_up: Tensor, activate: Activate, limit: GateLimit | None) -> Tensor:
    """Activated gates […, F] times what they gate, within a limit if there is one."""
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is None:
        return activate(gate) * up
    up = up.clamp(-limit.size, limit.size)
    if limit.kind == "activated":
        return activate(gate).clamp(max=limit.size) * up
    gate = gate.clamp(max=limit.size)
    if limit.kind == "swiglu":
        return gate * torch.sigmoid(gate * limit.alpha) * (up + 1)
    return activate(gate) * up
