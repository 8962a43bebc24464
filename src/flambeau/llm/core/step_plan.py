"""StepPlan: which sequences one step computes, and how many tokens of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from flambeau.llm.core.sequence import Sequence
from flambeau.llm.core.state_slots import StateCopy


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
