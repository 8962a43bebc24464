"""StepLimits: how many sequences and tokens a step may have, and how long the next chunk of a prompt is."""

from __future__ import annotations

from dataclasses import dataclass

from flambeau.llm.core.sequence import Sequence
from flambeau.llm.core.state_slots import until_snapshot

MIN_CHUNK = 64  # tokens of a prompt that leaves room for others: attention computes fewer as slowly
MIN_BACKLOG = 16  # prompts that wait: from then on steps may be longer although sequences decode
BACKLOG_SHARE = 8  # steps are not longer where fewer prompts wait than an eighth of the sequences that decode
MAX_SCORED_TOKENS = 256  # of a prompt in one step: each has logits for the whole vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What a step may hold. A token of a prompt costs more the further behind the prompt's beginning it is."""

    max_num_seqs: int
    max_step_tokens: int
    prompt_step_tokens: int | None = None  # of a step in which no sequence decodes; None: as of others
    short_step_tokens: int = 32  # of tenants that have used much more than others
    min_late_chunk: int = 8  # tokens of a chunk far behind the beginning of a prompt
    attention_span: int | None = None  # attending to so many tokens takes as long as all else; None: unknown
    whole_prompts: bool = False  # the network cannot compute a prompt in chunks

    @property
    def min_prompt_tokens(self) -> int:
        """Prompts advance by so many tokens however many sequences decode."""
        return max(1, self.max_step_tokens // 8)

    def num_tokens(self, num_decodes: int, num_prompts: int) -> int:
        """How many tokens a step may have: more where many prompts wait for each sequence that decodes.

        Longer steps compute prompts faster, and sequences that decode wait for them. Prompts that wait for the end of
        a sequence do not count.
        """
        longest = self.prompt_step_tokens or self.max_step_tokens
        if not num_decodes:
            return longest
        if num_prompts < MIN_BACKLOG:
            return self.max_step_tokens
        return max(
            self.max_step_tokens, min(self.max_step_tokens * BACKLOG_SHARE * num_prompts // num_decodes, longest)
        )

    def chunk_length(self, sequence: Sequence, room: int, *, has_others: bool) -> int:
        """As much of a prompt as fits; one that does not fit leaves half of the room to those behind it."""
        start, span = sequence.num_computed, self.attention_span
        length = len(sequence.tokens) - start
        if not self.whole_prompts:
            if chunk_cost(length, start, span) > room:
                min_chunk = min(MIN_CHUNK, self.min_prompt_tokens)
                share = min(room, max(-(-room // 2), min_chunk)) if has_others else room
                length = min(length, max(affordable_length(share, start, span), min(share, self.min_late_chunk)))
            if sequence.needs_prompt_logits:
                length = min(length, MAX_SCORED_TOKENS)
        return with_whole_images(sequence, until_snapshot(sequence.snapshot_ends, start, length))


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
    for part in sequence.media:
        if part.is_whole and part.start < end < part.end:
            end = part.start if part.start > first else part.end
    return end - first
