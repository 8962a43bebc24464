"""Ling 2.5, which transformers does not have: its DeepSeek V3, in which a plain twin takes the place of some attention.

The twin goes from token to token, as the formulas are written down.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.mtp_weights import load_mtp, read_mtp
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.sampling_params import SamplingParams
from support.checkpoints import reference
from support.ranks import logits_in_threads
from support.tiny_models import tiny_engine
from unit.llm.models.families.test_llama_like import TOLERANCE
from unit.llm.models.test_hybrid import backend_for, inputs_of

HEADS, SIZE, ROTATED, GROUPS, LAYERS = 4, 16, 8, 2, 5
LINEAR = (0, 1)  # of groups of three; the last two layers are no whole group
CONFIG = {
    "architectures": ["BailingMoeV2_5ForCausalLM"],
    "model_type": "bailing_hybrid",
    "num_shared_experts": 2,
    "head_dim": SIZE,
    "partial_rotary_factor": 0.5,
    "layer_group_size": 3,
    "group_norm_size": GROUPS,
    "use_qk_norm": True,
    "linear_silu": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "mtp_loss_scaling_factor": 0,
    "num_nextn_predict_layers": 0,
}


class Twin(torch.nn.Module):
    """Lightning attention of one layer."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        generator, size = torch.Generator().manual_seed(layer), HEADS * SIZE
        shapes = {"query_key_value": (3 * size, 32), "dense": (32, size), "g_proj": (size, 32)}
        self.tensors = {f"{name}.weight": torch.randn(s, generator=generator) * 0.3 for name, s in shapes.items()}
        for name, width in (("query_layernorm", SIZE), ("key_layernorm", SIZE), ("g_norm", size)):
            self.tensors[f"{name}.weight"] = torch.rand(width, generator=generator) + 0.5
        self.decays = [
            math.exp(-(2.0 ** (-8 * (head + 1) / HEADS)) * (1 - (layer - 1) / (LAYERS - 1) + 1e-5))
            for head in range(HEADS)
        ]

    def forward(self, hidden_states, **others):
        x, weights = hidden_states[0].double(), {name: tensor.double() for name, tensor in self.tensors.items()}
        parts = (x @ weights["query_key_value.weight"].T).chunk(3, dim=-1)
        q, k, v = (part.view(-1, HEADS, SIZE) for part in parts)
        q = rotated(F.rms_norm(q, (SIZE,), weights["query_layernorm.weight"], 1e-6))
        k = rotated(F.rms_norm(k, (SIZE,), weights["key_layernorm.weight"], 1e-6))
        found = torch.zeros_like(v)
        for head, decay in enumerate(self.decays):
            state = torch.zeros(SIZE, SIZE, dtype=torch.float64)
            for token in range(len(x)):
                state = state * decay + torch.outer(k[token, head], v[token, head])
                found[token, head] = q[token, head] @ state * SIZE**-0.5
        groups = F.rms_norm(found.view(len(x), GROUPS, -1), (HEADS * SIZE // GROUPS,), eps=1e-6).flatten(1)
        gate = torch.sigmoid(x @ weights["g_proj.weight"].T)
        y = (groups * weights["g_norm.weight"] * gate) @ weights["dense.weight"].T
        return y.float()[None], None


def rotated(x):
    """Heads [T, H, D] by the places of their tokens; halves of the first coordinates are pairs."""
    half = ROTATED // 2
    angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x[..., :half], x[..., half:ROTATED], x[..., ROTATED:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """A folder with the publisher's names, and the network that it describes."""
    folder = tmp_path_factory.mktemp("ling")
    model = reference(
        "deepseek-v3", num_hidden_layers=LAYERS, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    )
    model.save_pretrained(folder)
    tensors, renamed = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if not any(name.startswith(f"model.layers.{layer}.self_attn.") for layer in LINEAR):
            name = name.replace(".self_attn.", ".attention.").replace(".attention.o_proj.", ".attention.dense.")
            name = name.replace("e_score_correction_bias", "expert_bias").replace("embed_tokens", "word_embeddings")
            renamed[name] = tensor
    for layer in LINEAR:
        twin = Twin(layer)
        model.model.layers[layer].self_attn = twin
        renamed |= {f"model.layers.{layer}.attention.{name}": tensor for name, tensor in twin.tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    left_out = ("n_shared_experts", "n_routed_experts", "num_local_experts", "rope_parameters", "qk_head_dim")
    kept = {key: value for key, value in config.items() if key not in left_out}
    experts = {"num_experts": config["n_routed_experts"], "rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps({**kept, **experts, **CONFIG}))
    return folder, load_model(folder), model


def expected_logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def some_ids(length):
    return torch.randint(101, (length,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("kind", ["plain", "kernels"])
def test_prompts_in_chunks_and_single_tokens_have_the_logits_of_the_twin(networks, kind):
    folder, model, twin = networks
    assert model.arch.unknown_keys == ()
    assert model.arch.recurrent_layers == set(LINEAR)
    backend, ids = backend_for(load_model(folder), 3, kind), some_ids(31)
    found, done = [], 0
    for length in (5, 1, 19, 1, 1, 4):
        inputs = inputs_of({0: (done, ids[done : done + length])})
        found.append(backend.prefill(inputs, torch.arange(length)))
        done += length
    torch.testing.assert_close(torch.cat(found), expected_logits(twin, ids), **TOLERANCE)


def test_an_engine_generates_what_the_twin_does(networks):
    _, model, twin = networks
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [some_ids(1), some_ids(70), some_ids(9)]
    for prompt, one in zip(prompts, tiny_engine(model, max_step_tokens=32).generate(prompts, greedy), strict=True):
        logits = expected_logits(twin, [*prompt, *one.token_ids])
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == one.token_ids


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_find_what_one_finds(networks, num_ranks, monkeypatch):
    folder, _, twin = networks
    ids = some_ids(40)
    for found in logits_in_threads(folder, num_ranks, ids, monkeypatch):
        torch.testing.assert_close(found, expected_logits(twin, ids), **TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_silu": True}, "linear_silu"),
        ({"partial_rotary_factor": 1.0}, "qk_rope_head_dim"),
        ({"group_norm_size": 3}, "group_norm_size"),
        ({"use_qkv_bias": True}, "use_qkv_bias"),
    ],
)
def test_other_settings_are_refused_by_name(networks, changes, message):
    config = json.loads((networks[0] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message):
        from_hugging_face({**config, **changes})


def test_the_layer_that_predicts_further_tokens_has_latent_attention(networks, tmp_path):
    """It has the publisher's names; here it is a copy of the last layer."""
    folder, model, _ = networks
    tensors, last = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS - 1}."
    start, generator = f"model.layers.{LAYERS}.", torch.Generator().manual_seed(4)
    further = {name.replace(last, start): x.clone() for name, x in tensors.items() if name.startswith(last)}
    further |= {f"{start}{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "final_layernorm")}
    further[f"{start}eh_proj.weight"] = torch.randn(32, 64, generator=generator)
    save_file(tensors | further, tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    settings, naming = read_mtp(tmp_path, read_architecture(tmp_path))
    head = load_mtp(tmp_path, settings, naming, model, device=torch.device("cpu"), dtype=torch.float32)
    ids, hidden = torch.arange(3, 14), torch.randn(11, 32, generator=generator)
    both = [F.rms_norm(x, (32,), eps=1e-6) for x in (model.model.embed_tokens(ids), hidden)]
    x = torch.cat(both, dim=-1) @ further[f"{start}eh_proj.weight"].T
    x = model.model.layers[LAYERS - 1](x, model.rotation(torch.arange(11)), WholeAttention())
    found = head(ids, hidden, torch.arange(11), WholeAttention())
    torch.testing.assert_close(found, F.rms_norm(x, (32,), eps=1e-6), atol=2e-4, rtol=1e-4)
