"""What each rank has of a network: which sizes can be divided, and which rows of recurrent layers are its own.

Heads, channels and intermediate sizes are divided evenly. What several heads share (keys and values, B and C of Mamba
2, keys of a delta net) is divided, too; if there are more ranks than such groups, ranks share a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from flambeau.llm.errors import LLMError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.families.recurrence import HEADED, Recurrence

MAX_RANKS = 64  # that are tried for an error message

Part = tuple[int, int]  # rows side by side, and how many heads, groups or channels they belong to


# ---- sizes ----


def check_sizes(arch: Architecture, size: int) -> None:
    """Raise if a network cannot be divided among so many ranks; the message names numbers of ranks that work."""
    problem = first_problem(arch, size)
    if problem is None:
        return
    others = [str(number) for number in range(2, MAX_RANKS + 1) if first_problem(arch, number) is None]
    remedy = f"numbers of ranks that work: {', '.join(others)}" if others else "use one rank"
    raise LLMError(f"{problem} cannot be divided among {size} ranks; {remedy}")


def first_problem(arch: Architecture, size: int) -> str | None:
    """What cannot be divided among so many ranks; None: nothing."""
    if arch.is_differential:
        return "heads that are subtracted from each other"
    if any(arch.sparsity):
        return "the activation depends on all of the intermediate size and"
    for number, name in divided(arch):
        if number % size:
            return f"{name} {number}" if name.endswith(" of") else f"{number} {name}"
    for number, name in shared(arch):
        if number % size and size % number:
            return f"{number} {name}"
    return None


def divided(arch: Architecture) -> Iterator[tuple[int, str]]:
    """Of these, every rank has its own."""
    shapes = [arch.of_layer(layer) for layer in range(arch.num_layers)] if arch.shapes else [arch]
    if arch.attending_layers:
        yield from unique((one.num_heads, "heads") for one in shapes)
    if any(has_dense_mlp(arch, layer) for layer in range(arch.num_layers)):
        yield from unique((one.intermediate_size, "an intermediate size of") for one in shapes)
    if arch.num_experts:
        yield arch.expert_size, "experts with an intermediate size of"
        yield arch.shared_expert_size, "a shared expert with an intermediate size of"
    if arch.compression is not None:
        yield arch.compression.num_output_groups, "groups of heads"
    if arch.recurrence is not None and arch.recurrence.kind != "compressor":
        if arch.recurrence.kind in HEADED:
            yield arch.recurrence.num_heads, "heads of recurrent layers"
        else:
            yield arch.recurrence.inner_size, "channels of recurrent layers"


def shared(arch: Architecture) -> Iterator[tuple[int, str]]:
    """Of these, several ranks may have the same."""
    if arch.attending_layers:
        shapes = [arch.of_layer(layer) for layer in range(arch.num_layers)] if arch.shapes else [arch]
        yield from unique((one.num_kv_heads, "key-value heads") for one in shapes)
    recurrence = arch.recurrence
    if recurrence is not None and recurrence.kind == "mamba2":
        yield recurrence.num_groups, "groups of heads with the same B and C"
    if recurrence is not None and recurrence.kind in ("mamba2", "lightning"):
        if recurrence.norm != "none":
            yield recurrence.norm_groups, "groups of channels that are normalized together"
    elif recurrence is not None and recurrence.kind == "delta_net":
        yield recurrence.num_groups, "key heads of recurrent layers"


def has_dense_mlp(arch: Architecture, layer: int) -> bool:
    has_other = arch.has_experts(layer) and not arch.experts_beside_mlp
    has_mlp = layer not in arch.attention_only_layers if arch.has_mlp else layer in arch.feed_forward_layers
    return has_mlp and not has_other


def unique(found: Iterable[tuple[int, str]]) -> Iterable[tuple[int, str]]:
    """The same without repetitions."""
    return dict.fromkeys(found)


def local_recurrence(recurrence: Recurrence, size: int) -> Recurrence:
    """The shape of one rank's part of recurrent layers."""
    if recurrence.kind == "compressor":  # every rank has it all: one key for all heads
        return recurrence
    has_heads = recurrence.kind in HEADED
    return replace(
        recurrence,
        inner_size=recurrence.inner_size // size,
        num_heads=recurrence.num_heads // size if has_heads else recurrence.num_heads,
        num_groups=max(1, recurrence.num_groups // size),
        norm_groups=max(1, recurrence.norm_groups // size),
    )


# ---- rows ----


def own_span(part: Part, rank: int, size: int) -> tuple[int, int]:
    """The first row of a rank's part, and the number of its rows."""
    rows, units = part
    each = rows // units
    return rank * units // size * each, max(1, units // size) * each


def own_rows(tensor: Tensor, parts: list[Part], rank: int, size: int) -> Tensor:
    """A rank's rows of all parts, which lie one behind the other; a tensor of another shape stays as it is."""
    if sum(rows for rows, _ in parts) != tensor.shape[0]:
        return tensor  # the loader rejects it
    spans, start = [], 0
    for part in parts:
        first, number = own_span(part, rank, size)
        spans.append((start + first, number))
        start += part[0]
    return joined(tensor, spans)


def joined(tensor: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """Some rows of a tensor."""
    if tensor.is_meta:  # only the shape is needed; torch.cat would import a compiler here
        return tensor.new_empty(sum(number for _, number in spans), *tensor.shape[1:])
    pieces = [tensor[first : first + number] for first, number in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


MIXER_COLUMNS = ("out_proj", "x_proj")  # their outputs are sums over all heads or channels


def mixer_rows(recurrence: Recurrence, leaf: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """A rank's rows of a tensor of a recurrent layer; all of them if every rank needs them."""
    if recurrence.kind == "delta_net" and leaf in ("in_proj_qkvz", "in_proj_ba"):
        return own_key_heads(recurrence, leaf, tensor, rank, size)
    parts = mixer_parts(recurrence).get(leaf)
    return tensor if parts is None else own_rows(tensor, parts, rank, size)


def mixer_parts(recurrence: Recurrence) -> dict[str, list[Part]]:
    """The parts of all tensors whose rows are divided."""
    size, heads, groups = recurrence.inner_size, recurrence.num_heads, recurrence.num_groups
    channels, inner, each = (size, size), (size, heads), (heads, heads)
    keys = groups * recurrence.state_size, groups
    if recurrence.kind == "short_conv":
        return {"in_proj": [channels] * 3, "conv1d": [channels]}
    if recurrence.kind == "mamba":
        return {"in_proj": [channels] * 2, **for_all([channels], "conv1d", "dt_proj", "A_log", "D")}
    if recurrence.kind == "mamba2":
        wide = {"in_proj": [inner, inner, keys, keys, each], "conv1d": [inner, keys, keys], "norm": [inner]}
        return {**wide, **for_all([each], "dt_bias", "A_log", "D")}
    if recurrence.kind == "rwkv":
        return for_all([channels], "in_proj_k", "in_proj_v", "in_proj_r", "time_decay", "time_first")
    if recurrence.kind == "gated":
        gates = for_all(
            [each], *(f"{gate}_gate_{part}" for gate in ("input", "recurrent") for part in ("weight", "bias"))
        )
        return {**gates, **for_all([inner], "in_proj_x", "in_proj_y", "conv1d", "recurrent_param")}
    if recurrence.kind == "lightning":
        qkv = [(3 * size, heads)] if recurrence.is_grouped else [inner] * 3
        return {"in_proj_qkv": qkv, **for_all([inner], "in_proj_z", "norm")}
    own = {} if recurrence.kind == "delta_net" else for_all([inner], "f_b_proj", "f_proj", "g_b_proj", "g_proj")
    time = inner if recurrence.kind == "kimi_delta" else each
    return {
        **own,
        "dt_bias": [time],
        **for_all([keys], "in_proj_q", "in_proj_k", "q_conv1d", "k_conv1d"),
        **for_all([inner], "in_proj_v", "v_conv1d", "in_proj_z"),
        **for_all([each], "in_proj_b", "in_proj_a", "A_log"),
    }


def for_all(parts: list[Part], *names: str) -> dict[str, list[Part]]:
    return dict.fromkeys(names, parts)


def own_key_heads(recurrence: Recurrence, leaf: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """The same where the rows of each key head lie side by side; ranks that share a key head share its value heads."""
    groups, shared = recurrence.num_groups, recurrence.num_heads // recurrence.num_groups
    values, key = (shared * recurrence.head_size, shared), (recurrence.state_size, 1)
    parts = [key, key, values, values] if leaf == "in_proj_qkvz" else [(shared, shared)] * 2
    if tensor.shape[0] != groups * sum(rows for rows, _ in parts):
        return tensor  # the loader rejects it
    num_sharing = max(1, size // groups)
    first, number = own_span((groups, groups), rank, size)
    heads = tensor.view(groups, -1, *tensor.shape[1:])[first : first + number]
    rows = own_rows(heads.transpose(0, 1), parts, rank % num_sharing, num_sharing)
    return rows.transpose(0, 1).flatten(0, 1)
