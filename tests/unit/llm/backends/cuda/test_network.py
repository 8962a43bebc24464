"""Networks of every family give the logits of plain PyTorch: on a GPU, or by Triton's interpreter (TRITON_INTERPRET=1).

Their parts and sizes are those of the tiny checkpoints, their weights are random.
"""

from __future__ import annotations

import os

import pytest
import torch

from flambeau.llm.backends.cuda import comparison
from flambeau.llm.backends.cuda.parts import unknown_parts
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.transformer import Transformer
from support.checkpoints import KINDS_OF_ALL, config_of
from support.llm_steps import room
from support.steady_steps import use_steady_steps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def interpreted(monkeypatch):
    """What the interpreter has patience for."""
    pytest.importorskip("triton", reason="there is no Triton here")
    if DEVICE.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)")
        monkeypatch.setattr("flambeau.llm.backends.cuda.attention.PROGRAMS", 16)
        monkeypatch.setattr(comparison, "LENGTHS", (21, 3))
    monkeypatch.setattr(comparison, "MAX_WIDE_DIFFERENCE", 1e-4)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # convolutions of plain PyTorch


def random_network(arch):
    """One whose norms and biases have an effect, too."""
    torch.manual_seed(0)
    model = Transformer(arch).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif weight.dim() == 1:
            torch.nn.init.normal_(weight, std=0.3)
        else:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model.to(DEVICE)


EXPERTS_WITHOUT_GATES = ["feed_forward_layers", "has_gate"]
LAYERS = ["normalizes_values", "scales_layers", "shapes"]  # of Gemma 4
OWN = ["layer_input_size", "layer_input_vocab"]
STREAMS = ["active_stream", "laurel_size", *OWN, "normalizes_values", "num_streams", "scales_stream", "shapes"]
LATENT_WINDOWS = ["shapes", "windows"]
UNKNOWN = {
    "nemotron-h-moe": EXPERTS_WITHOUT_GATES,
    "nemotron-h-latent": ["expert_latent_size", *EXPERTS_WITHOUT_GATES],
    "kimi-linear": ["recurrence", "unrotated_layers"],
    "lfm-3": ["attention_gate", "norm_places"],
    "dots-3": [
        *("gates_heads", "indexer", "latent_epsilon", "latent_scale", "normalizes_rotated_keys"),
        *LATENT_WINDOWS,
    ],
    "dots-3-plain": [*("gates_heads", "latent_epsilon", "latent_scale", "normalizes_rotated_keys"), *LATENT_WINDOWS],
    "qwen-4": ["hyper", "indexer", "ngrams"],
    "qwen-4-plain": ["hyper", "indexer"],
    "ax-k2": ["indexer", "joins_query_latents", "norm_gate_rank"],
    "ax-k2-groups": ["indexer", "joins_query_latents", "norm_gate_rank"],
    "diff-llama": ["is_differential", "value_size"],
    "diff-llama-biased": ["is_differential", "value_size"],
    "ling-3": ["gates_heads", "recurrence"],
    "ling-3-softplus": ["gates_heads", "recurrence"],
    "minimax-01": ["norm_places", "recurrence", "stream_scales"],
    "deepseek-v3.2": ["indexer"],
    "glm-5": ["indexer"],
    "minimax-m3": ["gate_limits", "indexer"],
    "mistral-large-4": ["indexer", "latent_epsilon", "learned_rope", "position_scales", "shapes", "shared_keys"],
    "gemma-3n": [*STREAMS, "shared_keys", "sparsity"],
    "gemma-4": [*OWN, *LAYERS, "shared_keys"],
    "gemma-4-moe": ["activation", "experts_beside_mlp", *LAYERS],
    "gemma-4-unified": LAYERS,
    "mistral-4": ["temperature_length"],
    "apertus": ["activation"],
    "nanochat": ["has_norm_weight", "reversed_rope"],
    "bitnet": ["inner_norms"],
    "persimmon": ["norm"],
    "afmoe": ["attention_gate"],
    "laguna": ["attention_gate", "shapes"],
    "mimo-v2": ["shapes", "sinks_in_windows", "value_scale", "value_size"],
    "step-3.7": ["attention_gate", "gate_limits", "shapes"],
    "longcat": ["has_shortcuts", "latent_scale", "num_zero_experts"],
    "ax-k1": ["expert_norm"],
    "deepseek-v4": ["compression", "gate_limits", "hashed_layers", "hyper", "recurrence"],
    "glm-5.3": [*("gate_limits", "hyper", "indexer", "latent_epsilon", "recurrence", "unrotated_layers")],
    "hy-4": ["attention_gate", "gate_limits", "has_sinks", "hyper", "indexer"],
    "modern-bert": ["has_first_norm", "head_layer", "head_layer_bias", "tied_bias"],
    "modern-bert-biased": ["has_first_norm", "head_layer"],
    "recurrent-gemma": ["recurrence"],
    "rwkv": ["recurrence"],
    "zamba-2": ["adapter_rank", "adapts_attention", "block_layers", "num_blocks"],
    "zamba-2-unrotated": ["adapter_rank", "block_layers", "num_blocks"],
}


def test_the_kernels_know_the_parts_of_all_families():
    found = {kind: unknown_parts(from_hugging_face(config_of(kind))) for kind in KINDS_OF_ALL}
    assert {kind: parts for kind, parts in found.items() if parts} == UNKNOWN


@pytest.mark.gpu
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", [kind for kind in KINDS_OF_ALL if kind not in UNKNOWN])
def test_steps_of_a_family(kind, monkeypatch):
    from flambeau.llm.backends.cuda.network import CudaNetwork

    model = random_network(from_hugging_face(config_of(kind)))
    use_steady_steps(monkeypatch, model)
    cache = room(model, 1, device=DEVICE)
    assert comparison.find_difference(model, cache, lambda ours: CudaNetwork(model, ours)) is None
