"""CudaNetwork: steps of a network by the kernels; tested against EagerBackend.

A step is a list of launches that can be captured as a graph. Only the kernels are compiled, which takes seconds. A
norm adds what the part before it has given to the residual stream; so a norm after a part is computed together with
the one before the next part.

Shapes: T tokens of the step · N rows of them · S parts of a sum · E hidden · V vocabulary · C counters of a token
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.backends.cuda import few_row_kernel, latent_attention
from flambeau.llm.backends.cuda.attention import ScoreParts, attend_uniform
from flambeau.llm.backends.cuda.attention_gates import gated, without_gates
from flambeau.llm.backends.cuda.code_instructions import Codes
from flambeau.llm.backends.cuda.decode_attention import ProjectionAdapters, attend_new_tokens
from flambeau.llm.backends.cuda.feed_forward import (
    DenseLayer,
    ScaledDenseLayer,
    SparseLayer,
    can_compute_experts,
    joined,
    kernel_experts,
)
from flambeau.llm.backends.cuda.few_row_kernel import tied_head
from flambeau.llm.backends.cuda.group_scaled import GroupScaledLinear, widened
from flambeau.llm.backends.cuda.group_scaled_experts import group_scaled_weights, is_group_scaled
from flambeau.llm.backends.cuda.joined_linear import JoinedKernelLinear
from flambeau.llm.backends.cuda.latent_attention import LatentLayer
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.norm import NormParameters, gains_of
from flambeau.llm.backends.cuda.norm_product import is_joinable, is_plain, multiply_normalized
from flambeau.llm.backends.cuda.parts import unknown_parts
from flambeau.llm.backends.cuda.prompt_attention import MAX_SHARED, attend_prompts, make_tiles, shape_of
from flambeau.llm.backends.cuda.recurrent_layer import (
    CLASSES,
    MIXERS,
    RecurrentPart,
    first_projection,
    recurrent_part,
)
from flambeau.llm.backends.cuda.recurrent_sequences import Sequences, sequences_of
from flambeau.llm.backends.cuda.rope import HeadParts, rope
from flambeau.llm.backends.eager import alibi_biases
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.architecture import Activation, Architecture
from flambeau.llm.models.attention import Attention
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.latent_attention import LatentAttention, LatentUp
from flambeau.llm.models.moe import Experts, SharedExpert, SparseMLP
from flambeau.llm.models.rope import Rotation
from flambeau.llm.models.transformer import (
    FeedForwardLayer,
    JointLayer,
    PlainMLP,
    PostNormLayer,
    RecurrentLayer,
    RowEmbedding,
    ScaledMLP,
    Transformer,
    is_unmodified,
    like_embeddings,
)
from flambeau.llm.quantize.coded import CODE_GROUPS, CudaCodedLinear, table_tensor
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear, pair_bits
from flambeau.llm.quantize.groups import JoinedLinear
from flambeau.llm.quantize.packed_layers import CudaFp8Linear, CudaInt4Linear
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.quantize.row_scaled import RowScaledLinear

GROUPED = (CudaCodedLinear, CudaGroupedLinear)
QUANTIZED = (RowScaledLinear, CudaFp8Linear, CudaInt4Linear, JoinedLinear, *GROUPED)
SPARSE = (SparseMLP, Experts, SharedExpert, ExpertStack)
LATENT = (LatentAttention, LatentUp)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadAttention:
    """Attention of a layer over keys and values, with its cache."""

    module: Attention
    heads: HeadParts
    scores: ScoreParts
    keys: Tensor
    values: Tensor

    def __call__(
        self, qkv: Tensor, dtype: torch.dtype, inputs: StepInputs, tiles: Tensor | None, counters_GT: Tensor
    ) -> Tensor:
        """The outputs [T, H·D] of projections [T, (H+2G)·D], or of parts; see `attend_new_tokens`.

        With gates, the projections have H·D more numbers.
        """
        if self.module.has_gates:
            queries = self.module.num_heads * self.module.head_size
            qkv, gates = without_gates(qkv, queries, self.module.head_size, dtype)
            return gated(self.attend(qkv, dtype, inputs, tiles, counters_GT), gates)
        return self.attend(qkv, dtype, inputs, tiles, counters_GT)

    def attend(
        self,
        qkv: Tensor,
        dtype: torch.dtype,
        inputs: StepInputs,
        tiles: Tensor | None,
        counters_GT: Tensor,
        adapters: ProjectionAdapters | None = None,
    ) -> Tensor:
        """The same of projections without gates; in decode steps, they may have adapters that are not added yet."""
        module, keys, values = self.module, self.keys, self.values
        window = module.window or 0
        qkv = with_wide_norms(module, qkv) if module.is_wide and module.q_norm is not None else qkv
        if tiles is None and inputs.query_len == 1:
            return attend_new_tokens(
                qkv,
                keys,
                values,
                inputs.positions_T,
                inputs.slots_T,
                inputs.block_tables_SB,
                module.num_heads,
                self.heads,
                self.scores,
                module.scale,
                window,
                dtype,
                counters_GT,
                adapters,
            ).flatten(1)
        assert adapters is None
        q_THD = rope(qkv, keys, values, inputs.positions_T, inputs.slots_T, module.num_heads, self.heads, dtype)
        cached = keys, values, inputs.positions_T, inputs.block_tables_SB
        options = module.scale, window, self.scores
        if tiles is None:
            return attend_uniform(q_THD, *cached, inputs.query_len, *options).flatten(1)
        return attend_prompts(q_THD, *cached, tiles, *options).flatten(1)


class Projected(NamedTuple):
    """Rows before attention."""

    x_TE: Tensor  # the residual stream
    normal_TE: Tensor  # normalized, if something else needs that
    projections: Tensor  # [T, X], or parts [S, T, X] of them
    second: Tensor | None = None  # the outputs of `CudaLayer.second`, if they are there


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentBranch:
    """A recurrence beside attention, with its products."""

    first: KernelLinear
    part: RecurrentPart
    out: KernelLinear
    scales: tuple[float, float] = (1.0, 1.0)  # of inputs and outputs

    def __call__(self, normal_TE: Tensor, sequences: Sequences) -> Tensor:
        """What is added to the residual stream [T, E], or parts of it."""
        given_TE = scaled(normal_TE, self.scales[0])
        return scaled(self.out(self.part(given_TE, self.first(given_TE), sequences)), self.scales[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaLayer:
    """The tensors of one layer, and what happens between its products."""

    attention: HeadAttention | LatentLayer | RecurrentPart | None  # None: only a feed-forward layer, in its place
    norm: NormParameters  # before attention
    qkv: KernelLinear  # queries, keys and values; or latents; or what else the attention, or a recurrence, takes
    out: KernelLinear
    mlp: DenseLayer | SparseLayer | None  # None: the layer has one part
    is_parallel: bool = False  # attention and the feed-forward layer have the same input
    scales: tuple[float, float] = (1.0, 1.0)  # of the inputs of `qkv` and of what `out` gives
    beside: RecurrentBranch | None = None  # added to attention, with the same normalized inputs

    @property
    def second(self) -> KernelLinear | None:
        """A second product of the normalized rows: of queries for latents, or of betas."""
        if isinstance(self.attention, LatentLayer):
            return self.attention.queries[0]
        return self.attention.second if isinstance(self.attention, RecurrentPart) else None

    @property
    def needs_normal(self) -> bool:
        """Whether more than these two products need the normalized rows."""
        more = isinstance(self.attention, RecurrentPart) and self.attention.needs_normal
        return self.is_parallel or more or self.beside is not None or self.scales[0] != 1.0

    def project(self, x_TE: Tensor, sums: Tensor | None) -> Projected:
        """What attention needs, after the sums were added to the residual stream, perhaps in place."""
        if len(x_TE) > 1 or self.needs_normal or not is_joinable(self.norm, self.qkv):
            normal_TE = self.norm(x_TE, sums)
            return Projected(x_TE, normal_TE, self.qkv(scaled(normal_TE, self.scales[0])))
        second = self.second
        if second is None:
            x_TE, projections = multiply_normalized(x_TE, sums, self.norm, self.qkv)
            return Projected(x_TE, x_TE, projections)
        if not (is_plain(self.qkv) and is_plain(second)):
            normal_TE = self.norm(x_TE, sums)
            return Projected(x_TE, normal_TE, self.qkv(normal_TE))
        x_TE, both = multiply_normalized(x_TE, sums, self.norm, self.qkv, second)
        return Projected(x_TE, x_TE, both[:, : self.qkv.width], both[:, self.qkv.width :])


class CudaLayers:
    """Layers and their cache as the kernels read them."""

    def __init__(self, layers: Sequence[CudaLayer], arch: Architecture, like: Tensor) -> None:
        """Numbers have the type and device of `like`."""
        self._layers = layers
        self._num_kv_heads = arch.num_kv_heads
        self._device, self._dtype = like.device, like.dtype
        shared = arch.num_heads // arch.num_kv_heads
        rows = shape_of(self._dtype, arch.head_size)[0]
        self._tile_size = latent_attention.tile_size(arch.num_heads) if arch.latent_size else rows // shared  # tokens

    def tiles(self, inputs: StepInputs) -> Tensor:
        """The tiles [M, 3] of the sequences' tokens."""
        return make_tiles(inputs.query_starts, self._tile_size)

    def max_tiles(self, num_tokens: int, num_sequences: int) -> int:
        """How many tiles so many tokens have at most."""
        return -(-num_tokens // self._tile_size) + num_sequences

    def _counters(self, num_rows: int, *, has_prompts: bool) -> Sequence[Tensor]:
        """Zeros [C, T] for each layer: one of a row for its router, and for decode steps one of each key-value head.

        Steps may run at the same time: each has its own.
        """
        num_counters = 1 + (0 if has_prompts else self._num_kv_heads)
        width = -(-num_rows // 4) * 4  # the kernels are compiled for aligned addresses
        zeros = torch.zeros(len(self._layers), num_counters, width, dtype=torch.int32, device=self._device)
        return zeros.unbind()

    def _compute(
        self,
        layer: CudaLayer,
        projected: Projected,
        inputs: StepInputs,
        tiles: Tensor | None,
        counters_CT: Tensor,
        sequences: Sequences | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream [T, E] and what is to be added to it, [T, E] or parts.

        `sequences` are those of the step, if the network has recurrent layers.
        """
        x_TE, normal_TE = projected[:2]
        sums = scaled(layer.out(self._attend(layer, projected, inputs, tiles, counters_CT, sequences)), layer.scales[1])
        if layer.beside is not None:
            assert sequences is not None
            sums = joined(sums, layer.beside(normal_TE, sequences), x_TE)
        if layer.mlp is None:
            return x_TE, sums
        if not layer.is_parallel:
            return layer.mlp(x_TE, sums, counters_CT[0])
        given_TE = normal_TE if layer.mlp.norm.gain is None else layer.mlp.norm(x_TE, None)
        return x_TE, joined(sums, layer.mlp.compute(given_TE), x_TE)

    def _attend(
        self,
        layer: CudaLayer,
        projected: Projected,
        inputs: StepInputs,
        tiles: Tensor | None,
        counters_CT: Tensor,
        sequences: Sequences | None,
    ) -> Tensor:
        """The outputs of attention [T, H·D], or of what is in its place."""
        if layer.attention is None:
            return projected.projections
        if isinstance(layer.attention, RecurrentPart):
            assert sequences is not None
            return layer.attention(projected.normal_TE, projected.projections, sequences, projected.second)
        if isinstance(layer.attention, LatentLayer):
            return layer.attention(projected.normal_TE, projected.projections, inputs, tiles, projected.second)
        return layer.attention(projected.projections, self._dtype, inputs, tiles, counters_CT[1:])


class CudaNetwork(CudaLayers):
    """A network and its cache as the kernels read them."""

    def __init__(self, model: Transformer, cache: KVCache, states: HiddenStates | None = None) -> None:
        arch, body = model.arch, model.model
        embedding = like_embeddings(body.embed_tokens)
        super().__init__(cuda_layers(body.layers, cache, arch, model.rotation, embedding), arch, embedding)
        self._states = states
        self._embedding_scale = float(torch.tensor(arch.embedding_scale, dtype=embedding.dtype))
        self._embeddings = embeddings_of(body.embed_tokens)
        projections = body.project_in, body.project_out
        self._project_in, self._project_out = (None if each is None else each.weight for each in projections)
        self._positions = None if body.embed_positions is None else body.embed_positions.weight
        self._position_offset = arch.position_offset
        self._first_norm = None if body.embed_norm is None else norm_parameters(body.embed_norm, arch, embedding)
        self._logit_scale, self._logit_softcap = arch.logit_scale, arch.logit_softcap
        self._head = kernel_linear(tied_head(body.embed_tokens) if model.lm_head is None else model.lm_head)
        self._last_norm = last_norm(body, arch, embedding)
        self._has_states, self._is_wide = cache.states.has_layers, arch.wide_residual

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of the tokens at `rows_N`; sequences have any number of tokens."""
        tiles = self.tiles(inputs)
        return self.run(inputs.to(self._device), rows_N.to(self._device), tiles.to(self._device))

    def run(self, inputs: StepInputs, rows_N: Tensor | None = None, tiles: Tensor | None = None) -> Tensor:
        """The logits [N, V] of these tokens, or [T, V] of all of them, in float32."""
        x_TE = self._embed(inputs)
        sums: Tensor | None = None
        layers = () if self._states is None else self._states.layers
        inputs_of: dict[int, Tensor] = {}
        sequences = sequences_of(inputs) if self._has_states else None
        counters = self._counters(len(x_TE), has_prompts=tiles is not None)
        for number, (layer, counters_CT) in enumerate(zip(self._layers, counters, strict=True)):
            projected = layer.project(x_TE, sums)
            if number in layers:
                inputs_of[number] = projected.x_TE.clone()  # the next norm adds to it in place
            x_TE, sums = self._compute(layer, projected, inputs, tiles, counters_CT, sequences)
        hidden_TE = self._last_norm(x_TE, sums)
        if self._states is not None:
            inputs_of[len(self._layers)] = x_TE
            self._states.set(torch.cat([inputs_of[number] for number in layers], dim=-1).to(self._dtype))
        hidden_TE = hidden_TE if rows_N is None else hidden_TE[rows_N]
        hidden_TE = hidden_TE if self._project_out is None else F.linear(hidden_TE, self._project_out)
        logits = self._head(hidden_TE)
        logits = logits.sum(0) if logits.dim() == 3 else logits.float()
        logits = logits if self._logit_scale == 1.0 else logits * self._logit_scale
        cap = self._logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _embed(self, inputs: StepInputs) -> Tensor:
        """What the first layer gets [T, E], as `Transformer.embed`."""
        x_TE = embedded(inputs.ids_T, self._embeddings, self._dtype)
        x_TE = x_TE if self._embedding_scale == 1.0 else x_TE * self._embedding_scale
        x_TE = x_TE if self._project_in is None else F.linear(x_TE, self._project_in)
        if self._positions is not None:
            x_TE = x_TE + F.embedding(inputs.positions_T + self._position_offset, self._positions)
        x_TE = x_TE if self._first_norm is None else self._first_norm(x_TE, None)
        return x_TE.float() if self._is_wide else x_TE


def scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def embeddings_of(embeddings: Any) -> Tensor | GroupScaledLinear:
    """All embeddings [V, E], or a layer whose weights they are."""
    if not isinstance(embeddings, RowEmbedding):
        return embeddings.weight  # type: ignore[no-any-return]
    rows = kernel_linear(embeddings.rows)
    assert isinstance(rows, GroupScaledLinear)
    return rows


def embedded(ids_T: Tensor, embeddings: Tensor | GroupScaledLinear, dtype: torch.dtype) -> Tensor:
    """The embeddings [T, E] of tokens."""
    if isinstance(embeddings, Tensor):
        return F.embedding(ids_T, embeddings)
    return widened(embeddings, dtype, ids_T)


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


def with_wide_norms(attention: Attention, qkv: Tensor) -> Tensor:
    """Projections [T, (H+2G)·D], or parts of their sums, with norms over all heads of queries and of keys."""
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    dtype = next(attention.q_norm.parameters()).dtype
    qkv = qkv.sum(0).to(dtype) if qkv.dim() == 3 else qkv
    sizes = [heads * attention.head_size for heads in (attention.num_heads, *[attention.num_kv_heads] * 2)]
    q, k, v = torch.split(qkv, sizes, dim=-1)
    return torch.cat((attention.q_norm(q), attention.k_norm(k), v), dim=-1)


def kernel_linear(layer: nn.Module, *, gates: bool = False, activation: Activation | None = None) -> KernelLinear:
    """A linear layer for the kernels; the activation of gates is SiLU unless said otherwise."""
    activation = activation or ("silu" if gates else None)
    if isinstance(layer, JoinedLinear):
        parts = tuple(kernel_linear(part) for part in layer.parts)
        return JoinedKernelLinear(
            layer=layer, weight=parts[0].weight, bias=layer.bias, gates=gates, activation=activation, parts=parts
        )
    weight, bias = layer.weight, getattr(layer, "bias", None)
    assert isinstance(weight, Tensor)
    if isinstance(layer, GROUPED) or (isinstance(layer, RowScaledLinear) and layer.scale.dim() == 2):
        return group_scaled_linear(layer, gates=gates, activation=activation)
    has_kernel = few_row_kernel.runs_on(weight.device) and few_row_kernel.kind_of(layer) is not None
    scales = few_row_kernel.kernel_scales(layer, gates) if has_kernel else None
    linear = KernelLinear(
        layer=layer, weight=weight, bias=bias, gates=gates, activation=activation, kernel_scales=scales
    )
    if isinstance(layer, (RowScaledLinear, CudaFp8Linear)):
        return replace(linear, scale=layer.scale.flatten())
    if isinstance(layer, CudaInt4Linear):
        return replace(linear, scale=layer.scales, minimums=layer.minimums, group_size=layer.group_size)
    return linear


def group_scaled_linear(
    layer: CudaCodedLinear | CudaGroupedLinear | RowScaledLinear, *, gates: bool, activation: Activation | None
) -> GroupScaledLinear:
    """A linear layer with scales of groups for the kernels."""
    linear = GroupScaledLinear(layer=layer, weight=layer.weight, bias=layer.bias, gates=gates, activation=activation)
    if isinstance(layer, RowScaledLinear):
        group_size = layer.in_features // layer.scale.shape[1]
        return replace(linear, scale=layer.scale, group_size=group_size)
    if isinstance(layer, CudaGroupedLinear):
        return replace(
            linear,
            scale=layer.scales,
            minimums=layer.minimums,
            group_size=layer.layout.size,
            bits=pair_bits(layer.layout),
            more=layer.more,
            factors=layer.factors,
        )
    layout = layer.layout
    return replace(
        linear,
        scale=layer.scales,
        group_size=layout.size,
        codes=Codes(layout, table_tensor(layout, layer.weight.device)),
    )


def can_compute(model: Transformer, cache: KVCache) -> bool:
    """Whether the kernels support a network: on an NVIDIA GPU; not sharded."""
    arch = model.arch
    if cache.keys[0].device.type != "cuda" or torch.version.hip is not None or unknown_parts(arch):
        return False
    if not can_attend(arch, model.rotation):
        return False
    dtype, cached = like_embeddings(model.model.embed_tokens).dtype, cache.keys[0].dtype
    if cached not in (dtype, torch.float8_e4m3fn):
        return False
    if not all(can_compute_experts(module) for module in model.modules() if isinstance(module, Experts)):
        return False
    if not group_sizes(model) <= {*CODE_GROUPS}:
        return False
    return have_type(model, dtype) and all(
        is_unmodified(module, (*QUANTIZED, *SPARSE, *LATENT, *CLASSES)) for module in model.modules()
    )


def group_sizes(model: Transformer) -> set[int]:
    """The sizes of groups of weights that have scales of their own."""
    linear = {module.layout.size for module in model.modules() if isinstance(module, GROUPED)}
    linear |= {
        module.in_features // module.scale.shape[1]
        for module in model.modules()
        if isinstance(module, RowScaledLinear) and module.scale.dim() == 2
    }
    stacks = [module for module in model.modules() if isinstance(module, ExpertStack) and is_group_scaled(module)]
    return linear | {group_scaled_weights(stack, None).group_size for stack in stacks}


def can_attend(arch: Architecture, rotation: Rotation) -> bool:
    """Whether the kernels support the number of heads, and find cosine and sine in tables."""
    return rotation.has_tables and (arch.latent_size > 0 or arch.num_heads // arch.num_kv_heads <= MAX_SHARED)


def have_type(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether all parameters have a type and are contiguous, but for what routers add to scores, and decays."""
    wide = {id(module.score_bias) for module in model.modules() if isinstance(module, SparseMLP)}
    mixers = [module for module in model.modules() if isinstance(module, MIXERS)]
    wide |= {id(p) for mixer in mixers for p in mixer.parameters(recurse=False)}
    if not all(
        p.dtype == torch.float32 and p.is_contiguous() for mixer in mixers for p in mixer.parameters(recurse=False)
    ):
        return False
    return all(p.dtype == dtype and p.is_contiguous() for p in model.parameters() if id(p) not in wide)
