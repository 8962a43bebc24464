"""Steps for the compiler to try out."""

from __future__ import annotations

import torch

from flambeau.llm.backends import inductor
from flambeau.llm.backends.eager import EagerBackend
from support.llm_steps import random_model, room


def test_dummy_inputs_touch_block_0_only():
    model = random_model()
    cache = room(model, 2)
    before = [tensor[1:].clone() for tensor in (*cache.keys, *cache.values)]
    EagerBackend(model, cache).decode(inductor.dummy_inputs(3, 2, 2, torch.device("cpu")))
    after = [tensor[1:] for tensor in (*cache.keys, *cache.values)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
