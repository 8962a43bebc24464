"""Stepper: a plan's forward passes, and the tokens chosen from their logits.

Shapes: S sequences · W tokens of each that may be kept · N sequences that get one token · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flambeau.llm.logprobs import token_infos
from flambeau.llm.outputs import TokenInfo
from flambeau.llm.runner import Runner
from flambeau.llm.sampler import NO_TOKEN, Sampler
from flambeau.llm.scheduler import Plan
from flambeau.llm.sequence import Sequence


@dataclass(slots=True)
class Made:
    """The tokens that a step has made for a sequence, before anybody looked whether one of them ends it."""

    sequence: Sequence
    ids: list[int]
    tokens: list[TokenInfo] | None = None
    is_broken: bool = field(init=False)  # its logits were no numbers

    def __post_init__(self) -> None:
        self.is_broken = NO_TOKEN in self.ids
        if self.is_broken:
            self.ids = self.ids[: self.ids.index(NO_TOKEN)]


class Stepper:
    """Computes what the scheduler has planned."""

    def __init__(self, runner: Runner, sampler: Sampler) -> None:
        self._runner = runner
        self._sampler = sampler

    def run(self, plan: Plan) -> list[Made]:
        """One token for each sequence that decodes, and for each whose prompt is computed to the end."""
        logits = []
        if plan.decodes:
            logits.append(self._runner.decode(plan.decodes))
        if plan.chunks:
            logits.append(self._runner.prefill(plan.chunks))
        sequences = [*plan.decodes, *plan.finished_prompts]
        if not sequences:
            return []
        logits_NV = torch.cat(logits) if len(logits) > 1 else logits[0]
        ids = self._sampler.sample(logits_NV.unsqueeze(1), [s.row for s in sequences]).squeeze(1).tolist()
        made = [Made(sequence, [token]) for sequence, token in zip(sequences, ids, strict=True)]
        add_token_infos(made, logits_NV.unsqueeze(1))
        return made


def add_token_infos(made: Many[Made], logits_SWV: Tensor) -> None:
    """Say how likely the tokens were, to those who ask; the logits of each come before its token."""
    asking = [(i, each) for i, each in enumerate(made) if each.sequence.params.logprobs is not None and each.ids]
    if not asking:
        return
    logits_MV = torch.cat([logits_SWV[i, : len(each.ids)] for i, each in asking])
    counts = [each.sequence.params.logprobs or 0 for _, each in asking for _ in each.ids]
    infos = iter(token_infos(logits_MV, [token for _, each in asking for token in each.ids], counts))
    for _, each in asking:
        each.tokens = [next(infos) for _ in each.ids]
