"""Transformer: one decoder, assembled from the parts that an Architecture names; Llama's are the defaults.

`attend` stores keys and values; quantization, sharding and compilation are applied to the network from their own files.
Weights have the names of Hugging Face checkpoints, except for fused ones: `qkv_proj` has the rows of q_proj, k_proj and
v_proj, `gate_up_proj` those of gate_proj and up_proj.

Shapes: … any leading dimensions (tokens, or batch and tokens) · E hidden · H heads · G key-value heads · D head size
· F intermediate · V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models import norms
from flambeau.llm.models.activations import ACTIVATIONS
from flambeau.llm.models.altup import AltUp, Laurel, Streams, above_threshold, threshold_of
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attend, Attention, SharedKeyAttention, SharedKeys
from flambeau.llm.models.latent_attention import LatentAttention
from flambeau.llm.models.layer_inputs import LayerInput, LayerInputs
from flambeau.llm.models.lightning_attention import LightningAttention
from flambeau.llm.models.mixers import make_mixer
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.norms import make_norm
from flambeau.llm.models.recurrent import Mixer
from flambeau.llm.models.rope import Rotation, Rotations
from flambeau.llm.models.step_images import StepImages


class MLP(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(arch.hidden_size, 2 * arch.intermediate_size, bias=arch.mlp_bias)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias)
        self.activate = ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activate(gate) * up)  # type: ignore[no-any-return]


class PlainMLP(nn.Module):
    """A feed-forward layer without a gate."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.up_proj = nn.Linear(arch.hidden_size, arch.intermediate_size, bias=arch.mlp_bias)
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias)
        self.activate = ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        return self.down_proj(self.activate(self.up_proj(x)))  # type: ignore[no-any-return]


class XieluMLP(PlainMLP):
    """A feed-forward layer without a gate, whose activation has parameters (Apertus)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.alpha_p, self.alpha_n = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
        self.beta, self.eps = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-1e-6))

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        y, (positive, negative) = self.up_proj(x), self.factors()
        below = (torch.expm1(torch.minimum(y, self.eps)) - y) * negative
        return self.down_proj(torch.where(y > 0, positive * y * y, below) + self.beta * y)  # type: ignore[no-any-return]

    def factors(self) -> tuple[Tensor, Tensor]:
        """Of numbers above 0 and of those below it."""
        return F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)


class InnerNormMLP(MLP):
    """A gated feed-forward layer with a norm before its last layer (BitNet)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.inner_norm = make_norm(arch, arch.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.inner_norm(self.activate(gate) * up))  # type: ignore[no-any-return]


class CutMLP(MLP):
    """A gated feed-forward layer of whose gates only the largest count (Gemma 3n)."""

    def __init__(self, arch: Architecture, sparsity: float) -> None:
        super().__init__(arch)
        self.threshold = threshold_of(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activate(above_threshold(gate, self.threshold)) * up)  # type: ignore[no-any-return]


class MixedMLP(MLP):
    """A feed-forward layer beside experts, each with norms of its own (Gemma 4)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.sparse = SparseMLP(arch)
        self.dense_norm, self.sparse_norm = make_norm(arch), make_norm(arch)
        self.expert_norm, self.router_norm = make_norm(arch), make_norm(arch)
        self.router_scale = arch.hidden_size**-0.5

    def forward(self, x: Tensor, raw: Tensor | None = None) -> Tensor:
        """[…, E] to […, E]; experts and their router read what the layer has not normalized."""
        assert raw is not None
        sparse = self.sparse(self.expert_norm(raw), self.router_norm(raw) * self.router_scale)
        return self.dense_norm(super().forward(x)) + self.sparse_norm(sparse)  # type: ignore[no-any-return]


class ScaledMLP(MLP):
    """A gated feed-forward layer with a factor of the gate and one of the output."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.scales = arch.mlp_scales

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.activate(gate * self.scales[0]) * up) * self.scales[1]  # type: ignore[no-any-return]


def make_attention(arch: Architecture, layer: int) -> Attention | LatentAttention:
    if arch.key_layer(layer) != layer:
        return SharedKeyAttention(arch, layer)
    return LatentAttention(arch, layer) if arch.latent_size else Attention(arch, layer)


def make_mlp(arch: Architecture, layer: int) -> nn.Module:
    arch = arch.of_layer(layer)
    if arch.experts_beside_mlp:
        return MixedMLP(arch)
    if arch.has_experts(layer):
        return SparseMLP(arch)
    if arch.mlp_scales != (1.0, 1.0):
        return ScaledMLP(arch)
    if arch.sparsity and arch.sparsity[layer]:
        return CutMLP(arch, arch.sparsity[layer])
    if arch.activation == "xielu":
        return XieluMLP(arch)
    if arch.inner_norms:
        return InnerNormMLP(arch)
    return MLP(arch) if arch.has_gate else PlainMLP(arch)


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_norm(arch)
        self.self_attn = make_attention(arch, layer)
        self.post_attention_layernorm = make_norm(arch)
        self.mlp = make_mlp(arch, layer)
        self.residual_scale = arch.residual_scale

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        x = self.add(x, self.self_attn(self.input_layernorm(x), rotations, attend))
        return self.add(x, self.mlp(self.post_attention_layernorm(x)))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.residual_scale == 1.0 else x + y * self.residual_scale


