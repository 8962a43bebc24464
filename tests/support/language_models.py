"""A tiny language model in a folder: a random Llama and a real tokenizer, made in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.tokenizer_files import write_sentencepiece

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 32, 56, 2, 4, 2, 8
CONTEXT = 256
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # enough for it, and others test at the same time


def write_language_model(folder: Path, *, seed: int = 0, context: int = CONTEXT, **tokenizer: Any) -> Path:
    """A checkpoint as Hugging Face has it; texts of different seeds differ. `tokenizer`: options of SentencePiece."""
    import sentencepiece
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    write_sentencepiece(folder, **tokenizer)
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).get_piece_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (vocabulary, HIDDEN), "lm_head.weight": (vocabulary, HIDDEN)}
    for i in range(LAYERS):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        shapes |= {
            f"{attention}.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{attention}.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{attention}.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{attention}.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{mlp}.gate_proj.weight": (INNER, HIDDEN),
            f"{mlp}.up_proj.weight": (INNER, HIDDEN),
            f"{mlp}.down_proj.weight": (HIDDEN, INNER),
        }
    norms = ["model.norm.weight"]
    norms += [
        f"model.layers.{i}.{name}.weight"
        for i in range(LAYERS)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    save_file({**weights, **{name: torch.ones(HIDDEN) for name in norms}}, folder / "model.safetensors")
    return folder
