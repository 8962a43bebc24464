"""No part of a network is overlooked by what decides whether the GPU's kernels compute it."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest
import torch
from torch import nn

from flambeau.llm.backends.cuda import lora_slots
from flambeau.llm.backends.cuda.lora_slots import layer_shapes
from flambeau.llm.backends.cuda.parts import COMPARED, TUNED, unknown_parts
from flambeau.llm.models import architecture
from flambeau.llm.models.architecture import EXTRAS, Architecture
from flambeau.llm.models.families.recurrence import Recurrence, RecurrentKind
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.norms import RMSNorm, SharedRMSNorm
from flambeau.llm.models.transformer import Transformer, is_unmodified
from support.checkpoints import KINDS_OF_ALL, config_of
from support.llm_steps import random_model

# What Llama has, too, or what only the loading of files depends on: kernels read it from modules and tables.
PLAIN = {
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "intermediate_size"),
    *("max_length", "rope_theta", "rope_scaling", "unrotated_layers", "windows", "position_axes"),
    *("norm_epsilon", "tied_embeddings", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "dense_layers"),
    *("num_experts", "num_experts_per_token", "expert_size", "normalizes_experts"),
    "image_layer_id",  # steps with images are plain PyTorch
}
OF_FILES = {
    *("renames", "interleaved_rope", "interleaved_gates", "grouped_qkv", "qvk_blocks", "values_from_keys", "unused"),
    *("num_unused_layers", "normalized_head", "transposed", "either_order", "eos_ids", "bos_id", "dtype"),
    *("unknown_keys", "source", "vision", "sounds", "zeros", "flat_experts", "sinusoids"),
}
CLASSES = {  # of networks that the kernels compute
    "Attention", "CenteredNorm", "Conv1d", "Decoder", "DeltaNet", "Embedding", "Experts", "FeedForwardLayer", "Gate",
    "AttentionOnlyLayer", "DecoderLayer", "GatedNorm", "HeadNorm", "Identity", "JointLayer", "LatentAttention",
    "LatentUp", "Linear", "MLP", "Mamba", "Mamba2", "ModuleList", "OffsetRMSNorm", "ParallelLayer", "PlainMLP",
    "PostNormLayer", "RMSNorm", "RecurrentLayer", "Rotation", "ScaledMLP", "SharedExpert", "ShortConvolution",
    "SparseMLP", "SumNormLayer", "Transformer",
}  # fmt: skip
WITH_EXPERTS = {"num_experts": 4, "expert_size": 16}
LAYERS = frozenset({0})


@pytest.fixture(scope="module")
def networks() -> dict[str, Transformer]:
    with torch.device("meta"):
        return {kind: Transformer(from_hugging_face(config_of(kind))) for kind in KINDS_OF_ALL}


def test_every_field_of_an_architecture_is_decided_on():
    assert {field.name for field in fields(Architecture)} - EXTRAS == PLAIN | OF_FILES
    assert TUNED | COMPARED <= EXTRAS


def test_every_value_of_a_kind_is_decided_on():
    """A new one has to be added here, after a look at the kernels."""
    found = {
        "norm_places": {each: decide(norm_places=each) for each in get_args(architecture.NormPlaces)},
        "activation": {each: decide(activation=each) for each in get_args(architecture.Activation)},
        "of experts": {each: decide(**WITH_EXPERTS, activation=each) for each in get_args(architecture.Activation)},
        "router": {each: decide(**WITH_EXPERTS, router=each) for each in get_args(architecture.RouterKind)},
        "norm": {each: decide(norm=each) for each in get_args(architecture.NormKind)},
        "alibi": {each: decide(alibi=each) for each in get_args(architecture.AlibiKind)},
        "recurrence": {
            each: decide(recurrence=Recurrence(kind=each, layers=LAYERS, inner_size=8))
            for each in get_args(RecurrentKind)
        },
        "attention_gate": {each: decide(attention_gate=each) for each in get_args(architecture.GateKind)},
    }
    assert found == {
        "norm_places": {"before": (), "after": (), "both": (), "sum": ("norm_places",), "stream": ("norm_places",)},
        "activation": {
            **dict.fromkeys(("silu", "gelu", "gelu_tanh", "relu", "relu_squared"), ()),
            "xielu": ("activation",),
        },
        "of experts": {
            "silu": (),
            **dict.fromkeys(("gelu", "gelu_tanh", "relu", "relu_squared", "xielu"), ("activation",)),
        },
        "router": dict.fromkeys(  # those that the kernel does not know are computed by their own functions
            (
                *("softmax", "grouped_softmax", "biased_softmax", "biased_sigmoid", "biased_sqrt_softplus"),
                *("zeroed_sigmoid", "sigmoid", "wide_sigmoid", "late_sigmoid", "sparse_mixer"),
            ),
            (),
        ),
        "norm": {"rms": (), "layer": ()},
        "alibi": {"plain": (), "scaled": ()},
        "recurrence": {
            **dict.fromkeys(("short_conv", "mamba", "mamba2", "delta_net"), ()),
            **dict.fromkeys(("kimi_delta", "lightning", "gated", "rwkv", "compressor"), ("recurrence",)),
        },
        "attention_gate": dict.fromkeys(
            ("sigmoid", "softplus", "sigmoid_per_head", "softplus_per_head"), ("attention_gate",)
        ),
    }
    # Their tables have all that distinguishes them.
    assert {*get_args(architecture.RopeKind)} == {"linear", "llama3", "yarn", "longrope", "proportional"}


def test_norms_after_recurrent_layers_are_left_to_inductor():
    recurrence = Recurrence(kind="short_conv", layers=LAYERS, inner_size=32)
    assert decide(recurrence=recurrence, norm_places="both") == ("norm_places",)


def decide(**changes):
    shape = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_size": 8, "intermediate_size": 48}
    return tuple(unknown_parts(Architecture(**{"vocab_size": 97, "num_layers": 2, **shape, **changes})))


def test_networks_that_the_kernels_compute_have_known_classes(networks):
    known = [network for network in networks.values() if not unknown_parts(network.arch)]
    assert {type(module).__name__ for network in known for module in network.modules()} == CLASSES


def test_slots_of_adapters_have_the_shapes_of_layers(networks, monkeypatch):
    monkeypatch.setattr(lora_slots, "MIN_COLUMNS", 1)  # tiny heads
    num_found = 0
    for kind, network in networks.items():
        found, layers = layer_shapes(network.arch), dict(network.named_modules())
        for name, shape in found.items():
            assert (shape.outputs, shape.inputs) == layers[name].weight.shape, (kind, name)
        assert not found or not unknown_parts(network.arch), kind
        num_found += bool(found)
    assert num_found > 80


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp_scales": (0.5, 2.0)},
        {"feed_forward_layers": frozenset({1})},
        {"inner_norms": True},
        {"attention_gate": "sigmoid"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_layers_have_no_slots(changes):
    assert not layer_shapes(random_model(head_size=16, **changes).arch)
    assert layer_shapes(random_model(head_size=16).arch)


def test_norms_that_ranks_share_are_no_unmodified_ones():
    norm = RMSNorm(8, 1e-5)
    assert is_unmodified(norm)
    assert not is_unmodified(SharedRMSNorm(norm, lambda x: x))
    assert not is_unmodified(nn.LayerNorm(8))
