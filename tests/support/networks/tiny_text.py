"""Four classes of a text from the mean of its words."""

import torch


class TinyText(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(64, 8, sparse=True)
        self.fc = torch.nn.Linear(8, 4)

    def forward(self, text, offsets):
        return self.fc(self.embedding(text, offsets)) * 3
