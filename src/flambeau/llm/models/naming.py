"""What tensors are called in checkpoints, and which part of which parameter each of them is.

Three spellings are known: Hugging Face's (Mixtral's own experts included), gpt-fast's and ours, in which what is
multiplied together lies in one tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.llm.models.architecture import Architecture

RENAMES = (
    (r"^(layers|norm|embed_tokens)\.", r"model.\1."),
    (r"^tok_embeddings\.", "model.embed_tokens."),
    (r"^output\.", "lm_head."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attention\.w(q|k|v|qkv|o)\.", r".self_attn.\1_proj."),
    (r"\.block_sparse_moe\.cond_ffn\.", ".mlp.experts."),
    (r"\.(block_sparse_moe|feed_forward)\.", ".mlp."),
    (r"(\.mlp\..*)\bw1\b", r"\1gate_proj"),
    (r"(\.mlp\..*)\bw2\b", r"\1down_proj"),
    (r"(\.mlp\..*)\bw3\b", r"\1up_proj"),
)
HARMLESS = re.compile(r"rotary_emb\.inv_freq$|^rope\.freqs$")
ALTERNATING = re.compile(r"\.attention\.w(q|k|qkv)\.weight$")
EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(?:\.(\w+))?$")  # quantized, they are several tensors
STACKED = re.compile(r"\.experts\.(gate_proj|up_proj)$")

Region = tuple[slice | int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a parameter that is one tensor of a checkpoint; no region: the whole of it."""

    parameter: str
    region: Region = ()


def our_name(name: str) -> str:
    """A tensor's name in Hugging Face's spelling, or in ours where it is fused."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def part_rows(arch: Architecture, name: str, num_rows: int) -> dict[str, slice]:
    """The projections whose rows make up a fused parameter, and where; empty: it is not fused."""
    q_rows, kv_rows = arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    if ".qkv_proj." in name and num_rows == q_rows + 2 * kv_rows:
        ends = {"q_proj": q_rows, "k_proj": q_rows + kv_rows, "v_proj": num_rows}
    elif ".gate_up_proj" in name:
        ends = {"gate_proj": num_rows // 2, "up_proj": num_rows}
    else:
        return {}
    starts = (0, *ends.values())
    return {part: slice(start, end) for start, (part, end) in zip(starts, ends.items(), strict=False)}


def part_name(name: str, part: str) -> str:
    """The name of one of the projections in a fused parameter."""
    return re.sub(r"\b(qkv|gate_up)_proj\b", part, name)


def ways(arch: Architecture, name: str, parameter: Tensor) -> list[dict[str, Piece]]:
    """The sets of tensors that a parameter may be put together from; Hugging Face's comes first."""
    whole = {name: Piece(name)}
    if found := EXPERTS.search(name):
        parts = part_rows(arch, name, parameter.shape[1])
        stacked = {part_name(name, part): Piece(name, (slice(None), rows)) for part, rows in parts.items()}
        return [expert_pieces(name, found, len(parameter), parts), whole, *([stacked] if stacked else [])]
    parts = part_rows(arch, name, len(parameter)) if parameter.dim() else {}
    fused = {part_name(name, part): Piece(name, (rows,)) for part, rows in parts.items()}
    return [fused, whole] if fused else [whole]


def expert_pieces(name: str, found: re.Match[str], num_experts: int, parts: dict[str, slice]) -> dict[str, Piece]:
    """A tensor, or one for gate and one for up, of each expert."""
    return {
        f"{name[: found.start(1)]}{expert}.{part}.{found[2] or 'weight'}": Piece(name, (expert, rows))
        for expert in range(num_experts)
        for part, rows in (parts or {found[1]: slice(None)}).items()
    }


def parts_of(arch: Architecture, name: str, tensor: Tensor) -> dict[str, Region]:
    """The tensors of a Hugging Face checkpoint that are in one of any spelling, and where."""
    if found := STACKED.search(name):
        return {f"{name[: found.start(1)]}{expert}.{found[1]}.weight": (expert,) for expert in range(len(tensor))}
    return {part: piece.region for part, piece in ways(arch, name, tensor)[0].items()}


def num_alternating_heads(arch: Architecture, name: str) -> int:
    """How many heads at the beginning of a gpt-fast tensor have rotary coordinates that alternate."""
    found = ALTERNATING.search(name)
    heads = {"q": arch.num_heads, "k": arch.num_kv_heads, "qkv": arch.num_heads + arch.num_kv_heads}
    return heads[found[1]] if found else 0


def to_halves(tensor: Tensor, num_heads: int, head_size: int) -> Tensor:
    """Rotary coordinates that alternate, as the two halves of each of the first heads; further rows are kept."""
    alternating, rest = tensor[: num_heads * head_size], tensor[num_heads * head_size :]
    halves = alternating.reshape(num_heads, head_size // 2, 2, -1).transpose(1, 2).flatten(0, 2)
    return torch.cat((halves, rest))
