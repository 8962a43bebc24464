"""What training the target and the draft have in common: the schedule, one step, and the record of both.

Shapes: B windows · T tokens · V vocabulary
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from muon import Muon
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.models.attention import AttentionOptions
from flambeau.llm.models.transformer import Transformer

WARM_UP = 0.02  # of the time
Function = TypeVar("Function", bound=Callable[..., Any])


class Causal:
    """Whole windows, each token looking at those before it: as WholeAttention, and quicker to differentiate."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """From q […, T, H, D] and k, v […, T, G, D] to […, T, H, D]."""
        repeats = q.shape[-2] // k.shape[-2]
        k, v = k.repeat_interleave(repeats, dim=-2), v.repeat_interleave(repeats, dim=-2)
        q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=options.scale).transpose(-3, -2)


def logits_of(model: Transformer, ids_BT: Tensor) -> Tensor:
    """The logits [B, T, V] of windows that begin at position 0."""
    return model.logits(model(ids_BT, torch.arange(ids_BT.shape[1], device=ids_BT.device), Causal()))


def loss_of(model: Transformer, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
    """The mean loss of a token, in nats."""
    with mixed(ids_BT.device):
        return F.cross_entropy(logits_of(model, ids_BT).flatten(0, 1), labels_BT.flatten())


def mixed(device: torch.device) -> torch.autocast:
    """On a GPU, matrix products in bfloat16."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def compiled(function: Function, device: torch.device) -> Function:
    """On a GPU, compiled; a CPU learns too slowly for it to matter."""
    return torch.compile(function, dynamic=False) if device.type == "cuda" else function  # type: ignore[return-value]


class Optimizer:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms; one schedule for both."""

    def __init__(self, model: Transformer, *, matrix_lr: float, vector_lr: float) -> None:
        matrices = [weight for name, weight in model.named_parameters() if "layers" in name and weight.dim() == 2]
        others = [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]
        self._optimizers = [
            Muon(matrices, lr=matrix_lr),
            torch.optim.AdamW(others, lr=vector_lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
        ]
        self._peaks = (matrix_lr, vector_lr)

    def step(self, loss: Tensor, progress: float) -> None:
        """Move the weights down the slope of the loss."""
        loss.backward()
        for optimizer, peak in zip(self._optimizers, self._peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(progress)
            optimizer.step()
            optimizer.zero_grad()


def rate(progress: float) -> float:
    """The learning rate, as a share of its peak: a short rise, a plateau, then a straight line to zero."""
    return min(progress / WARM_UP + 0.1, (1 - progress) / 0.7, 1.0)


def schedule(steps: int, minutes: float) -> Iterator[tuple[int, float]]:
    """Steps, each with the progress before it; a time limit brings the end nearer, decay included.

    The time of the first step, which compiles, does not count.
    """
    began = time.monotonic()
    for step in range(steps):
        progress = max(step / steps, (time.monotonic() - began) / 60 / minutes)
        if progress >= 1:
            return
        yield step, progress
        if step == 0:
            began = time.monotonic()


class Journal:
    """What happened, on the screen and in training.log; what came out, in training.json."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "training.log"
        self._began = time.monotonic()
        self._shown = 0.0

    def start(self) -> None:
        """Begin a new record."""
        self._file.write_text("")

    def note(self, line: str) -> None:
        """A line to keep."""
        line = f"{time.monotonic() - self._began:7.0f} s  {line}"
        print(f"\r\033[K{line}" if sys.stdout.isatty() else line, flush=True)
        with self._file.open("a") as file:
            file.write(line + "\n")

    def show(self, name: str, progress: float, **figures: Any) -> None:
        """A bar that is drawn over and over, on a terminal only."""
        if sys.stdout.isatty() and time.monotonic() - self._shown > 0.5:
            self._shown = time.monotonic()
            bar = "█" * int(30 * progress) + "·" * (30 - int(30 * progress))
            words = "  ".join(f"{key} {value}" for key, value in figures.items())
            print(f"\r\033[K{name} {bar} {progress:4.0%}  {words}", end="", flush=True)
