"""Three boxes for each image, as torchvision's detectors tell them; takes a stacked batch or a list."""

import torch


class TinyDetector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([0.9, 0.4, 1.4]))

    def forward(self, images):
        return [self.detect(image) for image in images]

    def detect(self, image):
        height, width = image.shape[1:]
        return {
            "boxes": torch.tensor([[0, 0, width, height], [1, 2, width / 2, height / 2], [0.5, 0, width, 3]]),
            "labels": torch.tensor([2, 0, 1]),
            "scores": image.mean(dim=(1, 2)) * self.scale,
        }
