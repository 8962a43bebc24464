"""Seven classes from the colors of an image."""

import torch


class TinyClassifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 7, stride=4)
        self.scores = torch.nn.Linear(8, 7)

    def forward(self, images):
        return self.scores(torch.relu(self.convolution(images)).mean(dim=(2, 3))) * 20
