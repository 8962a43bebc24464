"""When logits of two ways count as the same."""

from __future__ import annotations

import torch

from flambeau.llm.backends.hugging_face.checks import LENGTH, PAGED_TURNS, TURNS, TURNS_IN_CHUNKS, agrees, kinds_of_rows

LOGITS = torch.randn(24, 50, generator=torch.Generator().manual_seed(0))
LENGTHS = (20, 1, 1, 1, 1)


def with_noise(part, first=0):
    noise = torch.randn(24, 50, generator=torch.Generator().manual_seed(1)) * part
    noise[:first] = 0
    return LOGITS + noise


def test_rounding_is_no_difference():
    assert agrees(with_noise(1e-5), LOGITS, torch.float32)
    assert not agrees(with_noise(1e-2), LOGITS, torch.float32)
    assert agrees(with_noise(1e-2), LOGITS, torch.bfloat16)


def test_a_difference_in_the_last_rows_is_found_in_half_precision_too():
    assert agrees(with_noise(0.5, first=20), LOGITS, torch.bfloat16)  # as if one kind of chunk had computed all
    assert not agrees(with_noise(0.5, first=20), LOGITS, torch.bfloat16, LENGTHS)


def test_a_constant_is_no_difference_but_what_is_not_finite_is():
    assert agrees(LOGITS + 7.0, LOGITS, torch.float32)
    assert not agrees(LOGITS * torch.nan, LOGITS, torch.float32)
    assert not agrees(LOGITS[:3], LOGITS, torch.float32)


def test_turns_compute_every_token_once():
    assert kinds_of_rows((2, 3, 0, 1)) == [0, 0, 1, 1, 1, 2]
    for turns in (PAGED_TURNS, TURNS, TURNS_IN_CHUNKS):
        assert [sum(lengths) for lengths in zip(*turns, strict=True)] == [LENGTH, LENGTH]
