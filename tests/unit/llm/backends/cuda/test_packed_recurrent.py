"""Packed weights of networks with recurrent layers, by the kernels, give what plain PyTorch gives for them.

On a GPU, or by Triton's interpreter. Each network has every kind of layer that its family has.
"""

from __future__ import annotations

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.gpu_weights import join_equal_parts, order_codes
from flambeau.llm.models.families.recurrence import Recurrence
from flambeau.llm.quantize.coded import CODE_GROUPS, FP4, CodedLinear, CodeLayout
from flambeau.llm.quantize.groups import GroupedLinear, GroupLayout, JoinedLinear
from flambeau.llm.quantize.quantizer import replace_layers
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from flambeau.llm.quantize.settings import QuantizationSettings
from support.llm_steps import random_model, room
from support.steady_steps import use_steady_steps
from unit.llm.checkpoints.test_hybrid_on_gpu_files import written

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda import comparison
from flambeau.llm.backends.cuda.group_scaled import GroupScaledLinear
from flambeau.llm.backends.cuda.network import CudaNetwork
from flambeau.llm.backends.cuda.parts import SCALES_OF_GROUPS, compared_parts, compared_weights, unknown_parts
from flambeau.llm.backends.cuda.recurrent_layer import RecurrentPart
from flambeau.llm.backends.cuda.supported_networks import can_compute, group_sizes, have_type

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]
NO_FP4 = tuple(round(-1 + i / 7.3, 3) for i in range(16))  # as of nf4
FP8_BLOCKS = "fp8 blocks"
KINDS = {
    FP8_BLOCKS: Fp8Linear,
    "int8 groups": Int8Linear,  # the same kernels, and the interpreter knows these numbers
    "MXFP4": CodeLayout(FP4, 32),
    "nf4": CodeLayout(NO_FP4, 64),
    "Q4_1": GroupLayout(4, 32, True, 16),
    "Q5_0": GroupLayout(5, 32, False, 16),
    "Q8_0": GroupLayout(8, 32, False, 16),
}
GROUP = 64
SIZES = {"hidden_size": 64, "head_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "expert_size": 64, "shared_expert_size": 64}
DELTA = {"kind": "delta_net", "inner_size": 64, "num_heads": 4, "head_size": 16, "state_size": 16, "num_groups": 2,
         "conv_bias": False}  # fmt: skip
MAMBA_2 = {"kind": "mamba2", "inner_size": 64, "num_heads": 4, "head_size": 16, "state_size": 16, "num_groups": 2}
MAMBA = {"kind": "mamba", "inner_size": 128, "state_size": 6, "time_step_rank": 4}
GATED = {"gates_attention": True, "qk_norm": True, "norm_offset": 1.0, "rotary_size": 8}
NETWORKS = {
    "Qwen3-Next": (DELTA, {**GATED, **EXPERTS, "gates_shared_expert": True}),
    "Qwen 3.5": ({**DELTA, "is_grouped": False}, GATED),
    "Granite 4 hybrid": (MAMBA_2, {**EXPERTS, "residual_scale": 0.5}),
    "Nemotron-H": (
        {**MAMBA_2, "norm_groups": 2, "projection_bias": True},
        {"num_layers": 3, "feed_forward_layers": frozenset({2}), "has_mlp": False, "has_gate": False,
         "activation": "relu_squared"},
    ),
    "Falcon H1": (
        {**MAMBA_2, "norm": "none", "is_beside_attention": True, "input_scale": 0.5, "output_scale": 0.8,
         "part_scales": (0.5, 1.5, 0.7, 1.2, 0.9), "layers": frozenset({0, 1})},
        {"attention_output_scale": 0.9, "mlp_scales": (0.9, 0.6)},
    ),
    "Jamba": ({**MAMBA, "inner_norms": "learned"}, EXPERTS),
    "Mamba": ({**MAMBA, "layers": frozenset({0, 1})}, {"has_mlp": False, "wide_residual": True}),
    "LFM2": ({"kind": "short_conv", "inner_size": 64, "conv_width": 3, "conv_bias": False}, {"qk_norm": True}),
}  # fmt: skip


def packed_layer(linear: nn.Linear, kind: str) -> nn.Module:
    """A layer of random numbers of a kind; its weights are about as large as those of the network."""
    layout, sizes = KINDS[kind], (linear.in_features, linear.out_features)
    if isinstance(layout, GroupLayout):
        layer = GroupedLinear(*sizes, layout)
        layer.dtype = DTYPE
        layer.weight.random_(0, 1 << layout.bits)
        layer.scales.copy_((0.5 + torch.rand(layer.scales.shape)) * 0.6 / (1 << layout.bits))
        if layout.has_minimums:
            layer.minimums.copy_(layer.scales.float() * -layout.middle * (0.5 + torch.rand(layer.scales.shape)))
    elif isinstance(layout, CodeLayout):
        layer = CodedLinear(*sizes, layout)
        layer.weight.random_(0, 256)
        layer.scales.copy_((0.5 + torch.rand(layer.scales.shape)) * (0.05 if layout.table == FP4 else 0.25))
    else:
        layer = layout(*sizes, scale_dtype=torch.float32, num_groups=linear.in_features // GROUP)
        layer.weight = torch.randn(linear.weight.shape).mul(40).to(layer.weight.dtype)
        layer.scale.copy_((0.5 + torch.rand(layer.scale.shape)) * 0.15 / 40)
    layer.bias = linear.bias
    return layer


def packed_network(network: str, kind: str):
    """A network whose layers have random numbers of a kind, in the order of files."""
    shape, parts = NETWORKS[network]
    recurrence = Recurrence(**{"layers": frozenset({0}), **shape})
    model = random_model(**{**SIZES, **parts, "recurrence": recurrence, "max_length": 128})
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.add_(torch.randn(weight.shape) * 0.3)
        elif weight.dim() == 3:
            torch.nn.init.normal_(weight, std=0.3)
    own = {p for mixer in model.modules() if hasattr(mixer, "A_log") for p in mixer.parameters(recurse=False)}
    for parameter in model.parameters():
        if parameter not in own:
            parameter.data = parameter.data.to(DTYPE)
    settings = QuantizationSettings(kind="int4", group_size=GROUP)
    replace_layers(model, settings, lambda linear, _: packed_layer(linear, kind))
    return model.to(DEVICE)


def for_kernels(plain: nn.Module) -> nn.Module:
    """The same weights in the order of the kernels."""
    model, arrange = copy.deepcopy(plain), order_codes(DTYPE)
    for name, module in [*model.named_modules()]:
        if (other := arrange(name, module)) is not None:
            model.set_submodule(name, other)
    return model


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", [FP8_BLOCKS, "MXFP4", "Q4_1"])
def test_the_kernels_know_all_layers(network, kind):
    model = for_kernels(packed_network(network, kind))
    cache = SimpleNamespace(keys=[SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=DTYPE)])
    assert can_compute(model, cache)


def cases():
    """All on a GPU. The interpreter takes half a minute for each: one network has all kinds, others have one."""
    known = [kind for kind in KINDS if DEVICE.type == "cuda" or kind != FP8_BLOCKS]
    for i, network in enumerate(NETWORKS):
        all_kinds = DEVICE.type == "cuda" or i == 0
        yield from ((network, kind) for j, kind in enumerate(known) if all_kinds or j == i % len(known))


@pytest.mark.parametrize(("network", "kind"), [*cases()])
def test_steps(network, kind, monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr("flambeau.llm.backends.cuda.attention.PROGRAMS", 16)
        monkeypatch.setattr(comparison, "LENGTHS", (21, 3))
    monkeypatch.setattr(comparison, "MAX_WIDE_DIFFERENCE", 1e-4)
    plain = packed_network(network, kind)
    use_steady_steps(monkeypatch, plain)
    model = for_kernels(plain)
    assert not unknown_parts(model.arch)
    assert "recurrence" in compared_parts(model.arch)
    assert compared_weights(model) == [SCALES_OF_GROUPS]
    assert group_sizes(model) <= {*CODE_GROUPS}
    assert have_type(model, DTYPE)
    cache = room(model, 1, device=DEVICE, dtype=DTYPE)
    step = CudaNetwork(model, cache)
    recurrent = [layer for layer in step._layers if layer.beside or isinstance(layer.attention, RecurrentPart)]
    assert recurrent
    assert all(isinstance((layer.beside or layer).out, GroupScaledLinear) for layer in recurrent)
    reason = comparison.find_difference(
        model, cache, lambda own: CudaNetwork(model, own), lambda own: EagerBackend(plain, own)
    )
    assert reason is None


@pytest.mark.parametrize("kind", ["qwen-3-next", "granite-4-hybrid"])
def test_steps_of_gguf_files(kind, tmp_path, monkeypatch):
    """Projections of a module have types of their own there, and delta nets a product for each of theirs."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("flambeau.llm.backends.cuda.attention.PROGRAMS", 16)
        monkeypatch.setattr(comparison, "LENGTHS", (21, 3))
    monkeypatch.setattr(comparison, "MAX_WIDE_DIFFERENCE", 1e-4)
    paths, options = written(tmp_path, kind), {"dtype": DTYPE, "device": DEVICE}
    model = load_model(paths[0], forms=KeptForms(groups="gpu"), arrived=order_codes(DTYPE), **options)
    join_equal_parts(model)
    plain = load_model(paths[1], **options)
    use_steady_steps(monkeypatch, plain)
    assert any(isinstance(module, JoinedLinear) for module in model.modules())
    cache = room(model, 1, device=DEVICE, dtype=DTYPE)
    reason = comparison.find_difference(
        model, cache, lambda own: CudaNetwork(model, own), lambda own: EagerBackend(plain, own)
    )
    assert reason is None
