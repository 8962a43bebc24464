"""The GPU's kernels give what their plain twins give: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

from flambeau.llm.backends.eager import EagerBackend, PagedAttention
from flambeau.llm.models.attention import AttentionOptions
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import CudaInt4Linear
from flambeau.llm.quantize.quantizer import quantize
from support.llm_steps import random_model, room, step_inputs

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda.attention import TritonAttention
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.backends.cuda.network import CudaNetwork

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]
STEPS = {
    "one sequence": {0: (11, [1])},
    "several": {0: (11, [1]), 1: (0, [2]), 2: (30, [3])},
    "one, verified": {0: (9, [1, 5, 6, 7])},
    "verified": {0: (4, [1] * 4), 1: (17, [2] * 4)},
    "verified, one of them fewer": {0: (4, [1] * 4), 1: (17, [2] * 4)},
    "many": {i: (i % 20, [i, i + 1]) for i in range(40)},
}
PROMPTS = {
    "one": {0: (0, [7, 8, 9])},
    "chunks": {0: (0, [1] * 7), 1: (5, [2, 3] * 11), 2: (8, [3])},
    "more than a tile": {i: (i, [i, 5] * 12) for i in range(4)},
}
NETWORKS = {
    "Llama": {},
    "odd sizes": {"hidden_size": 40, "intermediate_size": 72, "vocab_size": 131, "head_size": 24},
    "Mistral": {"windows": (None, 6), "num_kv_heads": 1},
    "Qwen 2": {"qkv_bias": True, "tied_embeddings": True},
    "Qwen 3": {"qk_norm": True, "num_kv_heads": 4},
    "SmolLM 3": {"unrotated_layers": frozenset({1})},
    "biases": {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "long rows": {"intermediate_size": 4500, "num_layers": 1},
    "Mixtral": {"num_experts": 4, "expert_size": 48, "windows": (None, 6)},
    "Qwen 2 MoE": {
        "num_experts": 6,
        "expert_size": 24,
        "num_experts_per_token": 3,
        "shared_expert_size": 40,
        "gates_shared_expert": True,
        "normalizes_experts": False,
        "qkv_bias": True,
    },
    "Qwen 3 MoE": {"num_experts": 16, "expert_size": 24, "num_experts_per_token": 8, "qk_norm": True},
    "OLMoE": {"num_experts": 8, "expert_size": 24, "qk_norm": True, "wide_qk_norm": True, "normalizes_experts": False},
    "Granite MoE": {
        "num_experts": 5,
        "expert_size": 24,
        "embedding_scale": 3.0,
        "residual_scale": 0.4,
        "logit_scale": 0.3,
        "attention_scale": 0.2,
    },
    "dots.llm1": {
        "num_experts": 8,
        "expert_size": 24,
        "router": "biased_sigmoid",
        "routed_scale": 2.5,
        "shared_expert_size": 48,
        "dense_layers": frozenset({0}),
        "qk_norm": True,
    },
    "groups of experts": {
        "num_experts": 8,
        "expert_size": 24,
        "router": "biased_sigmoid",
        "num_expert_groups": 4,
        "num_chosen_groups": 2,
    },
    "Ernie 4.5 MoE": {"num_experts": 8, "expert_size": 24, "router": "biased_softmax", "tied_embeddings": True},
    "Phi-3.5-MoE's router": {"num_experts": 8, "expert_size": 24, "router": "sparse_mixer", "router_jitter": 0.01},
}
WITH_EXPERTS = [name for name, parts in NETWORKS.items() if "num_experts" in parts]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """How many programs the interpreter has patience for."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("flambeau.llm.backends.cuda.attention.PROGRAMS", 16)


def inputs_of(case):
    """The step of a case, on the device."""
    step = STEPS[case]
    inputs = step_inputs(step, query_len=len(next(iter(step.values()))[1]))
    if "fewer" in case:
        inputs.positions_T[6:] = inputs.slots_T[6:] = 0
    return inputs.to(DEVICE)


