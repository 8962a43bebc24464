"""A small network for handwritten digits of 8×8 pixels."""

import torch


class DigitNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.layers(pixels / 16)
