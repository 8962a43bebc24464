"""What a step produces: sampled tokens from the executor, Output for the caller, Completion for a whole choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from flambeau.llm.core.sequence import FinishReason, Sequence

NO_TOKEN = -1  # the sampler found no finite score to choose


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token with its log-probability and the most likely alternatives (id, log-probability)."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # among all tokens, from 1: how many are at least as likely; 0: not counted


@dataclass(slots=True)
class SampledTokens:
    """The tokens that a step sampled for one sequence, before stop criteria are applied."""

    sequence: Sequence
    ids: list[int]
    tokens: list[TokenInfo] | None = None
    has_failed: bool = field(init=False)  # its logits were not finite

    def __post_init__(self) -> None:
        self.has_failed = NO_TOKEN in self.ids
        if self.has_failed:
            self.ids = self.ids[: self.ids.index(NO_TOKEN)]


StepOutput = list[SampledTokens]
"""What the executor returns for a plan: one entry for each sequence that got tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCounts:
    """Token counts of a finished sequence."""

    num_prompt: int
    num_generated: int
    num_cached: int
    num_drafted: int
    num_accepted: int
    num_preempted: int = 0
    is_first: bool = True  # of the choices with the same prompt

    @classmethod
    def of(cls, sequence: Sequence) -> SequenceCounts:
        return cls(
            num_prompt=sequence.num_prompt,
            num_generated=sequence.num_generated,
            num_cached=sequence.num_cached or 0,
            num_drafted=sequence.num_drafted,
            num_accepted=sequence.num_accepted,
            num_preempted=sequence.num_preempted,
            is_first=sequence.index == 0,
        )


@dataclass(slots=True, kw_only=True)  # not frozen: that would take longer than all else that is done for a token
class Output:
    """What a step produced for one choice of a request."""

    request_id: str
    index: int
    text: str  # complete characters only; empty while a character or a stop string is undecided
    token_ids: list[int]
    tokens: list[TokenInfo] | None = None
    prompt_tokens: list[TokenInfo] | None = None  # in the first output, where asked for: all but the prompt's first
    finish_reason: FinishReason | None = None
    stop: str = ""  # with the reason "stop": the stop string that ended the text, if one did
    error: str = ""  # with the reason "error": the cause and the remedy
    is_contradiction: bool = False  # with the reason "error": the request's settings exclude each other
    counts: SequenceCounts | None = None  # in the last output only
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Completion:
    """All outputs of one choice together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[TokenInfo] | None = None
    prompt_tokens: list[TokenInfo] | None = None
    finish_reason: FinishReason | None = None
    stop: str = ""
    error: str = ""
    is_contradiction: bool = False
    counts: SequenceCounts | None = None

    def add(self, output: Output) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        if output.tokens is not None:
            self.tokens = [*(self.tokens or []), *output.tokens]
        self.prompt_tokens = output.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens
        self.finish_reason, self.stop, self.error = output.finish_reason, output.stop, output.error
        self.is_contradiction, self.counts = output.is_contradiction, output.counts
