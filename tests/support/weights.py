"""Checkpoints of our own random networks in the spellings of others, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.tensor_names import parts_of
from flambeau.llm.models.transformer import Transformer
from support.tiny_models import tiny_model

IDS = torch.tensor([3, 1, 4, 15, 9, 26, 53, 58, 9, 7, 93])

GPT_FAST_NAMES = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.layers.": "layers.",
    "model.norm.": "norm.",
    "lm_head.": "output.",
    "self_attn.qkv_proj.": "attention.wqkv.",
    "self_attn.q_proj.": "attention.wq.",
    "self_attn.k_proj.": "attention.wk.",
    "self_attn.v_proj.": "attention.wv.",
    "self_attn.o_proj.": "attention.wo.",
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "mlp.experts.gate_proj": "block_sparse_moe.cond_ffn.w1",
    "mlp.experts.up_proj": "block_sparse_moe.cond_ffn.w3",
    "mlp.experts.down_proj": "block_sparse_moe.cond_ffn.w2",
    "mlp.gate.": "block_sparse_moe.gate.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.down_proj.": "feed_forward.w2.",
}


def config_of(arch: Architecture, **options: Any) -> dict[str, Any]:
    """The config.json of a network."""
    config = {
        "architectures": ["MixtralForCausalLM" if arch.num_experts else "LlamaForCausalLM"],
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "intermediate_size": arch.expert_size or arch.intermediate_size,
        "max_position_embeddings": arch.max_length,
        "rms_norm_eps": arch.norm_epsilon,
        "rope_theta": arch.rope_theta,
        "tie_word_embeddings": arch.tied_embeddings,
        "attention_bias": arch.qkv_bias,
        "eos_token_id": 2,
        "num_local_experts": arch.num_experts or None,
    }
    return {**config, **options}


def hugging_face_tensors(model: Transformer) -> dict[str, Tensor]:
    """The weights of a network by the names Hugging Face gives them; experts as Mixtral's."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        for part, region in parts_of(model.arch, name, tensor).items():
            tensors[mixtral_name(part)] = tensor[region].clone() if region else tensor.clone()
    return tensors


def mixtral_name(name: str) -> str:
    """What Mixtral calls a tensor of its experts; other names are kept."""
    if ".experts." not in name:
        return name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    for ours, theirs in {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items():
        name = name.replace(ours, theirs)
    return name


def gpt_fast_tensors(model: Transformer, *, fused: bool = True) -> dict[str, Tensor]:
    """The weights of a network as gpt-fast has them: rotary coordinates alternate."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(".experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            start = name.removesuffix("gate_up_proj")
            tensors |= {f"{start}gate_proj": gate.clone(), f"{start}up_proj": up.clone()}
        elif name.endswith(".experts.down_proj"):
            tensors[name] = tensor.clone()
        else:
            for part, region in parts_of(model.arch, name, tensor).items():
                value = tensor[region] if region else tensor
                is_rotated = part.endswith(("q_proj.weight", "k_proj.weight"))
                tensors[part] = alternating(value, model.arch.head_size) if is_rotated else value.clone()
    for layer in range(model.arch.num_layers) if fused else ():
        start = f"model.layers.{layer}.self_attn."
        parts = [tensors.pop(f"{start}{part}_proj.weight") for part in "qkv"]
        tensors[f"{start}qkv_proj.weight"] = torch.cat(parts)
    return {gpt_fast_name(name): tensor for name, tensor in tensors.items()}


def gpt_fast_name(name: str) -> str:
    """What gpt-fast calls a tensor."""
    for ours, theirs in GPT_FAST_NAMES.items():
        name = name.replace(ours, theirs)
    return name


def alternating(rows: Tensor, head_size: int) -> Tensor:
    """SamplingState by row: the first of the first half of a head, the first of its second half, and so on."""
    order = [half * head_size // 2 + i for i in range(head_size // 2) for half in (0, 1)]
    return torch.cat([head[order] for head in rows.split(head_size)])


def write_config(folder: Path, arch: Architecture, **options: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(arch, **options)))


def write_folder(folder: Path, model: Transformer | None = None, **options: Any) -> Transformer:
    """A Hugging Face folder with one file, and the network that is in it."""
    model = model or tiny_model()
    write_config(folder, model.arch, **options)
    save_file(hugging_face_tensors(model), folder / "model.safetensors")
    return model


def write_shards(folder: Path, tensors: Mapping[str, Tensor], save: Any, start: str, end: str) -> None:
    """Three files, none of which holds the whole of any layer, and their index."""
    names = list(tensors)
    files = [f"{start}-0000{i + 1}-of-00003.{end}" for i in range(3)]
    for i, file in enumerate(files):
        save({name: tensors[name] for name in names[i::3]}, folder / file)
    index = {"metadata": {}, "weight_map": {name: files[i % 3] for i, name in enumerate(names)}}
    (folder / f"{start}.{end}.index.json").write_text(json.dumps(index))


def logits_of(model: Transformer) -> Tensor:
    """What a network finds for some tokens, computed without a cache."""
    with torch.inference_mode():
        return model.logits(model(IDS, torch.arange(len(IDS)), WholeAttention()))
