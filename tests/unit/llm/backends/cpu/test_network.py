"""The kernels give what their plain twins give."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.layer_changes import AdapterChanges, LayerChange
from flambeau.llm.adapters.lora_weights import AdapterTarget, LoraPart
from flambeau.llm.backends.cpu import network
from flambeau.llm.backends.cpu.packed_experts import PackedStack, pack_experts
from flambeau.llm.backends.cpu.packed_linear import pack_layers
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.core.outputs import NO_TOKEN
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models import rope
from flambeau.llm.models.families.indexer_shape import IndexerShape
from flambeau.llm.models.families.layer_sizes import LayerSizes
from flambeau.llm.models.families.recurrence import Recurrence
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.quantizer import ExpertStack, quantize
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from flambeau.llm.sampling.logits_processors import argmax_tokens
from support.cpu_kernels import need_cpu_kernels
from support.llm_steps import BLOCK_SIZE, BLOCKS_EACH, greedy, prompts, random_model, room, step_inputs


@pytest.fixture(scope="module")
def loaded() -> None:
    """The kernels, built if need be."""
    need_cpu_kernels()


needs_kernels = pytest.mark.usefixtures("loaded")


pytestmark = pytest.mark.timeout(300)  # the kernels may have to be built, on a busy machine


def copy_of(model, cache: KVCache, dtype=torch.float32) -> KVCache:
    """A cache with the same contents."""
    num_slots = max([0, *(len(states[0]) - 1 for states in cache.states.layers.values())])
    copy = KVCache(model.arch, cache.num_blocks, cache.block_size, dtype=dtype, num_slots=num_slots)
    for ours, theirs in zip(copy.tensors, cache.tensors, strict=True):
        ours.copy_(theirs)
    return copy


def plain_network(**changes):
    """A network that the kernels compute as a whole, with weights that bfloat16 holds exactly."""
    model = random_model(head_size=16, **changes)
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    return model


@needs_kernels
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_whole_step_in_one_call_gives_the_twins_logits(is_exact, is_tied):
    model = plain_network(tied_embeddings=is_tied, windows=(None, 5), hidden_size=40)
    if not is_exact:
        model.model.layers[0].mlp.down_proj.weight.add_(1e-4)
    asked = prompts(5)
    first, cache = step_inputs({i: (0, ids) for i, ids in enumerate(asked)}), room(model, 5)
    twin = copy_of(model, cache)
    native_network, eager = network.CpuNetwork(model, cache), EagerBackend(model, twin)
    rows_N = first.query_starts[1:] - 1
    close = {"atol": 2e-5, "rtol": 1e-5}
    torch.testing.assert_close(native_network.run(first, rows_N), eager.prefill(first, rows_N), **close)
    drafted = step_inputs({i: (len(ids), [7 + i, 11, 13]) for i, ids in enumerate(asked)}, query_len=3)
    torch.testing.assert_close(native_network.run(drafted), eager.decode(drafted), **close)


@needs_kernels
def test_a_whole_step_gives_a_sequence_the_same_bits_alone_and_among_others():
    model, asked = plain_network(), prompts(9)
    inputs = step_inputs({i: (0, ids) for i, ids in enumerate(asked)})
    together = network.CpuNetwork(model, room(model, 9)).run(inputs, inputs.query_starts[1:] - 1)
    for i, ids in enumerate(asked):
        alone = step_inputs({0: (0, ids)})
        logits = network.CpuNetwork(model, room(model, 9)).run(alone, alone.query_starts[1:] - 1)
        assert torch.equal(logits[0], together[i])


@needs_kernels
@pytest.mark.parametrize("num_rows", range(1, 10))
def test_any_number_of_rows_gives_each_the_bits_it_gets_alone(num_rows):
    model = plain_network()
    cache = room(model, 9, rubbish=1.0)
    rows = {i: (5 + i, [7 + i]) for i in range(num_rows)}
    together = network.CpuNetwork(model, copy_of(model, cache)).run(step_inputs(rows, query_len=1))
    for i, row in rows.items():
        alone = network.CpuNetwork(model, copy_of(model, cache)).run(step_inputs({i: row}, query_len=1))
        assert torch.equal(alone[0], together[i])


@needs_kernels
def test_the_likeliest_tokens_are_those_with_the_largest_logits():
    model, asked = plain_network(tied_embeddings=False), prompts(6)
    model.lm_head.weight[50:] = model.lm_head.weight[: 97 - 50]  # of equal ones, the first
    inputs = step_inputs({i: (0, ids) for i, ids in enumerate(asked)})
    expected = network.CpuNetwork(model, room(model, 6)).run(inputs).argmax(-1)
    found = network.CpuNetwork(model, room(model, 6)).argmax(inputs)
    assert found.tolist() == expected.tolist()
    assert found.max() < 50
    assert len(set(found.tolist())) > 5


@needs_kernels
@pytest.mark.parametrize("token", [3, 96])  # within a vector, and in the rest
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_leave_no_token(token, value):
    model = plain_network(tied_embeddings=False)
    model.lm_head.weight[token] = value
    inputs = step_inputs({0: (0, [5, 6, 7]), 1: (0, [8])})
    first = network.CpuNetwork(model, room(model, 2))
    assert first.argmax(inputs).tolist() == argmax_tokens(first.run(inputs)).tolist()
    later = torch.zeros(1, 2, dtype=torch.long)
    assert NO_TOKEN in first.argmax(inputs)
    assert first.argmax_steps(inputs, later, later).min() >= 0


@needs_kernels
def test_several_steps_in_one_call_are_those_steps():
    model, asked = plain_network(), prompts(4)
    one_call, step_by_step = (network.CpuNetwork(model, room(model, 4)) for _ in range(2))
    for each in (one_call, step_by_step):
        each.run(step_inputs({i: (0, ids) for i, ids in enumerate(asked)}))
    first = step_inputs({i: (len(ids), [1 + i, 20 + i]) for i, ids in enumerate(asked)}, query_len=2)
    expected = [step_by_step.argmax(first)[1::2]]
    later = []
    for ahead in range(3):
        rows = {i: (len(ids) + 2 + ahead, [int(expected[-1][i])]) for i, ids in enumerate(asked)}
        later.append(step_inputs(rows, query_len=1))
        later[-1].positions_T[3] = later[-1].slots_T[3] = 0  # padding: nobody asked for these
        expected.append(step_by_step.argmax(later[-1]))
    places = torch.stack([step.positions_T for step in later]), torch.stack([step.slots_T for step in later])
    found = one_call.argmax_steps(replace(first, block_tables_SB=later[-1].block_tables_SB), *places)
    assert torch.equal(found, torch.stack(expected))
    assert len(set(found[:, :3].flatten().tolist())) > 3


@needs_kernels
def test_steps_in_several_threads_at_once_do_not_disturb_each_other():
    model, inputs, wrong = plain_network(), step_inputs({0: (0, prompts(5)[4])}), []
    expected = network.CpuNetwork(model, room(model, 1)).run(inputs)

    def repeat() -> None:
        mine = network.CpuNetwork(model, room(model, 1))
        wrong.extend(1 for _ in range(100) if not torch.equal(mine.run(inputs), expected))

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


LATENT = {
    "num_kv_heads": 1,
    "head_size": 32,
    "latent_size": 24,
    "rotary_size": 8,
    "unrotated_size": 12,
    "value_size": 10,
    "attention_scale": 0.2,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rotated_qk_norm": True, "qk_norm": True},
        {"num_experts": 4, "expert_size": 8},  # half a panel
        {**LATENT, "head_size": 28, "latent_size": 20},
    ],
)
def test_networks_with_more_to_them_are_not_computed_in_one_call(changes):
    model = random_model(**{"head_size": 16, **changes})
    assert not network.can_compute(model, room(model, 1))
    plain = random_model(head_size=16)
    assert network.can_compute(plain, room(plain, 1))
    assert not network.unknown_heads(plain.arch)
    assert bool(network.unknown_heads(model.arch)) == (model.arch.head_size == 28)
    plain.model.layers[1].mlp.down_proj = torch.nn.Identity()
    assert not network.can_compute(plain, room(plain, 1))


@pytest.mark.parametrize("part", [{"has_sinks": True}, {"attention_gate": "sigmoid"}, {"shared_keys": (0, 0)}])
def test_parts_of_heads_are_not_computed_over_latents(part):
    arch = random_model(**LATENT).arch
    assert network.unknown_parts(arch) == []
    assert network.unknown_parts(replace(arch, **part)) == [*part]


def logits_of_both(model, dtype=torch.float32):
    """The logits of the kernels and of the plain network: prompts of several lengths, then drafted tokens."""
    asked, has_states = [*prompts(4), [5 + i % 60 for i in range(24)]], bool(model.arch.recurrence)
    first = step_inputs({i: (0, ids) for i, ids in enumerate(asked)}, has_states=has_states)
    cache = room(model, 5, dtype=dtype)
    native, eager = network.CpuNetwork(model, cache), EagerBackend(model, copy_of(model, cache, dtype))
    later = {i: (len(ids), [7 + i, 11, 13]) for i, ids in enumerate(asked)}
    drafted = step_inputs(later, query_len=3, has_states=has_states)
    rows_N = first.query_starts[1:] - 1
    found = torch.cat((native.run(first, rows_N), native.run(drafted)))
    return found, torch.cat((eager.prefill(first, rows_N), eager.decode(drafted))).float()


UNROTATED = frozenset({0, 1})
LAYER_NORMS = {
    "norm": "layer",
    "norm_bias": True,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "has_gate": False,
    "activation": "gelu",
}
TWO_SIZES = ({"head_size": 16, "intermediate_size": 40}, {"head_size": 512, "intermediate_size": 72})
EXPERTS = {"num_experts": 6, "num_experts_per_token": 2, "expert_size": 32}
FAMILIES = {
    "Qwen 2": {"qkv_bias": True},
    "Qwen 3": {"qk_norm": True},
    "biases everywhere": {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "head_bias": True},
    "SmolLM 3": {"unrotated_layers": frozenset({1})},
    "Gemma": {"norm_offset": 1.0, "activation": "gelu_tanh", "embedding_scale": 5.6},
    "Gemma 2": {"norm_places": "both", "attention_softcap": 5.0, "logit_softcap": 3.0, "windows": (None, 5)},
    "Gemma 3": {"norm_places": "both", "qk_norm": True, "windows": (None, 5), "local_rope_theta": 100.0},
    "norms after": {"norm_places": "after"},
    "Gemma 4": {
        "norm_places": "both",
        "qk_norm": True,
        "normalizes_values": True,
        "scales_layers": True,
        "shapes": tuple(LayerSizes(num_heads=2, num_kv_heads=1, **sizes) for sizes in TWO_SIZES),
        "windows": (5, None),
        "local_rope_theta": 100.0,
        "layer_input_size": 12,
        "layer_input_vocab": 90,
    },
    "Gemma 3n": {
        "norm_places": "both",
        "qk_norm": True,
        "normalizes_values": True,
        "shared_keys": (0, 0),
        "activation": "gelu_tanh",
        "layer_input_size": 12,
        "layer_input_vocab": 90,
        "num_streams": 3,
        "active_stream": 1,
        "scales_stream": True,
        "laurel_size": 5,
        "sparsity": (0.7, 0.0),
    },
    "keys of another layer": {"shared_keys": (0, 0), "qkv_bias": True, "norm_places": "both"},
    "Llama-Nemotron": {
        "shapes": tuple(LayerSizes(num_heads=4, num_kv_heads=2, **sizes) for sizes in TWO_SIZES[::-1]),
        "attention_only_layers": frozenset({0}),
        "feed_forward_layers": frozenset({1}),
    },
    "BitNet": {"inner_norms": True, "activation": "relu_squared"},
    "Trinity": {"attention_gate": "sigmoid"},
    "Laguna": {"attention_gate": "softplus_per_head"},
    "Apertus": {"activation": "xielu", "has_gate": False},
    "NanoChat": {"has_norm_weight": False, "rotated_qk_norm": True, "reversed_rope": True},
    "Granite": {"residual_scale": 0.3, "logit_scale": 0.2, "attention_scale": 0.1, "embedding_scale": 2.0},
    "a part of each head is rotated": {"rotary_size": 8},
    "no gate": {"has_gate": False, "activation": "relu_squared"},
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu", "has_gate": False},
    "layer norms": {"norm": "layer", "norm_bias": True},
    "layer norms without biases": {"norm": "layer", "norm_offset": 1.0},
    "OLMo 1": {"norm": "layer", "has_norm_weight": False, "clip_qkv": 0.7},
    "GPT-NeoX": {**LAYER_NORMS, "is_parallel": True, "parallel_norms": True, "rotary_size": 8},
    "Phi 2": {**LAYER_NORMS, "is_parallel": True, "qk_norm": True, "rotary_size": 8, "head_bias": True},
    "Command R": {"norm": "layer", "is_parallel": True, "separate_qk_norm": True, "logit_scale": 0.3},
    "parallel layers with multipliers": {"is_parallel": True, "residual_scale": 0.3},
    "GPT-2": {**LAYER_NORMS, "learned_positions": True, "unrotated_layers": UNROTATED, "activation": "gelu_tanh"},
    "OPT": {**LAYER_NORMS, "learned_positions": True, "position_offset": 2, "has_last_norm": False},
    "BLOOM": {**LAYER_NORMS, "embedding_norm": True, "alibi": "plain", "unrotated_layers": UNROTATED},
    "Falcon with ALiBi": {"norm": "layer", "alibi": "scaled", "num_heads": 5, "num_kv_heads": 1},
    "OLMo 2": {"norm_places": "after", "qk_norm": True, "wide_qk_norm": True},
    "Hunyuan": {"qk_norm": True, "late_qk_norm": True},
    "OPT-350M": {
        **LAYER_NORMS,
        "learned_positions": True,
        "unrotated_layers": UNROTATED,
        "has_last_norm": False,
        "norm_places": "sum",
        "embedding_size": 20,
        "embedding_scale": 2.0,
    },
    "embeddings that are wider than the network": {"embedding_size": 72, "tied_embeddings": True},
    "Ministral 3": {"tempers_rotated": True, "temperature_length": 5, "temperature_scale": 0.4},
    "Llama 4": {
        **EXPERTS,
        "router": "sigmoid",
        "scales_expert_inputs": True,
        "normalizes_experts": False,
        "unrotated_layers": frozenset({1}),
        "chunks": (6, None),
        "rotated_qk_norm": True,
        "temperature_length": 5,
        "temperature_scale": 0.4,
        "shared_expert_size": 48,
    },
    "chunks in windows": {"chunks": (7, 7), "windows": (None, 4)},
    "Phi-3.5-MoE": {
        **EXPERTS,
        "router": "sparse_mixer",
        "router_jitter": 0.2,
        "normalizes_experts": False,
        "norm": "layer",
        "norm_bias": True,
    },
    "heads of 20 in windows": {"head_size": 20, "rotary_size": 12, "windows": (None, 5), "qk_norm": True},
    "6 heads of 40 for 2": {"head_size": 40, "num_heads": 6, "attention_softcap": 5.0, "has_sinks": True},
    "sinks": {"has_sinks": True, "windows": (None, 5)},
    "Mixtral": EXPERTS,
    "OLMoE": {**EXPERTS, "normalizes_experts": False, "qk_norm": True, "wide_qk_norm": True},
    "Qwen 2 MoE": {**EXPERTS, "normalizes_experts": False, "shared_expert_size": 48, "gates_shared_expert": True},
    "Granite MoE": {**EXPERTS, "residual_scale": 0.3, "shared_expert_size": 32},
    "GLM-4.5": {
        **EXPERTS,
        "router": "biased_sigmoid",
        "routed_scale": 2.5,
        "shared_expert_size": 16,
        "dense_layers": frozenset({0}),
    },
    "groups of experts": {
        **EXPERTS,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "router": "grouped_softmax",
        "normalizes_experts": False,
        "num_expert_groups": 4,
        "num_chosen_groups": 2,
    },
    "groups of experts with biases": {
        **EXPERTS,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "router": "biased_sigmoid",
        "num_expert_groups": 4,
        "num_chosen_groups": 2,
    },
    "Ernie 4.5 MoE": {**EXPERTS, "router": "biased_softmax"},
    "gpt-oss": {**EXPERTS, "expert_bias": True, "swiglu_limit": 0.5, "has_sinks": True},
    "experts without gates": {**EXPERTS, "has_gate": False, "activation": "relu_squared", "norm_places": "both"},
}


def recurrent(kind: str, *layers: int, **changes) -> dict:
    """A recurrence in these layers of two, or of as many as there are."""
    shapes = {
        "short_conv": {"inner_size": 48, "conv_width": 3},
        "mamba": {"inner_size": 64, "state_size": 18, "time_step_rank": 3},
        "mamba2": {"inner_size": 60, "num_heads": 10, "head_size": 6, "state_size": 18, "num_groups": 2},
        "delta_net": {"inner_size": 6 * 84, "num_heads": 6, "head_size": 84, "state_size": 10, "num_groups": 2},
    }
    return {"recurrence": Recurrence(kind=kind, layers=frozenset(layers), **{**shapes[kind], **changes})}


RECURRENT_FAMILIES = {
    "LFM2": {**recurrent("short_conv", 0), "qk_norm": True},
    "LFM2 with biases": recurrent("short_conv", 1, conv_width=5, conv_bias=True, projection_bias=True),
    "LFM2 MoE": {**EXPERTS, **recurrent("short_conv", 0), "router": "biased_sigmoid", "dense_layers": frozenset({0})},
    "Mamba": {**recurrent("mamba", 0, 1), "has_mlp": False, "wide_residual": True},
    "Falcon Mamba": {**recurrent("mamba", 0, 1, inner_norms="plain", inner_epsilon=1e-3), "has_mlp": False},
    "Jamba": {**EXPERTS, **recurrent("mamba", 0, inner_norms="learned"), "unrotated_layers": UNROTATED},
    "Mamba 2": {
        **recurrent("mamba2", 0, 1, time_step_limits=(0.2, 0.9), projection_bias=True),
        "has_mlp": False,
        "head_size": 7,  # of nothing
    },
    "Granite 4": {**recurrent("mamba2", 1), "residual_scale": 0.3, "logit_scale": 0.2, "unrotated_layers": UNROTATED},
    "Bamba": {**recurrent("mamba2", 0, conv_bias=False), "rotary_size": 8},
    "Nemotron-H": {
        **recurrent("mamba2", 0, norm_groups=2),
        "num_layers": 3,
        "has_mlp": False,
        "feed_forward_layers": frozenset({1}),
        "has_gate": False,
        "activation": "relu_squared",
    },
    "Falcon H1": {
        **recurrent(
            "mamba2",
            *(0, 1),
            is_beside_attention=True,
            norm="none",
            input_scale=1.2,
            part_scales=(0.9, 0.8, 0.7, 1.1, 1.2),
            output_scale=0.6,
        ),
        "attention_input_scale": 0.8,
        "attention_output_scale": 0.9,
        "mlp_scales": (0.8, 0.7),
    },
    "Falcon H1 with norms": recurrent("mamba2", 0, 1, is_beside_attention=True, norm="before_gate", norm_groups=2),
    "Qwen3-Next": {
        **EXPERTS,
        **recurrent("delta_net", 0),
        "gates_attention": True,
        "norm_offset": 1.0,
        "rotary_size": 8,
        "qk_norm": True,
        "shared_expert_size": 48,
        "gates_shared_expert": True,
    },
    "Qwen 3.5": {**recurrent("delta_net", 1, is_grouped=False, conv_bias=False), "gates_attention": True},
    "OLMo hybrid": {
        **recurrent("delta_net", 0, is_grouped=False, max_beta=2.0, inner_epsilon=1e-3),
        "norm_places": "after",
        "qk_norm": True,
        "wide_qk_norm": True,
    },
}
LATENT_FAMILIES = {
    "MiniCPM 3": {**LATENT, "query_latent_size": 20, "num_heads": 7, "residual_scale": 0.3},
    "DeepSeek V2 Lite": {
        **EXPERTS,
        **LATENT,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "paired_rope": True,
        "router": "grouped_softmax",
        "num_expert_groups": 4,
        "num_chosen_groups": 2,
        "normalizes_experts": False,
        "shared_expert_size": 48,
        "dense_layers": frozenset({0}),
    },
    "DeepSeek V3": {
        **EXPERTS,
        **LATENT,
        "num_experts": 8,
        "num_experts_per_token": 3,
        "query_latent_size": 20,
        "paired_rope": True,
        "qkv_bias": True,
        "router": "biased_sigmoid",
        "num_expert_groups": 4,
        "num_chosen_groups": 2,
        "routed_scale": 2.5,
    },
    "DeepSeek V3.2": {
        **LATENT,
        "query_latent_size": 20,
        "paired_rope": True,
        "indexer": IndexerShape(num_heads=11, head_size=12, num_chosen=5),
    },
    "GLM-5": {
        **LATENT,
        "query_latent_size": 20,
        "num_layers": 3,
        "indexer": IndexerShape(
            num_heads=8, head_size=16, num_chosen=7, paired_rope=True, reusing_layers=frozenset({1})
        ),
    },
    "Mistral 4": {
        **LATENT,
        "query_latent_size": 20,
        "paired_rope": True,
        "tempers_rotated": True,
        "temperature_length": 5,
        "temperature_scale": 0.4,
    },
}
FAMILIES |= RECURRENT_FAMILIES | LATENT_FAMILIES
INTEGER_FAMILIES = (
    "GPT-NeoX",
    "GPT-2",
    "BLOOM",
    "Command R",
    "OLMo 2",
    "Mixtral",
    "Qwen 2 MoE",
    "LFM2",
    "Jamba",
    "Granite 4",
    "Qwen 3.5",
    "DeepSeek V2 Lite",
    "BitNet",
    "Mistral 4",
    "GLM-5",
    "Gemma 3n",
)


def model_of(family: str, **changes):
    """A random network of a family; its norms and biases have an effect, too."""
    model = random_model(**{"head_size": 16, **FAMILIES[family], **changes})
    generator = torch.Generator().manual_seed(3)
    for name, weight in model.named_parameters():
        if weight.dim() == 1 or "norm" in name:
            weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_networks_of_other_families_give_the_twins_logits(family):
    model = model_of(family)
    assert network.can_compute(model, room(model, 1)), model.arch.extras
    found, expected = logits_of_both(model)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=2e-5)


@needs_kernels
@pytest.mark.parametrize("family", ["Gemma 3", "NanoChat", "DeepSeek V3.2"])
def test_angles_of_places_without_a_table_are_computed(family, monkeypatch):
    monkeypatch.setattr(rope, "MAX_TABLE_LENGTH", 32)
    model = model_of(family)
    assert not model.rotation.has_tables
    assert network.can_compute(model, room(model, 1))
    found, expected = logits_of_both(model)
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=2e-5)


ODD_SHAPES = {
    "15 heads for 5": {
        "hidden_size": 240,
        "num_heads": 15,
        "num_kv_heads": 5,
        "head_size": 16,
        "intermediate_size": 100,
    },
    "heads of 96": {"hidden_size": 97, "num_heads": 3, "num_kv_heads": 1, "head_size": 96, "intermediate_size": 131},
    "biases and 1,003 tokens": {"vocab_size": 1003, "head_size": 64, "qkv_bias": True, "mlp_bias": True},
}


@needs_kernels
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_sizes_that_no_panel_divides_give_the_twins_logits_and_tokens(shape):
    model = random_model(**ODD_SHAPES[shape])
    found, expected = logits_of_both(model)
    torch.testing.assert_close(found / expected.std(), expected / expected.std(), atol=5e-5, rtol=2e-5)
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))


@needs_kernels
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


@needs_kernels
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", INTEGER_FAMILIES)
def test_networks_of_other_families_give_the_logits_of_their_quantized_layers(family, kind):
    model = quantize(model_of(family, intermediate_size=64), kind, group_size=32, lm_head=True)
    pack_layers(model, (Int8Linear, Int4Linear))
    assert network.can_compute(model, room(model, 1))
    unpacked, _ = logits_of_both(model)
    pack_experts(model, packs_float32=True)
    found, layer_by_layer = logits_of_both(model)
    assert torch.equal(found, unpacked)
    assert (found - layer_by_layer).norm() / layer_by_layer.norm() < 0.01  # inputs near a limit round either way


@needs_kernels
@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("family", ["Qwen 2", "Mixtral"])
def test_fp8_weights_give_the_logits_of_the_dequantized_network(family, block_size):
    model = model_of(family, intermediate_size=64)
    quantize(model, "fp8", lm_head=True)
    for module in model.modules():
        if isinstance(module, Fp8Linear | ExpertStack) and block_size:
            scales = torch.linspace(0.5, 1, module.weight.shape[-1] // block_size)
            module.scale = module.scale.unsqueeze(-1) * scales
    assert network.can_compute(model, room(model, 1))
    unpacked, expected = logits_of_both(model)
    pack_layers(model, (Fp8Linear,))
    pack_experts(model, packs_float32=True)
    assert not any(isinstance(module, Fp8Linear | ExpertStack) for module in model.modules())
    found, layer_by_layer = logits_of_both(model)
    for logits in (unpacked, found, layer_by_layer):
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=2e-5)


@needs_kernels
@pytest.mark.parametrize("packs_float32", [True, False])
def test_experts_of_any_floats_are_packed_or_read_as_they_are(packs_float32, monkeypatch):
    monkeypatch.setattr(network, "PACKED_FLOAT32_BYTES", 1 << 30 if packs_float32 else 0)
    model = model_of("Mixtral")
    expected = logits_of_both(model)[1]
    pack_experts(model, packs_float32=packs_float32)
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, PackedStack) == packs_float32
    for logits in logits_of_both(model):
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=2e-5)


@needs_kernels
def test_experts_of_16_bits_give_the_twins_logits_within_their_rounding():
    model = model_of("Mixtral").to(torch.bfloat16)
    found, expected = logits_of_both(model, torch.bfloat16)
    assert (found - expected).norm() / expected.norm() < 8 * torch.finfo(torch.bfloat16).eps


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


@needs_kernels
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


@needs_kernels
def test_scores_of_experts_that_are_no_numbers_leave_no_token():
    model = model_of("Mixtral")
    model.model.layers[0].mlp.gate.weight[:] = torch.nan
    assert network.CpuNetwork(model, room(model, 1)).argmax(step_inputs({0: (0, [5, 6, 7])})).tolist() == [NO_TOKEN] * 3


@needs_kernels
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


@needs_kernels
@pytest.mark.parametrize("family", ["LFM2", "Jamba", "Granite 4", "Qwen 3.5", "DeepSeek V3"])
def test_parts_of_16_bits_give_the_twins_logits_within_their_rounding(family):
    model = model_of(family)
    expected = logits_of_both(model.to(torch.bfloat16).float())[1]
    found = logits_of_both(model.to(torch.bfloat16), torch.bfloat16)[0]
    assert (found - expected).norm() / expected.norm() < 8 * torch.finfo(torch.bfloat16).eps


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_of_16_bits_gives_the_twins_logits_within_its_rounding(dtype):
    model = random_model(head_size=16).to(dtype)
    found, expected = logits_of_both(model, dtype)
    assert (found - expected).norm() / expected.norm() < 4 * torch.finfo(dtype).eps


@needs_kernels
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_network_gives_the_logits_of_its_layers(kind):
    model = quantize(random_model(head_size=16, intermediate_size=64), kind, group_size=32, lm_head=True)
    found, plain = logits_of_both(model, torch.float16)
    assert (found - plain).norm() / plain.norm() < 0.03  # the plain layers do not round their inputs
    pack_layers(model, (Int8Linear, Int4Linear))
    again, layer_by_layer = logits_of_both(model, torch.float16)
    assert torch.equal(again, found)
    torch.testing.assert_close(again, layer_by_layer, atol=0.05, rtol=0.05)  # inputs near a limit round either way


@needs_kernels
def test_the_last_layer_has_8_bits_if_the_others_have_integer_weights():
    model = quantize(random_model(head_size=16, intermediate_size=64, tied_embeddings=True), "int4", group_size=32)
    found, plain = logits_of_both(model)
    assert 0 < (found - plain).norm() / plain.norm() < 0.03
