"""Stepper: a plan's forward passes, and the tokens chosen from their logits.

Shapes: S sequences · W tokens of each that may be kept · N sequences that get one token · V vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flambeau.llm.compute.forward import Greedy
from flambeau.llm.compute.runner import Runner
from flambeau.llm.outputs import TokenInfo
from flambeau.llm.sampling.logprobs import token_infos
from flambeau.llm.sampling.sampler import NO_TOKEN, Sampler
from flambeau.llm.scheduling.scheduler import Plan
from flambeau.llm.scheduling.sequence import Sequence
from flambeau.llm.speculation.proposal import Proposal
from flambeau.llm.speculation.speculator import Speculator
from flambeau.llm.speculation.verify import matched, verify


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

    def __init__(self, runner: Runner, sampler: Sampler, speculator: Speculator | None = None) -> None:
        self._runner = runner
        self._sampler = sampler
        self._speculator = speculator

    def num_ahead(self, running: Many[Sequence]) -> int:
        """Proposed tokens that the next step needs room for."""
        return self._speculator.num_ahead(running) if self._speculator else 0

    def run(self, plan: Plan) -> list[Made]:
        """A token or more for each sequence that decodes, and one for each whose prompt is computed to the end."""
        began = time.perf_counter()
        speculator = self._speculator
        proposal = speculator.propose(plan.decodes, plan.lookahead) if speculator and plan.lookahead else None
        made = self._plain(plan) if proposal is None else self._verified(plan, proposal)
        if speculator and plan.decodes and not plan.chunks:
            kept = [max(0, len(each.ids) - 1) for each in made]
            speculator.note(plan.decodes, plan.lookahead, time.perf_counter() - began, kept)
        return made

    def _greedy(self, sequences: Many[Sequence]) -> Greedy | None:
        """What chooses tokens for all of these by itself; None: the sampler does, or somebody asks for logits."""
        greedy = self._runner.forward.greedy
        if greedy is None or any(sequence.params.logprobs is not None for sequence in sequences):
            return None
        return greedy if self._sampler.takes_likeliest([sequence.row for sequence in sequences]) else None

    def _plain(self, plan: Plan) -> list[Made]:
        if not plan.chunks and (greedy := self._greedy(plan.decodes)):
            return [*map(Made, plan.decodes, self._runner.choose(greedy, plan.decodes))]
        logits = []
        if plan.decodes:
            logits.append(self._runner.decode(plan.decodes))
        if plan.chunks:
            logits.append(self._runner.prefill(plan.chunks))
        sequences = [*plan.decodes, *plan.finished_prompts]
        return self._sampled(sequences, torch.cat(logits) if len(logits) > 1 else logits[0]) if sequences else []

    def _sampled(self, sequences: Many[Sequence], logits_NV: Tensor) -> list[Made]:
        logits_N1V = logits_NV.unsqueeze(1)
        ids = self._sampler.sample(logits_N1V, [sequence.row for sequence in sequences]).tolist()
        made = [Made(*each) for each in zip(sequences, ids, strict=True)]
        add_token_infos(made, logits_N1V)
        return made

    def _verified(self, plan: Plan, proposal: Proposal) -> list[Made]:
        assert self._speculator is not None
        if greedy := self._greedy(plan.decodes):
            draws = self._runner.choose(greedy, plan.decodes, proposal.ids_SK, proposal.lengths)
            made = self._kept(plan.decodes, proposal, matched(draws, proposal))
        else:
            logits_TV = self._runner.decode(plan.decodes, proposal.ids_SK, proposal.lengths)
            logits_SWV = logits_TV.view(len(plan.decodes), -1, logits_TV.shape[-1])
            ids = verify(self._sampler, logits_SWV, [sequence.row for sequence in plan.decodes], proposal)
            made = self._kept(plan.decodes, proposal, ids)
            add_token_infos(made, logits_SWV)
        if plan.chunks:
            logits_NV = self._runner.prefill(plan.chunks)
            made += self._sampled(plan.finished_prompts, logits_NV) if plan.finished_prompts else []
        return made

    def _kept(self, sequences: Many[Sequence], proposal: Proposal, ids: Many[list[int]]) -> list[Made]:
        assert self._speculator is not None
        for sequence, num_proposed, new_ids in zip(sequences, proposal.lengths, ids, strict=True):
            self._speculator.kept(sequence, num_proposed, len(new_ids) - 1)
        return [Made(*each) for each in zip(sequences, ids, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """It is over."""
        if self._speculator:
            self._speculator.forget(sequence)


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
