"""The weights of attention, to heads and to latents, as the structures that the C++ kernels read.

Shapes: H heads · R latent · N unrotated numbers of a key · V numbers of a value
"""

from __future__ import annotations

import torch
from torch import Tensor

from flambeau.llm.backends.cpu.bindings import CIndexer, CLatentAttention, CLayer, CMatrix, CNorm
from flambeau.llm.backends.cpu.weight_pointers import WeightPointers, norm_weights
from flambeau.llm.models.attention import Attention
from flambeau.llm.models.indexer import Indexer
from flambeau.llm.models.latent_attention import LatentAttention
from flambeau.llm.models.rope import Rotation
from flambeau.llm.models.shared_blocks import SharedBlock


def qk_norm_of(attention: Attention, pointers: WeightPointers) -> CNorm:
    """The weights of all heads of queries and keys, one after the other."""
    if attention.normalizes_rotated:
        return CNorm(pointers.pointer(torch.ones((attention.num_heads + attention.num_kv_heads) * attention.head_size)))
    if attention.q_norm is None:
        return CNorm()
    sides = [(attention.q_norm, attention.num_heads)]
    if attention.k_norm is not None:  # else keys are those of another layer
        sides.append((attention.k_norm, attention.num_kv_heads))
    parts = [(norm_weights(norm), count * attention.head_size) for norm, count in sides]
    weight = torch.cat([repeated(weight, size) for (weight, _), size in parts])
    biases = [repeated(bias, size) for (_, bias), size in parts if bias is not None]
    return CNorm(pointers.pointer(weight), pointers.pointer(torch.cat(biases) if biases else None))


def repeated(weight: Tensor, size: int) -> Tensor:
    """So many weights, of heads that may share theirs."""
    flat = weight.flatten()
    return flat.repeat(size // len(flat))


def fill_rotation(
    made: CLayer, rotation: Rotation, attention: Attention | LatentAttention | SharedBlock, pointers: WeightPointers
) -> None:
    """How a layer's heads are rotated: by tables, or by what these are computed from."""
    if not attention.is_rotated:
        return
    is_local = isinstance(attention, Attention) and attention.is_local
    own = rotation.local if is_local and rotation.local is not None else rotation
    if own.has_tables:
        made.cos, made.sin = pointers.pointer(own.cos), pointers.pointer(own.sin)
        return
    made.inverse = pointers.pointer(own.inverse)
    made.cos_factor, made.sin_factor = own.factor, -own.factor if own.arch.reversed_rope else own.factor


def latent_of(attention: LatentAttention, pointers: WeightPointers) -> CLatentAttention:
    has_latent = attention.has_query_latent
    to_keys_HNR, to_values_HVR = attention.kv_b_proj.parts()
    made = CLatentAttention(
        query_down=pointers.matrix(attention.q_a_proj) if has_latent else CMatrix(),
        query_up=pointers.matrix(attention.q_b_proj if has_latent else attention.q_proj),
        latent=pointers.matrix(attention.kv_a_proj_with_mqa),
        query_norm=pointers.norm(attention.q_a_layernorm) if has_latent else CNorm(),
        latent_norm=pointers.norm(attention.kv_a_layernorm),
        to_keys=pointers.head_matrices(to_keys_HNR.transpose(1, 2)),
        to_values=pointers.head_matrices(to_values_HVR),
        latent_size=attention.latent_size,
        rotary_size=attention.rotary_size,
        unrotated_size=attention.unrotated_size,
        value_size=attention.kv_b_proj.value_size,
        is_paired=attention.is_paired,
        epsilon=attention.kv_a_layernorm.epsilon,
        head_gate=CMatrix() if attention.gate_proj is None else pointers.matrix(attention.gate_proj),
    )
    pointers.keep(made)
    return made


def indexer_of(indexer: Indexer, keys: Tensor, pointers: WeightPointers) -> CIndexer:
    shape = indexer.shape
    made = CIndexer(
        query_up=pointers.matrix(indexer.wq_b),
        key=pointers.matrix(indexer.wk),
        weights=pointers.plain(indexer.weights_proj.weight),  # their scale makes no difference to the choice
        key_norm=pointers.norm(indexer.k_norm),
        keys=pointers.pointer(keys),
        heads=shape.num_heads,
        size=shape.head_size,
        num_chosen=shape.num_chosen,
        is_paired=shape.paired_rope,
        epsilon=shape.key_epsilon,
    )
    pointers.keep(made)
    return made
