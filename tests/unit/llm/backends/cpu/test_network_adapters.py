"""Adapters change all matrices of a network that the kernels compute."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.layer_changes import AdapterChanges, LayerChange
from flambeau.llm.adapters.lora_weights import AdapterTarget, LoraPart
from flambeau.llm.backends.cpu import network
from flambeau.llm.backends.cpu.lora_table import layer_names
from flambeau.llm.backends.eager import EagerBackend
from support.kernel_families import FAMILIES, model_of
from support.llm_steps import prompts, random_model, room, step_inputs

pytestmark = [
    pytest.mark.timeout(300),  # the kernels may have to be built, on a busy machine
    pytest.mark.usefixtures("loaded"),
]


def test_adapters_of_mixed_channels_are_left_to_plain_pytorch():
    names = layer_names(random_model(**FAMILIES["RWKV 4"]).arch)
    assert not any("mlp.up_proj" in name or "mlp.down_proj" in name for name in names)
    assert len(names) == len(layer_names(random_model().arch))


def adapted_layers(model) -> dict[str, tuple[int, int]]:
    """The sizes of all that adapters change in a network with experts."""
    mlp = model.model.layers[1].mlp
    found = {name: model.get_submodule(name) for name in ("lm_head", "model.layers.0.self_attn.o_proj")}
    if model.arch.latent_size:
        attention = model.model.layers[1].self_attn.named_children()
        found |= {f"model.layers.1.self_attn.{name}": one for name, one in attention if type(one) is torch.nn.Linear}
    found |= {
        f"model.layers.1.mlp.{name}": layer for name, layer in mlp.named_modules() if type(layer) is torch.nn.Linear
    }
    sizes = {name: (layer.out_features, layer.in_features) for name, layer in found.items()}
    for leaf in ("gate_up_proj", "down_proj"):
        weights = getattr(mlp.experts, leaf)
        sizes |= {f"model.layers.1.mlp.experts.{leaf}.{n}": weights.shape[1:] for n in range(len(weights))}
    return sizes


@pytest.mark.parametrize("kind", ["parts", "scaled", "matrices"])
@pytest.mark.parametrize("family", ["Mixtral", "GLM-4.5", "Qwen 2 MoE", "DeepSeek V2 Lite", "DeepSeek V3", "Llama 4"])
def test_adapters_change_every_layer(family, kind):
    model, generator = model_of(family), torch.Generator().manual_seed(4)

    def change(size_out: int, size_in: int) -> LayerChange:
        start, rank = (0, size_out) if size_out < 16 else (size_out - 12, 3 if kind != "matrices" else 12)
        a_RI, b_OR = (
            0.3 * torch.randn(size, generator=generator) for size in ((rank, size_in), (size_out - start, rank))
        )
        parts = [LoraPart(start, a_RI, None if kind == "matrices" else b_OR)]
        if kind == "parts":
            return LayerChange(parts)
        scale_O = torch.rand(size_out, generator=generator) + 0.5
        scale_O[start:] = 0.0 if kind == "matrices" else scale_O[start:]
        return LayerChange(parts, scale_O, 0.1 * torch.randn(size_out, generator=generator))

    cpu = torch.device("cpu")
    target = AdapterTarget(arch=model.arch, local=model.arch, shard=None, device=cpu, dtype=torch.float32)
    store = AdapterStore(target, model)
    layers = {name: change(*size) for name, size in adapted_layers(model).items()}
    assert len(layers) > 2 * model.arch.num_experts
    store.adapters[1] = AdapterChanges(layers=layers)
    inputs = step_inputs({i: (0, ids) for i, ids in enumerate(prompts(3))})
    rows_N = inputs.query_starts[1:] - 1
    plain = network.CpuNetwork(model, room(model, 3), store).run(inputs, rows_N)
    inputs.adapters_T = torch.tensor([1, 0, 1]).repeat_interleave(inputs.query_starts.diff())
    expected = EagerBackend(model, room(model, 3), adapters=store).prefill(inputs, rows_N)
    found = network.CpuNetwork(model, room(model, 3), store).run(inputs, rows_N)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=2e-5)
    assert torch.equal(found[1], plain[1])
    assert not torch.allclose(found[0], plain[0], atol=0.01)
    for name in layers:  # each of them has an effect
        store.adapters[1] = AdapterChanges(layers={name: layers[name]})
        alone = network.CpuNetwork(model, room(model, 3), store).run(inputs, torch.arange(len(inputs.ids_T)))
        both = EagerBackend(model, room(model, 3), adapters=store).prefill(inputs, torch.arange(len(inputs.ids_T)))
        torch.testing.assert_close(alone, both, atol=5e-5, rtol=2e-5)
