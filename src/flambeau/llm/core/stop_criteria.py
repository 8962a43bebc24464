"""Stop criteria: where the tokens that a step has sampled end a sequence, and why."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Ids

from flambeau.llm.core.sequence import FinishReason, Sequence
from flambeau.llm.sampling_params import SamplingParams

NO_FINITE_LOGITS = (
    "the network's logits are no finite numbers, or the request's settings leave no token to choose; check the "
    "checkpoint and its dtype (float16 overflows where bfloat16 does not), and logit_bias"
)


def append_tokens(sequence: Sequence, new_ids: Ids[int], eos_ids: Collection[int]) -> str:
    """Append new tokens up to the one that ends the sequence; returns the text that is final now."""
    kept, reason = cut_at_end(sequence, new_ids, eos_ids)
    detokenizer = sequence.detokenizer
    length = sequence.grammar.read_to_end(kept) if sequence.grammar is not None else None
    if length is not None:  # the end token that must follow needs no forward pass
        kept, reason = kept[:length], "stop"
    # A token that ends a sequence by itself is not text, unless its name is asked for.
    is_text = reason != "stop" or length is not None or shows_end(sequence.params)
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
        is_end = (token in eos_ids and (not params.ignore_eos or has_form(sequence))) or token in stop_ids
        if is_end and sequence.num_generated + i > params.min_tokens:
            return [*new_ids[:i]], "stop"
        if i >= room:
            return [*new_ids[:i]], "length"
    return [*new_ids], None


def has_form(sequence: Sequence) -> bool:
    """Whether a grammar leaves the end token, if it is to be ignored, only where nothing else may follow."""
    return sequence.grammar is not None and sequence.grammar.has_form


def shows_end(params: SamplingParams) -> bool:
    return params.include_stop and not params.skip_special_tokens
