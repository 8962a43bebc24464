"""Kernels are compared with plain PyTorch in steps of every kind, in caches of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flambeau.llm.backends.cuda.comparison import LENGTHS, find_difference
from flambeau.llm.backends.cuda.parts import compared_parts
from flambeau.llm.backends.eager import EagerBackend
from support.llm_steps import random_model, room
from support.tiny_models import tiny_hybrid


class StandIn:
    """Plain PyTorch, but steps with these numbers of tokens are wrong."""

    def __init__(self, model, cache, wrong=()):
        self._plain, self._wrong, self.cache = EagerBackend(model, cache), wrong, cache

    def prefill(self, inputs, rows_N):
        return self._spoiled(self._plain.prefill(inputs, rows_N), inputs)

    def run(self, inputs):
        return self._spoiled(self._plain.decode(inputs), inputs)

    def _spoiled(self, logits, inputs):
        return logits.roll(1, 0) + 1.0 if len(inputs.ids_T) in self._wrong else logits


@pytest.mark.parametrize("max_length", [200, 40])  # longer and shorter than the prompts
def test_equal_logits_are_no_difference_and_the_cache_is_not_written(max_length):
    model = random_model(max_length=max_length)
    cache, built = room(model, 1), []
    before = [tensor.clone() for tensor in cache.tensors]

    def build(ours):
        built.append(StandIn(model, ours))
        return built[0]

    assert find_difference(model, cache, build) is None
    assert all(torch.equal(*pair) for pair in zip(before, cache.tensors, strict=True))
    written = [(tensor != 0).flatten(1).any(1) for tensor in built[0].cache.tensors]
    assert all(blocks[1:-1].all() and not blocks[0] for blocks in written)  # the first is for padding


@pytest.mark.parametrize(
    ("num_tokens", "name"),
    [(sum(LENGTHS), "prompts"), (2, "several sequences"), (1, "one sequence"), (4, "verified tokens")],
)
def test_the_step_that_differs_is_named(num_tokens, name):
    model = random_model(max_length=200)
    found = find_difference(model, room(model, 1), lambda cache: StandIn(model, cache, [num_tokens]))
    assert found is not None
    assert found.startswith(f"the logits of {name} differ by ")


def test_logits_that_are_no_numbers_are_a_difference():
    model = random_model(max_length=200)
    broken = random_model(max_length=200)
    broken.model.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    found = find_difference(model, room(model, 1), lambda cache: StandIn(broken, cache))
    assert found == "the logits of prompts differ by nan% of their norm"


class Forgetful(StandIn):
    """Plain PyTorch that loses the states of a step with so many tokens, or does not find those of a sequence new."""

    def __init__(self, model, cache, loses=(), *, is_dirty=False):
        super().__init__(model, cache)
        self._loses, self._is_dirty = loses, is_dirty

    def prefill(self, inputs, rows_N):
        if self._is_dirty:
            inputs = replace(inputs, positions_T=inputs.positions_T + 1)
        found = self._plain.prefill(inputs, rows_N)
        self._lose(inputs)
        return found

    def run(self, inputs):
        found = self._plain.decode(inputs)
        self._lose(inputs)
        return found

    def _lose(self, inputs):
        if len(inputs.ids_T) in self._loses:
            for state in (state for layer in self.cache.states.layers.values() for state in layer):
                state.zero_()


FIRST = LENGTHS[0] - 3  # tokens of the first chunk


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "short_conv", "delta_net", "joint"])
@pytest.mark.parametrize(
    ("lost", "found_in"),
    [
        ((), None),
        ((FIRST,), "prompts"),
        ((sum(LENGTHS) - FIRST - 1,), "the last chunk of a prompt"),
        ((2,), "one sequence"),
    ],
)
def test_steps_go_on_from_the_states_of_those_before(kind, lost, found_in):
    model = tiny_hybrid(kind)
    cache = room(model, 1)
    found = find_difference(model, cache, lambda ours: Forgetful(model, ours, lost))
    assert (found is None) if found_in is None else found.startswith(f"the logits of {found_in} differ by ")


def test_a_new_sequence_that_reads_what_its_slot_holds_is_a_difference():
    model = tiny_hybrid("mamba2")
    found = find_difference(model, room(model, 1), lambda ours: Forgetful(model, ours, is_dirty=True))
    assert found == "the logits of the first chunk of a prompt differ by nan% of their norm"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"qk_norm": True, "residual_scale": 0.5, "num_experts": 4, "expert_size": 8}, []),
        ({"head_size": 256}, ["head_size"]),
        ({"norm": "layer", "rotary_size": 4}, ["norm", "rotary_size"]),
    ],
)
def test_networks_whose_kernels_were_measured_are_not_compared(changes, parts):
    assert compared_parts(random_model(**changes).arch) == parts
