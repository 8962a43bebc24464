"""Scheduler: plans which sequences run in a step and how many tokens of each, and applies the step's results.

Sequences that decode come first. Then prompts follow in order of arrival, in chunks of what the step has left; a long
prompt leaves room for those behind it. An image whose tokens attend to each other is never divided between chunks. A
sequence whose prefix is copied from a store lets others pass. When blocks run out, the sequence that arrived last is
preempted: it frees its blocks and is computed again later.

Where several tenants send requests, a step has prompts or decodes, the tenant that has used the fewest tokens lately
comes first, and the steps of those that have used many more are short. A new sequence may take the place and the blocks
of theirs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from typing import Literal

from flambeau.llm.core.block_pool import BlockPool
from flambeau.llm.core.cache_allocator import CacheAllocator
from flambeau.llm.core.outputs import Output, SampledTokens, SequenceCounts, StepOutput
from flambeau.llm.core.prefix_restores import PrefixRestores
from flambeau.llm.core.sequence import Sequence
from flambeau.llm.core.state_slots import StateSlots
from flambeau.llm.core.step_limits import StepLimits, chunk_cost
from flambeau.llm.core.step_plan import Chunk, StepPlan
from flambeau.llm.core.stop_criteria import append_tokens, error_of
from flambeau.llm.core.tenant_order import (
    first_of_each_tenant,
    in_rotation,
    max_heavy_decodes,
    may_preempt,
    victims_for,
)
from flambeau.llm.core.tenant_shares import TenantShares


def ignore_removal(sequence: Sequence) -> None:
    """The default for `on_remove`."""


class Scheduler:
    """Waiting and running sequences, in order of arrival. `on_remove` is called for each that leaves for good."""

    def __init__(
        self,
        pool: BlockPool,
        limits: StepLimits,
        *,
        eos_ids: Collection[int] = (),
        on_remove: Callable[[Sequence], None] = ignore_removal,
        state_slots: StateSlots | None = None,
        restores: PrefixRestores | None = None,
        switch_length: int | None = None,
        num_recomputed_blocks: int = 0,
    ) -> None:
        """`switch_length` and `num_recomputed_blocks` are those of CacheAllocator."""
        self._limits = limits
        self._state_slots = state_slots or StateSlots()
        self._cache = CacheAllocator(
            pool,
            self._state_slots,
            restores=restores,
            switch_length=switch_length,
            num_recomputed_blocks=num_recomputed_blocks,
        )
        self._max_num_seqs = min(limits.max_num_seqs, self._state_slots.number or limits.max_num_seqs)
        self._eos_ids = eos_ids
        self._on_remove = on_remove
        self._requests: dict[str, list[Sequence]] = {}  # request id → its choices
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preempted = 0
        self._shares = TenantShares()
        self._num_plans = 0
        self._last_step: Literal["decodes", "prompts", "light prompts"] = "decodes"

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def has_request(self, request_id: str) -> bool:
        return request_id in self._requests

    def uses_adapter(self, number: int) -> bool:
        """Whether a sequence that waits or runs is computed with this adapter."""
        return any(
            sequence.adapter == number and sequence.finish_reason is None
            for choices in self._requests.values()
            for sequence in choices
        )

    # ---- requests ----

    def add(self, choices: Many[Sequence]) -> None:
        """Queue the choices of a request. Choices with the same prompt wait until the first has computed it."""
        self._requests[choices[0].request_id] = [*choices]
        self._shares.see(choices[0].tenant)
        if any(sequence.num_generated for sequence in choices):  # a resumed request: the choices differ
            self.waiting.extend(choices)
        else:
            choices[0].siblings = [*choices[1:]]
            self.waiting.append(choices[0])

    def cancel(self, request_id: str) -> None:
        """Remove a request's choices; unknown ids are ignored."""
        for sequence in self._requests.pop(request_id, []):
            self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Drop a sequence and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._cache.free(sequence)
        self._on_remove(sequence)

    # ---- before a step ----

    def plan(self, lookahead: int = 0) -> StepPlan:
        """Plan the next step, with room for `lookahead` proposed tokens per decoding sequence if blocks allow it."""
        self._num_plans += 1
        self._shares.begin_step()
        plan = StepPlan()
        self._plan_restarts(plan)
        if self._shares.is_shared:
            self._plan_shared(plan, lookahead)
        else:
            self._plan_in_order(plan, lookahead)
        if plan.lookahead and self._state_slots.number:
            for sequence in plan.decodes:
                self._state_slots.lend(sequence, plan.lookahead)
        plan.state_copies = self._state_slots.take_copies()
        return plan

    def _plan_in_order(self, plan: StepPlan, lookahead: int) -> None:
        """Decodes and prompts of one step, in order of arrival."""
        self._plan_decodes(plan, lookahead, self.running)
        self._charge_decodes(plan.decodes)
        num_decodes = len(plan.decodes)
        num_places = self._max_num_seqs - len(self.running)
        num_prompts = len(self.running) - num_decodes + min(len(self.waiting), num_places)
        room = self._limits.num_tokens(num_decodes, num_prompts)
        left = max(room - num_decodes * (1 + plan.lookahead), self._limits.min_prompt_tokens)
        prompts: list[Sequence] = []
        if num_decodes < len(self.running):
            prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        for i, sequence in enumerate(prompts, 1):
            if left > 0:
                left -= self._add_chunk(plan, sequence, left, has_others=i < len(prompts) or bool(self.waiting))
        while left > 0 and len(self.running) < self._max_num_seqs and (first := self._next_waiting()) is not None:
            if not self._cache.admit(first, self._num_spare):
                if first.is_restoring:
                    continue
                break
            left -= self._start(plan, first, left, has_others=len(self.waiting) > 1)

    def _next_waiting(self) -> Sequence | None:
        return next((sequence for sequence in self.waiting if not sequence.is_restoring), None)

    def _start(self, plan: StepPlan, sequence: Sequence, left: int, *, has_others: bool) -> int:
        """Let a sequence that has blocks run; returns what its first chunk takes of the room."""
        self.waiting.remove(sequence)
        self.running.append(sequence)
        if not sequence.num_preempted:
            self._shares.set_prompt(sequence.tenant, len(sequence.tokens) - sequence.num_computed)
        return self._add_chunk(plan, sequence, left, has_others=has_others)

    # ---- steps of several tenants ----

    def _plan_shared(self, plan: StepPlan, lookahead: int) -> None:
        """A step of prompts or one of decodes, in turns, so that each is short; both are computed apart anyway.

        The prompts of tenants that are not heavy need not wait for their turn, but never have two steps in a row.
        """
        is_decoding = any(sequence.is_decoding for sequence in self.running)
        if self._last_step != "light prompts" or not is_decoding:
            self._plan_prompts(plan, light_only=self._last_step == "prompts" and is_decoding)
        if plan.chunks:
            is_light = not any(self._shares.is_heavy(chunk.sequence.tenant) for chunk in plan.chunks)
            self._last_step = "light prompts" if is_light else "prompts"
            return
        self._last_step = "decodes"
        order = sorted(self.running, key=lambda sequence: self._shares.used(sequence.tenant))
        self._plan_decodes(plan, lookahead, order, max_heavy_decodes(order, self._shares, self._limits))
        self._charge_decodes(plan.decodes)

    def _charge_decodes(self, sequences: Many[Sequence]) -> None:
        for tenant, number in Counter(sequence.tenant for sequence in sequences).items():
            self._shares.charge(tenant, number)

    def _plan_prompts(self, plan: StepPlan, *, light_only: bool) -> None:
        """Chunks, first of the tenant that has used the fewest tokens; those that have used many more wait for it."""
        limits, shares, first, planned, may_admit = self._limits, self._shares, "", 0, True
        tried: set[Sequence] = set()
        while True:
            prompts = [each for each in self._prompts(with_waiting=may_admit) if each not in tried]
            if light_only:
                prompts = [each for each in prompts if not shares.is_heavy(each.tenant)]
            sequence = min(prompts, key=lambda each: shares.used(each.tenant), default=None)
            if sequence is None or (plan.chunks and shares.outweighs(sequence.tenant, first)):
                return
            tried.add(sequence)
            room = shares.max_tokens(sequence.tenant, limits.short_step_tokens, limits.max_step_tokens) - planned
            if room <= 0:
                continue
            if not sequence.blocks and not (
                self._make_room(plan, sequence) and self._cache.admit(sequence, self._num_spare)
            ):
                may_admit = sequence.is_restoring  # else the others wait behind it
                continue
            rivals = (each for each in prompts if each is not sequence)
            has_others = any(not shares.outweighs(each.tenant, sequence.tenant) for each in rivals)
            if sequence in self.running:
                cost = self._add_chunk(plan, sequence, room, has_others=has_others)
            else:
                cost = self._start(plan, sequence, room, has_others=has_others)
            first, planned = first or sequence.tenant, planned + cost

    def _prompts(self, *, with_waiting: bool) -> list[Sequence]:
        """The sequences whose prompt is computed, and the first of each tenant that wait."""
        prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        return prompts + first_of_each_tenant(self.waiting) if with_waiting else prompts

    def _make_room(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Preempt sequences of tenants that have used much more, until this one, which is new, could be admitted.

        False if there is no place for it. Where preempting does not help, nothing is preempted.
        """
        is_full, cache = len(self.running) >= self._max_num_seqs, self._cache
        is_new = not sequence.num_preempted and not sequence.num_generated
        if not is_new or not (is_full or self._num_spare + cache.num_needed(sequence) > cache.num_free):
            return not is_full
        planned = {chunk.sequence for chunk in plan.chunks}
        victims = victims_for(sequence.tenant, [each for each in self.running if each not in planned], self._shares)
        needed = cache.num_taken(sequence)
        if needed + self._num_spare > cache.num_free + sum(len(victim.blocks) for victim in victims):
            return not is_full
        while victims and (len(self.running) >= self._max_num_seqs or needed + self._num_spare > cache.num_free):
            self._preempt(plan, victims.pop())
        return len(self.running) < self._max_num_seqs

    def plan_next(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after one that has been started; None if that depends on the tokens of the started step.

        The sequences that the started step ends have a place in the next one too; its tokens for them are dropped.
        """
        sequences = [sequence for sequence in plan.decodes if sequence.blocks]  # those that were not cancelled
        if plan.chunks or len(sequences) < len(self.running):
            return None
        if len(self.running) < self._max_num_seqs and not all(sequence.is_restoring for sequence in self.waiting):
            return None
        if self._cache.outgrown(sequences, 1):
            return None
        if self._shares.is_shared and may_preempt(self.running, self.waiting, self._shares):
            return None
        decodes = [sequence for sequence in sequences if sequence.room > 1]
        if not decodes or not self._cache.grow_ahead(decodes):
            return None
        self._charge_decodes(decodes)
        return StepPlan(decodes=decodes)

    def _plan_restarts(self, plan: StepPlan) -> None:
        """Sequences that have grown too long for their rotary factors are computed again with others."""
        for sequence in self._cache.outgrown(self.running):
            self.running.remove(sequence)
            self._cache.free(sequence)
            self.waiting.appendleft(sequence)
            plan.preempted.append(sequence)

    def _plan_decodes(
        self, plan: StepPlan, lookahead: int, sequences: Many[Sequence], max_heavy: int | None = None
    ) -> None:
        """Add those that decode; where blocks run out, the last of all sequences are preempted."""
        order = [*sequences]
        if lookahead and not self._cache.outgrown(order, lookahead) and self._cache.has_room(lookahead, order):
            plan.lookahead = lookahead
        decoding = [sequence for sequence in order if sequence.is_decoding]
        if max_heavy is not None:
            decoding = in_rotation(decoding, lambda each: self._shares.is_heavy(each.tenant), max_heavy)
        for sequence in decoding:
            if sequence.blocks and self._reserve(sequence, plan, order):
                plan.decodes.append(sequence)
                sequence.last_decoded = self._num_plans

    def _reserve(self, sequence: Sequence, plan: StepPlan, order: list[Sequence]) -> bool:
        """Allocate the blocks it needs, preempting from the end of the order; False if it was preempted itself."""
        needed = self._cache.num_missing(sequence, plan.lookahead)
        if not needed:
            return True
        while needed > self._cache.num_free:
            victim = order.pop()
            if victim.blocks:
                self._preempt(plan, victim)
            if victim is sequence:
                return False
        self._cache.grow(sequence, needed)
        return True

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        self.num_preempted += 1
        sequence.num_preempted += 1
        self.running.remove(sequence)
        self._cache.free(sequence)
        sequence.may_restore = True
        self.waiting.appendleft(sequence)
        plan.preempted.append(sequence)

    @property
    def _num_spare(self) -> int:
        return self._cache.num_spare(len(self.running))

    def _add_chunk(self, plan: StepPlan, sequence: Sequence, room: int, *, has_others: bool) -> int:
        """Add the next chunk of a prompt; returns what it takes of the room."""
        length = self._limits.chunk_length(sequence, room, has_others=has_others)
        plan.chunks.append(Chunk(sequence, length))
        cost = chunk_cost(length, sequence.num_computed, self._limits.attention_span)
        self._shares.charge(sequence.tenant, cost)
        return cost

    # ---- after a step ----

    def update(self, plan: StepPlan, output: StepOutput) -> list[Output]:
        """Append the sampled tokens, cache full blocks, and remove the sequences that end."""
        for chunk in plan.chunks:
            if not chunk.is_last:
                self._cache.set_computed(chunk.sequence, chunk.sequence.num_computed + chunk.length)
                if chunk.sequence.num_computed in chunk.sequence.snapshot_ends:
                    self._state_slots.keep(chunk.sequence, chunk.sequence.parent)
        output = [sampled for sampled in output if sampled.sequence.blocks]  # the others have left meanwhile
        outputs = [self._append(sampled) for sampled in output]
        # A sequence with a token has a computed prompt, also if the last prompt token was planned as a decode.
        for sampled in output:
            if sampled.sequence.siblings:
                self._start_siblings(sampled.sequence)
        return outputs

    def _append(self, sampled: SampledTokens) -> Output:
        sequence, before = sampled.sequence, len(sampled.sequence.tokens)
        if sequence.spare_slots:
            self._state_slots.settle(sequence, len(sampled.ids) - 1)
        text = append_tokens(sequence, sampled.ids, self._eos_ids)
        if sampled.has_failed and sequence.finish_reason is None:
            text += sequence.detokenizer.flush()
            sequence.finish_reason = "error"
        # The last token is not in the cache: the next step computes it.
        self._cache.set_computed(sequence, len(sequence.tokens) - 1)
        reason, new_ids = sequence.finish_reason, sequence.tokens[before:]
        output = Output(
            request_id=sequence.request_id,
            index=sequence.index,
            text=text,
            token_ids=new_ids,
            tokens=sampled.tokens and sampled.tokens[: len(new_ids)],
            prompt_tokens=sequence.prompt_infos if sequence.scores_prompt and before == sequence.num_prompt else None,
            finish_reason=reason,
            stop=sequence.detokenizer.stopped_by if reason == "stop" else "",
            error=error_of(sequence) if reason == "error" else "",
            is_contradiction=reason == "error" and sequence.grammar is not None and sequence.grammar.is_contradiction,
            counts=SequenceCounts.of(sequence) if reason else None,
            seed=sequence.seed,
        )
        if reason:
            self._finish(sequence)
        return output

    def _finish(self, sequence: Sequence) -> None:
        self.remove(sequence)
        choices = self._requests.get(sequence.request_id, [])
        if all(choice.finish_reason for choice in choices):
            self._requests.pop(sequence.request_id, None)

    def _start_siblings(self, sequence: Sequence) -> None:
        """Queue the other choices first: the blocks of their prompt are cached now."""
        for sibling in sequence.siblings:
            sibling.prompt_infos = sequence.prompt_infos
        self.waiting.extendleft(reversed(sequence.siblings))
        sequence.siblings = []