def caches(model, **options):
    """Two that hold the same rubbish."""
    ours, twin = (room(model, 40, rubbish=1.0, **options) for _ in range(2))
    for one, other in zip((*ours.keys, *ours.values), (*twin.keys, *twin.values), strict=True):
        other.copy_(one)
    return ours, twin


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("case", STEPS)
def test_attention(case, window):
    model = random_model(head_size=24)
    cache, twin = caches(model, device=DEVICE)
    inputs, arch = inputs_of(case), model.arch
    qkv = torch.randn((len(inputs.ids_T), arch.num_heads + 2 * arch.num_kv_heads, 24)).to(DEVICE)
    q_k_v = qkv.split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
    options = AttentionOptions(24**-0.5, window)
    expected = PagedAttention(twin, inputs)(1, *q_k_v, options)
    found = TritonAttention(cache, inputs)(1, *q_k_v, options)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache.keys[1][1:], twin.keys[1][1:])


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("case", STEPS)
def test_a_whole_step(case, network):
    model = with_random_vectors(random_model(**NETWORKS[network])).to(DEVICE)
    cache, twin = caches(model, device=DEVICE)
    inputs = inputs_of(case)
    expected = EagerBackend(model, twin).decode(inputs)
    with torch.inference_mode():
        found = CudaNetwork(model, cache).run(inputs)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip((*cache.keys, *cache.values), (*twin.keys, *twin.values), strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("network", ["Llama", "odd sizes", "Mistral", "Qwen 3", *WITH_EXPERTS])
@pytest.mark.parametrize("case", PROMPTS)
def test_prompts(case, network):
    model = with_random_vectors(random_model(**NETWORKS[network])).to(DEVICE)
    cache, twin = caches(model, device=DEVICE)
    inputs = step_inputs(PROMPTS[case])
    rows = inputs.query_starts[1:] - 1
    expected = EagerBackend(model, twin).prefill(inputs, rows)
    with torch.inference_mode():
        found = CudaNetwork(model, cache).prefill(inputs, rows)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip((*cache.keys, *cache.values), (*twin.keys, *twin.values), strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter does not know 8-bit floating point numbers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["one sequence", "several", "many", "verified", "one", "chunks"])
def test_a_cache_of_8_bits(case, dtype):
    model = with_random_vectors(random_model(head_size=32)).to(DEVICE, dtype)
    ours, twin = caches(model, device=DEVICE)
    for cache in (ours, twin):
        cache.keys, cache.values = (
            [each.to(torch.float8_e4m3fn) for each in all_] for all_ in (cache.keys, cache.values)
        )
    with torch.inference_mode():
        if case in PROMPTS:
            inputs = step_inputs(PROMPTS[case])
            rows = inputs.query_starts[1:] - 1
            found, expected = (
                CudaNetwork(model, ours).prefill(inputs, rows),
                EagerBackend(model, twin).prefill(inputs, rows),
            )
        else:
            inputs = inputs_of(case)
            found, expected = CudaNetwork(model, ours).run(inputs), EagerBackend(model, twin).decode(inputs)
    assert (found - expected).norm() < 0.03 * expected.norm()  # what rounds the other way is off by a sixteenth
    changed = [
        (a.float() - b.float())[1:].abs() > 0.1 * b.float()[1:].abs() for a, b in zip(ours.keys, twin.keys, strict=True)
    ]
    assert sum(each.sum() for each in changed) < 0.01 * sum(each.numel() for each in changed)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "int4 in large groups"])
@pytest.mark.parametrize("case", ["one sequence", "several", "many"])
def test_quantized_networks(case, kind):
    if DEVICE.type == "cpu" and kind == "fp8":
        pytest.skip("the interpreter does not know 8-bit floating point numbers")
    shape = {"hidden_size": 128, "intermediate_size": 384, "head_size": 32, "mlp_bias": True}
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    model = quantize(
        with_random_vectors(random_model(**shape)).to(DEVICE, dtype),
        kind.split()[0],
        group_size=128 if "large" in kind else 32,
    )
    cache, twin = caches(model, device=DEVICE, dtype=dtype)
    inputs = inputs_of(case)
    expected = EagerBackend(model, twin).decode(inputs)
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, Int4Linear):
            model.set_submodule(name, CudaInt4Linear(layer))
    with torch.inference_mode():
        found = CudaNetwork(model, cache).run(inputs)
    assert (found - expected).norm() <= (0.04 if DEVICE.type == "cuda" else 1e-4) * expected.norm()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter takes minutes")
@pytest.mark.parametrize("outputs", [256, 4096, 12288, 22016])
@pytest.mark.parametrize("rows", [2, 16, 32, 33, 64, 96])
def test_int4_layers_of_any_width_for_any_number_of_rows(rows, outputs):
    linear = torch.nn.Linear(256, outputs, bias=False, dtype=torch.bfloat16, device=DEVICE)
    layer = CudaInt4Linear(Int4Linear.from_linear(linear, 64))
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device=DEVICE)
    with torch.inference_mode():
        expected = layer(x).float()
        found = kernel_linear(layer)(x).float()
        assert ((found.sum(0) if found.dim() == 3 else found) - expected).norm() <= 0.01 * expected.norm()
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
        assert (kernel_linear(layer, gates=True)(x) - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter does not know bfloat16")
@pytest.mark.parametrize("case", ["one sequence", "several", "many"])
def test_a_whole_step_in_bfloat16_is_as_near_to_float32_as_its_twin(case):
    model = with_random_vectors(random_model(head_size=32, hidden_size=128))
    exact, _ = caches(model)
    halves = random_model(head_size=32, hidden_size=128)
    halves.load_state_dict(model.state_dict())
    halves = halves.to(DEVICE, torch.bfloat16)
    cache, twin = (room(model, 40, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for which in (cache, twin):
        for one, other in zip((*exact.keys, *exact.values), (*which.keys, *which.values), strict=True):
            other.copy_(one)
    expected = EagerBackend(model, exact).decode(inputs_of(case).to(torch.device("cpu")))
    plain = EagerBackend(halves, twin).decode(inputs_of(case)).cpu()
    with torch.inference_mode():
        found = CudaNetwork(halves, cache).run(inputs_of(case)).cpu()
    assert (found - expected).norm() <= 1.5 * (plain - expected).norm()


def with_random_vectors(model):
    """Gains and biases that are not all alike."""
    for weight in model.parameters():
        if weight.dim() == 1:
            torch.nn.init.normal_(weight, mean=1.0, std=0.3)
    return model
