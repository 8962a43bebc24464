"""Layers of a decoder, which differ in the places of norms, and in what is in the place of attention or beside it.

Shapes: … any leading dimensions (tokens, or batch and tokens) · E hidden
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flambeau.llm.models.altup import AltUp, Laurel
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attend, Attention, DifferentialAttention, SharedKeyAttention, SharedKeys
from flambeau.llm.models.compressed_attention import CompressedAttention
from flambeau.llm.models.feed_forward import MixedMLP, make_mlp
from flambeau.llm.models.hyper_connections import make_connection
from flambeau.llm.models.latent_attention import LatentAttention
from flambeau.llm.models.layer_inputs import LayerInput
from flambeau.llm.models.lightning_attention import LightningAttention
from flambeau.llm.models.mixers import make_mixer
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.ngram_embeddings import NgramEmbeddings
from flambeau.llm.models.norms import NoNorm, make_input_norm, make_norm
from flambeau.llm.models.receptance import ChannelMix
from flambeau.llm.models.recurrent import Mixer
from flambeau.llm.models.rope import Rotations
from flambeau.llm.models.shared_blocks import BlockAdapters, SharedBlock


def make_attention(arch: Architecture, layer: int) -> Attention | LatentAttention | CompressedAttention:
    if arch.compression is not None:
        return CompressedAttention(arch, layer)
    if arch.latent_size:
        return LatentAttention(arch, layer)
    if arch.is_differential:
        return DifferentialAttention(arch, layer)
    return SharedKeyAttention(arch, layer) if arch.key_layer(layer) != layer else Attention(arch, layer)


class DecoderLayer(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        self.input_layernorm = make_input_norm(arch) if layer or arch.has_first_norm else NoNorm()
        self.self_attn = make_attention(arch, layer)
        self.post_attention_layernorm = make_input_norm(arch, is_gated=arch.has_experts(layer))
        self.mlp = make_mlp(arch, layer)
        self.residual_scale = arch.residual_scale

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        x = self.add(x, self.self_attn(self.input_layernorm(x), rotations, attend))
        return self.add(x, self.mlp(self.post_attention_layernorm(x)))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.residual_scale == 1.0 else x + y * self.residual_scale


class ExpertNormLayer(DecoderLayer):
    """What experts give is normalized before it is added (A.X-K1)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.post_feedforward_layernorm = make_norm(arch)

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        x = self.add(x, self.self_attn(self.input_layernorm(x), rotations, attend))
        return self.add(x, self.post_feedforward_layernorm(self.mlp(self.post_attention_layernorm(x))))


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


class SharingLayer(DecoderLayer):
    """A layer that may read the latents of another (Mistral Large 4)."""

    def forward(
        self,
        x: Tensor,
        rotations: Rotations,
        attend: Attend,
        shared: SharedKeys | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        """[…, E] to […, E]."""
        x = self.add(x, self.self_attn(self.input_layernorm(x), rotations, attend, shared))
        return self.add(x, self.mlp(self.post_attention_layernorm(x)))


class ShortcutLayer(DecoderLayer):
    """One of two layers; the first one's experts are added after the second (LongCat)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.layer, self.is_first = layer, layer % 2 == 0
        self.shortcut = SparseMLP(arch, layer) if self.is_first else None

    def forward(
        self,
        x: Tensor,
        rotations: Rotations,
        attend: Attend,
        shared: SharedKeys | None = None,
        own: Tensor | None = None,
    ) -> Tensor:
        """[…, E] to […, E]."""
        assert shared is not None
        x = x + self.self_attn(self.input_layernorm(x), rotations, attend)
        y = self.post_attention_layernorm(x)
        x = x + self.mlp(y)
        if self.shortcut is not None:
            shared[self.layer] = (self.shortcut(y),)
            return x
        return x + shared[self.layer - 1][0]


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
        narrow = x.to(self.input_layernorm.weight.dtype)  # type: ignore[arg-type]
        y = mix(self.mixer, self.input_layernorm(narrow), rotations, attend)
        x = self.add(x.float() if self.is_wide else x, y)
        return self.add(x, self.mlp(self.post_attention_layernorm(x))) if self.has_mlp else x


class PostNormRecurrentLayer(RecurrentLayer):
    """Norms before and after a recurrence and the feed-forward layer (LFM3)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = make_norm(arch), make_norm(arch)

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        y = mix(self.mixer, self.input_layernorm(x), rotations, attend)
        x = self.add(x, self.post_attention_layernorm(y))
        return self.add(x, self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))))


