"""The draft: learns to guess what the target would say.

Shapes: B windows · T tokens · V vocabulary
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus
from learning import Journal, Optimizer, compiled, logits_of, mixed, schedule
from networks import save
from torch import Tensor

from flambeau.llm.models.transformer import Transformer

LENGTH = 1024
TEMPERATURES = (1.0, 0.8, 0.5)  # at which the two are to agree, in turn
NOTE_EVERY_S = 20.0
GROW_EVERY = 100  # steps


@torch.no_grad()
def begin_alike(draft: Transformer, target: Transformer) -> Transformer:
    """Give the draft the target's embedding, in as many of its main directions as the draft has."""
    embedding = target.model.embed_tokens.weight
    _, _, directions = torch.linalg.svd(embedding.float(), full_matrices=False)
    draft.model.embed_tokens.weight.copy_(embedding @ directions[: draft.arch.hidden_size].T)
    return draft


def train_draft(
    model: Transformer,
    target: Transformer,
    corpus: Corpus,
    folder: Path,
    journal: Journal,
    *,
    steps: int,
    minutes: float,
    windows: int,
    length: int = LENGTH,
) -> dict[str, Any]:
    """Bring the draft's distributions near to the target's: first in divergence, more and more in what is accepted."""
    device = model.model.embed_tokens.weight.device
    target.requires_grad_(False).eval()
    optimizer = Optimizer(model.train(), matrix_lr=0.02, vector_lr=3e-3)
    compute = compiled(compare_networks, device)
    generator = torch.Generator(device).manual_seed(300)
    began = noted = time.monotonic()
    step, overlap, divergence = 0, torch.zeros(()), torch.zeros(())
    for step, progress in schedule(steps, minutes):
        if step % GROW_EVERY == 0:
            corpus.grow()
        batch = corpus.draw(generator, windows=windows, length=length)
        # A tensor: a number would be compiled anew for each temperature.
        temperature = torch.tensor(TEMPERATURES[step % len(TEMPERATURES)], device=device)
        divergence, overlap = compute(target, model, batch.ids_BT, temperature)
        optimizer.step((1 - progress) * divergence + 2 * progress * (1 - overlap), progress)
        journal.show("draft", progress, step=step)
        if step % 10 == 9 and overlap.isfinite() and time.monotonic() - noted > NOTE_EVERY_S:
            noted = time.monotonic()
            journal.note(f"draft step {step + 1}: divergence {divergence.item():.3f}, in common {overlap.item():.3f}")
    save(model, folder)
    seconds = round(time.monotonic() - began)
    journal.note(f"draft: {step + 1} steps in {seconds} s, in common {overlap.item():.3f}")
    return {
        "steps": step + 1,
        "tokens_per_step": windows * length,
        "seconds": seconds,
        "in_common": round(overlap.item(), 4),
    }


def compare_networks(
    target: Transformer, draft: Transformer, ids_BT: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """The divergence of the draft from the target, and the share of the two distributions that is common."""
    with mixed(ids_BT.device):
        with torch.no_grad():
            target_BTV = logits_of(target, ids_BT) / temperature
        draft_BTV = logits_of(draft, ids_BT) / temperature
    return compare_logits(target_BTV, draft_BTV)


def compare_logits(target_BTV: Tensor, draft_BTV: Tensor) -> tuple[Tensor, Tensor]:
    """As above, from logits."""
    log_p_BTV, log_q_BTV = target_BTV.log_softmax(-1), draft_BTV.log_softmax(-1)
    p_BTV = log_p_BTV.exp()
    divergence = (p_BTV * (log_p_BTV - log_q_BTV)).sum(-1).mean()
    return divergence, torch.minimum(p_BTV, log_q_BTV.exp()).sum(-1).mean()
