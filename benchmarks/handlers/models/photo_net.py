"""A network of about the cost of a small ResNet."""

import torch
from torch import nn


def block(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class PhotoNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            block(3, 32, 2),
            block(32, 64, 2),
            block(64, 64, 1),
            block(64, 128, 2),
            block(128, 128, 1),
            block(128, 256, 2),
        )
        self.head = nn.Linear(256, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).mean((2, 3)))
