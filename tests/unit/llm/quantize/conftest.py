"""A layer that is quantized."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(128, 48).requires_grad_(False)
