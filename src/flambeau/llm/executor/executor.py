"""ModelExecutor: runs the forward passes of a plan and samples tokens from their logits.

Shapes: T tokens of the step · S sequences · W places of each: the last token and the proposed ones · N sequences that
get one token · V vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from flambeau.llm.core.outputs import SampledTokens, StepOutput
from flambeau.llm.core.sequence import Sequence
from flambeau.llm.core.step_plan import Chunk, StepPlan
from flambeau.llm.executor.backend import Backend, Greedy, KeepsStates, StartedTokens, run_prefill
from flambeau.llm.executor.inputs import InputBuilder, media_of, to_tensor
from flambeau.llm.executor.state_cache import StateCache
from flambeau.llm.sampling.row_groups import RowSettings
from flambeau.llm.sampling.sampler import Sampler, token_infos
from flambeau.llm.speculation.rejection_sampler import verify, verify_draws
from flambeau.llm.speculation.speculator import Proposal, Speculator, TokenSpan


@dataclass(slots=True)
class StartedStep:
    """A step that runs on the device, or has been computed."""

    plan: StepPlan
    tokens: StartedTokens | None = None
    needs_masks: bool = False  # before it chooses its tokens
    output: StepOutput = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Whether all its sequences have left."""
        return not any(sequence.blocks for sequence in self.plan.decodes)


