"""Every Triton kernel compiles for a Hopper GPU with the parts and sizes of real networks; no GPU is needed.

Networks are on the meta device: their launches are recorded instead of run, and what was launched is compiled.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import replace

import pytest
import torch

from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.gpu_weights import order_codes
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.families.gate_limits import GateLimits
from flambeau.llm.models.families.recurrence import Recurrence
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.coded import FP4, CodedLinear, CodeLayout, CudaCodedLinear
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear, CudaGroupedStack
from flambeau.llm.quantize.groups import GroupedLinear, GroupLayout, JoinedLinear
from flambeau.llm.quantize.quantizer import CudaCodedStack, ExpertStack, replace_layers
from flambeau.llm.quantize.row_scaled import Fp8Linear
from flambeau.llm.quantize.settings import QuantizationSettings
from support.llm_steps import step_inputs

pytest.importorskip("triton", reason="there is no Triton here")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flambeau.llm.backends.cuda import launch
from flambeau.llm.backends.cuda.attention import ScoreParts, attend_uniform
from flambeau.llm.backends.cuda.decode_attention import attend_new_tokens
from flambeau.llm.backends.cuda.feed_forward import kernel_experts
from flambeau.llm.backends.cuda.group_scaled import GroupScaledLinear, widened
from flambeau.llm.backends.cuda.group_scaled_experts import GroupScaledExperts
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.backends.cuda.lora_layers import NO_FUSIONS
from flambeau.llm.backends.cuda.lora_network import LoraNetwork
from flambeau.llm.backends.cuda.lora_norm import Unexpanded, normalize
from flambeau.llm.backends.cuda.lora_slots import LoraSlots, layer_shapes
from flambeau.llm.backends.cuda.network import CudaNetwork
from flambeau.llm.backends.cuda.norm import NormParameters
from flambeau.llm.backends.cuda.parts import unknown_parts
from flambeau.llm.backends.cuda.rope import HeadParts

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 << 10  # of a block on a Hopper GPU
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv", torch.int8: "i8"}
TYPES |= {torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.float16: "fp16"}
OPTIONS = ("num_warps", "num_stages", "launch_pdl")
LAYER_NORMS = {"norm": "layer", "norm_bias": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
NETWORKS = {
    "Llama": {"num_heads": 32, "num_kv_heads": 8, "head_size": 128},
    "Gemma 2": {"norm_offset": 1.0, "norm_places": "both", "activation": "gelu_tanh", "attention_softcap": 50.0,
                "logit_softcap": 30.0, "head_size": 256, "num_heads": 8, "num_kv_heads": 4, "windows": (4096,)},
    "Gemma 3": {"norm_offset": 1.0, "norm_places": "both", "activation": "gelu_tanh", "qk_norm": True,
                "head_size": 256},
    "OLMo 1": {"norm": "layer", "has_norm_weight": False, "clip_qkv": 8.0},
    "Exaone 4": {"norm_places": "after", "qk_norm": True},
    "GLM-4.5": {"rotary_size": 64, "qk_norm": True, "num_heads": 96, "num_kv_heads": 8},
    "GPT-NeoX": {**LAYER_NORMS, "is_parallel": True, "parallel_norms": True, "has_gate": False, "activation": "gelu",
                 "rotary_size": 16, "head_size": 64, "num_kv_heads": 32, "num_heads": 32},
    "Phi-2": {**LAYER_NORMS, "is_parallel": True, "has_gate": False, "activation": "gelu_tanh", "qk_norm": True,
              "rotary_size": 32, "head_size": 80, "num_kv_heads": 32, "num_heads": 32},
    "Command R": {"norm": "layer", "is_parallel": True, "separate_qk_norm": True},
    "BLOOM": {**LAYER_NORMS, "alibi": "plain", "embedding_norm": True, "has_gate": False, "activation": "gelu_tanh",
              "unrotated_layers": frozenset({0}), "num_kv_heads": 32, "num_heads": 32},
    "OPT-350M's norms": {**LAYER_NORMS, "norm_places": "sum", "has_last_norm": False, "has_gate": False,
                         "activation": "relu"},
    "Nemotron": {"norm": "layer", "norm_bias": True, "norm_offset": 1.0, "has_gate": False,
                 "activation": "relu_squared", "rotary_size": 64},
    "Hunyuan": {"qk_norm": True, "late_qk_norm": True},
    "DeepSeek V3": {"latent_size": 512, "query_latent_size": 1536, "rotary_size": 64, "unrotated_size": 128,
                    "value_size": 128, "num_kv_heads": 1, "head_size": 576, "num_heads": 128, "paired_rope": True,
                    "num_experts": 256, "num_experts_per_token": 8, "expert_size": 2048, "num_expert_groups": 8,
                    "num_chosen_groups": 4, "router": "biased_sigmoid", "shared_expert_size": 2048},
    "Llama 4": {"chunks": (8192,), "rotated_qk_norm": True, "scales_expert_inputs": True, "router": "sigmoid",
                "num_experts": 16, "num_experts_per_token": 1, "expert_size": 8192, "shared_expert_size": 8192,
                "normalizes_experts": False},
    "Ministral 3": {"temperature_length": 16384, "temperature_scale": 0.1, "tempers_rotated": True},
    "gpt-oss": {"has_sinks": True, "num_experts": 32, "num_experts_per_token": 4, "expert_size": 2880,
                "expert_bias": True, "gate_limits": GateLimits(kind="swiglu", experts=(7.0,)), "hidden_size": 2880,
                "head_size": 64, "num_heads": 64, "num_kv_heads": 8, "windows": (128,), "qkv_bias": True,
                "output_bias": True},
}  # fmt: skip
GATED = {"num_kv_heads": 2, "head_size": 256, "rotary_size": 64, "qk_norm": True, "gates_attention": True}
MAMBA_2 = {"kind": "mamba2", "inner_size": 8192, "num_heads": 128, "head_size": 64, "state_size": 128}
DELTA = {
    "kind": "delta_net",
    "inner_size": 4096,
    "num_heads": 32,
    "head_size": 128,
    "state_size": 128,
    "num_groups": 16,
    "conv_bias": False,
}
RECURRENT = {  # the first of two layers, or both
    "LFM2-1.2B": (
        {"kind": "short_conv", "inner_size": 2048, "conv_width": 3, "conv_bias": False},
        {"num_heads": 32, "head_size": 64, "qk_norm": True},
    ),
    "Granite-4-H-Small": (
        MAMBA_2,
        {
            "hidden_size": 4096,
            "num_heads": 32,
            "num_experts": 72,
            "num_experts_per_token": 10,
            "expert_size": 768,
            "shared_expert_size": 1536,
            "residual_scale": 0.22,
        },
    ),
    "Mamba-2.8B": (
        {"kind": "mamba", "inner_size": 5120, "state_size": 16, "time_step_rank": 160},
        {"hidden_size": 2560, "has_mlp": False, "wide_residual": True},
    ),
    "Mamba2-2.7B": (
        {**MAMBA_2, "inner_size": 5120, "num_heads": 80},
        {"hidden_size": 2560, "has_mlp": False, "wide_residual": True},
    ),
    "Qwen3-Next-80B-A3B": (
        DELTA,
        {
            **GATED,
            "norm_offset": 1.0,
            "num_experts": 512,
            "num_experts_per_token": 10,
            "expert_size": 512,
            "shared_expert_size": 512,
            "gates_shared_expert": True,
        },
    ),
    "Qwen3.5": ({**DELTA, "is_grouped": False}, {**GATED, "norm_offset": 1.0}),
    "Nemotron-H-8B": (
        {**MAMBA_2, "num_groups": 8, "norm_groups": 8},
        {
            "hidden_size": 4096,
            "num_heads": 32,
            "has_mlp": False,
            "has_gate": False,
            "activation": "relu_squared",
            "intermediate_size": 21504,
            "num_layers": 3,
            "feed_forward_layers": frozenset({2}),
        },
    ),
    "Falcon-H1-7B": (
        {
            **MAMBA_2,
            "inner_size": 3072,
            "num_heads": 24,
            "head_size": 128,
            "state_size": 256,
            "norm": "none",
            "is_beside_attention": True,
            "input_scale": 0.25,
            "output_scale": 0.5,
            "part_scales": (0.35, 0.25, 0.18, 0.5, 0.35),
        },
        {
            "hidden_size": 3072,
            "num_heads": 12,
            "num_kv_heads": 2,
            "intermediate_size": 12288,
            "attention_output_scale": 0.9,
            "mlp_scales": (0.9, 0.6),
        },
    ),
    "Jamba": (
        {"kind": "mamba", "inner_size": 8192, "state_size": 16, "time_step_rank": 256, "inner_norms": "learned"},
        {"hidden_size": 4096, "num_heads": 32, "num_experts": 16, "expert_size": 14336},
    ),
}
NARROW = ("Gemma 2", "DeepSeek V3", "gpt-oss")  # also with a cache of 8 bits
STEPS = {
    "one sequence": {0: (11, [1])},
    "several": {i: (i, [1]) for i in range(8)},
    "verified": {0: (4, [1] * 4), 1: (17, [2] * 4)},
    "prompt": {0: (0, [1] * 7), 1: (5, [2, 3] * 11)},
}
compiled: set[tuple[object, ...]] = set()


class Launches(list):
    """What was launched: kernels and their arguments by name."""

    def record(self, kernel, *args, grid, warmup, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        self.append((kernel, {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}, options))


@pytest.fixture
def launches(monkeypatch):
    found = Launches()
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda kernel, *args, **kwargs: found.record(kernel, *args, **kwargs)
    )
    monkeypatch.setattr(launch, "can_overlap", lambda: True)
    return found


def random_network(**changes):
    """A layer of a network with sizes as they are in use, without weights."""
    shape = {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_layers": 1,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_size": 128,
        "intermediate_size": 8192,
    }
    with torch.device("meta"):
        return Transformer(Architecture(**{**shape, **changes})).to(torch.bfloat16)


def signature_of(kernel, arguments):
    """Types, constants and attributes of a launch, as Triton specializes them."""
    types, constants, attributes = {}, {}, {}
    for number, parameter in enumerate(kernel.params):
        value, is_special = arguments[parameter.name], not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and is_special):
            types[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            types[parameter.name], is_aligned = f"*{TYPES[value.dtype]}", True
        else:
            types[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            is_aligned = isinstance(value, int) and value % 16 == 0
        if is_aligned and is_special:
            attributes[(number,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def compile_all(launches):
    """Compile what was not compiled before; the kernels by name."""
    found = []
    for kernel, arguments, options in launches:
        types, constants, attributes = signature_of(kernel, arguments)
        key = kernel.__name__, str(types), str(constants), str(attributes), str(options)
        if key not in compiled:
            compiled.add(key)
            source = ASTSource(kernel, types, constants, attributes)
            found.append((kernel.__name__, triton.compile(source, target=TARGET, options=options)))
            shared = found[-1][1].metadata.shared
            assert shared <= MAX_SHARED_BYTES, f"{kernel.__name__} needs {shared} bytes: {constants}"
    return found


@pytest.mark.parametrize(
    ("network", "cached"),
    [*((name, torch.bfloat16) for name in NETWORKS), *((name, torch.float8_e4m3fn) for name in NARROW)],
)
def test_kernels_compile(network, cached, launches):
    model = random_network(**NETWORKS[network])
    assert not unknown_parts(model.arch)
    step = CudaNetwork(model, KVCache(model.arch, 64, 16, device="meta", dtype=cached))
    for case, sequences in STEPS.items():
        inputs = step_inputs(sequences, query_len=0 if case == "prompt" else len(sequences[0][1]))
        with torch.inference_mode():
            if case == "prompt":
                step.prefill(inputs, inputs.query_starts[1:] - 1)
            else:
                step.run(inputs.to(torch.device("meta")))
    assert launches
    compile_all(launches)


@pytest.mark.parametrize("network", RECURRENT)
def test_kernels_of_recurrent_layers_compile(network, launches):
    shape, parts = RECURRENT[network]
    layers = frozenset({0, 1} if shape.get("is_beside_attention") else {0})
    recurrence = Recurrence(**{**shape, "layers": layers})
    model = random_network(**{"num_layers": 2, **parts, "recurrence": recurrence})
    for mixer in (layer.mixer for layer in model.model.layers if hasattr(layer, "mixer")):
        for parameter in mixer.parameters(recurse=False):
            parameter.data = parameter.data.float()  # decays
    assert not unknown_parts(model.arch)
    step = CudaNetwork(model, KVCache(model.arch, 64, 16, device="meta", dtype=torch.bfloat16, num_slots=8))
    for case, sequences in STEPS.items():
        query_len = 0 if case == "prompt" else len(sequences[0][1])
        inputs = step_inputs(sequences, query_len=query_len, has_states=True)
        inputs.state_ends_T = torch.zeros_like(inputs.ids_T) if query_len > 1 else None
        with torch.inference_mode():
            if case == "prompt":
                step.prefill(inputs, inputs.query_starts[1:] - 1)
            else:
                step.run(inputs.to(torch.device("meta")))
    names = {kernel.__name__ for kernel, _, _ in launches}
    assert {"convolve_tokens", "keep_windows"} <= names
    compile_all(launches)


@pytest.mark.parametrize(("gates", "activation"), [(True, "gelu_tanh"), (True, "silu"), (False, "relu_squared")])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_layers_with_quantized_weights_compile(kind, gates, activation, launches):
    width, size, group_size = 4096, 2048, 64
    with torch.device("meta"):
        layer = torch.nn.Linear(size, width, bias=True, dtype=torch.bfloat16)
        tensors = {"layer": layer, "bias": layer.bias, "gates": gates, "activation": activation}
        if kind == "int4":
            scales, minimums = torch.empty(2, width, size // group_size, dtype=torch.bfloat16)
            tensors |= {"weight": torch.empty(width, size // 2, dtype=torch.uint8), "scale": scales}
            tensors |= {"minimums": minimums, "group_size": group_size}
        else:
            weight = torch.empty(width, size, dtype=torch.int8 if kind == "int8" else torch.float8_e4m3fn)
            tensors |= {"weight": weight, "scale": torch.empty(width)}
        linear = KernelLinear(**tensors)
        for num_rows in (1, 8, 64):
            y = linear(torch.empty(num_rows, size, dtype=torch.bfloat16))
            assert y.shape == (num_rows, linear.width)
    compile_all(launches)


NO_FP4 = tuple(i / 8 - 1 for i in range(16))
GROUP_SCALED = {
    "fp8 blocks": 128,
    "MXFP8": 32,
    "MXFP4": CodeLayout(FP4, 32, has_wide_scales=False),
    "NVFP4": CodeLayout(FP4, 16),
    "nf4": CodeLayout(NO_FP4, 64),
    "Q2_K": GroupLayout(4, 16, True, 8),
    "Q3_K": GroupLayout(4, 16, False, 8),
    "Q4_0": GroupLayout(4, 32, False, 16),
    "Q4_K": GroupLayout(4, 32, True, 8),
    "Q5_1": GroupLayout(5, 32, True, 16),
    "Q5_K": GroupLayout(5, 32, True, 8),
    "Q6_K": GroupLayout(6, 16, False, 8),
    "Q8_0": GroupLayout(8, 32, False, 16),
}


def plain_layer(kind, size, outputs):
    """A layer with scales of groups; there are no numbers."""
    layout = GROUP_SCALED[kind]
    if isinstance(layout, int):
        return Fp8Linear(size, outputs, num_groups=size // layout)
    make = CodedLinear if isinstance(layout, CodeLayout) else GroupedLinear
    return make(size, outputs, layout)


def of_kernels(layer):
    if isinstance(layer, GroupedLinear):
        return CudaGroupedLinear(layer)
    return CudaCodedLinear(layer) if isinstance(layer, CodedLinear) else layer


@pytest.mark.parametrize("kind", GROUP_SCALED)
def test_layers_with_scales_of_groups_compile(kind, launches):
    needs_multiples = kind == "fp8 blocks" or kind.endswith("_K")
    with torch.device("meta"):
        for outputs, size, gates in ((6144, 4096, False), (11520, 2816 if needs_multiples else 2880, True)):
            linear = kernel_linear(of_kernels(plain_layer(kind, size, outputs)), gates=gates)
            assert isinstance(linear, GroupScaledLinear)
            for num_rows in (1, 8, 64):
                y = linear(torch.empty(num_rows, size, dtype=torch.bfloat16))
                assert y.shape[-2:] == (num_rows, linear.width)
            widened(linear, torch.bfloat16)
            widened(linear, torch.bfloat16, torch.empty(7, dtype=torch.int64))
    compile_all(launches)


def test_layers_in_several_forms_compile(launches):
    with torch.device("meta"):
        parts = [of_kernels(plain_layer(kind, 4096, 1024)) for kind in ("Q4_K", "Q6_K")]
        parts.append(torch.nn.Linear(4096, 1024, bias=False, dtype=torch.bfloat16))
        for gates in (False, True):
            linear = kernel_linear(JoinedLinear(parts), gates=gates)
            for num_rows in (1, 8, 64):
                y = linear(torch.empty(num_rows, 4096, dtype=torch.bfloat16))
                assert y.shape == (num_rows, 3072 // (1 + gates))
    compile_all(launches)


@pytest.mark.parametrize("kind", ["fp8 blocks", "MXFP4", "Q4_K", "Q6_K", "Q8_0"])
def test_experts_with_scales_of_groups_compile(kind, launches):
    sizes = {} if kind == "MXFP4" else {"hidden_size": 2816, "expert_size": 1536}
    model = random_network(**{**NETWORKS["gpt-oss"], **sizes})
    experts = model.model.layers[0].mlp.experts
    with torch.device("meta"):
        for leaf in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, leaf)
            count, rows, size = weight.shape
            delattr(experts, leaf)
            stack = ExpertStack(plain_layer(kind, size, count * rows), num_experts=count, dtype=torch.bfloat16)
            makes = {CodeLayout: CudaCodedStack, GroupLayout: CudaGroupedStack}
            make = makes.get(type(stack.layout), lambda stack: stack)
            experts.add_module(leaf, make(stack))
        kernel = kernel_experts(experts)
        assert isinstance(kernel, GroupScaledExperts)
        for num_rows in (1, 32, 1024):
            x = torch.empty(num_rows, model.arch.hidden_size, dtype=torch.bfloat16)
            chosen = torch.empty(num_rows, 4, dtype=torch.int32)
            kernel(x, chosen, torch.empty(num_rows, 4))
    compile_all(launches)


@pytest.mark.parametrize(("network", "kind"), [("Qwen3-Next-80B-A3B", "fp8 blocks"), ("Granite-4-H-Small", "Q4_K")])
def test_packed_weights_of_recurrent_networks_compile(network, kind, launches):
    shape, parts = RECURRENT[network]
    recurrence = Recurrence(**{**shape, "layers": frozenset({0})})
    model = random_network(**{"num_layers": 2, **parts, "recurrence": recurrence})
    for mixer in (layer.mixer for layer in model.model.layers if hasattr(layer, "mixer")):
        for parameter in mixer.parameters(recurse=False):
            parameter.data = parameter.data.float()  # decays
    arrange = order_codes(torch.bfloat16)
    with torch.device("meta"):
        replace_layers(
            model,
            QuantizationSettings(kind="int4"),
            lambda linear, _: plain_layer(kind, linear.in_features, linear.out_features),
        )
        for name, module in [*model.named_modules()]:
            if (other := arrange(name, module)) is not None:
                model.set_submodule(name, other)
    step = CudaNetwork(model, KVCache(model.arch, 64, 16, device="meta", dtype=torch.bfloat16, num_slots=8))
    for case, sequences in STEPS.items():
        query_len = 0 if case == "prompt" else len(sequences[0][1])
        inputs = step_inputs(sequences, query_len=query_len, has_states=True)
        inputs.state_ends_T = torch.zeros_like(inputs.ids_T) if query_len > 1 else None
        with torch.inference_mode():
            if case == "prompt":
                step.prefill(inputs, inputs.query_starts[1:] - 1)
            else:
                step.run(inputs.to(torch.device("meta")))
    names = {kernel.__name__ for kernel, _, _ in launches}
    assert {"multiply_one_row_of_groups", "multiply_rows_of_groups", "multiply_pairs", "convolve_tokens"} <= names
    compile_all(launches)


def step_with_adapters(network, num_layers, rank, sequences, launches, fusions=None):
    """The names of what a step launches for eight adapters; a rank of 0: of the network without adapters."""
    model, meta = random_network(**{**NETWORKS, **SHAPES}[network], num_layers=num_layers), torch.device("meta")
    cache = KVCache(model.arch, 64, 16, device="meta", dtype=torch.bfloat16)
    step = CudaNetwork(model, cache)
    if rank:
        slots = LoraSlots(layer_shapes(model.arch), 8, rank, meta, torch.bfloat16)
        step = LoraNetwork(model, cache, slots, fusions=fusions)
    is_prompt = len({len(new) for _, new in sequences.values()}) > 1
    inputs = step_inputs(sequences, query_len=0 if is_prompt else len(sequences[0][1]))
    inputs.adapters_T = torch.ones_like(inputs.ids_T)
    before = len(launches)
    with torch.inference_mode():
        if is_prompt:
            step.prefill(inputs, inputs.query_starts[1:] - 1)
        else:
            step.run(replace(inputs.to(meta), adapters_T=inputs.adapters_T.to(meta)))
    return [kernel.__name__ for kernel, _, _ in launches[before:]]


SHAPES = {
    "Llama-3.2-1B": {"num_heads": 32, "num_kv_heads": 8, "head_size": 64},
    "Llama-2-7B": {
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 32,
        "head_size": 128,
        "intermediate_size": 11008,
    },
}
OF_ADAPTERS = {"shrink_rows", "expand_rows", "activate_rows", "normalize_with_adapters"}


@pytest.mark.parametrize(
    ("network", "rank"), [*((name, 16) for name in ("GPT-NeoX", "Gemma 2", *SHAPES)), ("Llama", 128)]
)
def test_kernels_of_adapters_compile(network, rank, launches):
    for sequences in STEPS.values():
        step_with_adapters(network, 1, rank, sequences, launches)
    names = {kernel.__name__ for kernel, _, _ in launches}
    assert {"activate_rows", "normalize_with_adapters"} <= names
    own = [one for one in launches if one[0].__name__ in OF_ADAPTERS or one[1].get("RANK")]
    assert rank > 16 or any("RANK" in arguments for _, arguments, _ in own)
    for name, kernel in compile_all(own):
        assert network not in SHAPES or not spills(kernel), name


@pytest.mark.parametrize("network", SHAPES)
@pytest.mark.parametrize("rows", [2, 8, 32])
def test_norms_for_products_of_all_slots_have_registers(network, rows, launches):
    model, meta = random_network(**{**NETWORKS, **SHAPES}[network], num_layers=1), torch.device("meta")
    layers = LoraSlots(layer_shapes(model.arch), 8, 16, meta, torch.bfloat16).layers
    before, after = layers["model.layers.0.mlp.down_proj"], layers["model.layers.0.self_attn.qkv_proj"]
    hidden = model.arch.hidden_size
    with meta:
        x_TE, gain = torch.empty(rows, hidden, dtype=torch.bfloat16), torch.empty(hidden, dtype=torch.bfloat16)
        places_T = torch.empty(rows, dtype=torch.int64)
        y, inner = torch.empty(4, rows, hidden), torch.empty(4, rows, 8 * 16)
    sums = Unexpanded(y=y, inner=inner, slots=before, places_T=places_T)
    normalize(NormParameters(gain=gain, epsilon=1e-5), x_TE, sums, after, places_T, spreads=True)
    ((_, arguments, _),) = launches
    assert (arguments["BEFORE_SLOTS"], arguments["SLOTS"]) == (8, 8)
    for name, kernel in compile_all(launches):
        assert not spills(kernel), name


def spills(kernel):
    """Whether a compiled kernel keeps numbers in local memory, as registers are too few."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.search(r"STACK:(\d+)", usage)[1] != "0"


