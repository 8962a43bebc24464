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
from torch.nn import functional as F

from flambeau.llm.backends.cpu.attention import CACHE_KINDS
from flambeau.llm.backends.cpu.bindings import (
    ACTIVATIONS,
    KINDS,
    CAltUp,
    CExperts,
    CIndexer,
    CLatentAttention,
    CLayer,
    CMatrix,
    CNetwork,
    CNorm,
)
from flambeau.llm.backends.cpu.packed_experts import LEAVES, packed_stack
from flambeau.llm.backends.cpu.packed_linear import PANEL, pack_floats, packed
from flambeau.llm.backends.cpu.recurrence_pointers import recurrence_of
from flambeau.llm.backends.eager import alibi_biases
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.altup import AltUp, Laurel, Streams
from flambeau.llm.models.architecture import Architecture, RouterKind
from flambeau.llm.models.attention import Attention
from flambeau.llm.models.decoder_layers import AltUpLayer, ExpertNormLayer, FeedForwardLayer, RecurrentLayer
from flambeau.llm.models.embeddings import RowEmbedding
from flambeau.llm.models.families.layer_sizes import GateKind
from flambeau.llm.models.feed_forward import CutMLP, MixedMLP, PlainMLP, XieluMLP
from flambeau.llm.models.indexer import Indexer
from flambeau.llm.models.latent_attention import LatentAttention
from flambeau.llm.models.layer_inputs import LayerInputs
from flambeau.llm.models.moe import Experts, SparseMLP
from flambeau.llm.models.norms import PlainRMSNorm, RMSNorm
from flambeau.llm.models.rope import Rotation, query_scale
from flambeau.llm.models.transformer import Decoder
from flambeau.llm.quantize.groups import JoinedLinear

ROUTER_KINDS: dict[RouterKind, int] = {  # as in csrc/experts.h
    "softmax": 0,
    "grouped_softmax": 0,
    "biased_softmax": 0,
    "biased_sigmoid": 1,
    "sigmoid": 2,
    "wide_sigmoid": 2,
    "late_sigmoid": 2,
    "sparse_mixer": 3,
}
GATES: tuple[GateKind | None, ...] = (  # as in csrc/network.h
    None,
    "sigmoid",
    "softplus",
    "sigmoid_per_head",
    "softplus_per_head",
)
GROUPED = ("grouped_softmax", "biased_sigmoid")  # the routers to which groups of experts make a difference


