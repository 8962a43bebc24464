"""Mistral's own files give the network that transformers has for the same weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.mistral_params import from_mistral
from support.checkpoints import reference
from support.weights import IDS, alternating

NAMES = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.layers.": "layers.",
    "model.norm.": "norm.",
    "lm_head.": "output.",
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "self_attn.q_proj.": "attention.wq.",
    "self_attn.k_proj.": "attention.wk.",
    "self_attn.v_proj.": "attention.wv.",
    "self_attn.o_proj.": "attention.wo.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.down_proj.": "feed_forward.w2.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.gate.": "feed_forward.gate.",
}


def params_of(config, **more):
    return {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
        "hidden_dim": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"],
        **more,
    }


def own_tensors(model):
    """The weights by Mistral's names, with the coordinates of a rotation side by side."""
    found = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = alternating(tensor, params_of(model.config)["head_dim"])
        if ".experts." in name:
            start = "layers." + name.split(".")[2] + ".feed_forward.experts."
            for i, expert in enumerate(tensor):
                parts = dict(zip(("w1", "w3"), expert.chunk(2), strict=True)) if "gate_up" in name else {"w2": expert}
                found |= {f"{start}{i}.{part}.weight": value for part, value in parts.items()}
            continue
        for theirs, own in NAMES.items():
            name = name.replace(theirs, own)
        found[name] = tensor
    return {name: tensor.clone().contiguous() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mistral-v0.3", {}),
        ("mistral", {"sliding_window": 9}),
        ("mixtral", {"sliding_window": [9], "moe": {"num_experts": 4, "num_experts_per_tok": 2}}),
    ],
)
@pytest.mark.parametrize("shards", [1, 2])
def test_consolidated_files_are_loaded(tmp_path, kind, more, shards):
    model = reference(kind)
    (tmp_path / "params.json").write_text(json.dumps(params_of(model.config, **more)))
    tensors = own_tensors(model)
    names = list(tensors)
    for i in range(shards):
        file = "consolidated.safetensors" if shards == 1 else f"consolidated-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, tmp_path / file)
    found = load_model(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(IDS.unsqueeze(0)).logits[0]
        logits = found.logits(found(IDS, torch.arange(len(IDS)), WholeAttention()))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_missing_part_is_named(tmp_path):
    model = reference("mistral-v0.3")
    (tmp_path / "params.json").write_text(json.dumps(params_of(model.config)))
    save_file(own_tensors(model), tmp_path / "consolidated-00001-of-00003.safetensors")
    with pytest.raises(CheckpointError, match="1 of 3 files"):
        load_model(tmp_path)


SMALL = {"dim": 8, "n_layers": 4, "n_heads": 2, "hidden_dim": 16, "vocab_size": 9}


def test_windows_may_alternate():
    arch = from_mistral({**SMALL, "sliding_window": [4, None]})
    assert arch.windows == (4, None, 4, None)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"yarn": {"factor": 4}}, "yarn"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization"),
        ({"vision_encoder": {"dim": 1}}, "vision_encoder"),
        ({"use_biases": True}, "use_biases"),
        ({"moe": {"num_experts": 2, "num_experts_per_tok": 1, "shared": 1}}, "moe.shared"),
        ({"dim": None}, "needs dim"),
        ({"sliding_window": "long"}, "sliding_window"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(more, named):
    with pytest.raises(CheckpointError, match=named):
        from_mistral({**SMALL, **more})
