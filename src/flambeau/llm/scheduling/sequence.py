"""Sequence: one generation: its tokens, its blocks, and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Literal, Protocol

from flambeau.llm.sampling.rows import Row
from flambeau.llm.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "error"]


class Text(Protocol):
    """Turns tokens into text as they come."""

    stopped_after: int | None  # of the tokens pushed last: those up to the one that completed a stop string

    def push(self, token_ids: Ids[int]) -> str:
        """The text that is certain now."""

    def flush(self) -> str:
        """What was held back, at the end."""


class NoText:
    """For an engine without a tokenizer."""

    stopped_after: int | None = None

    def push(self, token_ids: Ids[int]) -> str:
        """No text."""
        return ""

    def flush(self) -> str:
        """No text."""
        return ""


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """State that changes from step to step; `num_computed` tokens have their keys and values in the cache."""

    request_id: str
    index: int  # which of the request's choices
    tokens: list[int]  # the prompt, then what was generated
    num_prompt: int
    params: SamplingParams
    seed: int
    max_length: int  # of the prompt and the text together
    text: Text
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_published: int = 0  # full blocks whose content is known to the pool
    parent: int = 0  # serial of the last one's content
    num_cached: int | None = None  # tokens of the prompt that need not be computed; None: it has not begun
    num_in_draft: int = 0  # tokens whose keys and values are in the draft's cache
    num_drafted: int = 0
    num_accepted: int = 0
    finish_reason: FinishReason | None = None
    siblings: list[Sequence] = field(default_factory=list)  # choices that begin once the prompt is computed
    row: Row = field(init=False)  # what the sampler looks at

    def __post_init__(self) -> None:
        self.row = Row(self.params, self.seed, self.tokens, self.num_prompt)

    @property
    def num_generated(self) -> int:
        """Tokens made so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether only its last token is to be computed."""
        return self.num_computed == len(self.tokens) - 1 and self.num_computed > 0

    @property
    def room(self) -> int:
        """Tokens it may still get."""
        return self.max_length - len(self.tokens)
