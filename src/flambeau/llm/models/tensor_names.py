"""Tensor names in checkpoints, and which part of which parameter each tensor fills.

Three naming schemes are supported: Hugging Face's (with Mixtral's own experts), gpt-fast's and ours, with fused
projections.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.families.config_parts import OUTPUTS as OUTPUTS
from flambeau.llm.models.families.renames import Renames

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
NGRAM_TABLE = re.compile(r"\.ngrams\.table\.weight$")
IGNORED = re.compile(  # constants
    r"rotary_emb\.inv_freq$|^rope\.freqs$|\.(attn|attention)\.(masked_)?bias$"
    r"|\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"
    r"|\.(ple_embedding|ngrams)\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)$"
)
FURTHER_TOKENS = re.compile(r"^(model\.mtp_\w+|mtp)\.")  # of layers that predict them (mtp_weights.py)
VISION = re.compile(r"^(?:model\.)?(?:(vision_tower\.)(?:vision_model\.)?|(multi_modal_projector\.)|visual\.)")
INTERLEAVED = re.compile(r"\.attention\.w(q|k|qkv)\.weight$")  # gpt-fast
PROJECTED = re.compile(r"\.self_attn\.(?:(q|k|qkv)_proj\.(?:weight|bias)|(q|k)_norm\.weight)$")
EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(?:[._](\w+))?$")  # several tensors if quantized or biased
DELTA_NET = re.compile(r"\.mixer\.(in_proj_qkv|conv1d)\.")
CONVOLUTION_PART = re.compile(r"\.mixer\.([qkv])_conv1d\.weight$")
LAYER = re.compile(r"\blayers\.(\d+)\.")
HEAD_NORM = re.compile(r"\.self_attn\.[qk]_norm\.weight$")
ONE_HEAD_NORM = re.compile(r"(\.self_attn\.([qk])_norm)\.norms\.(\d+)\.weight$")
GATES = re.compile(r"\.experts\.gate_up_proj(_bias)?$")
JOINED = re.compile(r"\b(qkv_proj|gate_up_proj|in_proj_qkv)\.parts\.(\d+)\.")  # a projection in a form of its own
JOINED_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
}
STACKED = re.compile(r"\.experts\.(gate_proj|up_proj)(?:[._](\w+))?$")

Region = tuple[slice | int, ...]


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The part of a parameter that one tensor of a checkpoint fills; no region: all of it."""

    parameter: str
    region: Region = ()


def canonical_name(name: str, renames: Renames = ()) -> str:
    """A tensor's Hugging Face name in a Llama, or our name if it is fused; `renames` are those of its family."""
    return renamed(renamed(name, renames), RENAMES)


def renamed(name: str, renames: Renames) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def vision_name(name: str) -> str | None:
    """The name of a tensor in an encoder of images; None: it belongs to the decoder."""
    found = VISION.match(name)
    return None if found is None else (found[1] or found[2] or "") + name[found.end() :]


def layer_number(name: str) -> int | None:
    """The layer that a tensor belongs to."""
    found = LAYER.search(name)
    return None if found is None else int(found[1])


def of_its_layer(arch: Architecture, name: str) -> Architecture:
    """The architecture with the sizes of a tensor's layer; further layers have those of all."""
    layer = layer_number(name)
    return arch if layer is None or layer >= arch.num_layers else arch.of_layer(layer)


