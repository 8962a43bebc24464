"""Scheduler: who runs this step, and how many tokens of it; without tensors.

First everybody who has a token to add, then prompts in the order they came, in chunks of what the step has left; a long
one leaves room to those behind it.
Where blocks run out, the one who came last gives its own back and begins again later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from flambeau.llm.scheduling.blocks import BlockPool
from flambeau.llm.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """So many tokens of a prompt, beginning with the first that is not computed."""

    sequence: Sequence
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the sequence gets its next token after this."""
        return self.sequence.num_computed + self.length == len(self.sequence.tokens)


@dataclass(slots=True)
class Plan:
    """What one step computes."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)  # gave their blocks to others
    lookahead: int = 0  # proposed tokens that each sequence which decodes has room for

    @property
    def finished_prompts(self) -> list[Sequence]:
        """Sequences whose prompt is computed to the end, and which get a token too."""
        return [chunk.sequence for chunk in self.chunks if chunk.is_last]


class Scheduler:
    """Sequences that wait and sequences that run, in the order they came."""

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_step_tokens: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._least_prompt_tokens = max(1, max_step_tokens // 8)  # however many decode, prompts go on
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preempted = 0

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Let it wait for its turn."""
        self.waiting.append(sequence)

    def add_first(self, sequences: Iterable[Sequence]) -> None:
        """Let these run before all others that wait."""
        self.waiting.extendleft(reversed([*sequences]))

    def remove(self, sequence: Sequence) -> None:
        """It is over: its blocks are free from now on."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._free(sequence)

    def plan(self, lookahead: int = 0) -> Plan:
        """The next step; each sequence that decodes gets room for so many drafted tokens too, where there is any."""
        if lookahead and not self._has_room(lookahead):
            lookahead = 0
        plan = Plan(lookahead=lookahead)
        self._plan_decodes(plan, lookahead)
        left = max(self._max_step_tokens - len(plan.decodes) * (1 + lookahead), self._least_prompt_tokens)
        prompts: list[Sequence] = []
        if len(plan.decodes) < len(self.running):
            prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        for i, sequence in enumerate(prompts, 1):
            if left > 0:
                left -= self._add_chunk(plan, sequence, left, has_others=i < len(prompts) or bool(self.waiting))
        while left > 0 and self.waiting and len(self.running) < self._max_num_seqs and self._admit(self.waiting[0]):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            left -= self._add_chunk(plan, sequence, left, has_others=bool(self.waiting))
        return plan

    def _has_room(self, lookahead: int) -> bool:
        """Whether all who decode can have blocks for drafted tokens; nobody has to give way for those."""
        decoding = (sequence for sequence in self.running if sequence.is_decoding)
        return sum(self._num_missing(sequence, lookahead) for sequence in decoding) <= self._pool.num_free

    def _num_missing(self, sequence: Sequence, lookahead: int) -> int:
        """Blocks that it needs for its next token and the drafted ones."""
        length = len(sequence.tokens)
        if lookahead:
            length += max(0, min(lookahead, sequence.room - 1))
        return max(0, self._pool.num_needed(length) - len(sequence.blocks))

    def _plan_decodes(self, plan: Plan, lookahead: int) -> None:
        for sequence in [*self.running]:
            if sequence.blocks and sequence.is_decoding and self._reserve(sequence, lookahead, plan):
                plan.decodes.append(sequence)

    def _reserve(self, sequence: Sequence, lookahead: int, plan: Plan) -> bool:
        """Give it the blocks that it needs; those who came later make room, or it has to wait itself."""
        needed = self._num_missing(sequence, lookahead)
        if not needed:
            return True
        while needed > self._pool.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._pool.take(needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_published = sequence.parent = sequence.num_in_draft = 0

    def _admit(self, sequence: Sequence) -> bool:
        """Give it blocks for all its tokens, shared ones where others began the same way; False: not enough."""
        # One block for each that runs, so that the newcomer is not thrown out again by the next step.
        spare = min(len(self.running), self._pool.num_blocks // 16)
        if spare + 1 > self._pool.num_free:  # it needs one at least: no need to look, step after step, for what is kept
            return False
        # The last token has to be computed even if all its blocks are known: what follows it is wanted.
        shared, parent = self._pool.find_prefix(sequence.tokens[:-1])
        needed = self._pool.num_needed(len(sequence.tokens)) - len(shared)
        if needed + spare > self._pool.num_free - self._pool.num_kept(shared):
            return False
        self._pool.share(shared)
        sequence.blocks = shared + self._pool.take(needed)
        sequence.num_published, sequence.parent = len(shared), parent
        sequence.num_computed = len(shared) * self._pool.block_size
        if sequence.num_cached is None:  # what it computes again after a preemption was no gift
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        return True

    def _add_chunk(self, plan: Plan, sequence: Sequence, left: int, *, has_others: bool) -> int:
        """As much of a prompt as fits; one that does not fit leaves half of the room to those behind it."""
        length = len(sequence.tokens) - sequence.num_computed
        if length > left:
            length = -(-left // 2) if has_others else left
        plan.chunks.append(Chunk(sequence, length))
        return length

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The keys and values of so many tokens are in the cache; full blocks may be shared from now on."""
        sequence.num_computed = num_tokens
        size = self._pool.block_size
        while (sequence.num_published + 1) * size <= num_tokens:
            start = sequence.num_published * size
            block = sequence.blocks[sequence.num_published]
            sequence.parent = self._pool.publish(block, sequence.parent, sequence.tokens[start : start + size])
            sequence.num_published += 1
