"""Which cached tokens an indexer's scores choose."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from flambeau.llm.backends.sparse import best, chosen_keys
from flambeau.llm.models.indexer import Selection


@pytest.mark.parametrize("more", [0, 1, 7, 60, 700])
def test_of_equal_scores_the_first_are_chosen_whatever_else_a_step_has(more):
    """More columns are those of longer sequences beside this one, or of a larger portion of its prompt."""
    scores = torch.tensor([[0.0, 2.0, -0.0, 0.0, -1.0, 0.0, 3.0, 0.0]]).repeat(3, 1)
    mask = torch.tensor([[True] * 8, [False] * 2 + [True] * 6, [True] * 3 + [False] * 5])
    scores, mask = F.pad(scores, (0, more)), F.pad(mask, (0, more))
    found = best(scores, mask, 4) & mask
    assert [row.nonzero().flatten().tolist() for row in found] == [[0, 1, 2, 6], [2, 3, 5, 6], [0, 1, 2]]


def test_a_key_that_is_no_number_is_chosen_and_not_passed_over():
    scores = torch.tensor([[0.0, 1.0, torch.nan, 2.0]])
    assert best(scores, torch.ones(1, 4, dtype=torch.bool), 2).tolist() == [[False, False, True, True]]


def test_a_token_has_the_same_keys_in_every_portion_of_its_prompt():
    """Here all heads reject most of the keys, so that these have the same score."""
    generator = torch.Generator().manual_seed(5)
    q, k = torch.randn(24, 2, 4, generator=generator), torch.randn(24, 4, generator=generator)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    whole = chosen_keys(Selection(q, k, torch.ones(24, 2), 9), k, causal)[0]
    assert whole.sum(dim=-1).tolist() == [*range(1, 10), *[9] * 15]
    for size in (1, 5, 16):
        for start in range(0, 24, size):
            end = min(24, start + size)
            own = Selection(q[start:end], k[start:end], torch.ones(end - start, 2), 9)
            found = chosen_keys(own, k[:end], causal[start:end, :end])[0]
            assert torch.equal(found, whole[start:end, :end])
