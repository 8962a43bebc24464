"""Masks on logits, against the plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flambeau.llm.sampling.grammar_masks import expand_bits, mask_logits


def plainly_masked(logits, bits, rows):
    found = logits.clone()
    for p, row in enumerate(rows):
        for w in range(logits.shape[1]):
            for token in range(logits.shape[2]):
                if not (int(bits[p, w, token // 32]) >> (token % 32)) & 1:
                    found[row, w, token] = -torch.inf
    return found


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 97])
@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 2]])
def test_masked_logits_are_the_plain_loops(vocab_size, rows):
    generator = np.random.default_rng(vocab_size)
    bits = generator.integers(-(2**31), 2**31, (len(rows), 2, -(-vocab_size // 32))).astype(np.int32)
    logits = torch.randn(3, 2, vocab_size)
    expected = plainly_masked(logits, bits, rows)
    logits = mask_logits(logits, bits, None if len(rows) == 3 else torch.tensor(rows))
    assert torch.equal(logits, expected)


def test_a_device_expands_words_as_the_host_does():
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 3, 4)).astype(np.int32)
    host = expand_bits(bits, 101, torch.device("cpu"))
    words = torch.from_numpy(bits)
    places = torch.arange(32, dtype=torch.int32)
    assert torch.equal(host, (words.unsqueeze(-1) >> places).bitwise_and_(1).flatten(-2)[..., :101].bool())
