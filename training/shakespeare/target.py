"""The target: learns to continue the text. It begins with few layers, which learn quickly, and grows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from corpus import Batch, Corpus
from learning import Journal, Optimizer, logits_of, schedule
from measure import held_out_loss
from networks import add_dropout, deepen, save, shallow
from torch.nn import functional as F

from flambeau.llm.models.transformer import Transformer

TOKENS = 2048  # of a step
LENGTHS = (256, 1024)  # of the windows of a step; most are short
LONG_EVERY = 6  # steps
LAYERS = ((0.0, 2), (0.25, 4), (0.5, 8))  # how many there are, from which progress on
EVALUATE_EVERY_S = 150.0


class Growing:
    """The network as deep as it is by now, and its optimizer; in the end the whole one."""

    def __init__(self, whole: Transformer, dropout: float) -> None:
        self._whole, self._dropout = whole, dropout
        self._grow(shallow(whole, LAYERS[0][1]))

    def _grow(self, model: Transformer) -> None:
        self.model = model
        add_dropout(model, self._dropout)
        self.optimizer = Optimizer(model, matrix_lr=0.02, vector_lr=3e-3)

    def at(self, progress: float) -> Transformer:
        """The network to train now."""
        depth = max(layers for start, layers in LAYERS if progress >= start)
        if depth > self.model.arch.num_layers:
            is_whole = depth == self._whole.arch.num_layers
            self._grow(deepen(self.model, self._whole if is_whole else shallow(self._whole, depth)))
        return self.model.train()


def train_target(
    whole: Transformer, corpus: Corpus, folder: Path, journal: Journal, *, steps: int, minutes: float, dropout: float
) -> dict[str, Any]:
    """Train, keeping the weights of the whole network that predict the held-out text best."""
    growing = Growing(whole, dropout)
    generator = torch.Generator().manual_seed(1)
    began = evaluated = time.monotonic()
    best, loss, step, curve = float("inf"), 0.0, 0, []
    for step, progress in schedule(steps, minutes):
        model = growing.at(progress)
        value = learn(growing, corpus.draw(generator, **windows(step)), progress)
        loss = value if step == 0 else 0.95 * loss + 0.05 * value
        journal.show("target", progress, step=step, loss=f"{loss:.3f}", best=f"{best:.3f}")
        if time.monotonic() - evaluated > EVALUATE_EVERY_S:
            held_out = held_out_loss(model, corpus, every=4)
            if model is whole and held_out < best:
                best = held_out
                save(model, folder)
            layers, seconds = model.arch.num_layers, round(time.monotonic() - began)
            point = {"step": step + 1, "seconds": seconds, "layers": layers, "train": loss, "held_out": held_out}
            curve.append({name: round(value, 4) for name, value in point.items()})
            journal.note("target " + "  ".join(f"{name} {value}" for name, value in curve[-1].items()))
            evaluated = time.monotonic()
    if held_out_loss(whole, corpus, every=4) < best:
        save(whole, folder)
    seconds = round(time.monotonic() - began)
    return {"steps": step + 1, "tokens_per_step": TOKENS, "seconds": seconds, "train": round(loss, 4), "curve": curve}


def windows(step: int) -> dict[str, int]:
    """How many windows of which length a step learns from."""
    length = LENGTHS[step % LONG_EVERY == LONG_EVERY - 1]
    return {"windows": TOKENS // length, "length": length}


def learn(growing: Growing, batch: Batch, progress: float) -> float:
    """One step; its loss."""
    logits_BTV = logits_of(growing.model, batch.ids_BT)
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), batch.labels_BT.flatten())
    growing.optimizer.step(loss, progress)
    return loss.item()
