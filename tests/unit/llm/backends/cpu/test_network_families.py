"""The kernels give what their plain twins give, for the parts of many families."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm.backends.cpu import network
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.core.outputs import NO_TOKEN
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models import rope
from support.kernel_families import FAMILIES, RECURRENT_FAMILIES, logits_of_both, model_of
from support.llm_steps import BLOCK_SIZE, BLOCKS_EACH, greedy, prompts, room, step_inputs

pytestmark = [
    pytest.mark.timeout(300),  # the kernels may have to be built, on a busy machine
    pytest.mark.usefixtures("loaded"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_networks_of_other_families_give_the_twins_logits(family):
    model = model_of(family)
    assert network.can_compute(model, room(model, 1)), model.arch.extras
    found, expected = logits_of_both(model)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["Gemma 3", "NanoChat", "DeepSeek V3.2"])
def test_angles_of_places_without_a_table_are_computed(family, monkeypatch):
    monkeypatch.setattr(rope, "MAX_TABLE_LENGTH", 32)
    model = model_of(family)
    assert not model.rotation.has_tables
    assert network.can_compute(model, room(model, 1))
    found, expected = logits_of_both(model)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_networks_of_other_families_say_the_same_alone_and_among_others(family):
    model, asked = model_of(family), prompts(5)
    has_states = family in RECURRENT_FAMILIES
    inputs = step_inputs({i: (0, ids) for i, ids in enumerate(asked)}, has_states=has_states)
    together = network.CpuNetwork(model, room(model, 5)).run(inputs, inputs.query_starts[1:] - 1)
    for i, ids in enumerate(asked):
        alone = step_inputs({0: (0, ids)}, has_states=has_states)
        logits = network.CpuNetwork(model, room(model, 5)).run(alone, alone.query_starts[1:] - 1)
        assert torch.equal(logits[0], together[i])
    assert greedy(KernelSteps(model), asked, 8) == greedy(EagerBackend(model, room(model, 5)), asked, 8)


class KernelSteps:
    """Steps of the kernels in the form of a backend."""

    device = torch.device("cpu")

    def __init__(self, model) -> None:
        self.model = model
        self._network = network.CpuNetwork(model, room(model, 5))
        self.decode = self.prefill = self._network.run


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*(("MiniCPM 3", dtype) for dtype in (torch.bfloat16, torch.float16, torch.int8)), ("DeepSeek V3.2", torch.int8)],
)
def test_latents_in_a_narrow_cache_give_the_twins_logits(family, dtype):
    model, asked = model_of(family), prompts(4)
    caches = [KVCache(model.arch, 1 + 4 * BLOCKS_EACH, BLOCK_SIZE, dtype=dtype) for _ in range(2)]
    native, eager = network.CpuNetwork(model, caches[0]), EagerBackend(model, caches[1])
    for inputs in (
        step_inputs({i: (0, ids) for i, ids in enumerate(asked)}),
        step_inputs({i: (len(ids), [7 + i]) for i, ids in enumerate(asked)}, query_len=1),
    ):
        found, expected = native.run(inputs), eager.decode(inputs)
        assert (found - expected).norm() / expected.norm() < 1e-3  # numbers near a limit round either way
    for found, expected in zip(caches[0].tensors, caches[1].tensors, strict=True):
        assert (found != expected).float().mean() < 0.02  # the last bits of scales, too


def test_scores_of_experts_that_are_no_numbers_leave_no_token():
    model = model_of("Mixtral")
    model.model.layers[0].mlp.gate.weight[:] = torch.nan
    assert network.CpuNetwork(model, room(model, 1)).argmax(step_inputs({0: (0, [5, 6, 7])})).tolist() == [NO_TOKEN] * 3
