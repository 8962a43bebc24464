"""The tensors of recurrent layers in GGUF files, by our names and in our arrangement.

Files have the decay A itself instead of its logarithm, convolutions without their dimension of size 1, and numbers per
head as columns. Value heads of Qwen 3.5 are in another order: the first of each key head, then the second of each.
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader, GgufTensor

DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
TILED = ("qwen35", "qwen35moe")  # value heads of one key head do not lie side by side
MODULES = {
    "ssm_in": "mixer.in_proj",
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    "ssm_out": "mixer.out_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_norm": "mixer.norm",
    "ssm_dt_norm": "mixer.dt_layernorm",
    "ssm_b_norm": "mixer.b_layernorm",
    "ssm_c_norm": "mixer.c_layernorm",
    "ssm_alpha": "mixer.in_proj_a",
    "ssm_beta": "mixer.in_proj_b",
    "ssm_ba.alpha": "mixer.in_proj_a",
    "ssm_ba.beta": "mixer.in_proj_b",
    "ssm_in.qkv": "mixer.in_proj_qkv",
    "ssm_in.gate": "mixer.in_proj_z",
    "shortconv.conv": "mixer.conv1d",
    "shortconv.in_proj": "mixer.in_proj",
    "shortconv.out_proj": "mixer.out_proj",
}
DELTA_NET_MODULES = {"attn_qkv": "mixer.in_proj_qkv", "attn_gate": "mixer.in_proj_z"}
KIMI_MODULES = {  # of layers with delta attention
    "attn_q": "mixer.in_proj_q",
    "attn_k": "mixer.in_proj_k",
    "attn_v": "mixer.in_proj_v",
    "attn_output": "mixer.out_proj",
    "ssm_conv1d_q": "mixer.q_conv1d",
    "ssm_conv1d_k": "mixer.k_conv1d",
    "ssm_conv1d_v": "mixer.v_conv1d",
    "ssm_f_a": "mixer.f_a_proj",
    "ssm_f_b": "mixer.f_b_proj",
    "ssm_g_a": "mixer.g_a_proj",
    "ssm_g_b": "mixer.g_b_proj",
}
DECAY, SKIP, TIME_STEP_BIAS = "mixer.A_log", "mixer.D", "mixer.dt_bias"
WHOLE = {"ssm_a": DECAY, "ssm_d": SKIP}
JOINT = {  # projections in one tensor, whose rows are grouped by key head: the second in older files of Qwen3-Next
    "ssm_ba.weight": ("ssm_ba.beta.weight", "ssm_ba.alpha.weight"),
    "ssm_in.weight": ("ssm_in.qkv.weight", "ssm_in.gate.weight"),
}
TILED_ROWS = (
    "attn_qkv.weight",
    "attn_gate.weight",
    "ssm_conv1d.weight",
    "ssm_alpha.weight",
    "ssm_beta.weight",
    "ssm_a",
    "ssm_dt.bias",
)
RECURRENT_LAYER = re.compile(r"blk\.(\d+)\.(?:ssm_out|ssm_f_a|shortconv\.out_proj)\.weight$")
HAVE_STEP_PROJECTIONS = ("mamba", "jamba")  # Mamba 1


def recurrent_layers(header: GgufHeader) -> frozenset[int]:
    """The layers that have a recurrence, by their tensors; not all files have 0 key-value heads for them."""
    return frozenset(int(found[1]) for name in header.tensors if (found := RECURRENT_LAYER.match(name)))


def is_recurrent(name: str, header: GgufHeader) -> bool:
    """Whether a tensor belongs to a recurrent layer of a delta net, where names of attention have another meaning."""
    marker = "ssm_f_a.weight" if header.architecture == "kimi-linear" else "ssm_out.weight"
    layer = name.split(".", 2)[:2]
    return header.architecture in (*DELTA_NETS, "kimi-linear") and ".".join((*layer, marker)) in header.tensors


def recurrent_shape(name: str, tensor: GgufTensor) -> tuple[int, ...]:
    """The shape that we have for a tensor, by our name of it."""
    shape = tensor.shape
    if tensor.num_rows is not None:
        return tensor.num_rows, *shape[1:]
    if name.endswith(".mixer.conv1d.weight") and len(shape) == 2:
        return shape[0], 1, shape[1]
    if name.endswith("_conv1d.weight"):
        return prod(shape[:-1]), 1, shape[-1]
    is_column = name.endswith((SKIP, ".mixer.norm.weight")) or (name.endswith(DECAY) and shape[-1] == 1)
    return (prod(shape),) if is_column else shape


def recurrent_values(tensor: GgufTensor, value: Tensor, header: GgufHeader) -> Tensor:
    """The numbers that we have for those of a tensor, whose rows are in our order."""
    if tensor.name.endswith(".ssm_a"):
        return (-value.float()).log()
    columns = column_order(tensor, header)
    return value if columns is None else value[:, columns]


def parts_of(tensor: GgufTensor, header: GgufHeader) -> tuple[GgufTensor, ...]:
    """A tensor, or the parts of one that holds several projections, by names that files do not have."""
    start, joint = tensor.name[: -len("ssm_xx.weight")], tensor.name[-len("ssm_xx.weight") :]
    if header.architecture not in DELTA_NETS or joint not in JOINT:
        return (tensor,)
    rows = joint_rows(tensor, header)
    return tuple(
        replace(tensor, name=start + part, num_rows=len(found)) for part, found in zip(JOINT[joint], rows, strict=True)
    )


def joint_rows(tensor: GgufTensor, header: GgufHeader) -> tuple[Tensor, Tensor]:
    """Where the rows of the two parts of a tensor are in it."""
    keys, shared, size = value_heads(header)
    key_size, values = header.get("ssm.state_size"), shared * size
    sizes = [shared, shared] if ".ssm_ba." in tensor.name else [key_size, key_size, values, values]
    if tensor.shape[0] != keys * sum(sizes):
        raise CheckpointError(f"{tensor.name} in {header.path} has {tensor.shape[0]} rows for {keys} key heads")
    parts = [part.flatten() for part in torch.split(torch.arange(tensor.shape[0]).view(keys, -1), sizes, dim=1)]
    return torch.cat(parts[:-1]), parts[-1]


def recurrent_rows(tensor: GgufTensor, header: GgufHeader) -> Tensor | None:
    """Where the rows of a tensor of a delta net are in the file; None: in their order."""
    name = tensor.name.split(".", 2)[-1]
    if tensor.num_rows is not None:
        return joint_rows(tensor, header)[name.endswith((".alpha.weight", ".gate.weight"))]
    if header.architecture not in TILED or name not in TILED_ROWS or not is_recurrent(tensor.name, header):
        return None
    _, _, size = value_heads(header)
    if name in ("attn_qkv.weight", "ssm_conv1d.weight"):
        num_keys = tensor.shape[0] - header.get("ssm.inner_size")
        return torch.cat((torch.arange(num_keys), num_keys + untiled(header, size)))
    return untiled(header, size if name == "attn_gate.weight" else 1)


def column_order(tensor: GgufTensor, header: GgufHeader) -> Tensor | None:
    """Where the columns of a tensor are in the file; None: in their order."""
    if header.architecture not in TILED or not tensor.name.endswith(".ssm_out.weight"):
        return None
    return untiled(header, value_heads(header)[2])


def untiled(header: GgufHeader, size: int) -> Tensor:
    """Where value heads are in the file, each with so many numbers, if those of a key head lie side by side."""
    keys, shared, _ = value_heads(header)
    return torch.arange(shared * keys * size).view(shared, keys, size).transpose(0, 1).flatten()


def value_heads(header: GgufHeader) -> tuple[int, int, int]:
    """The key heads of a delta net, the value heads of each, and the size of these."""
    keys, heads, inner = (header.get(f"ssm.{key}") for key in ("group_count", "time_step_rank", "inner_size"))
    if not keys or not heads or not inner or heads % keys or inner % heads:
        raise CheckpointError(
            f"{header.path} has {heads} value heads of {inner} channels for {keys} key heads; is it damaged?"
        )
    return keys, heads // keys, inner // heads
