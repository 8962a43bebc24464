"""Slots of adapters: how their matrices lie, which products may multiply all of them, and what memory decides."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.layer_changes import AdapterChanges, LayerChange
from flambeau.llm.adapters.lora_weights import AdapterTarget, LoraPart
from flambeau.llm.backends.cuda import lora_slots, lora_steps
from flambeau.llm.backends.cuda.lora_slots import LayerShape, LoraSlots
from flambeau.llm.backends.cuda.lora_steps import LoraSteps
from support.llm_steps import random_model

CPU = torch.device("cpu")
SHAPES = {"qkv": LayerShape(2048, 96, (0, 64, 80)), "out": LayerShape(2048, 64), "small": LayerShape(64, 32, (0, 16))}


@pytest.fixture
def _on_a_gpu(monkeypatch):
    monkeypatch.setattr(lora_slots, "runs_on", lambda _: True)


def adapter_of(layer: str, shape: LayerShape, rank: int = 4) -> AdapterChanges:
    start, stop = shape.segments[-1]
    part = LoraPart(start, torch.randn(rank, shape.inputs), torch.randn(stop - start, rank))
    return AdapterChanges(layers={layer: LayerChange([part])})


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize(
    ("num_slots", "rank", "dtype", "together"),
    [
        (8, 16, torch.bfloat16, {"qkv", "out"}),
        (8, 64, torch.bfloat16, {"qkv", "out"}),
        (8, 128, torch.bfloat16, set()),  # too many ranks
        (64, 16, torch.bfloat16, set()),
        (2, 16, torch.bfloat16, set()),  # not a whole plane of inputs
        (8, 16, torch.float32, set()),
    ],
)
def test_a_comparison_has_slots_for_the_kernels_that_serve(num_slots, rank, dtype, together):
    slots = LoraSlots(SHAPES, num_slots, rank, CPU, dtype)
    own = slots.alone(adapter_of("qkv", SHAPES["qkv"]), 5)
    assert slots.together == own.together == together
    for name in SHAPES:
        assert (own.layers[name].b_OY is None) == (slots.layers[name].b_OY is None)
        assert own.layers[name].is_together == slots.layers[name].is_together == (name in together)
    assert not together or own.num_slots * rank % lora_slots.PLANE == 0
    assert own.num_slots <= max(2, 64 // rank)
    assert own.places(torch.tensor([5, 0])).tolist() == [1, 0]


@pytest.mark.usefixtures("_on_a_gpu")
def test_the_matrices_of_all_slots_lie_side_by_side():
    slots = LoraSlots(SHAPES, 8, 16, CPU, torch.bfloat16)
    adapters = {number: adapter_of("qkv", SHAPES["qkv"]) for number in (3, 4)}
    slots.update(adapters)
    layer = slots.layers["qkv"]
    expected_ON = torch.cat([layer.b_LRO[slot].T for slot in range(8)], dim=1)
    assert torch.equal(layer.b_OY, expected_ON)
    assert layer.b_OY[80:, :4].any()
    del adapters[3]
    adapters[9] = AdapterChanges(layers={})  # takes the free slot, and changes nothing
    slots.update(adapters)
    assert not layer.b_OY[:, :16].any()
    assert layer.b_OY[80:, 16:20].any()


@pytest.fixture
def steps():
    model = random_model(num_layers=1)
    arch = model.arch
    target = AdapterTarget(arch=arch, local=arch, shard=None, device=CPU, dtype=torch.float32)
    store = AdapterStore(target, model)
    shapes = lora_slots.layer_shapes(arch)
    name = next(iter(shapes))
    store.adapters[1] = adapter_of(name, shapes[name])
    return LoraSteps(store, model, CPU)


@pytest.mark.parametrize("has_memory", [True, False])
def test_slots_take_less_memory_where_there_is_little(steps, has_memory, monkeypatch, caplog):
    asked = []

    def allocate(*arguments):
        asked.append(arguments[-1])
        if arguments[-1] is None or not has_memory:
            raise torch.OutOfMemoryError("Tried to allocate 2 GiB")
        return LoraSlots(*arguments)

    monkeypatch.setattr(lora_steps, "LoraSlots", allocate)
    with caplog.at_level("INFO"):
        places_T = steps.place(torch.tensor([1, 0]))
    assert asked == [None, ()]
    if has_memory:
        assert places_T.tolist() == [1, 0]
        assert not steps.slots.together
    else:
        assert places_T is None
        assert "Tried to allocate 2 GiB" in caplog.text