class BlockLayer(RecurrentLayer):
    """A recurrence that also reads what a shared block of attention gives (Zamba 2)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.layer, self.adapters = layer, BlockAdapters(arch)
        self.linear = nn.Linear(arch.hidden_size, arch.hidden_size, bias=False)

    def forward(
        self,
        x: Tensor,
        rotations: Rotations,
        attend: Attend,
        block: SharedBlock | None = None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """[…, E] to […, E]; `embedded` are the embeddings of the tokens."""
        assert block is not None
        assert embedded is not None
        y = self.linear(block(x, embedded, self.layer, self.adapters, rotations, attend))
        return x + self.mixer(self.input_layernorm(x + y), attend.recur)  # type: ignore[no-any-return]


class ReceptanceLayer(RecurrentLayer):
    """A recurrence and a feed-forward layer with a state (RWKV 4)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.mlp = ChannelMix(arch, layer)

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        """[…, E] to […, E]."""
        x = x + self.mixer(self.input_layernorm(x), attend.recur)
        return x + self.mlp(self.post_attention_layernorm(x), attend.recur)  # type: ignore[no-any-return]


class HyperLayer(DecoderLayer):
    """Attention, or a recurrence, and a feed-forward layer, which read and change several streams."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        self.is_recurrent = layer not in arch.attending_layers
        self.is_hashed = layer in arch.hashed_layers
        if self.is_recurrent:
            del self.self_attn
            self.mixer = make_mixer(arch, layer)
        self.attn_hc, self.ffn_hc = make_connection(arch), make_connection(arch)
        assert arch.hyper is not None
        if arch.hyper.rank:  # what they give is normalized
            for name in ("input_layernorm", "post_attention_layernorm"):
                self.add_module(name, NoNorm())
        has_ngrams = arch.ngrams is not None and layer in arch.ngrams.layers
        self.ngrams = NgramEmbeddings(arch, layer) if has_ngrams else None

    def forward(self, x: Tensor, rotations: Rotations, attend: Attend, ids: Tensor | None = None) -> Tensor:
        """[…, S, E] of the tokens […] to […, S, E]."""
        if self.ngrams is not None:
            assert ids is not None
            x = x + self.ngrams(x, ids, attend.recur)
        one, joint = self.attn_hc(x)
        y = self.input_layernorm(one)
        y = mix(self.mixer, y, rotations, attend) if self.is_recurrent else self.self_attn(y, rotations, attend)
        x = self.attn_hc.join(x, y, joint)
        one, joint = self.ffn_hc(x)
        y = self.post_attention_layernorm(one)
        return self.ffn_hc.join(x, self.mlp(y, ids) if self.is_hashed else self.mlp(y), joint)


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
    if layer in arch.block_layers:
        return BlockLayer(arch, layer)
    if arch.hyper is not None:
        return HyperLayer(arch, layer)
    if arch.norm_places == "stream":
        return StreamLayer(arch, layer)
    if arch.recurrence is not None and arch.recurrence.kind == "rwkv":
        return ReceptanceLayer(arch, layer)
    if layer in arch.recurrent_layers:
        if layer in arch.attending_layers:
            return JointLayer(arch, layer)
        return PostNormRecurrentLayer(arch, layer) if arch.norm_places == "both" else RecurrentLayer(arch, layer)
    if layer in arch.feed_forward_layers:
        return FeedForwardLayer(arch, layer)
    if not arch.has_mlp or layer in arch.attention_only_layers:
        return AttentionOnlyLayer(arch, layer)
    if arch.is_parallel:
        return ParallelLayer(arch, layer)
    if arch.has_shortcuts:
        return ShortcutLayer(arch, layer)
    if arch.shared_keys and arch.latent_size:
        return SharingLayer(arch, layer)
    if has_layer_state(arch):
        return AltUpLayer(arch, layer) if arch.num_streams else GemmaLayer(arch, layer)
    if arch.expert_norm and arch.has_experts(layer):
        return ExpertNormLayer(arch, layer)
    kinds = {"before": DecoderLayer, "sum": SumNormLayer}
    return kinds.get(arch.norm_places, PostNormLayer)(arch, layer)


def has_layer_state(arch: Architecture) -> bool:
    """Whether layers read more than the hidden states: embeddings of their own, or what other layers give them."""
    return bool(
        arch.layer_input_size or arch.shared_keys or arch.scales_layers or arch.experts_beside_mlp or arch.has_shortcuts
    )
