"""Masks on logits, against the plain loop."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from flambeau.llm.core.sequence import SamplingState
from flambeau.llm.sampling.grammar_masks import GrammarMasks, best_allowed, expand_bits, mask_logits
from flambeau.llm.sampling.logits_processors import argmax_tokens
from flambeau.llm.sampling_params import SamplingParams


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logit_that_is_no_number_stays_one_also_where_it_is_not_allowed(dtype):
    logits = torch.tensor([[[1.0, torch.nan, 3.0]]], dtype=dtype)
    found = mask_logits(logits, np.array([[[1]]], np.int32), None)
    assert found.isnan().tolist() == [[[False, True, False]]]
    assert found[0, 0, 2] == -torch.inf


def test_masked_logits_of_other_types_are_the_plain_loops():
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 1, 4)).astype(np.int32)
    logits = torch.randn(2, 1, 101, dtype=torch.bfloat16)
    assert torch.equal(mask_logits(logits, bits, None), plainly_masked(logits, bits, [0, 1]))


@pytest.mark.parametrize("vocab_size", [31, 32, 97, 1000])
@pytest.mark.parametrize("num_allowed", [0, 1, 5, 900, "all"])
def test_best_allowed_token_is_the_plain_loops(vocab_size, num_allowed):
    rng = np.random.default_rng(vocab_size)
    rows, num_words = [0, 2], -(-vocab_size // 32)
    if num_allowed == "all":
        bits = np.full((2, 3, num_words), -1, np.int32)
    else:
        flags = np.zeros((2, 3, num_words * 32), np.uint8)
        for each in flags.reshape(6, -1):
            each[rng.choice(vocab_size, min(num_allowed, vocab_size), replace=False)] = 1
        bits = np.packbits(flags, axis=-1, bitorder="little").view(np.int32)
    logits = torch.from_numpy(rng.integers(0, 50, (3, 3, vocab_size)).astype(np.float32))  # many are equal
    logits[0, 1] = -torch.inf
    logits[2, 2, 0] = torch.nan
    expected = argmax_tokens(mask_logits(logits, bits, torch.tensor(rows)))
    assert torch.equal(best_allowed(logits, bits, rows), expected)


def test_words_are_expanded_as_the_bits_lie_in_them():
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 3, 4)).astype(np.int32)
    flags = np.unpackbits(bits.view(np.uint8), axis=-1, count=101, bitorder="little")
    assert np.array_equal(expand_bits(bits, 101, torch.device("cpu")).numpy(), flags == 1)


class Counter:
    """A grammar that allows the token with the number of generated tokens, and that after the tokens ahead."""

    error = ""

    def __init__(self):
        self.threads = []

    def masks(self, tokens, ahead, first, num_places):
        self.threads.append(threading.current_thread().name)
        bits = np.zeros((num_places, 4), np.int32)
        for place in range(num_places):
            number = len(tokens) + first + place
            bits[place, number // 32] = 1 << number % 32
        return bits

    def fill(self, tokens, num_prompt, row):
        row[:] = self.masks(tokens[num_prompt:], (), 0, 1)[0]


def constrained(length):
    return SamplingState(SamplingParams(), 0, [0] * (3 + length), 3, grammar=Counter())


def allowed(bits):
    """The only token of each row."""
    return [int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0]) for row in bits]


def test_masks_made_beside_a_step_are_used_where_they_fit():
    masks, states = GrammarMasks(120), [constrained(5), constrained(40)]
    masks.prepare(states, None)
    masks._made.result()
    assert allowed(masks.of(states, None, 0, 1)[:, 0]) == [5, 40]
    assert len(states[0].grammar.threads) == 1
    assert states[0].grammar.threads[0].startswith("grammar-masks")
    states[0].tokens.append(0)
    assert allowed(masks.of(states, None, 0, 1)[:, 0]) == [6, 40]
    assert allowed(masks.of(states[1:], None, 0, 1)[:, 0]) == [40]
    ahead = [[1, 2], [3, 4]]
    masks.prepare(states, ahead)
    masks._made.result()
    assert [allowed(each) for each in masks.of(states, ahead, 0, 3)] == [[6, 7, 8], [40, 41, 42]]
    assert [allowed(each) for each in masks.of(states, ahead, 2, 1)] == [[8], [42]]
    assert [allowed(each) for each in masks.of(states, [[1], [2]], 0, 2)] == [[6, 7], [40, 41]]


def test_masks_are_made_at_once_where_the_thread_has_not_begun():
    masks, states, gate = GrammarMasks(120), [constrained(5)], threading.Event()
    masks.prepare([], None)
    masks._thread.submit(gate.wait, 60)  # the thread is busy
    masks.prepare(states, None)
    assert allowed(masks.of(states, None, 0, 1)[:, 0]) == [5]
    assert states[0].grammar.threads == [threading.current_thread().name]
    gate.set()


def test_rows_without_a_grammar_and_of_those_who_have_left_allow_every_token():
    masks = GrammarMasks(120)
    free = SamplingState(SamplingParams(), 0, [1, 2], 1)
    found = masks.next_of([free, constrained(7), None, constrained(0)])
    assert allowed(found[[1, 3]]) == [7, 0]
    assert (found[[0, 2]] == -1).all()
    assert (masks.next_of([free, None]) == -1).all()
    assert allowed(masks.next_of([constrained(9)])) == [9]