class ModelExecutor:
    """Computes what the scheduler has planned."""

    def __init__(
        self,
        backend: Backend,
        inputs: InputBuilder,
        sampler: Sampler,
        speculator: Speculator | None = None,
        state_cache: StateCache | None = None,
    ) -> None:
        self._backend = backend
        self._inputs = inputs
        self._sampler = sampler
        self._speculator = speculator
        self._observer = speculator if speculator is not None and speculator.reads_states else None
        self._states = backend if isinstance(backend, KeepsStates) else None
        self._state_cache = state_cache

    def lookahead(self, running: Many[Sequence]) -> int:
        """How many proposed tokens per sequence the next step needs room for."""
        return self._speculator.num_ahead(running) if self._speculator else 0

    def start(self, plan: StepPlan) -> StartedStep:
        """Start a step; it is computed at once where the backend cannot do it in the background."""
        decoder, settings = self._backend.async_decoder, self._settings(plan)
        if decoder is None or settings is None or plan.state_copies:
            return StartedStep(plan, output=self.run(plan))
        for sequence in plan.preempted:
            self.forget(sequence)
        tokens = decoder.start(self._inputs.decode(plan.decodes), settings)
        if tokens is None:
            return StartedStep(plan, output=self.run(plan))
        return StartedStep(plan, tokens, settings.is_constrained)

    def start_next(self, started: StartedStep, plan: StepPlan) -> StartedStep | None:
        """Start the step after one whose tokens are on the device only; None if that is not possible."""
        decoder, settings = self._backend.async_decoder, self._settings(plan)
        if started.tokens is None or decoder is None or settings is None:
            return None
        assert not started.needs_masks, "its tokens are not chosen yet"
        ids_S = started.tokens.next_ids
        if len(plan.decodes) < len(started.plan.decodes):
            rows = {sequence: i for i, sequence in enumerate(started.plan.decodes)}
            kept = torch.tensor([rows[sequence] for sequence in plan.decodes], pin_memory=ids_S.is_cuda)
            ids_S = ids_S[kept.to(ids_S.device, non_blocking=True)]
        tokens = decoder.start(self._inputs.decode_next(plan.decodes, ids_S), settings)
        return None if tokens is None else StartedStep(plan, tokens, settings.is_constrained)

    def prepare(self, started: StartedStep) -> None:
        """Have the masks of a started step made while the network runs; the tokens before it are known now."""
        if started.needs_masks:
            self._prepare([sequence for sequence in started.plan.decodes if sequence.blocks])

    def choose(self, started: StartedStep) -> None:
        """Let a started step choose its tokens, if it waits for masks; those who have left need none."""
        if started.tokens is not None and started.needs_masks:
            states = [sequence.sampling if sequence.blocks else None for sequence in started.plan.decodes]
            started.tokens.choose(self._sampler.masks(states))
            started.needs_masks = False

    def finish(self, started: StartedStep) -> StepOutput:
        """Wait for the results of a step."""
        if started.tokens is None:
            return started.output
        ids = [[token] for token in started.tokens.wait()]
        return [*map(SampledTokens, started.plan.decodes, ids)]

    def _settings(self, plan: StepPlan) -> RowSettings | None:
        """How the tokens of a step are sampled; None if the backend cannot sample them by itself."""
        if plan.chunks or not plan.decodes or self._speculator is not None:
            return None
        if any(sequence.params.logprobs is not None for sequence in plan.decodes):
            return None
        return self._sampler.row_settings([sequence.sampling for sequence in plan.decodes])

    def run(self, plan: StepPlan) -> StepOutput:
        """One or more tokens for each decoding sequence, and one for each whose prompt is computed to the end."""
        for sequence in plan.preempted:
            self.forget(sequence)
        if plan.state_copies:
            assert self._state_cache is not None
            self._state_cache.copy(plan.state_copies)
        began = time.perf_counter()
        speculator = self._speculator
        proposal = speculator.propose(plan.decodes, plan.lookahead) if speculator and plan.lookahead else None
        output = self._run_plain(plan) if proposal is None else self._run_speculative(plan, proposal)
        if speculator and plan.decodes and not plan.chunks:
            num_accepted = [max(0, len(sampled.ids) - 1) for sampled in output]
            speculator.record_step(plan.decodes, plan.lookahead, time.perf_counter() - began, num_accepted)
        return output

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for a sequence that has left or was preempted."""
        self._free_row(sequence)
        if self._speculator:
            self._speculator.forget(sequence)

    def _free_row(self, sequence: Sequence) -> None:
        row = self._inputs.tables.forget(sequence)
        if self._states is not None and row is not None:
            self._states.forget_row(row)

    def _run_plain(self, plan: StepPlan) -> StepOutput:
        if not plan.chunks and (greedy := self._greedy(plan.decodes)):
            output = [*map(SampledTokens, plan.decodes, self._argmax(greedy, plan.decodes))]
            self._observe(plan.decodes)
            return output
        sequences = [*plan.decodes, *plan.finished_prompts]
        self._prepare(sequences)
        logits = []
        if plan.decodes:
            logits.append(self._backend.decode(self._inputs.decode(plan.decodes)))
            self._observe(plan.decodes)
        if plan.chunks:
            logits.append(self._prefill(plan.chunks))
        return self._sample(sequences, torch.cat(logits) if len(logits) > 1 else logits[0]) if sequences else []

    def _run_speculative(self, plan: StepPlan, proposal: Proposal) -> StepOutput:
        if greedy := self._greedy(plan.decodes):
            draws = self._argmax(greedy, plan.decodes, proposal)
            output = self._accept(plan.decodes, proposal, verify_draws(draws, proposal))
        else:
            self._prepare(plan.decodes, proposal)
            logits_TV = self._backend.decode(self._inputs.decode(plan.decodes, proposal.ids_SK, proposal.lengths))
            logits_SWV = logits_TV.view(len(plan.decodes), -1, logits_TV.shape[-1])
            ids = verify(self._sampler, logits_SWV, [sequence.sampling for sequence in plan.decodes], proposal)
            output = self._accept(plan.decodes, proposal, ids)
            add_token_infos(output, logits_SWV)
        if plan.chunks:
            logits_NV = self._prefill(plan.chunks)
            output += self._sample(plan.finished_prompts, logits_NV) if plan.finished_prompts else []
        return output

    def _observe(self, sequences: Many[Sequence], width: int = 1, counts: Many[int] = ()) -> None:
        """Tell the speculator which tokens a decode pass has computed: `counts` of `width` places, or all."""
        if self._observer is None:
            return
        self._observer.observe(
            [
                TokenSpan(sequence, len(sequence.tokens) - 1, i * width, counts[i] if counts else width)
                for i, sequence in enumerate(sequences)
            ]
        )

    def _prepare(self, sequences: Many[Sequence], proposal: Proposal | None = None) -> None:
        """Have the masks of constrained sequences made while the network runs."""
        constrained = [i for i, sequence in enumerate(sequences) if sequence.grammar is not None]
        if constrained:
            ahead = None if proposal is None else proposal.ids_SK.tolist()
            states = [sequences[i].sampling for i in constrained]
            self._sampler.prepare(states, None if ahead is None else [ahead[i] for i in constrained])

    def _greedy(self, sequences: Many[Sequence]) -> Greedy | None:
        """The backend's own greedy decoding, if it gives all of these sequences what the sampler would."""
        greedy = self._backend.greedy
        if greedy is None or any(sequence.params.logprobs is not None for sequence in sequences):
            return None
        return greedy if self._sampler.takes_argmax([sequence.sampling for sequence in sequences]) else None

    def _argmax(self, greedy: Greedy, sequences: Many[Sequence], proposal: Proposal | None = None) -> list[list[int]]:
        """The most likely tokens, one for each place of each sequence."""
        if proposal is None:
            inputs = self._inputs.decode(sequences)
        else:
            inputs = self._inputs.decode(sequences, proposal.ids_SK, proposal.lengths)
        found: list[list[int]] = greedy.argmax(inputs).view(-1, inputs.query_len).tolist()
        return found

    def _prefill(self, chunks: Many[Chunk]) -> Tensor:
        """The logits [N, V] after those chunks that are the last of their prompt; long sequences in other passes."""
        groups = [[*group] for _, group in groupby(chunks, key=lambda chunk: chunk.sequence.is_long)]
        logits = [self._prefill_pass(group) for group in groups]
        return torch.cat(logits) if len(logits) > 1 else logits[0]

    def _prefill_pass(self, chunks: Many[Chunk]) -> Tensor:
        sequences, lengths = [chunk.sequence for chunk in chunks], [chunk.length for chunk in chunks]
        starts = [sequence.num_computed for sequence in sequences]
        inputs = self._inputs.prefill(sequences, starts, lengths)
        inputs.media = media_of(sequences, starts, lengths)
        rows_N = (np.cumsum(lengths) - 1)[[chunk.is_last for chunk in chunks]]
        scored = [row for chunk, end in zip(chunks, np.cumsum(lengths), strict=True) for row in scored_rows(chunk, end)]
        rows_M = np.concatenate([scored, rows_N]) if scored else rows_N
        logits_MV = run_prefill(self._backend, inputs, to_tensor(rows_M))
        if self._observer is not None:
            rows = np.cumsum([0, *lengths[:-1]]).tolist()
            self._observer.observe([*map(TokenSpan, sequences, starts, rows, lengths)])
        if not scored:
            return logits_MV
        add_prompt_infos(chunks, logits_MV[: len(scored)])
        return logits_MV[len(scored) :]

    def _sample(self, sequences: Many[Sequence], logits_NV: Tensor) -> StepOutput:
        logits_N1V = logits_NV.unsqueeze(1)
        ids = self._sampler.sample(logits_N1V, [sequence.sampling for sequence in sequences]).tolist()
        output = [*map(SampledTokens, sequences, ids)]
        add_token_infos(output, logits_N1V)
        return output

    def _accept(self, sequences: Many[Sequence], proposal: Proposal, ids: Many[list[int]]) -> StepOutput:
        assert self._speculator is not None
        for sequence, num_proposed, new_ids in zip(sequences, proposal.lengths, ids, strict=True):
            self._speculator.record_accepted(sequence, num_proposed, len(new_ids) - 1)
        self._observe(sequences, 1 + proposal.ids_SK.shape[1], [len(new_ids) for new_ids in ids])
        return [*map(SampledTokens, sequences, ids)]


