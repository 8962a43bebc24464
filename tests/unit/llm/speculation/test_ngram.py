"""Prompt look-up proposes what followed the last time."""

import random

from flambeau.llm.speculation.ngram import MAX_MATCH, MIN_MATCH, NgramIndex


def plainly(tokens: list[int], most: int) -> list[int]:
    """The same by going through all of them."""
    for size in range(min(MAX_MATCH, len(tokens) - 1), MIN_MATCH - 1, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                repeated = tokens[start:]
                while len(repeated) < most:
                    repeated = repeated + repeated
                return repeated[:most]
    return []


def test_the_longest_then_latest_match_is_continued():
    tokens = [1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 7, 1, 2, 3]
    assert NgramIndex(tokens).propose(2) == [50, 51]
    assert NgramIndex([*tokens, 8, 3]).propose(3) == [8, 3, 8]


def test_nothing_is_proposed_where_nothing_is_known():
    assert NgramIndex([1]).propose(5) == []
    assert NgramIndex([1, 2, 3, 4]).propose(5) == []


def test_a_text_that_repeats_itself_goes_on_repeating_itself():
    assert NgramIndex([4, 5, 6, 4, 5, 6]).propose(7) == [4, 5, 6, 4, 5, 6, 4]


def test_a_match_may_have_to_be_longer():
    tokens = [1, 2, 3, 4, 5, 6, 7, 50, 2, 3, 4, 5, 6, 7]
    assert NgramIndex(tokens).propose(2, 6) == [50, 2]
    assert NgramIndex(tokens).propose(2, 7) == []
    assert NgramIndex([3, 3, 3, 3]).propose(2, 4) == []
    assert NgramIndex([3, 3, 3, 3, 3]).propose(2, 4) == [3, 3]


def test_a_growing_index_is_a_new_one():
    rng = random.Random(3)
    tokens = [rng.randrange(6) for _ in range(5)]
    grown = NgramIndex(tokens)
    for _ in range(300):
        tokens += [rng.randrange(6) for _ in range(rng.randrange(1, 4))]
        assert grown.propose(4) == NgramIndex([*tokens]).propose(4) == plainly(tokens, 4)