LAUNCHES = {  # of a layer in a step of eight sequences: without adapters, with launches of their own, and as it is
    ("Llama-3.2-1B", 16): (7, 15, 9),
    ("Llama-3.2-1B", 32): (7, 15, 10),
    ("Llama-2-7B", 16): (7, 15, 9),
    ("GPT-NeoX", 16): (7, 15, 12),
}


@pytest.mark.parametrize(("network", "rank"), LAUNCHES)
def test_adapters_add_few_launches(network, rank, launches):
    def of_a_layer(rank, fusions=None):
        one, two = (step_with_adapters(network, number, rank, STEPS["several"], launches, fusions) for number in (1, 2))
        return len(two) - len(one)

    assert (of_a_layer(0), of_a_layer(rank, NO_FUSIONS), of_a_layer(rank)) == LAUNCHES[network, rank]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dtype"), [(32, 4, torch.bfloat16), (8, 1, torch.float32)])
def test_attention_of_wide_heads_fits(num_heads, num_kv_heads, dtype, launches):
    with torch.device("meta"):
        q = torch.empty(10, num_heads, 512, dtype=dtype)
        keys = torch.empty(64, 16, num_kv_heads, 512, dtype=dtype)
        tables = torch.empty(2, 32, dtype=torch.int64)
        positions = torch.empty(10, dtype=torch.int64)
    attend_uniform(q[:2], keys, keys, positions[:2], tables, 1, 1.0, 0)
    if dtype == torch.bfloat16:
        attend_uniform(q, keys, keys, positions, tables, 5, 1.0, 0)
    for name, kernel in compile_all(launches):
        assert not spills(kernel), name


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "rotary_size"), [(16, 2, 64), (8, 4, 0)])
def test_attention_of_new_tokens_has_registers_for_heads_of_256(num_heads, num_kv_heads, rotary_size, launches):
    with torch.device("meta"):
        gains = (torch.empty(256, dtype=torch.bfloat16),) * 2
        tables = (torch.empty(4096, (rotary_size or 256) // 2),) * 2
        heads = HeadParts(tables=tables, rotary_size=rotary_size, gains=gains, epsilon=1e-6)
        keys = torch.empty(64, 16, num_kv_heads, 256, dtype=torch.bfloat16)
        for rows in (1, 256):  # split sequences, and programs enough to fill a GPU
            places, blocks = torch.empty(rows, dtype=torch.int64), torch.empty(rows, 64, dtype=torch.int64)
            qkv = torch.empty(rows, (num_heads + 2 * num_kv_heads) * 256, dtype=torch.bfloat16)
            given = qkv, keys, keys, places, places, blocks, num_heads, heads, ScoreParts(), 1.0, 0, torch.bfloat16
            attend_new_tokens(*given, torch.zeros(num_kv_heads, rows, dtype=torch.int32))
    for name, kernel in compile_all(launches):
        assert not spills(kernel), name
