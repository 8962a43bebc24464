"""The tensors of recurrent layers in GGUF files, by our names and in our arrangement.

Files have the decay A itself instead of its logarithm, convolutions without their dimension of size 1, and numbers per
head as columns. Value heads of Qwen 3.5 are in another order: the first of each key head, then the second of each.
"""

from __future__ import annotations

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
    "shortconv.conv": "mixer.conv1d",
    "shortconv.in_proj": "mixer.in_proj",
    "shortconv.out_proj": "mixer.out_proj",
}
DELTA_NET_MODULES = {"attn_qkv": "mixer.in_proj_qkv", "attn_gate": "mixer.in_proj_z"}
DECAY, SKIP, TIME_STEP_BIAS = "mixer.A_log", "mixer.D", "mixer.dt_bias"
WHOLE = {"ssm_a": DECAY, "ssm_d": SKIP}
BETAS_AND_STEPS = "ssm_ba.weight"  # in one tensor, grouped by key head
PARTS_OF_BETAS_AND_STEPS = ("mixer.in_proj_b.weight", "mixer.in_proj_a.weight")
HAVE_STEP_PROJECTIONS = ("mamba", "jamba")  # Mamba 1


def recurrent_layers(header: GgufHeader) -> frozenset[int]:
    """The layers that have a recurrence, by their tensors; not all files have 0 key-value heads for them."""
    ends = (".ssm_out.weight", ".shortconv.out_proj.weight")
    return frozenset(int(name.split(".")[1]) for name in header.tensors if name.endswith(ends))


def recurrent_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that we have for a tensor, by our name of it."""
    if name.endswith(".mixer.conv1d.weight") and len(shape) == 2:
        return shape[0], 1, shape[1]
    is_column = len(shape) == 2 and (shape[1] == 1 or name.endswith(".mixer.norm.weight"))
    return (shape[0] * shape[1],) if is_column and ".mixer." in name and "_proj" not in name else shape


def recurrent_values(name: str, tensor: Tensor, header: GgufHeader) -> Tensor:
    """The numbers that we have for a tensor whose rows are in our order."""
    if name.endswith(DECAY):
        return (-tensor.float()).log()
    columns = column_order(name, tensor.shape[-1], header)
    return tensor if columns is None else tensor[:, columns]


def recurrent_rows(name: str, tensor: GgufTensor, header: GgufHeader) -> Tensor | None:
    """Where the rows of a tensor of a delta net are in the file; None: in their order."""
    if name.endswith(PARTS_OF_BETAS_AND_STEPS) and tensor.name.endswith(BETAS_AND_STEPS):
        keys, shared, _ = value_heads(header)
        part = 0 if name.endswith(PARTS_OF_BETAS_AND_STEPS[0]) else 1
        return torch.arange(tensor.shape[0]).view(keys, 2, shared)[:, part].flatten()
    if header.architecture not in TILED or ".mixer." not in name or name.endswith(("out_proj.weight", "norm.weight")):
        return None
    _, _, size = value_heads(header)
    if name.endswith((".mixer.in_proj_qkv.weight", ".mixer.conv1d.weight")):
        num_keys = tensor.shape[0] - header.get("ssm.inner_size")
        return torch.cat((torch.arange(num_keys), num_keys + untiled(header, size)))
    return untiled(header, size if name.endswith(".mixer.in_proj_z.weight") else 1)


def column_order(name: str, size: int, header: GgufHeader) -> Tensor | None:
    """Where the columns of a tensor are in the file; None: in their order."""
    if header.architecture not in TILED or not name.endswith(".mixer.out_proj.weight"):
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
