"""Prompt look-up proposes what followed the last time."""

import random

from flambeau.llm.speculation.lookup import LONGEST, SHORTEST, Lookup


def plainly(tokens: list[int], most: int) -> list[int]:
    """The same by going through all of them."""
    for size in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if tokens[start - size : start] == tokens[-size:]:
                repeated = tokens[start:]
                while len(repeated) < most:
                    repeated = repeated + repeated
                return repeated[:most]
    return []


def test_the_longest_then_latest_match_is_continued():
    tokens = [1, 2, 3, 50, 51, 9, 2, 3, 60, 61, 7, 1, 2, 3]
    assert Lookup(tokens).propose(2) == [50, 51]
    assert Lookup([*tokens, 8, 3]).propose(3) == [8, 3, 8]


def test_nothing_is_proposed_where_nothing_is_known():
    assert Lookup([1]).propose(5) == []
    assert Lookup([1, 2, 3, 4]).propose(5) == []


def test_a_text_that_repeats_itself_goes_on_repeating_itself():
    assert Lookup([4, 5, 6, 4, 5, 6]).propose(7) == [4, 5, 6, 4, 5, 6, 4]


def test_a_match_may_have_to_be_longer():
    tokens = [1, 2, 3, 4, 5, 6, 7, 50, 2, 3, 4, 5, 6, 7]
    assert Lookup(tokens).propose(2, 6) == [50, 2]
    assert Lookup(tokens).propose(2, 7) == []
    assert Lookup([3, 3, 3, 3]).propose(2, 4) == []
    assert Lookup([3, 3, 3, 3, 3]).propose(2, 4) == [3, 3]


def test_a_growing_index_is_a_new_one():
    rng = random.Random(3)
    tokens = [rng.randrange(6) for _ in range(5)]
    grown = Lookup(tokens)
    for _ in range(300):
        tokens += [rng.randrange(6) for _ in range(rng.randrange(1, 4))]
        assert grown.propose(4) == Lookup([*tokens]).propose(4) == plainly(tokens, 4)
