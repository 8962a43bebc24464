"""GGUF files of tiny networks, written with the gguf package from what transformers has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
import torch

Values = Mapping[str, Any]
FACTORS = {  # of types that the package can only widen: where a block has them
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,)),
    **dict.fromkeys(("IQ1_M", "NVFP4"), ()),
}
LLAMA = ("llama", "granite", "smollm3")
GEMMA = ("gemma", "gemma2", "gemma3")


def values_of(config: Any, **more: Any) -> dict[str, Any]:
    """The header's values of a model of transformers."""
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    values = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "context_length": config.max_position_embeddings,
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    if getattr(config, "head_dim", None):
        values["attention.key_length"] = values["attention.value_length"] = config.head_dim
    return {**values, **more}


def tensors_of(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """The weights as a GGUF file has them: pairs of rotated rows for Llama, sums for Gemma's norms, stacked experts."""
    config, tensors = model.config, dict(model.state_dict())
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        if architecture in LLAMA and ".q_proj." in name:
            tensors[name] = by_pairs(tensor, config.num_attention_heads)
        elif architecture in LLAMA and ".k_proj." in name:
            tensors[name] = by_pairs(tensor, config.num_key_value_heads)
        elif architecture in GEMMA and "norm" in name:
            tensors[name] = tensor + 1
    return {part: value for name, tensor in tensors.items() for part, value in apart(name, tensor).items()}


def apart(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gates and the rest of stacked experts, by the names that the package knows."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    start = name.rpartition(".")[0]
    if name.endswith("down_proj"):
        return {f"{start}.down_proj.weight": tensor}
    gate, up = tensor.chunk(2, dim=1)
    return {f"{start}.gate_proj.weight": gate, f"{start}.up_proj.weight": up}


def written_twice(
    folder: Path, model: Any, architecture: str, values: Values, kind: str | Callable[[str], str]
) -> tuple[Path, Path]:
    """A quantized file, and one with the same weights as floats. Routers are never quantized."""
    paths = folder / "packed" / "model.gguf", folder / "plain" / "model.gguf"

    def kind_of(name: str) -> str:
        return "F32" if name.endswith("mlp.gate.weight") else kind if isinstance(kind, str) else kind(name)

    written = write_gguf(paths[0], architecture, tensors_of(model, architecture), values, kind_of)
    write_gguf(paths[1], architecture, written, values)
    return paths


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Mapping[str, torch.Tensor],
    values: Values,
    kind: str | Callable[[str], str] = "F32",
    tokenizer: Values | None = None,
    plain: Values | None = None,
) -> dict[str, torch.Tensor]:
    """Write tensors by their names in transformers; returns what the file stands for, quantized and widened again.

    `plain` values have keys without the architecture.
    """
    path.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        add(writer, f"{architecture}.{key}", value)
    for key, value in (tokenizer or {}).items():
        add(writer, f"tokenizer.{key}", value)
    for key, value in (plain or {}).items():
        add(writer, key, value)
    known = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(known, 10)
    written = {}
    for name, tensor in tensors.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias")) or name
        written[name] = add_tensor(writer, theirs, tensor, kind if isinstance(kind, str) else kind(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Norms and biases stay in float32, as everywhere."""
    data = tensor.detach().float().contiguous().numpy()
    if tensor.dim() == 1 or kind == "F32":
        writer.add_tensor(name, data)
        return tensor
    number = gguf.GGMLQuantizationType[kind]
    packed = random_blocks(data.shape, number) if kind in FACTORS else gguf.quantize(data, number)
    if kind == "F16":
        writer.add_tensor(name, packed)
    else:
        writer.add_tensor(name, packed, raw_dtype=number)
    return torch.from_numpy(gguf.dequantize(packed, number)).view(tensor.shape)


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Any bytes, which the package can widen but not make, with small factors."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(shape[-1] + int(kind))
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    for at in FACTORS[kind.name]:
        values = random.uniform(0.0005, 0.001, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = values[..., None].view(np.uint8)
    if kind.name == "IQ1_M":  # four bits of 0.001 in each of four bytes
        for at, bits in zip((49, 51, 53, 55), (0x9, 0x1, 0x4, 0x1), strict=True):
            blocks[..., at] = blocks[..., at] & 15 | bits << 4
    if kind.name == "NVFP4":
        blocks[..., :4] = 0x20  # a scale of each 16 numbers
    return blocks.reshape(*shape[:-1], -1)


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def by_pairs(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of queries or keys with the two coordinates of a rotation side by side, as Llama's GGUF files have them."""
    return rows.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def pieces_of(content: bytes) -> dict[str, Any]:
    """The vocabulary of a SentencePiece model as a GGUF file has it."""
    p = sentencepiece.SentencePieceProcessor(model_proto=content)
    numbers = range(p.vocab_size())
    kinds = [2 if p.is_unknown(i) else 3 if p.is_control(i) else 6 if p.is_byte(i) else 1 for i in numbers]
    scores = [float(p.get_score(i)) for i in numbers]
    return {"tokens": [p.id_to_piece(i) for i in numbers], "scores": scores, "token_type": kinds}
