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
from collections.abc import Callable, Collection, Hashable
from collections.abc import Sequence as Ids
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from flambeau.llm.core.block_pool import BlockPool
from flambeau.llm.core.outputs import Output, SampledTokens, SequenceCounts, StepOutput
from flambeau.llm.core.prefix_restores import PrefixRestores
from flambeau.llm.core.sequence import FinishReason, Sequence
from flambeau.llm.core.state_slots import StateCopy, StateSlots, snapshot_ends, until_snapshot
from flambeau.llm.core.tenant_shares import TenantShares

MIN_CHUNK = 64  # tokens of a prompt that leaves room for others: attention computes fewer as slowly
MIN_BACKLOG = 16  # prompts that wait: from then on steps may be longer although sequences decode
BACKLOG_SHARE = 8  # steps are not longer where fewer prompts wait than an eighth of the sequences that decode
MAX_SCORED_TOKENS = 256  # of a prompt in one step: each has logits for the whole vocabulary
NO_FINITE_LOGITS = (
    "the network's logits are no finite numbers, or the request's settings leave no token to choose; check the "
    "checkpoint and its dtype (float16 overflows where bfloat16 does not), and logit_bias"
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `length` tokens of a prompt that are not computed."""

    sequence: Sequence
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the sequence gets its next token after this chunk."""
        return self.sequence.num_computed + self.length == len(self.sequence.tokens)


@dataclass(slots=True)
class StepPlan:
    """What one step computes."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)  # their blocks were freed for others
    lookahead: int = 0  # proposed tokens that each decoding sequence has room for
    state_copies: list[StateCopy] = field(default_factory=list)  # before anything is computed, in this order

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.chunks

    @property
    def finished_prompts(self) -> list[Sequence]:
        """Sequences whose prompt is computed to the end in this step, so that they get a token too."""
        return [chunk.sequence for chunk in self.chunks if chunk.is_last]


def ignore_removal(sequence: Sequence) -> None:
    """The default for `on_remove`."""


class PrefixMatch(NamedTuple):
    """What of a sequence is in the cache."""

    reusable: list[Hashable]  # its contents that may be
    cached: list[int]  # the blocks that are
    cached_end: int  # the serial of the last of these
    shared: list[int]  # those that it uses; it computes the rest again
    parent: int  # the serial of the last of these
    num_needed: int  # further blocks


class Scheduler:
    """Waiting and running sequences, in order of arrival. `on_remove` is called for each that leaves for good."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        prompt_step_tokens: int | None = None,
        short_step_tokens: int = 32,
        min_late_chunk: int = 8,
        attention_span: int | None = None,
        eos_ids: Collection[int] = (),
        on_remove: Callable[[Sequence], None] = ignore_removal,
        whole_prompts: bool = False,
        state_slots: StateSlots | None = None,
        restores: PrefixRestores | None = None,
        switch_length: int | None = None,
        num_recomputed_blocks: int = 0,
    ) -> None:
        self._pool = pool
        self._num_recomputed = num_recomputed_blocks  # of a cached prefix, at its end
        self._whole_prompts = whole_prompts  # the network cannot compute a prompt in chunks
        self._state_slots = state_slots or StateSlots()
        self._max_num_seqs = min(max_num_seqs, self._state_slots.number or max_num_seqs)
        self._max_step_tokens = max_step_tokens
        self._prompt_step_tokens = prompt_step_tokens or max_step_tokens  # of a step in which no sequence decodes
        self._min_prompt_tokens = max(1, max_step_tokens // 8)  # prompts advance however many sequences decode
        self._short_step_tokens = min(short_step_tokens, max_step_tokens)
        self._min_late_chunk = min_late_chunk  # tokens of a chunk far behind the beginning of a prompt
        self._attention_span = attention_span  # attending to so many tokens takes as long as all else; None: unknown
        self._min_chunk = min(MIN_CHUNK, self._min_prompt_tokens)
        self._eos_ids = eos_ids
        self._on_remove = on_remove
        self._restores = restores
        self._switch_length = switch_length  # the longest sequence with the first rotary factors; None: they stay
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
        self._free(sequence)
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
        room = self._num_step_tokens(num_decodes)
        left = max(room - num_decodes * (1 + plan.lookahead), self._min_prompt_tokens)
        prompts: list[Sequence] = []
        if num_decodes < len(self.running):
            prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        for i, sequence in enumerate(prompts, 1):
            if left > 0:
                left -= self._add_chunk(plan, sequence, left, has_others=i < len(prompts) or bool(self.waiting))
        while left > 0 and len(self.running) < self._max_num_seqs and (first := self._next_waiting()) is not None:
            if not self._admit(first):
                if first.is_restoring:
                    continue
                break
            left -= self._start(plan, first, left, has_others=len(self.waiting) > 1)

    def _num_step_tokens(self, num_decodes: int) -> int:
        """How many tokens a step may have: more where many prompts wait for each sequence that decodes.

        Longer steps compute prompts faster, and sequences that decode wait for them. Prompts that wait for the end of
        a sequence do not count.
        """
        num_places = self._max_num_seqs - len(self.running)
        num_prompts = len(self.running) - num_decodes + min(len(self.waiting), num_places)
        if not num_decodes:
            return self._prompt_step_tokens
        if num_prompts < MIN_BACKLOG:
            return self._max_step_tokens
        longer = self._max_step_tokens * BACKLOG_SHARE * num_prompts // num_decodes
        return max(self._max_step_tokens, min(longer, self._prompt_step_tokens))

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
        self._plan_decodes(plan, lookahead, order, self._max_heavy_decodes(order))
        self._charge_decodes(plan.decodes)

    def _charge_decodes(self, sequences: Many[Sequence]) -> None:
        for tenant, number in Counter(sequence.tenant for sequence in sequences).items():
            self._shares.charge(tenant, number)

    def _plan_prompts(self, plan: StepPlan, *, light_only: bool) -> None:
        """Chunks, first of the tenant that has used the fewest tokens; those that have used many more wait for it."""
        shares, first, planned, may_admit = self._shares, "", 0, True
        tried: set[Sequence] = set()
        while True:
            prompts = [each for each in self._prompts(with_waiting=may_admit) if each not in tried]
            if light_only:
                prompts = [each for each in prompts if not shares.is_heavy(each.tenant)]
            sequence = min(prompts, key=lambda each: shares.used(each.tenant), default=None)
            if sequence is None or (plan.chunks and shares.outweighs(sequence.tenant, first)):
                return
            tried.add(sequence)
            room = shares.max_tokens(sequence.tenant, self._short_step_tokens, self._max_step_tokens) - planned
            if room <= 0:
                continue
            if not sequence.blocks and not (self._make_room(plan, sequence) and self._admit(sequence)):
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
        if with_waiting:
            firsts: dict[str, Sequence] = {}
            for sequence in self.waiting:
                if not sequence.is_restoring:
                    firsts.setdefault(sequence.tenant, sequence)
            prompts += firsts.values()
        return prompts

    def _max_heavy_decodes(self, sequences: Many[Sequence]) -> int | None:
        """How many sequences of heavy tenants decode in one step; None: there are none."""
        heavy = {sequence.tenant for sequence in sequences if self._shares.is_heavy(sequence.tenant)}
        limits = (self._shares.max_tokens(each, self._short_step_tokens, self._max_step_tokens) for each in heavy)
        return min(limits, default=None)

    def _make_room(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Preempt sequences of tenants that have used much more, until this one, which is new, could be admitted.

        False if there is no place for it. Where preempting does not help, nothing is preempted.
        """
        is_full = len(self.running) >= self._max_num_seqs
        is_new = not sequence.num_preempted and not sequence.num_generated
        if not is_new or not (
            is_full or self._num_spare() + self._pool.num_needed(len(sequence.tokens)) > self._pool.num_free
        ):
            return not is_full
        victims = self._victims(plan, sequence.tenant)
        match = self._match(sequence)
        needed = match.num_needed + self._pool.num_evictable(match.shared)
        if needed + self._num_spare() > self._pool.num_free + sum(len(victim.blocks) for victim in victims):
            return not is_full
        while victims and (len(self.running) >= self._max_num_seqs or needed + self._num_spare() > self._pool.num_free):
            self._preempt(plan, victims.pop())
        return len(self.running) < self._max_num_seqs

    def _may_preempt(self) -> bool:
        """Whether a sequence that waits could take the place of one that runs."""
        running = {sequence.tenant for sequence in self.running}
        waiting = {sequence.tenant for sequence in self.waiting if not sequence.is_restoring}
        return any(self._shares.outweighs(one, other) for one in running for other in waiting)

    def _victims(self, plan: StepPlan, tenant: str) -> list[Sequence]:
        """Those that may be preempted for a tenant, the first one last: of the heaviest, the one that costs least."""
        planned = {chunk.sequence for chunk in plan.chunks}
        found = [each for each in self.running if each not in planned and self._shares.outweighs(each.tenant, tenant)]
        return sorted(found, key=lambda each: (self._shares.used(each.tenant), -each.num_preempted, -each.num_computed))

    def plan_next(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after one that has been started; None if that depends on the tokens of the started step.

        The sequences that the started step ends have a place in the next one too; its tokens for them are dropped.
        """
        sequences = [sequence for sequence in plan.decodes if sequence.blocks]  # those that were not cancelled
        if plan.chunks or len(sequences) < len(self.running):
            return None
        if len(self.running) < self._max_num_seqs and not all(sequence.is_restoring for sequence in self.waiting):
            return None
        if self._switch_length is not None and any(self._outgrows(sequence, 1) for sequence in sequences):
            return None
        if self._shares.is_shared and self._may_preempt():
            return None
        decodes = [sequence for sequence in sequences if sequence.room > 1]
        size = self._pool.block_size
        full = [sequence for sequence in decodes if len(sequence.blocks) * size <= len(sequence.tokens)]
        needed = [self._pool.num_needed(len(sequence.tokens) + 1) - len(sequence.blocks) for sequence in full]
        if not decodes or sum(needed) > self._pool.num_free:
            return None
        for sequence, number in zip(full, needed, strict=True):
            sequence.blocks += self._pool.allocate(number)
        self._charge_decodes(decodes)
        return StepPlan(decodes=decodes)

    def _outgrows(self, sequence: Sequence, ahead: int = 0) -> bool:
        """Whether so many more tokens make it longer than its rotary factors allow."""
        limit = self._switch_length
        return limit is not None and not sequence.is_long and len(sequence.tokens) + ahead > limit

    def _plan_restarts(self, plan: StepPlan) -> None:
        """Sequences that have grown too long for their rotary factors are computed again with others."""
        for sequence in [*filter(self._outgrows, self.running)]:
            self.running.remove(sequence)
            self._free(sequence)
            self.waiting.appendleft(sequence)
            plan.preempted.append(sequence)

    def _has_room(self, lookahead: int, sequences: Many[Sequence]) -> bool:
        """Whether all decoding sequences can have blocks, and slots for states, for proposed tokens.

        None is preempted for those.
        """
        decoding = [sequence for sequence in sequences if sequence.is_decoding]
        if self._state_slots.number and len(decoding) * lookahead > self._state_slots.num_spare:
            return False
        return sum(self._num_missing(sequence, lookahead) for sequence in decoding) <= self._pool.num_free

    def _num_missing(self, sequence: Sequence, lookahead: int) -> int:
        """Blocks needed for the next token and the proposed ones."""
        length = len(sequence.tokens)
        if lookahead:
            length += max(0, min(lookahead, sequence.room - 1))
        return max(0, self._pool.num_needed(length) - len(sequence.blocks))

    def _plan_decodes(
        self, plan: StepPlan, lookahead: int, sequences: Many[Sequence], max_heavy: int | None = None
    ) -> None:
        """Add those that decode; where blocks run out, the last of all sequences are preempted."""
        order = [*sequences]
        outgrows = bool(lookahead) and any(self._outgrows(sequence, lookahead) for sequence in order)
        plan.lookahead = lookahead if lookahead and not outgrows and self._has_room(lookahead, order) else 0
        decoding = [sequence for sequence in order if sequence.is_decoding]
        if max_heavy is not None:
            decoding = in_rotation(decoding, lambda each: self._shares.is_heavy(each.tenant), max_heavy)
        for sequence in decoding:
            if sequence.blocks and self._reserve(sequence, plan, order):
                plan.decodes.append(sequence)
                sequence.last_decoded = self._num_plans

    def _reserve(self, sequence: Sequence, plan: StepPlan, order: list[Sequence]) -> bool:
        """Allocate the blocks it needs, preempting from the end of the order; False if it was preempted itself."""
        needed = self._num_missing(sequence, plan.lookahead)
        if not needed:
            return True
        while needed > self._pool.num_free:
            victim = order.pop()
            if victim.blocks:
                self._preempt(plan, victim)
            if victim is sequence:
                return False
        sequence.blocks += self._pool.allocate(needed)
        return True

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        self.num_preempted += 1
        sequence.num_preempted += 1
        self.running.remove(sequence)
        self._free(sequence)
        sequence.may_restore = True
        self.waiting.appendleft(sequence)
        plan.preempted.append(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._pool.free(sequence.blocks)
        self._state_slots.free(sequence)
        sequence.blocks = []
        sequence.num_computed = sequence.num_cached_blocks = sequence.num_in_draft = 0
        sequence.parent = sequence.root

    def _num_spare(self) -> int:
        """One spare block per running sequence, so that the next step does not preempt the newcomer."""
        return min(len(self.running), self._pool.num_blocks // 16)

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """What of its tokens is cached, for a sequence that waits."""
        sequence.is_long = self._switch_length is not None and len(sequence.tokens) > self._switch_length
        # The last token is always computed, even if all blocks are cached: its logits are needed.
        reusable = [] if sequence.needs_prompt_logits else sequence.contents(0, len(sequence.tokens) - 1)
        cached, serials = self._pool.match_prefix(reusable, sequence.root)
        num_shared = max(0, len(cached) - self._num_recomputed)
        if self._state_slots.number:
            num_shared = self._state_slots.num_restorable(serials)
        ends = [sequence.root, *serials]
        num_needed = self._pool.num_needed(len(sequence.tokens)) - num_shared
        return PrefixMatch(reusable, cached, ends[-1], cached[:num_shared], ends[num_shared], num_needed)

    def _admit(self, sequence: Sequence) -> bool:
        """Give it blocks for all its tokens, cached ones where the prefix matches.

        False if too few are free, or if its prefix is copied to blocks first.
        """
        if self._num_spare() + 1 > self._pool.num_free:  # it needs at least one: skip the prefix lookup
            return False
        match = self._match(sequence)
        shared, needed = match.shared, match.num_needed
        if needed + self._num_spare() > self._pool.num_free - self._pool.num_evictable(shared):
            return False
        if self._restores is not None and sequence.may_restore:
            sequence.restore, is_own = self._restores.find(match.reusable, match.cached, match.cached_end)
            if sequence.restore is not None:
                sequence.may_restore = not is_own
                return False
        self._pool.share(shared)
        sequence.blocks = shared + self._pool.allocate(needed)
        self._state_slots.allocate(sequence, match.parent if shared else None)
        sequence.num_cached_blocks, sequence.parent = len(shared), match.parent
        sequence.num_computed = len(shared) * self._pool.block_size
        if self._state_slots.number and self._pool.has_prefix_cache:
            size = self._pool.block_size
            ends = snapshot_ends(len(sequence.tokens), sequence.num_computed, len(match.cached) * size, size)
            sequence.snapshot_ends = ends
        if sequence.num_cached is None:  # recomputed tokens after a preemption do not count as prefix-cache hits
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        return True

    def _add_chunk(self, plan: StepPlan, sequence: Sequence, left: int, *, has_others: bool) -> int:
        """Add as much of a prompt as fits; one that does not fit leaves half of the room to those behind it.

        Returns what it takes of the room.
        """
        length, start, span = len(sequence.tokens) - sequence.num_computed, sequence.num_computed, self._attention_span
        if chunk_cost(length, start, span) > left and not self._whole_prompts:
            room = min(left, max(-(-left // 2), self._min_chunk)) if has_others else left
            length = min(length, max(affordable_length(room, start, span), min(room, self._min_late_chunk)))
        if sequence.needs_prompt_logits and not self._whole_prompts:
            length = min(length, MAX_SCORED_TOKENS)
        length = until_snapshot(sequence.snapshot_ends, start, length)
        length = with_whole_images(sequence, length)
        plan.chunks.append(Chunk(sequence, length))
        cost = chunk_cost(length, start, span)
        self._shares.charge(sequence.tenant, cost)
        return cost

    # ---- after a step ----

    def update(self, plan: StepPlan, output: StepOutput) -> list[Output]:
        """Append the sampled tokens, cache full blocks, and remove the sequences that end."""
        for chunk in plan.chunks:
            if not chunk.is_last:
                self._set_computed(chunk.sequence, chunk.sequence.num_computed + chunk.length)
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
        self._state_slots.settle(sequence, len(sampled.ids) - 1)
        text = append_tokens(sequence, sampled.ids, self._eos_ids)
        if sampled.has_failed and sequence.finish_reason is None:
            text += sequence.detokenizer.flush()
            sequence.finish_reason = "error"
        # The last token is not in the cache: the next step computes it.
        self._set_computed(sequence, len(sequence.tokens) - 1)
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

    def _set_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The keys and values of the first `num_tokens` are in the cache; full blocks can be shared from now on."""
        sequence.num_computed = num_tokens
        size = self._pool.block_size
        while (sequence.num_cached_blocks + 1) * size <= num_tokens:
            start = sequence.num_cached_blocks * size
            block = sequence.blocks[sequence.num_cached_blocks]
            sequence.parent = self._pool.cache_block(block, sequence.parent, sequence.contents(start, start + size))
            sequence.num_cached_blocks += 1


def chunk_cost(length: int, start: int, span: int | None) -> int:
    """How many tokens at the beginning of a prompt are computed in the time of these, which attend to all before."""
    return length if span is None else length + length * start // span


def affordable_length(room: int, start: int, span: int | None) -> int:
    """The longest chunk from `start` on that costs no more than the room."""
    return room if span is None else room * span // (span + start)


def with_whole_images(sequence: Sequence, length: int) -> int:
    """The length of a chunk that ends within no image whose tokens must be computed together.

    It ends before such an image, or else after it, however long that is.
    """
    first = sequence.num_computed
    end = first + length
    for image in sequence.images:
        if image.is_whole and image.start < end < image.end:
            end = image.start if image.start > first else image.end
    return end - first


def in_rotation(sequences: Many[Sequence], is_limited: Callable[[Sequence], bool], most: int) -> list[Sequence]:
    """All that are not limited, and of the others the `most` that have waited longest, in the given order."""
    limited = [sequence for sequence in sequences if is_limited(sequence)]
    if len(limited) <= most:
        return [*sequences]
    left_out = {*sorted(limited, key=lambda sequence: sequence.last_decoded)[most:]}
    return [sequence for sequence in sequences if sequence not in left_out]


def append_tokens(sequence: Sequence, new_ids: Ids[int], eos_ids: Collection[int]) -> str:
    """Append new tokens up to the one that ends the sequence; returns the text that is final now."""
    kept, reason = cut_at_end(sequence, new_ids, eos_ids)
    detokenizer = sequence.detokenizer
    length = sequence.grammar.read_to_end(kept) if sequence.grammar is not None else None
    if length is not None:  # the end token that must follow needs no forward pass
        kept, reason = kept[:length], "stop"
    is_text = reason != "stop" or length is not None  # a token that ends a sequence by itself is not text
    text = detokenizer.push(kept if is_text else kept[:-1])
    if detokenizer.stopped_after is not None:
        kept, reason = kept[: detokenizer.stopped_after], "stop"
    elif reason is not None:
        text += detokenizer.flush()
    sequence.tokens += kept
    sequence.finish_reason = reason
    return text


def error_of(sequence: Sequence) -> str:
    return (sequence.grammar.error if sequence.grammar else "") or NO_FINITE_LOGITS


def cut_at_end(
    sequence: Sequence, new_ids: Ids[int], eos_ids: Collection[int]
) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the first that ends the sequence, and the reason."""
    params, room, stop_ids = sequence.params, sequence.room, sequence.params.stop_token_ids
    for i, token in enumerate(new_ids, 1):
        # A grammar leaves the end token, if it is to be ignored, only where nothing else may follow.
        is_end = (token in eos_ids and (not params.ignore_eos or sequence.grammar is not None)) or token in stop_ids
        if is_end and sequence.num_generated + i > params.min_tokens:
            return [*new_ids[:i]], "stop"
        if i >= room:
            return [*new_ids[:i]], "length"
    return [*new_ids], None
