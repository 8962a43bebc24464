"""NetworkPointers: a network's weights and cache as the structures that the C++ kernels read.

Weights are expanded where that saves the kernels a case: norms of queries and keys have weights for every head, layer
norms always have biases, and ALiBi is a table.

Shapes: H heads · P places · E hidden · O outputs · I inputs · N experts
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.backends.cpu.attention import CACHE_KINDS
from flambeau.llm.backends.cpu.bindings import ACTIVATIONS, KINDS, CExperts, CLayer, CMatrix, CNetwork, CNorm
from flambeau.llm.backends.cpu.packed_experts import LEAVES, packed_stack
from flambeau.llm.backends.cpu.packed_linear import packed
from flambeau.llm.backends.eager import alibi_biases
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attention
from flambeau.llm.models.moe import Experts, SparseMLP
from flambeau.llm.models.norms import RMSNorm
from flambeau.llm.models.rope import Rotation
from flambeau.llm.models.transformer import Decoder, PlainMLP, RowEmbedding
from flambeau.llm.quantize.groups import JoinedLinear


class NetworkPointers:
    """Structures that point to weights and caches, which are kept alive with them."""

    def __init__(self, cache: KVCache, *, packs_float32: bool) -> None:
        self._cache, self._packs_float32 = cache, packs_float32
        self._references: list[Any] = [cache]

    def network(
        self,
        arch: Architecture,
        layers: Iterable[nn.Module],
        rotation: Rotation,
        *,
        body: Decoder | None,
        head: CMatrix,
        recorded: tuple[int, ...],
    ) -> CNetwork:
        """A network of these layers; without the other parts of a decoder, hidden states are its input."""
        made = [self._layer(arch, layer, rotation, i) for i, layer in enumerate(layers)]
        self._references.append(array := (CLayer * len(made))(*made))
        embedding, rows, dtype = None, CMatrix(), torch.float32
        if body is not None and isinstance(body.embed_tokens, RowEmbedding):
            rows, dtype = self.matrix(body.embed_tokens.rows), body.embed_tokens.dtype
        elif body is not None:
            embedding = body.embed_tokens.weight
            dtype = embedding.dtype
        biases_HP = place_biases(arch)
        return CNetwork(
            arch.hidden_size,
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_size,
            arch.rotary_size or arch.head_size,
            self._cache.block_size,
            len(made),
            max(arch.intermediate_size, arch.expert_size, arch.shared_expert_size),
            arch.num_experts,
            ACTIVATIONS.index(arch.activation),
            arch.has_gate,
            CACHE_KINDS[self._cache.keys[0].dtype],
            CACHE_KINDS[dtype],
            arch.is_parallel,
            arch.wide_qk_norm,
            arch.late_qk_norm,
            array,
            self._pointer(embedding),
            self._pointer(None if body is None else learned_positions(body, arch)),
            self._norm(getattr(body, "embed_norm", None)),
            self._norm(getattr(body, "norm", None)),
            head,
            arch.norm_epsilon,
            attention_scale(arch),
            arch.attention_softcap or 0.0,
            self._pointer(biases_HP),
            0 if biases_HP is None else biases_HP.shape[1],
            arch.clip_qkv or 0.0,
            float(torch.tensor(arch.embedding_scale, dtype=dtype)),  # rounded as the network's numbers are
            arch.residual_scale,
            arch.logit_scale,
            arch.logit_softcap or 0.0,
            self._pointer(torch.tensor(recorded, dtype=torch.int64)),
            len(recorded),
            rows,
        )

    def _layer(self, arch: Architecture, layer: Any, rotation: Rotation, number: int) -> CLayer:
        attention, mlp, cache = layer.self_attn, layer.mlp, self._cache
        has_experts = isinstance(mlp, SparseMLP)
        return CLayer(
            *(self._norm(getattr(layer, name, None)) for name in norm_names(arch)),
            self._qk_norm(attention),
            *(self._rotation(rotation, attention)),
            *map(self.matrix, (attention.qkv_proj, attention.o_proj)),
            *((CMatrix(), CMatrix()) if has_experts else self._feed_forward(mlp)),
            self._experts(mlp) if has_experts else None,
            *map(self._pointer, (cache.keys[number], cache.values[number])),
            arch.window(number) or 0,
            self._pointer(None if attention.sinks is None else attention.sinks.detach().float()),
        )

    def _feed_forward(self, mlp: Any) -> tuple[CMatrix, CMatrix]:
        up = mlp.up_proj if isinstance(mlp, PlainMLP) else mlp.gate_up_proj
        return self.matrix(up), self.matrix(mlp.down_proj)

    def _experts(self, mlp: SparseMLP) -> Any:
        experts, shared, shared_gate = mlp.experts, mlp.shared_expert, mlp.shared_expert_gate
        weight, bias = mlp.gate.weight.float(), mlp.gate.bias
        arrays = [(CMatrix * len(weight))(*self._expert_matrices(experts, leaf)) for leaf in LEAVES]
        made = CExperts(
            self._plain(weight, None if bias is None else bias.float()),
            self._pointer(None if mlp.score_bias is None else mlp.score_bias.detach().float()),
            *arrays,
            *((CMatrix(), CMatrix()) if shared is None else self._feed_forward(shared)),
            CMatrix() if shared_gate is None else self.matrix(shared_gate),
            len(weight),
            mlp.settings.num_chosen,
            mlp.router == "biased_sigmoid",
            mlp.normalizes_experts,
            ACTIVATIONS.index(experts.kind),
            mlp.routed_scale,
            experts.limit or 0.0,
            experts.alpha,
        )
        self._references += [*arrays, made]
        return ctypes.pointer(made)

    def _expert_matrices(self, experts: Experts, leaf: str) -> Iterator[CMatrix]:
        weights, biases_NO = getattr(experts, leaf), getattr(experts, f"{leaf}_bias")
        stack = packed_stack(weights, packs_float32=self._packs_float32)
        self._references.append(stack)
        for number in range(len(weights)):
            matrix = stack.matrix(number) if stack is not None else self._plain(weights[number])
            matrix.bias = self._pointer(None if biases_NO is None else biases_NO[number].detach().float())
            yield matrix

    def _plain(self, weight_OI: Tensor, bias: Tensor | None = None) -> CMatrix:
        """Float32 weights as they are."""
        pointers = self._pointer(weight_OI.detach()), self._pointer(None if bias is None else bias.detach())
        return CMatrix(KINDS.index("plain"), *pointers, weight_OI.shape[1], len(weight_OI), 1)

    def _norm(self, norm: Any) -> CNorm:
        if norm is None or isinstance(norm, nn.Identity):
            return CNorm()
        weight, bias = norm_weights(norm)
        return CNorm(self._pointer(weight), self._pointer(bias))

    def _qk_norm(self, attention: Attention) -> CNorm:
        """The weights of all heads of queries and keys, one after the other."""
        if attention.q_norm is None or attention.k_norm is None:
            return CNorm()
        sides = (attention.q_norm, attention.num_heads), (attention.k_norm, attention.num_kv_heads)
        parts = [(norm_weights(norm), count * attention.head_size) for norm, count in sides]
        weight = torch.cat([repeated(weight, size) for (weight, _), size in parts])
        biases = [repeated(bias, size) for (_, bias), size in parts if bias is not None]
        return CNorm(self._pointer(weight), self._pointer(torch.cat(biases) if biases else None))

    def _rotation(self, rotation: Rotation, attention: Any) -> tuple[int | None, int | None]:
        if not attention.is_rotated:
            return None, None
        tables = rotation.local if attention.is_local and rotation.local is not None else rotation
        return self._pointer(tables.cos), self._pointer(tables.sin)

    def matrix(self, layer: Any) -> CMatrix:
        """The structure of a layer; of joined ones, that of the first, which points to the next."""
        if not isinstance(layer, JoinedLinear):
            return self._single(layer)
        bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
        self._references.append(bias)
        made: list[CMatrix] = []
        for part in layer.parts:
            matrix = self._single(part)
            if bias is not None:
                matrix.bias = bias[sum(before.width for before in made) :].data_ptr()
            if made:
                made[-1].next = ctypes.addressof(matrix)
            made.append(matrix)
        self._references += made
        return made[0]

    def _single(self, layer: Any) -> CMatrix:
        one = packed(layer, packs_float32=self._packs_float32)
        if one is not None:
            self._references.append(one)
            return one.matrix
        return self._plain(layer.weight, layer.bias)

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._references.append(tensor)
        return tensor.data_ptr()


def norm_names(arch: Architecture) -> tuple[str, str, str, str]:
    """The norms of a layer: before attention and the feed-forward layer, and after each."""
    if arch.norm_places == "before":
        return "input_layernorm", "post_attention_layernorm", "", ""
    return (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )


def norm_weights(norm: Any) -> tuple[Tensor, Tensor | None]:
    """The weights of a norm in float32; a layer norm always has both."""
    offset = getattr(norm, "offset", 0.0)
    if isinstance(norm, RMSNorm):
        return norm.weight.detach().float() + offset, None
    weight = norm.weight.detach().float() + offset if norm.weight is not None else torch.ones(norm.size)
    bias = getattr(norm, "bias", None)
    return weight, torch.zeros_like(weight) if bias is None else bias.detach().float()


def repeated(weight: Tensor, size: int) -> Tensor:
    """So many weights, of heads that may share theirs."""
    flat = weight.flatten()
    return flat.repeat(size // len(flat))


def attention_scale(arch: Architecture) -> float:
    return arch.head_size**-0.5 if arch.attention_scale is None else arch.attention_scale


def place_biases(arch: Architecture) -> Tensor | None:
    """What is added to the scores of each head for each place [H, P]; None: nothing."""
    if arch.alibi is None:
        return None
    return alibi_biases(arch.alibi, arch.num_heads, torch.arange(arch.max_length), attention_scale(arch)).squeeze(1)


def learned_positions(body: Decoder, arch: Architecture) -> Tensor | None:
    """The embeddings of positions [P, E] in float32; None: there are none."""
    if body.embed_positions is None:
        return None
    return body.embed_positions.weight.detach()[arch.position_offset :].float()
