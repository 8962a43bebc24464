"""Families that transformers has no code for: each is a Llama whose files have other names and arrangements."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families import llama_like
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.slopes import alibi_slopes
from support.checkpoints import VOCAB_SIZE, config_of, write_checkpoint

LENGTH = 24
IDS = torch.randint(VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(3))
TOLERANCE = {"atol": 5e-5, "rtol": 0.0}
INTERNLM_2_NAMES = {
    r"\.self_attn\.o_proj\.": ".attention.wo.",
    r"\.input_layernorm\.": ".attention_norm.",
    r"\.post_attention_layernorm\.": ".ffn_norm.",
    r"\.mlp\.gate_proj\.": ".feed_forward.w1.",
    r"\.mlp\.up_proj\.": ".feed_forward.w3.",
    r"\.mlp\.down_proj\.": ".feed_forward.w2.",
    r"^model\.embed_tokens\.": "model.tok_embeddings.",
    r"^lm_head\.": "output.",
}


def rewrite(folder, config, change) -> None:
    """Replace keys of config.json (None removes one), and the tensors by what `change` makes of them."""
    file, weights = folder / "config.json", folder / "model.safetensors"
    kept = {**json.loads(file.read_text()), **config}
    file.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(weights)).items()}, weights)


def fused(tensors: dict[str, Tensor], name: str, fuse) -> dict[str, Tensor]:
    """The tensors with q_proj, k_proj and v_proj of each layer in one."""
    others = {key: tensor for key, tensor in tensors.items() if not re.search(r"\.[qkv]_proj\.", key)}
    for key in [key for key in tensors if ".q_proj." in key]:
        parts = [tensors[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        others[key.replace("self_attn.q_proj", name)] = fuse(*parts)
    return others


def by_groups(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """InternLM 2: the queries of each key-value head, its key and its value; 2 key-value heads of 8."""
    heads = [part.view(2, -1, 8, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(heads, dim=1).flatten(0, 2)


def found_logits(folder) -> Tensor:
    model = load_model(folder)
    assert model.arch.unknown_keys == ()
    with torch.inference_mode():
        return model.logits(model(IDS, torch.arange(LENGTH), WholeAttention()))


def expected_logits(reference, **inputs) -> Tensor:
    with torch.inference_mode():
        return reference(IDS.unsqueeze(0), **inputs).logits[0].float()


@pytest.mark.parametrize("kind", ["llama-3", "llama-biased"])
def test_internlm_2_is_a_llama_with_other_names(tmp_path, kind):
    reference = write_checkpoint(tmp_path, kind)
    has_bias = kind == "llama-biased"
    if has_bias:  # InternLM 2 has them in attention only
        for name, parameter in reference.named_parameters():
            if ".mlp." in name and name.endswith(".bias"):
                parameter.zero_()

    def change(tensors):
        kept = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.mlp\..*bias$", name)}
        renamed = fused(kept, "attention.wqkv", by_groups)
        for pattern, name in INTERNLM_2_NAMES.items():
            renamed = {re.sub(pattern, name, key): tensor for key, tensor in renamed.items()}
        return renamed

    keys = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": has_bias}
    rewrite(tmp_path, {**keys, "attention_bias": None, "mlp_bias": None}, change)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)


def test_internlm_3_has_a_key_for_the_biases_of_queries_keys_and_values(tmp_path):
    reference = write_checkpoint(tmp_path, "llama-biased")
    keys = {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "bias": True, "qkv_bias": True}
    rewrite(tmp_path, {**keys, "attention_bias": None, "mlp_bias": None}, lambda tensors: tensors)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)


@pytest.mark.parametrize(
    ("kind", "name"), [("internlm-3", "InternLM3ForCausalLM"), ("iquest-coder", "IQuestCoderForCausalLM")]
)
def test_the_class_of_a_llama_is_that_of_its_publisher_or_that_of_transformers(kind, name):
    written = config_of(kind)
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert from_hugging_face({**written, "architectures": [name]}) == from_hugging_face(written)


@pytest.mark.parametrize(("key", "value"), [("clip_qkv", 8.0), ("use_sliding_window", True)])
def test_a_coder_of_iquest_has_no_windows_and_no_limit(key, value):
    config = {**config_of("iquest-coder"), "architectures": ["IQuestCoderForCausalLM"], key: value}
    with pytest.raises(CheckpointError, match=key):
        from_hugging_face(config)


BAICHUAN = {
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan",
    "model_max_length": 128,
    "z_loss_weight": 0,
    "num_key_value_heads": None,
    "max_position_embeddings": None,
    "attention_bias": None,
    "mlp_bias": None,
    "head_dim": None,
    "rope_parameters": None,
}


def write_baichuan(folder):
    """A checkpoint of Baichuan's form, and the Llama that has its weights."""
    reference = write_checkpoint(folder, "llama-2")
    rewrite(folder, BAICHUAN, lambda tensors: fused(tensors, "self_attn.W_pack", lambda *parts: torch.cat(parts)))
    return reference


def test_the_small_baichuan_is_a_llama_and_the_second_has_a_normalized_head(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_like, "BAICHUAN_7B_SIZE", 32)
    reference = write_baichuan(tmp_path)
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)
    monkeypatch.setattr(llama_like, "BAICHUAN_2_VOCABULARY", VOCAB_SIZE)
    reference.lm_head.weight.copy_(torch.nn.functional.normalize(reference.lm_head.weight))
    torch.testing.assert_close(found_logits(tmp_path), expected_logits(reference), **TOLERANCE)


def test_the_large_baichuan_has_alibi_instead_of_rotary_positions(tmp_path):
    reference = write_baichuan(tmp_path)
    distance = torch.arange(LENGTH) - torch.arange(LENGTH).unsqueeze(1)
    biases = alibi_slopes(4, torch.device("cpu")).view(-1, 1, 1) * distance
    mask = biases.masked_fill(distance > 0, -torch.inf).unsqueeze(0)
    still = torch.zeros(1, LENGTH, dtype=torch.int64)  # at position 0, nothing is rotated
    expected = expected_logits(reference, attention_mask=mask, position_ids=still)
    torch.testing.assert_close(found_logits(tmp_path), expected, **TOLERANCE)
