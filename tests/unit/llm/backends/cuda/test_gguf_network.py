"""GGUF files by the GPU kernels give what plain PyTorch gives for their weights; on a CPU, by the interpreter."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from flambeau.llm.backends.cuda.backend import CudaBackend
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.gpu_weights import join_equal_parts, order_codes
from flambeau.llm.quantize.groups import JoinedLinear
from support.checkpoints import reference
from support.llm_steps import room, step_inputs

pytest.importorskip("triton", reason="there is no Triton here")
pytest.importorskip("gguf", reason="there is nothing that writes GGUF files here")

from flambeau.llm.backends.cuda import few_row_kernel, one_row_step, persistent_step
from flambeau.llm.backends.cuda.joined_linear import JoinedKernelLinear
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.backends.cuda.network import CudaNetwork
from flambeau.llm.backends.cuda.parts import SCALES_OF_GROUPS, compared_weights, unknown_parts
from flambeau.llm.backends.cuda.supported_networks import group_sizes, have_type
from support.gguf_files import values_of, written_twice

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
SIZES = {"hidden_size": 256, "intermediate_size": 256}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}


def mixed(name):
    """The types of a file that is called Q4_K_M, and others, in one module."""
    kinds = {"v_proj": "Q6_K", "1.self_attn.k_proj": "F16", "down_proj": "Q6_K", "embed": "Q6_K", "1.mlp.up": "Q8_0"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_K")


def others(name):
    """A type for each layer."""
    kinds = {"q_proj": "IQ4_XS", "k_proj": "IQ4_NL", "v_proj": "Q5_1", "o_proj": "Q3_K", "gate": "Q5_0", "up": "Q2_K",
             "down": "MXFP4", "embed": "Q8_0"}  # fmt: skip
    return next((kind for part, kind in kinds.items() if part in name), "Q5_K")


NETWORKS = {  # family, architecture, values of the header, types, changes
    "Q4_K_M, tied": ("qwen-2", "qwen2", {}, mixed, {"tie_word_embeddings": True}),
    "Llama, other types": ("llama-2", "llama", {}, others, {}),
    "experts": ("qwen-3-moe-normalized", "qwen3moe", EXPERTS, mixed, {"num_experts": 4, "moe_intermediate_size": 256}),
}
STEPS = {"one": {0: (11, [1])}, "several": {0: (11, [1]), 1: (0, [2]), 2: (30, [3])}}


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """The network in the form of the kernels, and that of floats."""
    found = {}

    def of(name):
        if name not in found:
            family, architecture, values, kind, changes = NETWORKS[name]
            model = reference(family, **SIZES, **HEADS, **changes)
            folder = tmp_path_factory.mktemp(architecture)
            paths = written_twice(folder, model, architecture, values_of(model.config, **values), kind)
            options = {"dtype": DTYPE, "device": DEVICE}
            packed = load_model(paths[0], forms=KeptForms(groups="gpu"), arrived=order_codes(DTYPE), **options)
            join_equal_parts(packed)
            found[name] = packed, load_model(paths[1], **options)
        return found[name]

    return of


@pytest.mark.parametrize("case", [*STEPS, "prompt"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name, case, networks, monkeypatch):
    if DEVICE.type == "cpu":
        monkeypatch.setattr("flambeau.llm.backends.cuda.attention.PROGRAMS", 16)
    packed, plain = networks(name)
    assert not unknown_parts(packed.arch)
    assert compared_weights(packed) == [SCALES_OF_GROUPS]
    assert group_sizes(packed) <= {16, 32}
    assert have_type(packed, DTYPE)
    ours, twin = (room(plain, 40, device=DEVICE, dtype=DTYPE) for _ in range(2))
    for one, other in zip((*ours.keys, *ours.values), (*twin.keys, *twin.values), strict=True):
        one.copy_(other)
    inputs = (
        step_inputs({i: (i, [i, 5] * 12) for i in range(3)})
        if case == "prompt"
        else step_inputs(STEPS[case], query_len=1)
    )
    rows = inputs.query_starts[1:] - 1
    with torch.inference_mode():
        backend = EagerBackend(plain, twin)
        expected = backend.prefill(inputs, rows) if case == "prompt" else backend.decode(inputs.to(DEVICE))
        step = CudaNetwork(packed, ours)
        found = step.prefill(inputs, rows) if case == "prompt" else step.run(inputs.to(DEVICE))
    assert (found - expected).norm() <= (0.08 if DEVICE.type == "cuda" else 1e-4) * expected.norm()


def test_the_kernels_for_one_sequence_leave_such_networks_alone(networks):
    """They read other weights; a module in several forms has no weight at all."""
    packed, _ = networks("Q4_K_M, tied")
    joined = packed.model.layers[1].self_attn.qkv_proj
    assert isinstance(joined, JoinedLinear)
    assert few_row_kernel.kind_of(joined) is None
    assert one_row_step.weight_kinds(packed) == {None}
    assert persistent_step.weight_kind(packed) is None


def test_the_kernels_for_one_sequence_make_no_copy_of_packed_embeddings(networks, monkeypatch):
    """Also where all other layers are as these kernels read them."""
    packed, _ = networks("Q4_K_M, tied")

    def fail(*_):
        raise AssertionError("this would widen all embeddings")

    for kernels in (one_row_step, persistent_step):
        monkeypatch.setattr(kernels, "is_faster", fail)
    backend = SimpleNamespace(model=packed, cache=room(packed, 1), _states=None)
    assert CudaBackend._build_one_row(backend, step_inputs(STEPS["one"], query_len=1), torch.zeros(1, 1)) is None


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 70, 300])
def test_layers_in_several_forms(num_rows, gates, networks):
    packed, _ = networks("Q4_K_M, tied")
    module = packed.model.layers[1].mlp.gate_up_proj if gates else packed.model.layers[1].self_attn.qkv_proj
    linear = kernel_linear(module, gates=gates)
    assert isinstance(linear, JoinedKernelLinear)
    assert {type(part) for part in linear.parts} != {KernelLinear}
    torch.manual_seed(0)
    x = torch.randn(num_rows, 256, device=DEVICE).to(DTYPE)
    with torch.inference_mode():
        found, expected = linear(x), module(x)
    if gates:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    assert found.shape == expected.shape
    bound = 0.02 if DEVICE.type == "cuda" else 1e-5
    assert (found - expected).float().norm() <= bound * expected.float().norm()