class PostNormLayer(DecoderLayer):
    """Norms after attention and the feed-forward layer, and before them too if there are norms in `both` places."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.has_both = arch.norm_places == "both"
        self.post_feedforward_layernorm = make_norm(arch)
        if self.has_both:
            self.pre_feedforward_layernorm = make_norm(arch)
        else:
            del self.input_layernorm

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        y = self.input_layernorm(x) if self.has_both else x
        x = self.add(x, self.post_attention_layernorm(self.self_attn(y, rotations, attend)))
        y = self.pre_feedforward_layernorm(x) if self.has_both else x
        return self.add(x, self.post_feedforward_layernorm(self.mlp(y)))


class GemmaLayer(PostNormLayer):
    """Norms in both places, embeddings of the layer's own, and a factor of its output (Gemma 4)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.layer_scale = nn.Parameter(torch.ones(1)) if arch.scales_layers else None
        self.layer_input = LayerInput(arch) if arch.layer_input_size else None

    def forward(
        self,
        x: Tensor,
        rotations: Rotations,
        attend: Attend,
        shared: SharedKeys | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        """[…, E] to […, E]; `own` are the embeddings […, P] of this layer."""
        y = self.self_attn(self.input_layernorm(x), rotations, attend, shared)
        x = x + self.post_attention_layernorm(y)
        y = self.pre_feedforward_layernorm(x)
        y = self.mlp(y, x) if isinstance(self.mlp, MixedMLP) else self.mlp(y)
        x = x + self.post_feedforward_layernorm(y)
        if self.layer_input is not None:
            assert own is not None
            x = x + self.layer_input(x, own)
        return x if self.layer_scale is None else x * self.layer_scale


class AltUpLayer(GemmaLayer):
    """A layer that computes one of several streams, which change the others (Gemma 3n)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.altup, self.laurel = AltUp(arch), Laurel(arch)

    def forward(
        self,
        x: Tensor,
        rotations: Rotations,
        attend: Attend,
        shared: SharedKeys | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        """[…, S, E] to […, S, E]; `own` are the embeddings […, P] of this layer."""
        assert self.layer_input is not None
        assert own is not None
        x = self.altup.predict(x)
        one = x[..., self.altup.active, :]
        y = self.input_layernorm(one)
        attended = self.post_attention_layernorm(self.self_attn(y, rotations, attend, shared))
        one = (one + attended + self.laurel(y)) * 2.0**-0.5
        one = one + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(one)))
        x = self.altup.correct(x, one)
        added = self.layer_input(self.altup.scaled(x), own).unsqueeze(-2)
        return torch.cat((x[..., :1, :], x[..., 1:, :] + added), dim=-2)


class SumNormLayer(DecoderLayer):
    """A norm after each addition to the residual stream."""

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        x = self.input_layernorm(self.add(x, self.self_attn(x, rotations, attend)))
        return self.post_attention_layernorm(self.add(x, self.mlp(x)))  # type: ignore[no-any-return]


class StreamLayer(DecoderLayer):
    """The residual stream is normalized itself before each part, and scaled as what the part gives is (MiniMax)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.is_recurrent = layer in arch.recurrent_layers
        if self.is_recurrent:
            del self.self_attn
            self.mixer = make_mixer(arch, layer)
        attending, recurrent, feeding = arch.stream_scales
        self.scales = (recurrent if self.is_recurrent else attending), feeding

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        x = self.input_layernorm(x)
        y = mix(self.mixer, x, rotations, attend) if self.is_recurrent else self.self_attn(x, rotations, attend)
        x = self.post_attention_layernorm(x * self.scales[0][0] + y * self.scales[0][1])
        return x * self.scales[1][0] + self.mlp(x) * self.scales[1][1]  # type: ignore[no-any-return]


def mix(mixer: Mixer, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
    """What a recurrent layer gives […, E]; some kinds have rotary positions."""
    if isinstance(mixer, LightningAttention):
        return mixer(x, attend.recur, rotations)  # type: ignore[no-any-return]
    return mixer(x, attend.recur)  # type: ignore[no-any-return]


class ParallelLayer(DecoderLayer):
    """Attention and the feed-forward layer read the same input, normalized once or by a norm each."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.has_norms = arch.parallel_norms
        if not self.has_norms:
            del self.post_attention_layernorm

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        y = self.input_layernorm(x)
        z = self.post_attention_layernorm(x) if self.has_norms else y
        return self.add(x, self.self_attn(y, rotations, attend) + self.mlp(z))


class RecurrentLayer(DecoderLayer):
    """A recurrence in the place of attention; there may be no feed-forward layer."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        del self.self_attn
        self.mixer = make_mixer(arch, layer)
        self.has_mlp, self.is_wide = arch.has_mlp, arch.wide_residual
        if not self.has_mlp:
            del self.mlp, self.post_attention_layernorm

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        y = mix(self.mixer, self.input_layernorm(x.to(self.input_layernorm.weight.dtype)), rotations, attend)
        x = self.add(x.float() if self.is_wide else x, y)
        return self.add(x, self.mlp(self.post_attention_layernorm(x))) if self.has_mlp else x


class AttentionOnlyLayer(DecoderLayer):
    """Attention without a feed-forward layer (Nemotron-H)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        del self.mlp, self.post_attention_layernorm

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        return self.add(x, self.self_attn(self.input_layernorm(x), rotations, attend))


class FeedForwardLayer(DecoderLayer):
    """A feed-forward layer without attention (Nemotron-H)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        del self.self_attn, self.post_attention_layernorm

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        return self.add(x, self.mlp(self.input_layernorm(x)))


class JointLayer(DecoderLayer):
    """Attention and a recurrence read the same input; what they say is added up."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.mixer = make_mixer(arch, layer)
        self.scales = arch.attention_input_scale, arch.attention_output_scale

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        y = self.input_layernorm(x)
        attended = self.self_attn(y * self.scales[0], rotations, attend) * self.scales[1]
        x = self.add(x, attended + self.mixer(y, attend.recur))
        return self.add(x, self.mlp(self.post_attention_layernorm(x)))


def make_layer(arch: Architecture, layer: int) -> DecoderLayer:
    if arch.norm_places == "stream":
        return StreamLayer(arch, layer)
    if layer in arch.recurrent_layers:
        return JointLayer(arch, layer) if layer in arch.attending_layers else RecurrentLayer(arch, layer)
    if layer in arch.feed_forward_layers:
        return FeedForwardLayer(arch, layer)
    if not arch.has_mlp or layer in arch.attention_only_layers:
        return AttentionOnlyLayer(arch, layer)
    if arch.is_parallel:
        return ParallelLayer(arch, layer)
    if has_layer_state(arch):
        return AltUpLayer(arch, layer) if arch.num_streams else GemmaLayer(arch, layer)
    kinds = {"before": DecoderLayer, "sum": SumNormLayer}
    return kinds.get(arch.norm_places, PostNormLayer)(arch, layer)


def has_layer_state(arch: Architecture) -> bool:
    """Whether layers read more than the hidden states: embeddings of their own, or keys of other layers."""
    return bool(arch.layer_input_size or arch.shared_keys or arch.scales_layers or arch.experts_beside_mlp)


class NarrowEmbedding(nn.Embedding):
    """Embeddings in the type of their file, for a network whose type represents it exactly."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__(weight.shape[0], weight.shape[1], _weight=weight.detach(), _freeze=True)
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[…] to […, E], in the type of the network."""
        return super().forward(ids).to(self.dtype)


ROWS_AT_ONCE = 4096  # of embeddings that are widened


def tied_logits(hidden: Tensor, weight_VE: Tensor) -> Tensor:
    """Hidden states […, E] to […, V] by embeddings, which may be narrower: some of them are widened at a time."""
    if weight_VE.dtype == hidden.dtype:
        return F.linear(hidden, weight_VE)
    return torch.cat([F.linear(hidden, rows.to(hidden.dtype)) for rows in torch.split(weight_VE, ROWS_AT_ONCE)], dim=-1)


class RowEmbedding(nn.Module):
    """Embeddings as a linear layer whose outputs are the tokens: it computes the logits where these are tied."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.dtype = torch.get_default_dtype()
        self.rows: Any = rows  # has read_rows(ids), too

    @property
    def weight(self) -> Tensor:
        """All of them [V, E], dequantized."""
        return self.rows.dequantize(self.dtype)  # type: ignore[no-any-return]

    @property
    def like(self) -> Tensor:
        """Nothing, in the type and on the device of what they give."""
        return torch.empty(0, dtype=self.dtype, device=next(self.rows.buffers()).device)

    def forward(self, ids: Tensor) -> Tensor:
        """[…] to […, E]."""
        return self.rows.read_rows(ids).to(self.dtype)  # type: ignore[no-any-return]


def like_embeddings(embeddings: Any) -> Tensor:
    """A tensor in the type and on the device of the embeddings, whose numbers do not matter."""
    found: Tensor = embeddings.like if isinstance(embeddings, RowEmbedding) else embeddings.weight
    return found


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        size = arch.embedding_size
        self.embed_tokens: Any = nn.Embedding(arch.vocab_size, size or arch.hidden_size)  # or a RowEmbedding
        self.project_in = nn.Linear(size, arch.hidden_size, bias=False) if size else None
        self.project_out = nn.Linear(arch.hidden_size, size, bias=False) if size else None
        self.layers = nn.ModuleList(make_layer(arch, i) for i in range(arch.num_layers))
        self.norm = make_norm(arch)
        if not arch.has_last_norm:
            del self.norm
        self.embed_positions = (
            nn.Embedding(arch.max_length + arch.position_offset, arch.hidden_size) if arch.learned_positions else None
        )
        self.embed_norm = make_norm(arch) if arch.embedding_norm else None
        self.layer_inputs = LayerInputs(arch) if arch.layer_input_size else None
        self.streams = Streams(arch) if arch.num_streams else None


class Transformer(nn.Module):
    """Token ids and their positions to hidden states, and those to logits."""

    lm_head: nn.Module | None  # None: the embeddings are used instead (tied)

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.model = Decoder(arch)
        self.lm_head = (
            None
            if arch.tied_embeddings
            else nn.Linear(arch.embedding_size or arch.hidden_size, arch.vocab_size, bias=arch.head_bias)
        )
        self.rotation = Rotation(arch)

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, images: StepImages | None = None) -> Tensor:
        """The hidden states […, E] of the tokens […]; those of images have embeddings of their own."""
        return self.with_layer_inputs(ids, positions, attend, images, ())[0]

    def with_layer_inputs(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        images: StepImages | None,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """The hidden states […, E], and the inputs […, E] of some layers; see `HiddenStates`."""
        x = self.embed(ids, positions)
        added: list[Tensor] = []  # to the outputs of the first layers
        if images is not None and len(images.rows_M):
            replaced, *added = torch.split(images.features_ME.to(x.dtype), x.shape[-1], dim=-1)
            x = x.index_copy(0, images.rows_M, replaced)
        rotations = self.rotation(positions, None if images is None else images.rotary_3T)
        inputs = {}
        has_state = has_layer_state(self.arch)
        shared: SharedKeys = {}
        own = None if self.model.layer_inputs is None else self.model.layer_inputs(ids, x)
        streams = self.model.streams
        if streams is not None:
            x = streams.spread(x)
        for number, layer in enumerate(self.model.layers):
            if number in layers:
                inputs[number] = x
            if has_state:
                x = layer(x, rotations, attend, shared, None if own is None else own[..., number, :])
            else:
                x = layer(x, rotations, attend)
            if images is not None and number < len(added):
                x = x.index_add(0, images.rows_M, added[number])
        if streams is not None:
            assert not layers, "heads read one stream"
            x = streams.merge(x)
        inputs[self.arch.num_layers] = x
        if self.arch.wide_residual:
            inputs = {number: x.to(self.model.norm.weight.dtype) for number, x in inputs.items()}
            x = inputs[self.arch.num_layers]
        return self.model.norm(x) if self.arch.has_last_norm else x, [inputs[number] for number in layers]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """What the first layer gets […, E] for the tokens […]."""
        x: Tensor = self.model.embed_tokens(ids)
        if self.arch.embedding_scale != 1.0:
            x = x * torch.tensor(self.arch.embedding_scale, dtype=x.dtype)  # rounded as the network's numbers are
        if self.model.project_in is not None:
            x = self.model.project_in(x)
        if self.model.embed_positions is not None:
            x = x + self.model.embed_positions(positions + self.arch.position_offset)
        if self.model.embed_norm is not None:
            x = self.model.embed_norm(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states […, E] to logits […, V], in float32."""
        if self.model.project_out is not None:
            hidden = self.model.project_out(hidden)
        if self.lm_head is None and isinstance(self.model.embed_tokens, RowEmbedding):
            logits = self.model.embed_tokens.rows(hidden).float()
        elif self.lm_head is None:
            logits = tied_logits(hidden, self.model.embed_tokens.weight).float()
        else:
            logits = self.lm_head(hidden).float()
        if self.arch.logit_scale != 1.0:
            logits = logits * self.arch.logit_scale
        cap = self.arch.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def is_unmodified(module: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> bool:
    """Whether a module computes what its file says, so that a kernel may replace it: known class, no hooks.

    `others` are further classes that a kernel supports.
    """
    known = type(module) in (nn.Linear, nn.Embedding, MLP, Rotation, nn.ModuleList) or isinstance(module, others)
    hooks = module._forward_hooks or module._forward_pre_hooks
    modules = (__name__, Attention.__module__, norms.__name__, LayerInput.__module__)
    is_shared = getattr(module, "mean_square", None) is not None  # a norm over numbers of several ranks
    return not hooks and not is_shared and (known or type(module).__module__ in modules)