def part_rows(arch: Architecture, name: str, num_rows: int) -> dict[str, slice]:
    """The projections in a fused parameter and their rows; empty if it is not fused."""
    arch = of_its_layer(arch, name)
    q_rows, k_rows = arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    q_rows = 2 * q_rows if arch.gates_attention else q_rows
    if ".qkv_proj." in name and num_rows == q_rows + k_rows + arch.num_kv_heads * arch.projected_value_size:
        ends = {"q_proj": q_rows, "k_proj": q_rows + k_rows, "v_proj": num_rows}
    elif ".qkv_proj." in name and num_rows == q_rows and arch.shared_keys:
        ends = {"q_proj": q_rows}
    elif ".gate_up_proj" in name and not arch.has_gate:  # of experts, which have no other name without gates
        ends = {"up_proj": num_rows}
    elif ".gate_up_proj" in name:
        ends = {"gate_proj": num_rows // 2, "up_proj": num_rows}
    elif arch.recurrence is not None and arch.recurrence.kind in ("delta_net", "kimi_delta") and DELTA_NET.search(name):
        form = "in_proj_{}" if ".in_proj_" in name else "{}_conv1d"
        keys = arch.recurrence.num_groups * arch.recurrence.state_size
        ends = {form.format("q"): keys, form.format("k"): 2 * keys, form.format("v"): num_rows}
    else:
        return {}
    starts = (0, *ends.values())
    return {part: slice(start, end) for start, (part, end) in zip(starts, ends.items(), strict=False)}


def part_name(name: str, part: str) -> str:
    """The name of one projection of a fused parameter."""
    return re.sub(r"\b((qkv|gate_up)_proj(?=\b|_bias)|in_proj_qkv\b|conv1d\b)", part, name)


def apart_name(name: str) -> str:
    """The name of a projection of a fused layer, also if it is a part of a JoinedLinear."""
    return JOINED.sub(lambda found: f"{JOINED_PARTS[found[1]][int(found[2])]}.", name)


def layouts(arch: Architecture, name: str, parameter: Tensor) -> list[dict[str, ParameterSlice]]:
    """The sets of tensors that can fill a parameter; Hugging Face's comes first."""
    whole = {name: ParameterSlice(name)}
    if JOINED.search(name):
        return [whole]
    if found := EXPERTS.search(name):
        parts = part_rows(arch, name, parameter.shape[1])
        stacked = {part_name(name, part): ParameterSlice(name, (slice(None), rows)) for part, rows in parts.items()}
        return [expert_slices(name, found, len(parameter), parts), whole, *([stacked] if stacked else [])]
    if arch.ngrams is not None and NGRAM_TABLE.search(name):
        return [divided_rows(name, len(parameter), arch.ngrams.num_files), whole]
    parts = part_rows(arch, name, len(parameter)) if parameter.dim() else {}
    fused = {part_name(name, part): ParameterSlice(name, (rows,)) for part, rows in parts.items()}
    if HEAD_NORM.search(name) and parameter.dim() == 2:  # StableLM has a norm for each head
        one = name.removesuffix(".weight")
        return [whole, {f"{one}.norms.{i}.weight": ParameterSlice(name, (i,)) for i in range(len(parameter))}]
    return [fused, whole] if fused else [whole]


def divided_rows(name: str, num_rows: int, num_files: int) -> dict[str, ParameterSlice]:
    """Tensors with the rows of a table, one after the other."""
    start, each = name.removesuffix("weight"), -(-num_rows // num_files)
    return {
        f"{start}shard_{first // each}.weight": ParameterSlice(name, (slice(first, min(first + each, num_rows)),))
        for first in range(0, num_rows, each)
    }


def expert_slices(
    name: str, found: re.Match[str], num_experts: int, parts: dict[str, slice]
) -> dict[str, ParameterSlice]:
    """One tensor per expert, or two: gate and up."""
    return {
        f"{name[: found.start(1)]}{expert}.{part}.{found[2] or 'weight'}": ParameterSlice(name, (expert, rows))
        for expert in range(num_experts)
        for part, rows in (parts or {found[1]: slice(None)}).items()
    }


def parts_of(arch: Architecture, name: str, tensor: Tensor) -> dict[str, Region]:
    """The Hugging Face tensors that a tensor of any naming scheme contains, and where."""
    if found := STACKED.search(name):
        start, leaf = name[: found.start(1)], found[2] or "weight"
        return {f"{start}{expert}.{found[1]}.{leaf}": (expert,) for expert in range(len(tensor))}
    return {part: piece.region for part, piece in layouts(arch, name, tensor)[0].items()}


def num_interleaved_heads(arch: Architecture, name: str) -> int:
    """How many leading heads of a tensor have interleaved rotary coordinates."""
    heads = {"q": arch.num_heads, "k": arch.num_kv_heads, "qkv": arch.num_heads + arch.num_kv_heads}
    if found := INTERLEAVED.search(name):
        return heads[found[1]]
    if not arch.interleaved_rope or not (found := PROJECTED.search(name)):
        return 0
    return heads[found[1]] if found[1] else heads[found[2]] if arch.separate_qk_norm else 0


def ungrouped(tensor: Tensor, arch: Architecture) -> Tensor:
    """Queries, keys and values of each key-value head or block of heads, side by side → all queries, keys, values."""
    if arch.qvk_blocks:
        blocks = tensor.view(arch.qvk_blocks, 3, -1, *tensor.shape[1:])
        return torch.cat([blocks[:, part].flatten(0, 1) for part in (0, 2, 1)])
    shared = arch.num_heads // arch.num_kv_heads
    groups = tensor.view(arch.num_kv_heads, shared + 2, arch.head_size, *tensor.shape[1:])
    q, k, v = groups.tensor_split([shared, shared + 1], dim=1)
    return torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in (q, k, v)])


def to_halves(tensor: Tensor, num_heads: int, head_size: int, rotary_size: int | None = None) -> Tensor:
    """Turn interleaved rotary coordinates of the first heads into halves; all else stays as it is."""
    size = rotary_size or head_size
    heads, rest = tensor[: num_heads * head_size], tensor[num_heads * head_size :]
    rotated, fixed = heads.reshape(num_heads, head_size, -1).tensor_split([size], dim=1)
    halves = rotated.reshape(num_heads, size // 2, 2, -1).transpose(1, 2).flatten(1, 2)
    return torch.cat((torch.cat((halves, fixed), dim=1).reshape(heads.shape), rest))
