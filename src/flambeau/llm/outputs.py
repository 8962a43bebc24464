"""Output and Completion: what a step has made for a sequence, and all of it together."""

from __future__ import annotations

from dataclasses import dataclass, field

from flambeau.llm.scheduling.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token with its log-probability and the likeliest alternatives (id, log-probability)."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much a sequence took."""

    num_prompt: int
    num_generated: int
    num_cached: int
    num_drafted: int
    num_accepted: int

    @classmethod
    def of(cls, sequence: Sequence) -> Counts:
        """The counts of a sequence as it is now."""
        return cls(
            num_prompt=sequence.num_prompt,
            num_generated=sequence.num_generated,
            num_cached=sequence.num_cached or 0,
            num_drafted=sequence.num_drafted,
            num_accepted=sequence.num_accepted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a step has made for one choice of a request."""

    request_id: str
    index: int
    text: str  # complete characters only; may be empty while a character or a stop string is not decided
    token_ids: list[int]
    tokens: list[TokenInfo] | None = None
    finish_reason: FinishReason | None = None
    error: str = ""  # where the reason is "error": what happened, and the remedy
    counts: Counts | None = None  # in the last one
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Completion:
    """One choice, whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenInfo] | None = None
    finish_reason: FinishReason | None = None
    error: str = ""
    counts: Counts | None = None

    def add(self, output: Output) -> None:
        """Append what a step has made."""
        self.text += output.text
        self.token_ids += output.token_ids
        if output.tokens is not None:
            self.tokens = [*(self.tokens or []), *output.tokens]
        self.finish_reason, self.error = output.finish_reason, output.error
        self.counts = output.counts
