"""The end of a thought by a limit of tokens: the same masks step by step, ahead of the tokens, and after a restart."""

from __future__ import annotations

import numpy as np
import pytest

from flambeau.llm.grammar.reasoning_budget import ReasoningBudget

CLOSE, END = [7, 8], 9  # 7 and 8 close a thought; 9 ends one by itself
ALL = set(range(64))


class Only:
    """A grammar that allows the numbers `first`, `first + 1` and so on, in this order, and ends after three."""

    error = ""
    has_form = True

    def __init__(self, first):
        self.first, self.num_read = first, 0

    def read_to_end(self, new_ids):
        self.num_read += len(new_ids)
        return 1 if self.num_read == 3 else None

    def masks(self, tokens, ahead, first, num_places):
        bits = np.zeros((num_places, 2), np.uint32)
        for row in range(num_places):
            token = self.first + len(tokens) + first + row
            bits[row, token // 32] = 1 << token % 32
        return bits.view(np.int32)


def budget(limit, answer=None):
    return ReasoningBudget(
        limit=limit,
        close_ids=CLOSE,
        is_thinking=lambda ids: END not in ids,
        vocab_size=64,
        reply=None,
        answer=answer,
    )


def test_only_a_form_says_where_the_text_ends():
    assert not budget(3).has_form
    assert budget(3, answer=Only(20)).has_form


def allowed(bits):
    return [{i for i in range(64) if row.view(np.uint32)[i // 32] >> i % 32 & 1} for row in bits]


def steps(grammar, ids):
    """The tokens that are allowed at each place of a text."""
    found = []
    for place in range(len(ids) + 1):
        found += allowed(grammar.masks(ids[:place], [], 0, 1))
        if place < len(ids):
            grammar.read_to_end([ids[place]])
    return found


def test_thought_is_closed_at_its_limit_and_the_answer_follows():
    text = [1, 2, 3, 7, 8, 20, 21]
    assert steps(budget(3, Only(20)), text) == [ALL, ALL, ALL, {7}, {8}, {20}, {21}, {22}]
    assert steps(budget(3), text) == [ALL, ALL, ALL, {7}, {8}, ALL, ALL, ALL]
    assert steps(budget(0, Only(20)), text[3:]) == [{7}, {8}, {20}, {21}, {22}]


def test_thought_that_has_ended_is_left_alone():
    assert steps(budget(3, Only(20)), [1, 9, 3, 4, 5]) == [ALL] * 6


def test_answer_ends_the_text():
    grammar = budget(1, Only(20))
    assert grammar.read_to_end([1, 7, 8, 20, 21]) is None
    assert grammar.read_to_end([22, 23]) == 1


@pytest.mark.parametrize("limit", range(7))
@pytest.mark.parametrize("text", [[1, 2, 3, 4, 5, 6], [1, 9, 3, 4, 5, 6]])
def test_masks_ahead_and_after_a_restart_are_those_of_each_step(limit, text):
    text = [*text[:limit], *CLOSE, *range(20, 30)] if END not in text[:limit] else text
    expected = steps(budget(limit, Only(20)), text)
    for start in range(len(text)):
        for size in range(len(text) - start + 1):
            ahead = text[start : start + size]
            resumed = budget(limit, Only(20))
            assert allowed(resumed.masks(text[:start], ahead, 0, size + 1)) == expected[start : start + size + 1]
            assert allowed(resumed.masks(text[:start], ahead, size, 1)) == [expected[start + size]]
