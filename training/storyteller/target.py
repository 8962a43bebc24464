"""The target: learns to continue the text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from corpus import Batch, Corpus
from learning import Journal, Optimizer, compiled, loss_of, schedule
from networks import save

from flambeau.llm.models.transformer import Transformer

LENGTH = 1024  # of a window: longer texts are never written
EVALUATE_EVERY_S = 20.0
GROW_EVERY = 100  # steps


def train_target(
    model: Transformer,
    corpus: Corpus,
    held_out: Batch,
    folder: Path,
    journal: Journal,
    *,
    steps: int,
    minutes: float,
    windows: int,
    length: int = LENGTH,
) -> dict[str, Any]:
    """Train until the time is over, on text that was not seen before as long as it is made fast enough."""
    device = held_out.ids_BT.device
    optimizer = Optimizer(model, matrix_lr=0.02, vector_lr=3e-3)
    compute_loss = compiled(loss_of, device)
    generator = torch.Generator(device).manual_seed(100)
    began = evaluated = time.monotonic()
    step, curve = 0, []
    for step, progress in schedule(steps, minutes):
        if step % GROW_EVERY == 0:
            corpus.grow()
        model.train()
        batch = corpus.draw(generator, windows=windows, length=length)
        loss = compute_loss(model, batch.ids_BT, batch.labels_BT)
        optimizer.step(loss, progress)
        if step == 0:
            journal.note(f"target: first step after {time.monotonic() - began:.0f} s, loss {loss.item():.3f}")
            began = evaluated = time.monotonic()
        journal.show("target", progress, step=step)
        # The queue of the device is emptied now and then: else the time would be that of steps not computed yet.
        if step % 10 == 9 and (loss := loss.detach()).isfinite() and time.monotonic() - evaluated > EVALUATE_EVERY_S:
            point = {"step": step + 1, "seconds": time.monotonic() - began, "train": loss.item()}
            point |= {"held_out": held_out_loss(model, held_out), "million_tokens_made": len(corpus.ids) / 1e6}
            curve.append({name: round(value, 4) for name, value in point.items()})
            journal.note("target " + "  ".join(f"{name} {value}" for name, value in curve[-1].items()))
            save(model, folder)
            evaluated = time.monotonic()
    save(model, folder)
    seconds, value = round(time.monotonic() - began), held_out_loss(model, held_out)
    journal.note(f"target: {step + 1} steps in {seconds} s, held-out loss {value:.4f}")
    return {
        "steps": step + 1,
        "tokens_per_step": windows * length,
        "seconds": seconds,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "held_out": round(value, 4),
        "tokens_made": len(corpus.ids),
        "curve": curve,
    }


@torch.no_grad()
def held_out_loss(model: Transformer, held_out: Batch, *, at_once: int = 16) -> float:
    """The mean loss of a token of the held-out text, in nats."""
    model.eval()
    pairs = zip(held_out.ids_BT.split(at_once), held_out.labels_BT.split(at_once), strict=True)
    losses = [loss_of(model, ids_BT, labels_BT).item() * len(ids_BT) for ids_BT, labels_BT in pairs]
    return sum(losses) / len(held_out.ids_BT)
