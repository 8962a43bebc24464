"""A hundred million weights: 400 MB of float32."""

import torch
from torch import nn


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2500, 2500) for _ in range(16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[:, :4]