class NetworkPointers:
    """Structures that point to weights and caches, which are kept alive with them."""

    def __init__(self, cache: KVCache, *, packs_float32: bool) -> None:
        self._cache, self._packs_float32 = cache, packs_float32
        self._references: list[Any] = [cache]
        self._query_scales: int | None = None

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
        own = dtype if body is None else getattr(body.embed_tokens, "dtype", dtype)  # the network's
        biases_HP = place_biases(arch)
        made_network = CNetwork(
            arch.hidden_size,
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_size,
            arch.rotary_size or arch.head_size,
            self._cache.block_size,
            len(made),
            max(*map(arch.intermediate_size_of, range(arch.num_layers)), arch.expert_size, arch.shared_expert_size),
            arch.num_experts,
            ACTIVATIONS.index(arch.activation),
            arch.has_gate,
            CACHE_KINDS[self._cache.keys[0].dtype],
            CACHE_KINDS[dtype],
            arch.is_parallel,
            arch.wide_qk_norm,
            arch.late_qk_norm or arch.rotated_qk_norm,
            array,
            self.pointer(embedding),
            self.pointer(None if body is None else learned_positions(body, arch)),
            self._norm(getattr(body, "embed_norm", None)),
            self._norm(getattr(body, "norm", None)),
            head,
            arch.norm_epsilon,
            attention_scale(arch),
            arch.attention_softcap or 0.0,
            self.pointer(biases_HP),
            0 if biases_HP is None else biases_HP.shape[1],
            arch.clip_qkv or 0.0,
            float(torch.tensor(arch.embedding_scale, dtype=own)),  # rounded as the network's numbers are
            arch.residual_scale,
            arch.logit_scale,
            arch.logit_softcap or 0.0,
            self.pointer(torch.tensor(recorded, dtype=torch.int64)),
            len(recorded),
            rows,
            arch.gates_attention,
            arch.attention_input_scale,
            arch.stream_scales[0][1] if arch.stream_scales else arch.attention_output_scale,
            *arch.mlp_scales,
            *(self._projection(body, name) for name in ("project_in", "project_out")),
            GATES.index(arch.attention_gate),
            *self._own_embeddings(getattr(body, "layer_inputs", None), own),
        )
        if (streams := getattr(body, "streams", None)) is not None:
            self._add_streams(made_network, arch, streams)
        return made_network

    def _add_streams(self, made: CNetwork, arch: Architecture, streams: Streams) -> None:
        made.num_streams, made.active_stream = arch.num_streams, arch.active_stream
        sides = [[*map(self.matrix, layers)] for layers in (streams.projections, streams.unembed_projections)]
        made.stream_projections, made.stream_unembeddings = arrays = [(CMatrix * len(side))(*side) for side in sides]
        self._references += arrays

    def _own_embeddings(self, inputs: LayerInputs | None, dtype: torch.dtype) -> Iterator[Any]:
        """The embeddings that each layer has of its own."""
        if inputs is None:
            return
        table = inputs.embed_tokens
        weight, rows = (None, self.matrix(table.rows)) if isinstance(table, RowEmbedding) else (table.weight, CMatrix())
        kind = torch.float32 if weight is None else weight.dtype
        yield from (self.pointer(weight), CACHE_KINDS[kind], inputs.size, inputs.num_own)
        yield from (self.matrix(inputs.projection), self._norm(inputs.norm))
        yield float(torch.tensor(inputs.embedding_scale, dtype=dtype))  # rounded as the network's numbers are
        yield from (inputs.projection_scale, rows)

    def _projection(self, body: Decoder | None, name: str) -> CMatrix:
        layer = getattr(body, name, None)
        return CMatrix() if layer is None else self.matrix(layer)

    def _layer(self, arch: Architecture, layer: Any, rotation: Rotation, number: int) -> CLayer:
        attention, mlp, mixer = (getattr(layer, name, None) for name in ("self_attn", "mlp", "mixer"))
        made = CLayer(*(self._norm(getattr(layer, name, None)) for name in norm_names(arch, layer)), output_scale=1.0)
        own = arch.of_layer(number)
        made.heads, made.kv_heads, made.head_size = own.num_heads, own.num_kv_heads, own.head_size
        made.rotary_size = own.rotary_size or own.head_size
        self._layer_parts(made, layer)
        if attention is not None and attention.is_tempered and arch.temperature_length:
            made.query_scales = self._scales_of_queries(arch)
        if isinstance(attention, LatentAttention):
            self._rotate(made, rotation, attention)
            made.out, made.keys = self.matrix(attention.o_proj), self.pointer(self._cache.keys[number])
            made.latent = ctypes.pointer(latent := self._latent(attention))
            latent.num_chosen = 0 if arch.indexer is None else arch.indexer.num_chosen
            if attention.indexer is not None:
                latent.indexer = ctypes.pointer(self._indexer(attention.indexer, self._cache.index_keys[number]))
        elif attention is not None:
            cache = self._cache
            made.qk_norm = self._qk_norm(attention)
            self._rotate(made, rotation, attention)
            made.qkv, made.out = map(self.matrix, (attention.qkv_proj, attention.o_proj))
            source = arch.key_layer(number)
            made.has_shared_keys, made.attention_scale = source != number, attention.scale
            made.keys, made.values = map(self.pointer, (cache.keys[source], cache.values[source]))
            if attention.normalizes_values:
                made.value_norm = CNorm(self.pointer(torch.ones(own.head_size)))
            if attention.gate is not None:
                made.attention_gate = self.matrix(attention.gate_proj)
            made.window, made.chunk = arch.window(number) or 0, arch.chunk(number) or 0
            made.attention_inner_norm = self._norm(attention.inner_norm)
            made.sinks = self.pointer(None if attention.sinks is None else attention.sinks.detach().float())
        if isinstance(mlp, SparseMLP):
            made.experts = self._experts(mlp)
        elif mlp is not None:
            made.gate_up, made.down = self._feed_forward(mlp)
            made.mlp_inner_norm = self._norm(getattr(mlp, "inner_norm", None))
        if isinstance(mlp, XieluMLP):
            made.positive, made.negative, made.beta, made.epsilon = map(float, (*mlp.factors(), mlp.beta, mlp.eps))
        if arch.norm_places == "sum":
            made.attention_sum_norm = self._norm(layer.input_layernorm)
            made.mlp_sum_norm = self._norm(layer.post_attention_layernorm)
        if arch.norm_places == "stream":
            made.stream_attention, made.stream_mlp = layer.scales[0][0], layer.scales[1][0]
            made.experts.contents.weight_scale *= layer.scales[1][1]
        if mixer is not None:
            recurrence = recurrence_of(mixer, self._cache.states.layers[number], rotation, self)
            self._references.append(recurrence)
            made.recurrence = ctypes.pointer(recurrence)
        return made

    def _scales_of_queries(self, arch: Architecture) -> int | None:
        """A table for all layers: it has a number for each place."""
        if self._query_scales is None:
            scales = query_scale(arch, torch.arange(arch.max_length))
            self._query_scales = self.pointer(None if scales is None else scales.flatten())
        return self._query_scales

    def _layer_parts(self, made: CLayer, layer: Any) -> None:
        """What layers of Gemma 3n and 4 have beside attention and the feed-forward layer."""
        if (inputs := getattr(layer, "layer_input", None)) is not None:
            made.input_gate, made.input_projection = self.matrix(inputs.gate), self.matrix(inputs.projection)
            made.input_norm = self._norm(inputs.norm)
        if isinstance(layer, AltUpLayer):
            made.altup = ctypes.pointer(self._altup(layer.altup, layer.laurel))
        if isinstance(mlp := getattr(layer, "mlp", None), CutMLP):
            threshold = torch.tensor(mlp.threshold, dtype=layer.input_layernorm.weight.dtype)  # rounded as its numbers
            made.cuts_gates, made.gate_threshold = True, float(threshold)
        if (scale := getattr(layer, "layer_scale", None)) is not None:
            made.output_scale = float(scale)
        if isinstance(mlp, MixedMLP):
            made.experts = self._experts(mlp.sparse)
            made.dense_norm, made.sparse_norm = self._norm(mlp.dense_norm), self._norm(mlp.sparse_norm)
            made.expert_norm = self._norm(mlp.expert_norm)
            weight, _ = norm_weights(mlp.router_norm)
            made.router_norm = CNorm(self.pointer(weight * mlp.router_scale))

    def _altup(self, altup: AltUp, laurel: Laurel) -> CAltUp:
        layers = altup.modality_router, altup.prediction_coefs, altup.correction_coefs
        made = CAltUp(
            *map(self.matrix, layers),
            self._norm(altup.router_norm),
            self.pointer(altup.correct_output_scale.detach().float()) if altup.scales else None,
            *map(self.matrix, (laurel.linear_left, laurel.linear_right)),
            self._norm(laurel.norm),
        )
        self._references.append(made)
        return made

    def _latent(self, attention: LatentAttention) -> CLatentAttention:
        has_latent = attention.has_query_latent
        to_keys_HNR, to_values_HVR = attention.kv_b_proj.parts()
        made = CLatentAttention(
            query_down=self.matrix(attention.q_a_proj) if has_latent else CMatrix(),
            query_up=self.matrix(attention.q_b_proj if has_latent else attention.q_proj),
            latent=self.matrix(attention.kv_a_proj_with_mqa),
            query_norm=self._norm(attention.q_a_layernorm) if has_latent else CNorm(),
            latent_norm=self._norm(attention.kv_a_layernorm),
            to_keys=self._head_matrices(to_keys_HNR.transpose(1, 2)),
            to_values=self._head_matrices(to_values_HVR),
            latent_size=attention.latent_size,
            rotary_size=attention.rotary_size,
            unrotated_size=attention.unrotated_size,
            value_size=attention.kv_b_proj.value_size,
            is_paired=attention.is_paired,
            epsilon=attention.kv_a_layernorm.epsilon,
            head_gate=CMatrix() if attention.gate_proj is None else self.matrix(attention.gate_proj),
        )
        self._references.append(made)
        return made

    def _indexer(self, indexer: Indexer, keys: Tensor) -> CIndexer:
        shape = indexer.shape
        made = CIndexer(
            query_up=self.matrix(indexer.wq_b),
            key=self.matrix(indexer.wk),
            weights=self._plain(indexer.weights_proj.weight),  # their scale makes no difference to the choice
            key_norm=self._norm(indexer.k_norm),
            keys=self.pointer(keys),
            heads=shape.num_heads,
            size=shape.head_size,
            num_chosen=shape.num_chosen,
            is_paired=shape.paired_rope,
            epsilon=shape.key_epsilon,
        )
        self._references.append(made)
        return made

    def _head_matrices(self, weights_HOI: Tensor) -> Any:
        """A matrix for each head; the outputs of each begin with a panel."""
        heads, count, _ = weights_HOI.shape
        padded = F.pad(weights_HOI.detach(), (0, 0, 0, -count % PANEL)).contiguous()
        rows = pack_floats(padded.flatten(0, 1), packs_float32=self._packs_float32)
        self._references += [rows, padded]
        if rows is None:
            made = [self._plain(padded[head, :count]) for head in range(heads)]
        else:
            made = [rows.part(head * padded.shape[1], count) for head in range(heads)]
        self._references.append(array := (CMatrix * heads)(*made))
        return array

    def _feed_forward(self, mlp: Any) -> tuple[CMatrix, CMatrix]:
        up = mlp.up_proj if isinstance(mlp, PlainMLP) else mlp.gate_up_proj
        return self.matrix(up), self.matrix(mlp.down_proj)

    def _experts(self, mlp: SparseMLP) -> Any:
        experts, shared, shared_gate = mlp.experts, mlp.shared_expert, mlp.shared_expert_gate
        weight, bias = mlp.gate.weight.float(), mlp.gate.bias
        arrays = [(CMatrix * len(weight))(*self._expert_matrices(experts, leaf)) for leaf in LEAVES]
        made = CExperts(
            self._plain(weight, None if bias is None else bias.float()),
            self.pointer(None if mlp.score_bias is None else mlp.score_bias.detach().float()),
            *arrays,
            *((CMatrix(), CMatrix()) if shared is None else self._feed_forward(shared)),
            CMatrix() if shared_gate is None else self.matrix(shared_gate),
            len(weight),
            mlp.settings.num_chosen,
            ROUTER_KINDS[mlp.router],
            mlp.normalizes_experts,
            ACTIVATIONS.index(experts.kind),
            mlp.routed_scale,
            experts.limit or 0.0,
            experts.alpha,
            mlp.settings.num_groups if mlp.router in GROUPED else 1,
            mlp.settings.num_chosen_groups,
            experts.scales_inputs,
            mlp.settings.jitter,
            self.pointer(None if mlp.expert_scales is None else mlp.expert_scales.detach().float()),
        )
        if mlp.fc1_latent_proj is not None and mlp.fc2_latent_proj is not None:
            made.latent_in, made.latent_out = map(self.matrix, (mlp.fc1_latent_proj, mlp.fc2_latent_proj))
        self._references += [*arrays, made]
        return ctypes.pointer(made)

    def _expert_matrices(self, experts: Experts, leaf: str) -> Iterator[CMatrix]:
        weights, biases_NO = getattr(experts, leaf), getattr(experts, f"{leaf}_bias")
        stack = packed_stack(weights, packs_float32=self._packs_float32)
        self._references.append(stack)
        for number in range(len(weights)):
            matrix = stack.matrix(number) if stack is not None else self._plain(weights[number])
            matrix.bias = self.pointer(None if biases_NO is None else biases_NO[number].detach().float())
            yield matrix

    def _plain(self, weight_OI: Tensor, bias: Tensor | None = None) -> CMatrix:
        """Float32 weights as they are."""
        pointers = self.pointer(weight_OI.detach()), self.pointer(None if bias is None else bias.detach())
        return CMatrix(KINDS.index("plain"), *pointers, weight_OI.shape[1], len(weight_OI), 1)

    def _norm(self, norm: Any) -> CNorm:
        if norm is None or isinstance(norm, nn.Identity):
            return CNorm()
        weight, bias = norm_weights(norm)
        return CNorm(self.pointer(weight), self.pointer(bias))

    def _qk_norm(self, attention: Attention) -> CNorm:
        """The weights of all heads of queries and keys, one after the other."""
        if attention.normalizes_rotated:
            return CNorm(self.pointer(torch.ones((attention.num_heads + attention.num_kv_heads) * attention.head_size)))
        if attention.q_norm is None:
            return CNorm()
        sides = [(attention.q_norm, attention.num_heads)]
        if attention.k_norm is not None:  # else keys are those of another layer
            sides.append((attention.k_norm, attention.num_kv_heads))
        parts = [(norm_weights(norm), count * attention.head_size) for norm, count in sides]
        weight = torch.cat([repeated(weight, size) for (weight, _), size in parts])
        biases = [repeated(bias, size) for (_, bias), size in parts if bias is not None]
        return CNorm(self.pointer(weight), self.pointer(torch.cat(biases) if biases else None))

    def _rotate(self, made: CLayer, rotation: Rotation, attention: Attention | LatentAttention) -> None:
        """How a layer's heads are rotated: by tables, or by what these are computed from."""
        if not attention.is_rotated:
            return
        is_local = isinstance(attention, Attention) and attention.is_local
        own = rotation.local if is_local and rotation.local is not None else rotation
        if own.has_tables:
            made.cos, made.sin = self.pointer(own.cos), self.pointer(own.sin)
            return
        made.inverse = self.pointer(own.inverse)
        made.cos_factor, made.sin_factor = own.factor, -own.factor if own.arch.reversed_rope else own.factor

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

    def pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._references.append(tensor)
        return tensor.data_ptr()


def norm_names(arch: Architecture, layer: nn.Module) -> tuple[str, str, str, str]:
    """The norms of a layer: before attention and the feed-forward layer, and after each."""
    if arch.norm_places == "sum":
        return "", "", "", ""
    if isinstance(layer, FeedForwardLayer):
        return "", "input_layernorm", "", ""
    if isinstance(layer, ExpertNormLayer):
        return "input_layernorm", "post_attention_layernorm", "", "post_feedforward_layernorm"
    if arch.norm_places in ("before", "stream") or isinstance(layer, RecurrentLayer):
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
    if isinstance(norm, PlainRMSNorm):
        return torch.ones(norm.size), None
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
