"""Sequence: one generation with its tokens and blocks; SamplingState: the part of it that the sampler reads."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from flambeau.llm.core.prefix_restores import PrefixRestore
from flambeau.llm.media_kinds import MediaKind
from flambeau.llm.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "error"]

_WORD = 2**64
_KEY_INCREMENT = 0x1E3779B97F4A7C15
_KEY_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xBF58476D1CE4E5B9)


class IncrementalDetokenizer(Protocol):
    """Turns tokens into text as they are generated."""

    # How many of the tokens pushed last belong to the text; None while no stop string is complete.
    stopped_after: int | None
    stopped_by: str  # the stop string that ended the text; empty: none did

    def push(self, token_ids: Ids[int]) -> str:
        """Return the text that is final now."""

    def flush(self) -> str:
        """Return the text that was held back, at the end."""


class NoDetokenizer:
    """For an engine without a tokenizer: the text is empty."""

    stopped_after: int | None = None
    stopped_by = ""

    def push(self, token_ids: Ids[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class TokenGrammar(Protocol):
    """The tokens that may follow the text of one sequence, which it reads as it grows."""

    @property
    def has_form(self) -> bool:
        """Whether it says where the text ends; else the end token is one like others to it."""

    @property
    def error(self) -> str:
        """Why it cannot go on; empty: it can."""

    @property
    def is_contradiction(self) -> bool:
        """Whether the error is that the request's own settings exclude each other."""

    def read_to_end(self, new_ids: Ids[int]) -> int | None:
        """Read the next generated tokens up to the one after which only the end may follow, and return their number.

        None if more may follow, or if the end is among the tokens.
        """

    def masks(self, tokens: Ids[int], ahead: Ids[int], first: int, num_places: int) -> Any:
        """Bits [W, words] of the tokens allowed after the generated tokens and `first`, `first + 1` … of those ahead.

        Bit i of word j stands for token 32 * j + i. Behind a token that is not allowed, all are.
        """

    def fill(self, tokens: Ids[int], num_prompt: int, row: Any) -> None:
        """Write the bits of the tokens allowed after all of these, which begin with a prompt, into `row`."""


class RepeatPenalty(Protocol):
    """What makes a sequence less likely to repeat itself, beside the penalties for single tokens."""

    def places(self, tokens: Ids[int], ahead: Ids[int], num_places: int) -> Iterable[tuple[Any, Any]]:
        """Arrays of tokens and of what is subtracted from their logits, at the last places of the text.

        These come after all tokens and after each of the last ones ahead.
        """


@dataclass(slots=True, eq=False, weakref_slot=True)
class SamplingState:
    """What the sampler reads of one sequence. `tokens` is the sequence's own list, so it grows with it."""

    params: SamplingParams
    seed: int  # the request's own, or a random one
    tokens: list[int]  # the prompt, then the generated tokens
    num_prompt: int
    grammar: TokenGrammar | None = None
    repeats: RepeatPenalty | None = None
    key: int = field(init=False)  # where the seed's random numbers begin

    def __post_init__(self) -> None:
        self.key = seed_key(self.seed)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_repeatable(self) -> bool:
        """Whether the exact tokens are promised, and not only their distribution."""
        return self.params.is_greedy or self.params.seed is not None

    @property
    def has_penalties(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, eq=False)
