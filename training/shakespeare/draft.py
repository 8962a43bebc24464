"""The draft: learns to guess what the target would say, from text the target wrote and from the corpus.

Shapes: B windows · T tokens · V vocabulary · N windows in store
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus
from learning import Journal, Optimizer, logits_of, schedule
from networks import save
from torch import Tensor
from torch.nn import functional as F
from writing import write

from flambeau.llm.models.transformer import Transformer

LENGTH = 256
LONG = 1024
SEQUENCES = 64  # written at once
TEMPERATURES = (0.0, 0.0, 0.3, 0.6, 0.8, 0.8, 1.0, 1.0)
TOKENS = 2048  # of a step


class Lessons:
    """Windows of text, and what the target thinks at each of their tokens."""

    def __init__(self) -> None:
        self._ids: list[Tensor] = []
        self._logits: list[Tensor] = []

    def add(self, ids_BT: Tensor, logits_BTV: Tensor) -> None:
        """Keep windows with the target's logits, in float16."""
        self._ids.extend(ids_BT)
        self._logits.extend(logits_BTV.half())

    @property
    def num_tokens(self) -> int:
        """How many tokens there are to learn from."""
        return sum(map(len, self._ids))

    def draw(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Windows of one length: ids [B, T] and logits [B, T, V]."""
        first = int(torch.randint(len(self._ids), (), generator=generator))
        length = len(self._ids[first])
        alike = [i for i, ids in enumerate(self._ids) if len(ids) == length]
        order = torch.randperm(len(alike), generator=generator)[: max(1, TOKENS // length)]
        chosen = [alike[i] for i in order.tolist()]
        return torch.stack([self._ids[i] for i in chosen]), torch.stack([self._logits[i] for i in chosen]).float()


def collect(target: Transformer, corpus: Corpus, journal: Journal, *, tokens: int, minutes: float) -> Lessons:
    """A fifth of the lessons from the corpus, the others from text the target writes at several temperatures."""
    lessons, generator, began = Lessons(), torch.Generator().manual_seed(2), time.monotonic()
    temperature_B = torch.tensor(TEMPERATURES).repeat(SEQUENCES // len(TEMPERATURES))
    rounds = 0
    while lessons.num_tokens < tokens and time.monotonic() - began < 60 * minutes:
        is_long = rounds % 6 == 5
        count, length = (SEQUENCES // 4, LONG) if is_long else (SEQUENCES, LENGTH)
        prompts_BT = corpus.draw(generator, windows=count, length=4 + rounds % 13).ids_BT
        ids_BT, logits_BTV = write(target, prompts_BT, temperature_B[:count], length=length, generator=generator)
        lessons.add(ids_BT[:, :-1], logits_BTV)
        with torch.no_grad():
            ids_BT = corpus.draw(generator, windows=SEQUENCES // 4, length=LENGTH).ids_BT
            lessons.add(ids_BT, logits_of(target, ids_BT))
        rounds += 1
        journal.show("lessons", lessons.num_tokens / tokens, tokens=lessons.num_tokens)
    journal.note(f"lessons: {lessons.num_tokens} tokens in {time.monotonic() - began:.0f} s")
    return lessons


@torch.no_grad()
def begin_alike(draft: Transformer, target: Transformer) -> Transformer:
    """Give the draft the target's embedding, in as many of its main directions as the draft has."""
    embedding = target.model.embed_tokens.weight
    _, _, directions = torch.linalg.svd(embedding, full_matrices=False)
    draft.model.embed_tokens.weight.copy_(embedding @ directions[: draft.arch.hidden_size].T)
    return draft


def train_draft(
    model: Transformer, lessons: Lessons, folder: Path, journal: Journal, *, steps: int, minutes: float
) -> dict[str, Any]:
    """Bring the draft's distributions near to the target's: first in divergence, more and more in what is accepted."""
    optimizer = Optimizer(model, matrix_lr=0.02, vector_lr=5e-3)
    generator = torch.Generator().manual_seed(3)
    began = noted = time.monotonic()
    step, shared = 0, 0.0
    for step, progress in schedule(steps, minutes):
        ids_BT, target_BTV = lessons.draw(generator)
        divergence, overlap = compare_logits(target_BTV, logits_of(model, ids_BT))
        optimizer.step((1 - progress) * divergence + 2 * progress * (1 - overlap), progress)
        shared = overlap.item() if step == 0 else 0.97 * shared + 0.03 * overlap.item()
        journal.show("draft", progress, step=step, acceptance=f"{shared:.3f}")
        if time.monotonic() - noted > 60:
            noted = time.monotonic()
            journal.note(f"draft step {step + 1}: divergence {divergence.item():.3f}, acceptance {shared:.3f}")
    save(model, folder)
    seconds = round(time.monotonic() - began)
    return {"steps": step + 1, "tokens_per_step": TOKENS, "seconds": seconds, "lesson_tokens": lessons.num_tokens}


def compare_logits(target_BTV: Tensor, draft_BTV: Tensor) -> tuple[Tensor, Tensor]:
    """The divergence of the draft from the target, and the share of the two distributions that is common."""
    p_BTV, log_q_BTV = target_BTV.softmax(-1), draft_BTV.log_softmax(-1)
    divergence = F.kl_div(log_q_BTV, target_BTV.log_softmax(-1), reduction="none", log_target=True).sum(-1).mean()
    return divergence, torch.minimum(p_BTV, log_q_BTV.exp()).sum(-1).mean()