def scored_rows(chunk: Chunk, end: int) -> range:
    """The rows of a chunk whose logits come before a token of its prompt, where their log-probabilities are asked for.

    `end` is the row after the chunk's last.
    """
    sequence = chunk.sequence
    if not sequence.needs_prompt_logits:
        return range(0)
    first = end - chunk.length
    num_before = min(chunk.length, sequence.num_prompt - 1 - sequence.num_computed)
    return range(first, first + max(0, num_before))


def add_prompt_infos(chunks: Many[Chunk], logits_MV: Tensor) -> None:
    """Add the log-probabilities of prompts; of one that was preempted, only those that it does not have yet."""
    at = 0
    for chunk in chunks:
        number = len(scored_rows(chunk, chunk.length))
        if not number:
            continue
        sequence = chunk.sequence
        start = sequence.num_computed + 1
        params = sequence.params
        count = [max(params.logprobs or 0, params.prompt_logprobs or 0)] * number
        has_ranks = params.prompt_logprobs is not None
        ids = sequence.tokens[start : start + number]
        infos = token_infos(logits_MV[at : at + number], ids, count, has_ranks=has_ranks)
        sequence.prompt_infos += infos[len(sequence.prompt_infos) - start + 1 :]
        at += number


def add_token_infos(output: StepOutput, logits_SWV: Tensor) -> None:
    """Add log-probabilities for the requests that ask for them; `logits_SWV[:, w]` come before token w."""
    asking = [(i, each) for i, each in enumerate(output) if each.sequence.params.logprobs is not None and each.ids]
    if not asking:
        return
    logits_MV = torch.cat([logits_SWV[i, : len(each.ids)] for i, each in asking])
    counts = [each.sequence.params.logprobs or 0 for _, each in asking for _ in each.ids]
    infos = iter(token_infos(logits_MV, [token for _, each in asking for token in each.ids], counts))
    for _, each in asking:
        each.tokens = [next(infos) for _ in each.ids]
