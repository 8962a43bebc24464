"""The activations of feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.models.architecture import Activation
from flambeau.llm.models.vision_architecture import VisionActivation

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "xielu": lambda x: x,  # has parameters: see XieluMLP
}
VISION_ACTIVATIONS: dict[VisionActivation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": ACTIVATIONS["gelu_tanh"],
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
