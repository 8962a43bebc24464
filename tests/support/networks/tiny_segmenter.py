"""Four classes for each pixel."""

import torch


class TinySegmenter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images):
        return {"out": self.convolution(images) * 5}