class EncodedMedia:
    """The embeddings of a file; the digest tells its content, and how a video is sampled, from others."""

    digest: bytes
    features: Any  # [tokens, hidden size], on the host
    grid: tuple[int, int] | None = None  # rows and columns of its tokens, where these are the positions that rotate
    kind: MediaKind = "image"
    times: tuple[int, ...] = (0,)  # of a video with a grid: what the first position of each step adds
    num_places: int = 1  # of a video: spans of as many tokens each, with texts between them


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """A file in the tokens of a prompt, or a part of one with other tokens around it."""

    start: int
    end: int
    encoded: EncodedMedia
    is_whole: bool = True  # its tokens attend to each other in both directions, so one step computes them all
    first: int = 0  # which of its embeddings is that of the first token

    @property
    def num_saved(self) -> int:
        """How many fewer positions it takes than tokens, which have a time, a row and a column each.

        Less than zero for a video of few tokens whose steps are far apart in time.
        """
        if self.encoded.grid is None:
            return 0
        return self.end - self.start - max(*self.encoded.grid, self.encoded.times[-1] + 1)


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of a request. The keys and values of its first `num_computed` tokens are in the cache."""

    request_id: str
    index: int  # which of the request's choices
    tokens: list[int]  # the prompt, then the generated tokens
    num_prompt: int
    params: SamplingParams
    seed: int
    max_length: int  # prompt and generated tokens together
    detokenizer: IncrementalDetokenizer
    grammar: TokenGrammar | None = None
    repeats: RepeatPenalty | None = None
    adapter: int = field(default=0, init=False)  # the number of the adapter that it is computed with; 0: none
    media: tuple[PromptMedia, ...] = ()  # in the order of the prompt
    tenant: str = ""  # whose request it is; tenants take turns
    cache_salt: str = ""  # only sequences with the same one share the prefix cache
    scores_prompt: bool = False  # log-probabilities of the prompt's tokens are asked for, as of the generated ones
    prompt_infos: list[Any] = field(default_factory=list)  # of the prompt's tokens but the first, as computed so far
    num_computed: int = 0
    is_long: bool = False  # it is computed with the rotary factors of long sequences (longrope)
    blocks: list[int] = field(default_factory=list)
    state_slot: int = 0  # where the states of its recurrent layers are; 0: nowhere
    spare_slots: list[int] = field(default_factory=list)  # for the states after proposed tokens, during one step
    snapshot_ends: tuple[int, ...] = ()  # numbers of computed tokens after which these states are kept for others
    num_cached_blocks: int = 0  # full blocks in the prefix cache
    parent: int = 0  # serial of the last cached block's content
    num_cached: int | None = None  # prompt tokens found in the prefix cache; None: not started yet
    num_in_draft: int = 0  # tokens whose keys and values are in the draft model's cache
    num_drafted: int = 0
    num_accepted: int = 0
    num_preempted: int = 0
    last_decoded: int = 0  # the number of the plan in which it decoded last
    finish_reason: FinishReason | None = None
    restore: PrefixRestore | None = None  # the copy of its prefix that it waits for, or has waited for
    may_restore: bool = True  # once between two preemptions
    siblings: list[Sequence] = field(default_factory=list)  # choices that start once the prompt is computed
    sampling: SamplingState = field(init=False)

    def __post_init__(self) -> None:
        self.sampling = SamplingState(self.params, self.seed, self.tokens, self.num_prompt, self.grammar, self.repeats)

    def use_adapter(self, number: int) -> None:
        """Compute it with an adapter; before its first step."""
        self.adapter = number
        self.parent = self.root

    @property
    def root(self) -> int:
        """What comes before its first block: keys and values depend on the adapter, so each has its own prefixes."""
        return -self.adapter

    def contents(self, start: int, end: int) -> list[Hashable]:
        """What tells the keys and values of these tokens from others: their ids, or which part of which file.

        The first one of a long sequence is negative, as its rotary positions differ from those of short ones. So do
        those of sequences whose images and videos save positions (see image_positions.py), and of each cache salt.
        """
        found: list[Hashable] = [*self.tokens[start:end]]
        for part in self.media:
            for place in range(max(start, part.start), min(end, part.end)):
                found[place - start] = (part.encoded.digest, place - part.start + part.first)
        if self.is_long and start == 0 and found:
            found[0] = -1 - self.tokens[0]
        if start == 0 and found and (num_saved := sum(part.num_saved for part in self.media)):
            found[0] = (found[0], num_saved)
        if start == 0 and found and self.cache_salt:
            found[0] = (found[0], self.cache_salt)
        return found

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def is_decoding(self) -> bool:
        """Whether only the last token is left to compute."""
        return self.num_computed == len(self.tokens) - 1 and self.num_computed > 0

    @property
    def is_restoring(self) -> bool:
        """Whether its prefix is being copied to blocks."""
        return self.restore is not None and not self.restore.is_over

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether its prompt must be computed even where it is cached."""
        return self.scores_prompt and len(self.prompt_infos) < self.num_prompt - 1

    @property
    def room(self) -> int:
        """How many more tokens it may get."""
        return self.max_length - len(self.tokens)


def seed_key(seed: int) -> int:
    """The start of a seed's counters, as a signed 64-bit word (see sampling/rng.py)."""
    word = (seed + _KEY_INCREMENT) % _WORD
    for factor in _KEY_FACTORS:
        word ^= word >> 31
        word = word * factor % _WORD
    word ^= word >> 29
    return word - _WORD if word >= _WORD // 2 else word
