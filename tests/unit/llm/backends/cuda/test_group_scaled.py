"""Products with scales of groups give what the plain layers give: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.config import EngineConfig
from flambeau.llm.gpu_weights import can_keep_on_gpu, order_codes
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.families.gate_limits import GateLimits
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.quantize.coded import CODE_GROUPS, FP4, CodedLinear, CodeLayout, CudaCodedLinear
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear, CudaGroupedStack
from flambeau.llm.quantize.groups import GroupedLinear, GroupLayout
from flambeau.llm.quantize.packed_layers import CudaCodedStack
from flambeau.llm.quantize.quantizer import ExpertStack, replace_layers
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from flambeau.llm.quantize.settings import QuantizationSettings
from support.llm_steps import random_model, room, step_inputs

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda import expert_tiles
from flambeau.llm.backends.cuda.feed_forward import can_compute_experts, kernel_experts
from flambeau.llm.backends.cuda.group_scaled import GroupScaledLinear, widened
from flambeau.llm.backends.cuda.group_scaled_experts import GroupScaledExperts
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.backends.cuda.network import CudaNetwork
from flambeau.llm.backends.cuda.parts import SCALES_OF_GROUPS, compared_weights
from flambeau.llm.backends.cuda.supported_networks import group_sizes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BOUND = 0.01 if DEVICE.type == "cuda" else 1e-5
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]
NO_FP4 = tuple(round(-1 + i / 7.3, 3) for i in range(16))  # any other table
KINDS = {
    "fp8, 128": ("fp8", 128),
    "fp8, 32": ("fp8", 32),
    "int8, 64": ("int8", 64),
    "int8, 32": ("int8", 32),
    "MXFP4": ("fp4", 32),
    "NVFP4": ("fp4", 16),
    "table": ("table", 64),
    "Q4_K": (GroupLayout(4, 32, True, 8), 32),
    "Q5_K": (GroupLayout(5, 32, True, 8), 32),
    "Q6_K": (GroupLayout(6, 16, False, 8), 16),
    "Q2_K": (GroupLayout(4, 16, True, 8), 16),
    "Q3_K": (GroupLayout(4, 16, False, 8), 16),
    "Q4_1": (GroupLayout(4, 32, True, 16), 32),
    "Q5_0": (GroupLayout(5, 32, False, 16), 32),
    "Q5_1": (GroupLayout(5, 32, True, 16), 32),
    "Q8_0": (GroupLayout(8, 32, False, 16), 32),
    "8 bits, minimums": (GroupLayout(8, 64, True), 64),
}


def relative_difference(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def plain_layer(kind, size_in, size_out, *, bias=False):
    """A layer of random numbers; scales of MXFP4 are powers of two."""
    if DEVICE.type == "cpu" and kind.startswith("fp8"):
        pytest.skip("the interpreter does not know 8-bit floating point numbers")
    name, group = KINDS[kind]
    shape = size_out, size_in // group
    if isinstance(name, GroupLayout):
        return leveled_layer(name, size_in, size_out, bias=bias)
    scales = torch.exp2(torch.randint(-8, -4, shape)) if kind == "MXFP4" else 0.01 + torch.rand(shape) / 50
    if name in ("fp4", "table"):
        layer = CodedLinear(size_in, size_out, CodeLayout(FP4 if name == "fp4" else NO_FP4, group), bias=bias)
        layer.weight.random_(0, 256)
        layer.scales.copy_(scales)
    else:
        make = Fp8Linear if name == "fp8" else Int8Linear
        layer = make(size_in, size_out, bias=bias, scale_dtype=torch.float32, num_groups=shape[1])
        layer.weight = torch.randn(size_out, size_in).mul(40).to(layer.weight.dtype)
        layer.scale.copy_(scales / 40)
    return with_bias(layer) if bias else layer.to(DEVICE)


def with_bias(layer):
    torch.nn.init.normal_(layer.bias)
    layer.bias.data = layer.bias.data.to(DTYPE)
    return layer.to(DEVICE)


def leveled_layer(layout, size_in, size_out, *, bias):
    """Random levels; the weights are about as large as those of other kinds."""
    layer = GroupedLinear(size_in, size_out, layout, bias=bias)
    layer.dtype = DTYPE
    layer.weight.random_(0, 1 << layout.bits)
    step = 0.1 / (1 << layout.bits)
    if layer.factors is None:
        layer.scales.copy_((0.5 + torch.rand(layer.scales.shape)) * step)
    else:
        layer.scales.random_(8, 64)
        layer.factors.copy_((0.5 + torch.rand(layer.factors.shape)) * step / 32)
    if layout.has_minimums and layer.factors is not None:
        layer.minimums.random_(8, 64)
        layer.factors.view(size_out, -1, 2)[:, :, 1] *= -layout.middle
    elif layout.has_minimums:
        layer.minimums.copy_(layer.scales.float() * -layout.middle * (0.5 + torch.rand(layer.scales.shape)))
    return with_bias(layer) if bias else layer.to(DEVICE)


def of_kernels(layer):
    if isinstance(layer, GroupedLinear):
        return CudaGroupedLinear(layer)
    return CudaCodedLinear(layer, DTYPE) if isinstance(layer, CodedLinear) else layer


def unit_of(kind):
    """The fewest inputs of a layer in the tests."""
    layout, group = KINDS[kind]
    return 256 if isinstance(layout, GroupLayout) and layout.scale_bits == 8 else max(32, group)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 2, 40, 70])
def test_linear_layers(kind, num_rows):
    torch.manual_seed(0)
    size = 768 if unit_of(kind) == 256 else 384
    layer = plain_layer(kind, size, 200, bias=True)
    x = torch.randn(num_rows, size, device=DEVICE).to(DTYPE)
    linear = kernel_linear(of_kernels(layer))
    assert isinstance(linear, GroupScaledLinear)
    found, expected = linear(x), layer(x)
    assert relative_difference(found.sum(0) if found.dim() == 3 else found, expected) < BOUND


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 3, 300])
def test_gates(kind, num_rows):
    torch.manual_seed(0)
    layer = plain_layer(kind, 256, 144)
    x = torch.randn(num_rows, 256, device=DEVICE).to(DTYPE)
    gate, up = layer(x).chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    assert relative_difference(kernel_linear(of_kernels(layer), gates=True)(x), expected) < 2 * BOUND


@pytest.mark.parametrize("kind", KINDS)
def test_the_wide_copy_and_the_order_of_codes(kind):
    layer = plain_layer(kind, 256, 24)
    plain, ordered = layer.dequantize(torch.float32), of_kernels(layer)
    if isinstance(layer, CodedLinear):
        ordered = CudaCodedLinear(layer, torch.float32)
    if isinstance(layer, CodedLinear | GroupedLinear):
        assert torch.equal(ordered.dequantize(torch.float32), plain)
        ids = torch.tensor([3, 0, 23, 3], device=DEVICE)
        torch.testing.assert_close(ordered.read_rows(ids).float(), plain[ids], rtol=BOUND, atol=0)
        torch.testing.assert_close(widened(kernel_linear(ordered), torch.float32, ids), plain[ids])
    torch.testing.assert_close(widened(kernel_linear(ordered), torch.float32), plain)


def experts_of(kind, *, hidden, size, **changes):
    shape = {"vocab_size": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_size": 16}
    number = 4 if size == 256 else 12  # the interpreter is slow
    sizes = {"hidden_size": hidden, "intermediate_size": 64, "num_experts": number, "num_experts_per_token": 3}
    mlp = SparseMLP(Architecture(**{**shape, **sizes, "expert_size": size, **changes})).requires_grad_(False)
    experts = mlp.experts
    for leaf, rows, columns in (("gate_up_proj", 2 * size, hidden), ("down_proj", hidden, size)):
        delattr(experts, leaf)
        experts.add_module(
            leaf, ExpertStack(plain_layer(kind, columns, number * rows), num_experts=number, dtype=DTYPE)
        )
    for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
        if bias is not None:
            bias.data = torch.randn_like(bias)
    return mlp.to(DEVICE)


CHANGES = [
    {},
    {"expert_bias": True, "gate_limits": GateLimits(kind="swiglu", experts=(1.0,))},
    {"scales_expert_inputs": True},
]
FEW_CASES = [(1, CHANGES[1]), (20, CHANGES[2])]
EXPERT_CASES = [
    (kind, *case)
    for kind in KINDS
    for case in (FEW_CASES if unit_of(kind) == 256 else itertools.product([1, 2, 20, 90], CHANGES))
]


@pytest.mark.parametrize(("kind", "num_rows", "changes"), EXPERT_CASES)
def test_experts(num_rows, kind, changes, monkeypatch):
    monkeypatch.setattr(expert_tiles, "SEARCHED", (16, 64))
    torch.manual_seed(0)
    size = unit_of(kind)
    hidden = size if size == 256 else 3 * size
    mlp = experts_of(kind, hidden=hidden, size=size, **changes)
    for parameter in mlp.parameters():
        parameter.data = parameter.data.to(DTYPE)
    x = torch.randn(num_rows, hidden, device=DEVICE).to(DTYPE)
    weights, chosen = mlp.choose(x)
    expected = mlp.experts.compute_each(x, chosen, weights)
    for leaf in ("gate_up_proj", "down_proj"):
        stack = getattr(mlp.experts, leaf)
        if stack.layout is not None:
            delattr(mlp.experts, leaf)
            make = CudaGroupedStack if isinstance(stack.layout, GroupLayout) else CudaCodedStack
            mlp.experts.add_module(leaf, make(stack))
    assert can_compute_experts(mlp.experts)
    experts = kernel_experts(mlp.experts)
    assert isinstance(experts, GroupScaledExperts)
    found = experts(x, chosen.int(), weights.float())
    found = found.sum(0) if found.dim() == 3 else found
    assert relative_difference(found, expected) < BOUND
    again = mlp.experts.compute_each(x, chosen, weights)
    assert relative_difference(again, expected) < BOUND


STEPS = {"one": {0: (11, [1])}, "several": {0: (11, [1]), 1: (0, [2]), 2: (30, [3])}}
NETWORKS = {
    "dense": {"hidden_size": 64, "intermediate_size": 128, "head_size": 32, "num_layers": 1, "qkv_bias": True},
    "experts": {
        "hidden_size": 64,
        "head_size": 32,
        "num_layers": 1,
        "num_experts": 4,
        "expert_size": 64,
        "expert_bias": True,
        "gate_limits": GateLimits(kind="swiglu", experts=(1.0,)),
    },
}


def quantized_network(network, kind):
    """A network whose layers have random numbers of a kind."""
    torch.manual_seed(0)
    model = random_model(**NETWORKS[network]).to(DTYPE)  # first: scales and numbers of 8 bits keep their types

    def made(linear, _):
        layer = plain_layer(kind, linear.in_features, linear.out_features)
        for name in ("scale", "scales"):
            if hasattr(layer, name):
                setattr(layer, name, (getattr(layer, name) / 8).to(getattr(layer, name).dtype))
        layer.bias = linear.bias
        return layer

    replace_layers(model, QuantizationSettings(kind="int4", group_size=32), made)
    return model.to(DEVICE)


@pytest.mark.parametrize("case", [*STEPS, "prompt"])
@pytest.mark.parametrize("kind", ["fp8, 32", "int8, 64", "MXFP4", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("network", NETWORKS)
def test_networks(network, kind, case, monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr("flambeau.llm.backends.cuda.attention.PROGRAMS", 16)
    model = quantized_network(network, kind)
    ours, twin = (room(model, 40, device=DEVICE, dtype=DTYPE) for _ in range(2))
    for one, other in zip((*ours.keys, *ours.values), (*twin.keys, *twin.values), strict=True):
        one.copy_(other)
    inputs = (
        step_inputs({i: (i, [i, 5] * 12) for i in range(3)})
        if case == "prompt"
        else step_inputs(STEPS[case], query_len=1)
    )
    rows = inputs.query_starts[1:] - 1
    plain = EagerBackend(model, twin)
    expected = plain.prefill(inputs, rows) if case == "prompt" else plain.decode(inputs.to(DEVICE))
    arrange = order_codes(DTYPE)
    for name, module in [*model.named_modules()]:
        if (other := arrange(name, module)) is not None:
            model.set_submodule(name, other)
    assert group_sizes(model) <= {*CODE_GROUPS}
    assert compared_weights(model) == [SCALES_OF_GROUPS]
    with torch.inference_mode():
        step = CudaNetwork(model, ours)
        found = step.prefill(inputs, rows) if case == "prompt" else step.run(inputs.to(DEVICE))
    # In bfloat16, a row whose scores are almost equal may have another expert: plain PyTorch is up to 5 % off then.
    assert (found - expected).norm() <= (0.08 if DEVICE.type == "cuda" else 1e-4) * expected.norm()


def test_networks_without_scales_of_groups_are_not_compared_for_them():
    assert compared_weights(random_model(**NETWORKS["experts"])) == []


def test_other_devices_and_settings_keep_nothing():
    arch, gpu = random_model().arch, torch.device("cuda")
    assert not can_keep_on_gpu(EngineConfig(), torch.device("cpu"), None, arch)
    for options in ({"compile": False}, {"quantization": "int8"}, {"merge_lora": True}):
        assert not can_keep_on_gpu(EngineConfig(**options), gpu, None, arch)
