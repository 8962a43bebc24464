"""Figures of trained networks: loss on held-out text, agreement of the two, and text to read.

Shapes: B sequences or windows · T tokens · V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from corpus import Corpus
from learning import logits_of
from torch import Tensor
from torch.nn import functional as F
from writing import write

from flambeau.llm.models.transformer import Transformer


@torch.no_grad()
def held_out_loss(model: Transformer, corpus: Corpus, *, every: int = 1, length: int = 512) -> float:
    """The mean loss of a token of the held-out text, in nats."""
    model.eval()
    batch = corpus.held_out(length=length, every=every)
    losses = [
        F.cross_entropy(logits_of(model, ids_BT).flatten(0, 1), labels_BT.flatten()).item() * len(ids_BT)
        for ids_BT, labels_BT in zip(batch.ids_BT.split(4), batch.labels_BT.split(4), strict=True)
    ]
    return sum(losses) / len(batch.ids_BT)


@torch.no_grad()
def agreement(
    target: Transformer, draft: Transformer, ids_BT: Tensor, start: int, temperature: float
) -> dict[str, Any]:
    """How often the draft's tokens are accepted in text the target wrote from `start` on."""
    ours_BTV = logits_of(target, ids_BT)[:, start - 1 : -1]
    theirs_BTV = logits_of(draft, ids_BT)[:, start - 1 : -1]
    if temperature == 0:
        accepted_BT = (ours_BTV.argmax(-1) == theirs_BTV.argmax(-1)).float()
    else:
        p_BTV, q_BTV = (ours_BTV / temperature).softmax(-1), (theirs_BTV / temperature).softmax(-1)
        accepted_BT = torch.minimum(p_BTV, q_BTV).sum(-1)
    figures = {f"tokens_per_round_k{k}": round(accepted_length(accepted_BT, k), 3) for k in (3, 4, 5)}
    return {"acceptance": round(accepted_BT.mean().item(), 4), **figures}


def accepted_length(accepted_BT: Tensor, k: int) -> float:
    """The mean number of tokens of a round with k drafted ones: those accepted, and one of the target's own."""
    chains_BWK = accepted_BT.unfold(1, k, 1).cumprod(-1)
    return 1 + chains_BWK.sum(-1).mean().item()


def compare(target: Transformer, draft: Transformer, corpus: Corpus, generator: torch.Generator) -> dict[str, Any]:
    """Acceptance at several temperatures, on fresh text."""
    prompts_BT = corpus.draw(generator, windows=16, length=12).ids_BT
    results = {}
    for temperature in (0.0, 0.5, 0.8, 1.0):
        ids_BT, _ = write(target, prompts_BT, torch.full((16,), temperature), length=256, generator=generator)
        results[f"temperature_{temperature}"] = agreement(target, draft, ids_BT, prompts_BT.shape[1], temperature)
    return results
