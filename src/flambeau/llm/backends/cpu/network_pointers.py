"""NetworkPointers: a network's weights and cache as the structures that the C++ kernels read.

Weights are expanded where that saves the kernels a case: norms of queries and keys have weights for every head, layer
norms always have biases, and ALiBi is a table.

Shapes: H heads · P places · E hidden
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.backends.cpu.attention import CACHE_KINDS
from flambeau.llm.backends.cpu.attention_pointers import fill_rotation, indexer_of, latent_of, qk_norm_of
from flambeau.llm.backends.cpu.bindings import (
    ACTIVATIONS,
    CAltUp,
    CLayer,
    CMatrix,
    CNetwork,
    CNorm,
    CSharedBlock,
)
from flambeau.llm.backends.cpu.expert_pointers import experts_of, feed_forward_of
from flambeau.llm.backends.cpu.recurrence_pointers import channel_mix_of, recurrence_of
from flambeau.llm.backends.cpu.weight_pointers import WeightPointers, norm_weights
from flambeau.llm.backends.eager import alibi_biases
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.altup import AltUp, Laurel, Streams
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attention
from flambeau.llm.models.decoder_layers import (
    AltUpLayer,
    BlockLayer,
    ExpertNormLayer,
    FeedForwardLayer,
    PostNormRecurrentLayer,
    RecurrentLayer,
)
from flambeau.llm.models.embeddings import RowEmbedding
from flambeau.llm.models.families.layer_sizes import GateKind
from flambeau.llm.models.feed_forward import CutMLP, MixedMLP, XieluMLP
from flambeau.llm.models.latent_attention import LatentAttention
from flambeau.llm.models.layer_inputs import LayerInputs
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.receptance import ChannelMix
from flambeau.llm.models.rope import Rotation, query_scale
from flambeau.llm.models.shared_blocks import SharedBlock
from flambeau.llm.models.transformer import Decoder

GATES: tuple[GateKind | None, ...] = (  # as in csrc/network.h
    None,
    "sigmoid",
    "softplus",
    "sigmoid_per_head",
    "softplus_per_head",
)


class NetworkPointers(WeightPointers):
    """Structures that point to weights and caches, which are kept alive with them."""

    def __init__(self, cache: KVCache, *, packs_float32: bool) -> None:
        super().__init__(packs_float32=packs_float32)
        self._cache = cache
        self.keep(cache)
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
        blocks: Any = getattr(body, "blocks", None) or ()
        made = [self._layer(arch, layer, rotation, i, blocks) for i, layer in enumerate(layers)]
        self.keep(array := (CLayer * len(made))(*made))
        biases_HP = place_biases(arch)
        network = CNetwork(
            hidden=arch.hidden_size,
            heads=arch.num_heads,
            kv_heads=arch.num_kv_heads,
            head_size=arch.head_size,
            rotary_size=arch.rotary_size or arch.head_size,
            block_size=self._cache.block_size,
            num_layers=len(made),
            intermediate=max(
                *map(arch.intermediate_size_of, range(arch.num_layers)), arch.expert_size, arch.shared_expert_size
            ),
            max_experts=arch.num_experts,
            activation=ACTIVATIONS.index(arch.activation),
            has_gate=arch.has_gate,
            cache_kind=CACHE_KINDS[self._cache.keys[0].dtype],
            is_parallel=arch.is_parallel,
            wide_qk_norm=arch.wide_qk_norm,
            late_qk_norm=arch.late_qk_norm or arch.rotated_qk_norm,
            layers=array,
            head=head,
            epsilon=arch.norm_epsilon,
            scale=attention_scale(arch),
            softcap=arch.attention_softcap or 0.0,
            biases=self.pointer(biases_HP),
            num_places=0 if biases_HP is None else biases_HP.shape[1],
            clip=arch.clip_qkv or 0.0,
            residual_scale=arch.residual_scale,
            logit_scale=arch.logit_scale,
            logit_softcap=arch.logit_softcap or 0.0,
            recorded=self.pointer(torch.tensor(recorded, dtype=torch.int64)),
            num_recorded=len(recorded),
            gates_attention=arch.gates_attention,
            attention_input_scale=arch.attention_input_scale,
            attention_output_scale=arch.stream_scales[0][1] if arch.stream_scales else arch.attention_output_scale,
            gate_scale=arch.mlp_scales[0],
            mlp_output_scale=arch.mlp_scales[1],
            attention_gate=GATES.index(arch.attention_gate),
        )
        if body is not None:
            self._add_ends(network, arch, body)
        return network

    def _add_ends(self, made: CNetwork, arch: Architecture, body: Decoder) -> None:
        """What is before the layers, and after them."""
        table = body.embed_tokens
        if isinstance(table, RowEmbedding):
            made.embedding_rows, dtype = self.matrix(table.rows), table.dtype
        else:
            made.embedding, dtype = self.pointer(table.weight), table.weight.dtype
        made.embedding_kind = CACHE_KINDS[dtype]
        own = getattr(table, "dtype", dtype)  # the network's
        made.embedding_scale = float(torch.tensor(arch.embedding_scale, dtype=own))  # rounded as its numbers are
        made.positions = self.pointer(learned_positions(body, arch))
        made.embedding_norm, made.last_norm = self.norm(body.embed_norm), self.norm(getattr(body, "norm", None))
        if body.project_in is not None and body.project_out is not None:
            made.project_in, made.project_out = map(self.matrix, (body.project_in, body.project_out))
        made.head = self._with_bias(made.head, body.head_bias)
        if body.head_layer is not None:
            made.head_layer, made.head_layer_norm = self.matrix(body.head_layer.dense), self.norm(body.head_layer.norm)
            made.head_activation = ACTIVATIONS.index(arch.head_layer)
        if body.layer_inputs is not None:
            self._add_own_embeddings(made, body.layer_inputs, own)
        if isinstance(body.streams, Streams):
            self._add_streams(made, arch, body.streams)

    def _with_bias(self, head: CMatrix, bias: Tensor | None) -> CMatrix:
        """A last layer whose weights are those of embeddings, with its own biases."""
        if bias is None:
            return head
        parts, at = [head], 0
        while parts[-1].next:
            parts.append(CMatrix.from_address(parts[-1].next))
        made, biases = [CMatrix.from_buffer_copy(part) for part in parts], bias.detach().float().contiguous()
        self.keep(parts, made, biases)
        for part, following in zip(made, [*made[1:], None], strict=True):
            part.bias, at = biases[at:].data_ptr(), at + part.width
            part.next = None if following is None else ctypes.addressof(following)
        return made[0]

    def _add_own_embeddings(self, made: CNetwork, inputs: LayerInputs, dtype: torch.dtype) -> None:
        """The embeddings that each layer has of its own."""
        table = inputs.embed_tokens
        if isinstance(table, RowEmbedding):
            made.own_rows, made.own_kind = self.matrix(table.rows), CACHE_KINDS[torch.float32]
        else:
            made.own_embedding, made.own_kind = self.pointer(table.weight), CACHE_KINDS[table.weight.dtype]
        made.own_size, made.own_vocab = inputs.size, inputs.num_own
        made.own_projection, made.own_norm = self.matrix(inputs.projection), self.norm(inputs.norm)
        made.own_scale = float(torch.tensor(inputs.embedding_scale, dtype=dtype))  # rounded as the network's numbers
        made.own_projection_scale = inputs.projection_scale

    def _add_streams(self, made: CNetwork, arch: Architecture, streams: Streams) -> None:
        made.num_streams, made.active_stream = arch.num_streams, arch.active_stream
        sides = [[*map(self.matrix, layers)] for layers in (streams.projections, streams.unembed_projections)]
        made.stream_projections, made.stream_unembeddings = arrays = [(CMatrix * len(side))(*side) for side in sides]
        self.keep(*arrays)

    def _layer(self, arch: Architecture, layer: Any, rotation: Rotation, number: int, blocks: Any) -> CLayer:
        attention, mlp, mixer = (getattr(layer, name, None) for name in ("self_attn", "mlp", "mixer"))
        made = CLayer(*(self.norm(getattr(layer, name, None)) for name in norm_names(arch, layer)), output_scale=1.0)
        own = arch.of_layer(number)
        made.heads, made.kv_heads, made.head_size = own.num_heads, own.num_kv_heads, own.head_size
        made.rotary_size = own.rotary_size or own.head_size
        if (limit := arch.mlp_limit(number)) is not None:
            made.mlp_limit = limit.size  # of activated gates: others are not known
        self._layer_parts(made, layer)
        if attention is not None and attention.is_tempered and arch.temperature_length:
            made.query_scales = self._scales_of_queries(arch)
        if attention is not None:
            fill_rotation(made, rotation, attention, self)
            made.out = self.matrix(attention.o_proj)
        if isinstance(attention, LatentAttention):
            self._add_latent(made, arch, attention, number)
        elif attention is not None:
            self._add_heads(made, arch, attention, number)
        if isinstance(mlp, SparseMLP):
            made.experts = experts_of(mlp, self)
        elif isinstance(mlp, ChannelMix):
            mixing = channel_mix_of(mlp, self._cache.states.layers[mlp.layer], self)
            self.keep(mixing)
            made.channel_mix = ctypes.pointer(mixing)
        elif mlp is not None:
            made.gate_up, made.down = feed_forward_of(mlp, self)
            made.mlp_inner_norm = self.norm(getattr(mlp, "inner_norm", None))
        if isinstance(mlp, XieluMLP):
            made.positive, made.negative, made.beta, made.epsilon = map(float, (*mlp.factors(), mlp.beta, mlp.eps))
        if arch.norm_places == "sum":
            made.attention_sum_norm = self.norm(layer.input_layernorm)
            made.mlp_sum_norm = self.norm(layer.post_attention_layernorm)
        if arch.norm_places == "stream":
            made.stream_attention, made.stream_mlp = layer.scales[0][0], layer.scales[1][0]
            made.experts.contents.weight_scale *= layer.scales[1][1]
        if mixer is not None:
            recurrence = recurrence_of(mixer, self._cache.states.layers[number], rotation, self)
            self.keep(recurrence)
            made.recurrence = ctypes.pointer(recurrence)
        if isinstance(layer, BlockLayer):
            block = blocks[arch.block_layers.index(number) % len(blocks)]
            fill_rotation(made, rotation, block, self)
            made.keys, made.values = (self.pointer(side[number]) for side in (self._cache.keys, self._cache.values))
            made.attention_scale = block.options.scale
            made.block = ctypes.pointer(self._block(layer, block))
        return made

    def _block(self, layer: BlockLayer, block: SharedBlock) -> CSharedBlock:
        """A block of attention that layers share, as this one uses it."""
        made = CSharedBlock(
            *(self.norm(norm) for norm in (block.input_layernorm, block.pre_feedforward_layernorm)),
            *map(self.matrix, (block.qkv_proj, block.o_proj, block.gate_up_proj, block.down_proj)),
            projection=self.matrix(layer.linear),
        )
        made.gate_down, made.gate_widen = map(self.matrix, layer.adapters.gate_up)
        adapters: Any = layer.adapters.qkv
        if adapters:
            made.query_down, made.query_up = map(self.matrix, adapters["q"])
            made.key_down, made.key_up = map(self.matrix, adapters["k"])
            made.value_down, made.value_up = map(self.matrix, adapters["v"])
        self.keep(made)
        return made

    def _add_latent(self, made: CLayer, arch: Architecture, attention: LatentAttention, number: int) -> None:
        """Attention to latents."""
        made.keys = self.pointer(self._cache.keys[number])
        made.latent = ctypes.pointer(latent := latent_of(attention, self))
        latent.num_chosen = 0 if arch.indexer is None else arch.indexer.num_chosen
        if attention.indexer is not None:
            latent.indexer = ctypes.pointer(indexer_of(attention.indexer, self._cache.index_keys[number], self))

    def _add_heads(self, made: CLayer, arch: Architecture, attention: Attention, number: int) -> None:
        """Attention to keys and values, which may be those of another layer."""
        source = arch.key_layer(number)
        made.qkv, made.qk_norm = self.matrix(attention.qkv_proj), qk_norm_of(attention, self)
        made.has_shared_keys, made.attention_scale = source != number, attention.scale
        made.keys, made.values = map(self.pointer, (self._cache.keys[source], self._cache.values[source]))
        if attention.normalizes_values:
            made.value_norm = CNorm(self.pointer(torch.ones(attention.head_size)))
        if attention.gate is not None:
            made.attention_gate = self.matrix(attention.gate_proj)
        made.window, made.chunk = arch.window(number) or 0, arch.chunk(number) or 0
        made.attention_inner_norm = self.norm(attention.inner_norm)
        made.sinks = self.pointer(None if attention.sinks is None else attention.sinks.detach().float())

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
            made.input_norm = self.norm(inputs.norm)
        if isinstance(layer, AltUpLayer):
            made.altup = ctypes.pointer(self._altup(layer.altup, layer.laurel))
        if isinstance(mlp := getattr(layer, "mlp", None), CutMLP):
            threshold = torch.tensor(mlp.threshold, dtype=layer.input_layernorm.weight.dtype)  # rounded as its numbers
            made.cuts_gates, made.gate_threshold = True, float(threshold)
        if (scale := getattr(layer, "layer_scale", None)) is not None:
            made.output_scale = float(scale)
        if isinstance(mlp, MixedMLP):
            made.experts = experts_of(mlp.sparse, self)
            made.dense_norm, made.sparse_norm = self.norm(mlp.dense_norm), self.norm(mlp.sparse_norm)
            made.expert_norm = self.norm(mlp.expert_norm)
            weight, _ = norm_weights(mlp.router_norm)
            made.router_norm = CNorm(self.pointer(weight * mlp.router_scale))

    def _altup(self, altup: AltUp, laurel: Laurel) -> CAltUp:
        layers = altup.modality_router, altup.prediction_coefs, altup.correction_coefs
        made = CAltUp(
            *map(self.matrix, layers),
            self.norm(altup.router_norm),
            self.pointer(altup.correct_output_scale.detach().float()) if altup.scales else None,
            *map(self.matrix, (laurel.linear_left, laurel.linear_right)),
            self.norm(laurel.norm),
        )
        self.keep(made)
        return made


def norm_names(arch: Architecture, layer: nn.Module) -> tuple[str, str, str, str]:
    """The norms of a layer: before attention and the feed-forward layer, and after each."""
    if arch.norm_places == "sum":
        return "", "", "", ""
    if isinstance(layer, FeedForwardLayer):
        return "", "input_layernorm", "", ""
    if isinstance(layer, ExpertNormLayer):
        return "input_layernorm", "post_attention_layernorm", "", "post_feedforward_layernorm"
    has_both = isinstance(layer, PostNormRecurrentLayer)
    if arch.norm_places in ("before", "stream") or (isinstance(layer, RecurrentLayer) and not has_both):
        return "input_layernorm", "post_attention_layernorm", "", ""
    return (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )


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
