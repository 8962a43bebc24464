"""Where sampled tokens end a sequence."""

from __future__ import annotations

import pytest

from flambeau.llm.core.sequence import NoDetokenizer, Sequence
from flambeau.llm.core.stop_criteria import append_tokens, cut_at_end
from flambeau.llm.sampling_params import SamplingParams

EOS = 9


def sequence(max_length: int = 64, **params: object) -> Sequence:
    return Sequence(
        request_id="a",
        index=0,
        tokens=[1, 2, 3],
        num_prompt=3,
        params=SamplingParams(**params),
        seed=0,
        max_length=max_length,
        detokenizer=NoDetokenizer(),
    )


@pytest.mark.parametrize(
    ("settings", "new", "kept", "reason"),
    [
        ({}, [5, 6], [5, 6], None),
        ({}, [5, EOS, 6], [5, EOS], "stop"),
        ({"ignore_eos": True}, [5, EOS, 6], [5, EOS, 6], None),
        ({"stop_token_ids": [6]}, [5, 6, 7], [5, 6], "stop"),
        ({"min_tokens": 2}, [EOS, 5, EOS], [EOS, 5, EOS], "stop"),
        ({"max_length": 5}, [5, 6, 7], [5, 6], "length"),
        ({"max_length": 5}, [5, EOS, 7], [5, EOS], "stop"),
    ],
)
def test_tokens_after_the_end_are_dropped(settings, new, kept, reason):
    assert cut_at_end(sequence(**settings), new, {EOS}) == (kept, reason)


class StopsAfterOne(NoDetokenizer):
    def push(self, token_ids):
        self.stopped_after = 1
        return "text"


def test_a_stop_string_ends_the_sequence_where_it_is_complete():
    one = sequence()
    one.detokenizer = StopsAfterOne()
    assert append_tokens(one, [5, 6], {EOS}) == "text"
    assert (one.tokens, one.finish_reason) == ([1, 2, 3, 5], "stop")
