"""Row: what must be known about one sequence to choose its next token."""

from __future__ import annotations

from dataclasses import dataclass, field

from flambeau.llm.sampling import noise
from flambeau.llm.sampling_params import SamplingParams


@dataclass(slots=True, eq=False, weakref_slot=True)
class Row:
    """Lives as long as its sequence, and looks at the very list of tokens that grows there."""

    params: SamplingParams
    seed: int  # the request's own, or one made up for it
    tokens: list[int]  # the prompt, then what was generated
    num_prompt: int
    key: int = field(init=False)

    def __post_init__(self) -> None:
        self.key = noise.key(self.seed)

    @property
    def num_generated(self) -> int:
        """Tokens made so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_repeatable(self) -> bool:
        """Whether the very tokens are promised, and not their distribution alone."""
        return self.params.is_greedy or self.params.seed is not None

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that occurred count against themselves."""
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
