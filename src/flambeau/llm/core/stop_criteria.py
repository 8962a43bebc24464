"""When a sequence ends, and which of its new tokens it keeps."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Ids

from flambeau.llm.core.sequence import FinishReason, Sequence


def append_tokens(sequence: Sequence, new_ids: Ids[int], eos_ids: Collection[int]) -> str:
    """Append new tokens up to the one that ends the sequence; returns the text that is final now."""
    kept, reason = cut_at_end(sequence, new_ids, eos_ids)
    detokenizer = sequence.detokenizer
    text = detokenizer.push(kept[:-1] if reason == "stop" else kept)  # the token that ends a sequence is not text
    if detokenizer.stopped_after is not None:
        kept, reason = kept[: detokenizer.stopped_after], "stop"
    elif reason is not None:
        text += detokenizer.flush()
    sequence.tokens += kept
    sequence.finish_reason = reason
    return text


def cut_at_end(
    sequence: Sequence, new_ids: Ids[int], eos_ids: Collection[int]
) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the first that ends the sequence, and the reason."""
    params, room = sequence.params, sequence.room
    for i, token in enumerate(new_ids, 1):
        is_end = (token in eos_ids and not params.ignore_eos) or token in params.stop_token_ids
        if is_end and sequence.num_generated + i > params.min_tokens:
            return [*new_ids[:i]], "stop"
        if i >= room:
            return [*new_ids[:i]], "length"
    return [*new_ids], None
