"""The two networks: their shapes, first weights, and the folders they are kept in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.transformer import Transformer

TARGET = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8, "num_attention_heads": 8}
DRAFT = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['name'] or {'assistant': 'Storyteller', 'system': 'System'}.get(message['role'], 'Reader') }}:\n"
    "{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}Storyteller:\n{% endif %}"
)


def describe(shape: Mapping[str, int], vocab_size: int) -> dict[str, Any]:
    """The config.json of a network, as Hugging Face writes it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        **shape,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def create(folder: Path, shape: Mapping[str, int], vocabulary_file: Path, vocab_size: int) -> Transformer:
    """A new network, and its folder with everything but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", describe(shape, vocab_size))
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "do_sample": True, "temperature": 1.0},
    )
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "LlamaTokenizer",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "add_eos_token": False,
            "add_prefix_space": False,
            "legacy": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1024,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    if not (folder / "tokenizer.model").exists():
        shutil.copy(vocabulary_file, folder / "tokenizer.model")
    return with_first_weights(Transformer(from_hugging_face(describe(shape, vocab_size))))


def with_first_weights(model: Transformer) -> Transformer:
    """Small random weights; what is added to the residual stream is smaller the more layers add to it."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            share = (2 * model.arch.num_layers) ** -0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(weight, std=0.02 * share)
    return model


def save(model: Transformer, folder: Path) -> None:
    """Write the weights in bfloat16, under the names of Hugging Face checkpoints."""
    tensors = {name: weight.detach().bfloat16().contiguous().cpu() for name, weight in split(model).items()}
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # as every other file of the folder


def split(model: Transformer) -> dict[str, Tensor]:
    """The weights, each projection by itself: those that the network multiplies together are cut apart."""
    arch, tensors = model.arch, {}
    q_rows, kv_rows = arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    rows = {
        "qkv_proj": {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": {"gate_proj": arch.intermediate_size, "up_proj": arch.intermediate_size},
    }
    for name, weight in model.state_dict().items():
        whole = name.split(".")[-2]
        parts = rows.get(whole, {whole: len(weight)})
        for part, piece in zip(parts, weight.split(list(parts.values())), strict=True):
            tensors[name.replace(whole, part)] = piece
    return tensors


def load(folder: Path) -> Transformer:
    """The network of a folder, with exactly the weights in its file, to compute with in float32."""
    return load_model(folder, dtype=torch.float32)


def write_json(file: Path, value: object) -> None:
    """Indented, for people to read."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
