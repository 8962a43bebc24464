"""A small network that has really learnt something, in a few seconds, as a Hugging Face folder."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from flambeau.llm.attention import WholeAttention
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.naming import split_fused
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.tokenizer import load_tokenizer
from support.tokenizer_files import write_sentencepiece

ROOT = Path(__file__).parents[2]
TEXT = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("ARCHITECTURE.md", "README.md"))
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_trained(folder: Path) -> Path:
    """Train and save; the tokenizer is beside the weights."""
    write_sentencepiece(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = trained(tuple(load_tokenizer(folder).encode(TEXT)))
    tensors = {
        part: tensor.clone()
        for name, value in model.state_dict().items()
        for part, tensor in split_fused(model.arch, name, value).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


@functools.cache
def trained(ids: tuple[int, ...], steps: int = 70) -> Transformer:
    """A network that knows the text a little."""
    torch.manual_seed(0)
    model = Transformer(architecture())
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.08)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    data = torch.tensor(ids)
    for _ in range(steps):
        starts = torch.randint(len(data) - 49, (8, 1))
        batch = data[starts + torch.arange(49)]
        hidden = model(batch[:, :-1], torch.arange(48).expand(8, 48), WholeAttention())
        loss = cross_entropy(model.logits(hidden).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def architecture() -> Architecture:
    """What CONFIG says."""
    return from_hugging_face(CONFIG)
