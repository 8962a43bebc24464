"""Trains the example model for handwritten digits, and writes its weights and settings into the package.

Needs scikit-learn for its data: `pip install -c constraints.txt scikit-learn`, then `python training/digits/train.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits

from flambeau.handlers.loaders.weights import find_model_class

FOLDER = Path(__file__).parents[2] / "src" / "flambeau" / "examples" / "digits"
EPOCHS = 200  # of one batch each
SHOWN = 7  # the row that is sent as the example


def train(images: torch.Tensor, labels: torch.Tensor) -> torch.nn.Module:
    torch.manual_seed(0)
    network: torch.nn.Module = find_model_class(FOLDER / "model.py")()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
    return network


def main() -> None:
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    network = train(images, labels)
    torch.save(network.state_dict(), FOLDER / "digits.pth")
    example = json.dumps([int(value) for value in digits.data[SHOWN]], separators=(",", ":"))
    settings = f"minWorkers: 1\nmaxWorkers: 1\nbatchSize: 16\nexample: '{example}'\n"
    (FOLDER / "model-config.yaml").write_text(settings)
    right = (network(images).argmax(1) == labels).float().mean()
    print(f"accuracy on the training data: {right:.4f}")


if __name__ == "__main__":
    main()
