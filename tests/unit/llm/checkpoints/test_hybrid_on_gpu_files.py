"""Files of networks with recurrent layers, packed in the order of the GPU's kernels: the same weights."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from flambeau.llm import proposers
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.config import EngineConfig
from flambeau.llm.gpu_weights import can_keep_integers, can_keep_on_gpu, join_equal_parts, order_codes
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear, CudaGroupedStack
from flambeau.llm.quantize.groups import JoinedLinear
from flambeau.llm.quantize.row_scaled import Fp8Linear
from support.checkpoints import config_of, reference
from support.gguf_architectures import KINDS, options_of
from support.gguf_converter import converted, header_of
from support.gguf_files import write_gguf
from support.packed_checkpoints import write_packed_kind
from support.weights import logits_of
from unit.llm.checkpoints.test_fp8 import blocks

GPU = torch.device("cuda")
DELTA_SIZES = {"linear_value_head_dim": 16, "intermediate_size": 64}
EXPERT_SIZES = {
    "num_experts": 4,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
EXPERT_VALUES = {"expert_count": 4, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32}
NETWORKS = {  # options, values of the header, layers that are packed
    "qwen-3-next": (
        {**DELTA_SIZES, **EXPERT_SIZES},
        {"ssm.inner_size": 96, **EXPERT_VALUES},
        ("in_proj_qkv", "in_proj_z", "out_proj"),
    ),
    "qwen-3.5": (DELTA_SIZES, {"ssm.inner_size": 96}, ("in_proj_qkv", "in_proj_z")),
    "granite-4-hybrid": ({"intermediate_size": 64}, {}, ("in_proj", "out_proj")),
    "nemotron-h": ({"intermediate_size": 64}, {"feed_forward_length": [0, 64, 0, 64, 0]}, ("in_proj", "out_proj")),
}
TYPES = {"q_proj": "Q5_0", "v_proj": "Q8_0", "in_proj": "Q5_1", "out_proj": "Q8_0"}


def written(tmp_path, kind):
    """A packed file, and one with the same weights as floats."""
    changes, more, _ = NETWORKS[kind]
    architecture, values = KINDS[kind]
    model = reference(kind, **options_of(kind) | changes)
    tensors = converted(model, tmp_path / "folder", architecture)
    header = header_of(model.config, **{**values, **more})
    paths = tmp_path / "packed" / "model.gguf", tmp_path / "plain" / "model.gguf"

    def kind_of(name):
        is_packed = tensors[name].dim() > 1 and tensors[name].shape[-1] % 32 == 0 and "conv" not in name
        is_router = name.endswith(("mlp.gate.weight", "shared_expert_gate.weight", "router.layer.weight"))
        return next((t for part, t in TYPES.items() if part in name), "Q4_1") if is_packed and not is_router else "F32"

    stored = write_gguf(paths[0], architecture, tensors, header, kind_of)
    write_gguf(paths[1], architecture, stored, header)
    return paths


@pytest.mark.parametrize("kind", NETWORKS)
def test_gguf_files(tmp_path, kind):
    paths = written(tmp_path, kind)
    found = load_model(paths[0], dtype=torch.float32, forms=KeptForms(groups="gpu"), arrived=order_codes(torch.float32))
    join_equal_parts(found)
    expected = load_model(paths[1], dtype=torch.float32)
    torch.testing.assert_close(logits_of(found), logits_of(expected), rtol=1e-4, atol=1e-4)
    mixer = next(layer.mixer for layer in found.model.layers if hasattr(layer, "mixer"))
    for name in NETWORKS[kind][2]:
        assert isinstance(getattr(mixer, name), CudaGroupedLinear | JoinedLinear), name
    if kind == "qwen-3-next":
        mlp = found.model.layers[0].mlp
        assert isinstance(mlp.experts.down_proj, CudaGroupedStack)
        assert isinstance(mlp.shared_expert.down_proj, CudaGroupedLinear)


def test_fp8_blocks_of_qwen3_next(tmp_path):
    declared = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    packed, plain = write_packed_kind(tmp_path, "qwen-3-next", lambda weight: blocks(weight, 16), declared)
    found = load_model(packed, dtype=torch.float32, forms=KeptForms(blocks=True))
    expected = load_model(plain, dtype=torch.float32)
    torch.testing.assert_close(logits_of(found), logits_of(expected), rtol=1e-4, atol=1e-4)
    mixer, attention = found.model.layers[0].mixer, found.model.layers[1].self_attn
    for layer in (mixer.in_proj_qkvz, attention.qkv_proj, attention.o_proj):
        assert isinstance(layer, Fp8Linear)
        assert layer.scale.shape == (layer.out_features, layer.in_features // 16)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("hopper")
def test_their_weights_stay_packed_on_a_gpu():
    for kind in ("qwen-3-next", "qwen-3.5", "granite-4-hybrid", "nemotron-h", "falcon-h1", "jamba", "mamba", "lfm-2"):
        arch = from_hugging_face(config_of(kind))
        assert can_keep_on_gpu(EngineConfig(), GPU, None, arch), kind
        assert can_keep_integers(EngineConfig(), GPU, None, arch), kind
        assert not can_keep_on_gpu(EngineConfig(compile=False), GPU, None, arch)
    experts_without_gates = from_hugging_face(config_of("nemotron-h-moe"))
    assert not can_keep_on_gpu(EngineConfig(), GPU, None, experts_without_gates)


def test_a_draft_with_recurrent_layers_is_dequantized(tmp_path, monkeypatch):
    """Its decode steps run as plain PyTorch, which would widen packed weights each time."""
    path, _ = written(tmp_path, "granite-4-hybrid")
    target = read_architecture(path)
    monkeypatch.setattr(proposers, "can_keep_integers", lambda *_: True)
    draft = proposers.load_draft(
        EngineConfig(draft=str(path), device="cpu", compile=False), target, torch.device("cpu"), torch.float32
    )
    assert not any(isinstance(module, CudaGroupedLinear | CudaGroupedStack) for module in draft.modules())
