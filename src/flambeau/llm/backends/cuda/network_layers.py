"""cuda_layers: from the modules of a network to the layers of the kernels.

Shapes: H heads · P places of the cache
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.backends.cuda.attention import ScoreParts
from flambeau.llm.backends.cuda.feed_forward import (
    DenseLayer,
    ScaledDenseLayer,
    SparseLayer,
    kernel_experts,
)
from flambeau.llm.backends.cuda.latent_attention import LatentLayer
from flambeau.llm.backends.cuda.layers import CudaLayer, HeadAttention, RecurrentBranch
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.backends.cuda.norm import NormParameters, gains_of
from flambeau.llm.backends.cuda.recurrent_layer import (
    first_projection,
    recurrent_part,
)
from flambeau.llm.backends.cuda.rope import HeadParts
from flambeau.llm.backends.cuda.stream_products import joined_norm
from flambeau.llm.backends.eager import alibi_biases
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.architecture import Activation, Architecture
from flambeau.llm.models.decoder_layers import FeedForwardLayer, JointLayer, PostNormLayer, RecurrentLayer
from flambeau.llm.models.feed_forward import PlainMLP, ScaledMLP
from flambeau.llm.models.latent_attention import LatentAttention
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.rope import Rotation


def cuda_layers(
    layers: Iterable[Any], cache: KVCache, arch: Architecture, rotation: Rotation, like: Tensor
) -> list[CudaLayer]:
    """Layers and their parts of the cache."""
    every = [*layers]
    scale = next((layer.self_attn.scale for layer in every if hasattr(layer, "self_attn")), 1.0)
    alibi_HP = place_biases(arch, scale, like.device)
    found = []
    for number, layer in enumerate(every):
        norms = layer_norms(layer, every[number - 1] if number else None, arch, like)
        products: dict[str, Any]
        if isinstance(layer, RecurrentLayer):
            branch = recurrent_branch(layer.mixer, cache)
            products = {"attention": branch.part, "qkv": branch.first, "out": branch.out, "scales": branch.scales}
        elif isinstance(layer, FeedForwardLayer):
            dense = dense_layer(norms[0], layer.mlp, arch.activation)
            products = {"attention": None, "qkv": dense.gate_up, "out": dense.down}
        else:
            products = attention_products(layer.self_attn, cache, number, arch, rotation, alibi_HP)
        if isinstance(layer, JointLayer):
            products |= {"scales": layer.scales, "beside": recurrent_branch(layer.mixer, cache)}
        mlp = feed_forward(norms[1], layer.mlp, arch.activation) if len(norms) > 1 else None
        found.append(CudaLayer(**products, norm=norms[0], mlp=mlp, is_parallel=arch.is_parallel))
    return with_joined_norms(found)


def with_joined_norms(layers: list[CudaLayer]) -> list[CudaLayer]:
    """Layers whose norms are parts of the products around them, where the kernels know both."""
    found = []
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        to_mlp = to_next = None
        is_plain = not layer.is_parallel and layer.beside is None and layer.scales == (1.0, 1.0)
        if is_plain and type(layer.mlp) is DenseLayer:
            to_mlp = joined_norm(layer.out, layer.mlp.norm, layer.mlp.gate_up)
            if after is not None and not after.needs_normal and after.second is None:
                to_next = joined_norm(layer.mlp.down, after.norm, after.qkv)
        found.append(replace(layer, to_mlp=to_mlp, to_next=to_next))
    return found


def attention_products(
    attention: Any, cache: KVCache, number: int, arch: Architecture, rotation: Rotation, alibi_HP: Tensor | None
) -> dict[str, Any]:
    """Attention of a layer, its part of the cache, and the products around it."""
    if isinstance(attention, LatentAttention):
        return {
            "attention": latent_layer(attention, cache, rotation),
            "qkv": kernel_linear(attention.kv_a_proj_with_mqa),
            "out": kernel_linear(attention.o_proj),
        }
    return {
        "attention": HeadAttention(
            module=attention,
            heads=head_parts(attention, arch, rotation, cache.keys[number].device),
            scores=ScoreParts(
                softcap=attention.softcap or 0.0,
                chunk=attention.chunk or 0,
                sinks=attention.sinks,
                alibi=alibi_HP,
            ),
            keys=cache.keys[number],
            values=cache.values[number],
        ),
        "qkv": kernel_linear(attention.qkv_proj),
        "out": kernel_linear(attention.o_proj),
    }


def recurrent_branch(mixer: Any, cache: KVCache) -> RecurrentBranch:
    """A recurrence with its part of the cache."""
    return RecurrentBranch(
        first=kernel_linear(first_projection(mixer)),
        part=recurrent_part(mixer, cache.states.layers[mixer.layer], kernel_linear),
        out=kernel_linear(mixer.out_proj),
        scales=(mixer.shape.input_scale, mixer.shape.output_scale),
    )


def feed_forward(norm: NormParameters, mlp: Any, activation: Activation) -> DenseLayer | SparseLayer:
    """A feed-forward layer after its norm."""
    return sparse_layer(norm, mlp) if isinstance(mlp, SparseMLP) else dense_layer(norm, mlp, activation)


def layer_norms(layer: Any, previous: Any, arch: Architecture, like: Tensor) -> list[NormParameters]:
    """The norms before the parts of a layer: attention and the feed-forward layer; `previous` is the one before it."""
    if arch.is_parallel:
        own = layer.post_attention_layernorm if arch.parallel_norms else None
        return [norm_parameters(norm, arch, like) for norm in (layer.input_layernorm, own)]
    if arch.norm_places == "sum":
        last = None if previous is None else previous.post_attention_layernorm
        return [norm_parameters(norm, arch, like, replaces=True) for norm in (last, layer.input_layernorm)]
    after = None if previous is None else norms_around(previous)[-1][1]
    found = []
    for before, own_after in norms_around(layer):
        found.append(norm_parameters(before, arch, like, after=after))
        after = own_after
    return found


def norms_around(layer: Any) -> list[tuple[nn.Module | None, nn.Module | None]]:
    """The norms before and after each part of a layer."""
    if isinstance(layer, PostNormLayer):
        before = (layer.input_layernorm, layer.pre_feedforward_layernorm) if layer.has_both else (None, None)
        return [*zip(before, (layer.post_attention_layernorm, layer.post_feedforward_layernorm), strict=True)]
    second = getattr(layer, "post_attention_layernorm", None)
    return [(layer.input_layernorm, None), *([] if second is None else [(second, None)])]


def last_norm(body: Any, arch: Architecture, like: Tensor) -> NormParameters:
    """The norm before the head."""
    last = body.layers[-1]
    if arch.norm_places == "sum":
        return norm_parameters(last.post_attention_layernorm, arch, like, replaces=True)
    norm = body.norm if arch.has_last_norm else None
    return norm_parameters(norm, arch, like, after=None if arch.is_parallel else norms_around(last)[-1][1])


def norm_parameters(
    norm: nn.Module | None, arch: Architecture, like: Tensor, *, after: nn.Module | None = None, replaces: bool = False
) -> NormParameters:
    """A norm for the kernels; None, or an identity: there is none. `after` normalizes what is added."""
    is_norm = norm is not None and not isinstance(norm, nn.Identity)
    gain, bias = gains_of(norm, like.device) if is_norm and norm is not None else (None, None)
    return NormParameters(
        gain=gain,
        epsilon=arch.norm_epsilon,
        residual_scale=arch.residual_scale,
        bias=bias,
        after=None if after is None else gains_of(after, like.device),
        replaces=replaces and is_norm,
        dtype=like.dtype if arch.wide_residual else None,
    )


def head_parts(attention: Any, arch: Architecture, rotation: Rotation, device: torch.device) -> HeadParts:
    """What a layer does to queries and keys; norms over all heads are computed before."""
    own = rotation.local if attention.is_local else rotation
    assert own is not None
    gains: Any = None
    biases: Any = None
    if attention.q_norm is not None and not attention.is_wide:
        gains, biases = zip(*(gains_of(norm, device) for norm in (attention.q_norm, attention.k_norm)), strict=True)
    if attention.normalizes_rotated:  # without weights
        gains = (torch.ones(arch.head_size, device=device),) * 2
    return HeadParts(
        tables=(own.cos, own.sin) if attention.is_rotated else None,
        rotary_size=attention.rotary_size or 0,
        gains=gains,
        biases=None if biases is None or biases[0] is None else biases,
        is_late=attention.normalizes_late or attention.normalizes_rotated,
        epsilon=arch.norm_epsilon,
        clip=attention.clip or 0.0,
        temperature_length=arch.temperature_length if attention.is_tempered else 0,
        temperature_scale=arch.temperature_scale,
        temperature_first=0.0 if arch.tempers_rotated else 1.0,
    )


def latent_layer(attention: LatentAttention, cache: KVCache, rotation: Rotation) -> LatentLayer:
    names = ("q_a_proj", "q_b_proj") if attention.has_query_latent else ("q_proj",)
    return LatentLayer(
        attention=attention,
        queries=tuple(kernel_linear(getattr(attention, name)) for name in names),
        tables=(rotation.cos, rotation.sin),
        keys=cache.keys[attention.layer],
    )


def place_biases(arch: Architecture, scale: float, device: torch.device) -> Tensor | None:
    """What ALiBi adds to the scores [H, P] of each head for each place."""
    if arch.alibi is None:
        return None
    places_P = torch.arange(arch.max_length, device=device)
    return alibi_biases(arch.alibi, arch.num_heads, places_P, scale).squeeze(1).contiguous()


def dense_layer(norm: NormParameters, mlp: Any, activation: Activation) -> DenseLayer:
    if isinstance(mlp, ScaledMLP):
        products = kernel_linear(mlp.gate_up_proj), kernel_linear(mlp.down_proj)
        return ScaledDenseLayer(
            norm=norm, gate_up=products[0], down=products[1], activation=activation, scales=mlp.scales
        )
    first = mlp.up_proj if isinstance(mlp, PlainMLP) else mlp.gate_up_proj
    gates = not isinstance(mlp, PlainMLP)
    return DenseLayer(
        norm=norm, gate_up=kernel_linear(first, gates=gates, activation=activation), down=kernel_linear(mlp.down_proj)
    )


def sparse_layer(norm: NormParameters, mlp: SparseMLP) -> SparseLayer:
    shared = mlp.shared_expert
    return SparseLayer(
        norm=norm,
        mlp=mlp,
        experts=kernel_experts(mlp.experts),
        shared=None
        if shared is None
        else (kernel_linear(shared.gate_up_proj, gates=True), kernel_linear(shared.down_proj)),
    )
