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

from flambeau.llm.models.activations import ACTIVATIONS
from flambeau.llm.models.altup import Streams
from flambeau.llm.models.architecture import Activation, Architecture
from flambeau.llm.models.attention import Attend, Attention, SharedKeys
from flambeau.llm.models.decoder_layers import DecoderLayer, has_layer_state, make_layer
from flambeau.llm.models.embeddings import RowEmbedding, tied_logits
from flambeau.llm.models.feed_forward import MLP
from flambeau.llm.models.hyper_connections import HyperStreams
from flambeau.llm.models.layer_inputs import LayerInput, LayerInputs
from flambeau.llm.models.norms import RMSNorm, make_norm
from flambeau.llm.models.rope import Rotation
from flambeau.llm.models.shared_blocks import SharedBlock
from flambeau.llm.models.step_media import StepMedia


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
        self.head_layer = HeadLayer(arch, arch.head_layer) if arch.head_layer is not None else None
        self.head_bias = nn.Parameter(torch.zeros(arch.vocab_size)) if arch.tied_bias else None
        if not arch.has_last_norm:
            del self.norm
        self.embed_positions = (
            nn.Embedding(arch.max_length + arch.position_offset, arch.hidden_size) if arch.learned_positions else None
        )
        self.embed_norm = make_norm(arch) if arch.embedding_norm else None
        self.layer_inputs = LayerInputs(arch) if arch.layer_input_size else None
        self.streams = Streams(arch) if arch.num_streams else HyperStreams(arch) if arch.hyper is not None else None
        self.blocks = nn.ModuleList(SharedBlock(arch) for _ in range(arch.num_blocks)) if arch.num_blocks else None


class HeadLayer(nn.Module):
    """A layer between the last norm and the head."""

    def __init__(self, arch: Architecture, activation: Activation) -> None:
        super().__init__()
        self.dense = nn.Linear(arch.hidden_size, arch.hidden_size, bias=arch.head_layer_bias)
        self.activate = ACTIVATIONS[activation]
        self.norm = make_norm(arch)

    def forward(self, hidden: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        return self.norm(self.activate(self.dense(hidden)))  # type: ignore[no-any-return]


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

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, media: StepMedia | None = None) -> Tensor:
        """The hidden states […, E] of the tokens […]; those of files have embeddings of their own."""
        return self.with_layer_inputs(ids, positions, attend, media, ())[0]

    def with_layer_inputs(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        media: StepMedia | None,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, list[Tensor]]:
        """The hidden states […, E], and the inputs […, E] of some layers; see `HiddenStates`."""
        x = self.embed(ids, positions)
        added: list[Tensor] = []  # to the outputs of the first layers
        if media is not None and len(media.rows_M):
            replaced, *added = torch.split(media.features_ME.to(x.dtype), x.shape[-1], dim=-1)
            x = x.index_copy(0, media.rows_M, replaced)
        rotations = self.rotation(positions, None if media is None else media.rotary_3T)
        layers_of_features = () if self.arch.vision is None else self.arch.vision.layers_of_features
        added_at = dict(zip(layers_of_features or range(1, len(added) + 1), added, strict=True)) if added else {}
        inputs = {}
        has_state = has_layer_state(self.arch)
        shared: SharedKeys = {}
        if media is not None and self.arch.image_layer_id is not None:
            ids = ids.index_fill(0, media.rows_M, self.arch.image_layer_id)
        own = None if self.model.layer_inputs is None else self.model.layer_inputs(ids, x)
        streams, blocks, embedded = self.model.streams, self.model.blocks, x
        if streams is not None:
            x = streams.spread(x)
        for number, layer in enumerate(self.model.layers):
            if media is not None and number in added_at:
                x = x.index_add(0, media.rows_M, added_at[number])
            if number in layers:
                inputs[number] = x
            if blocks is not None and number in self.arch.block_layers:
                x = layer(x, rotations, attend, blocks[self.arch.block_layers.index(number) % len(blocks)], embedded)
            elif has_state:
                x = layer(x, rotations, attend, shared, None if own is None else own[..., number, :])
            elif self.arch.hashed_layers or self.arch.ngrams is not None:
                x = layer(x, rotations, attend, ids)
            else:
                x = layer(x, rotations, attend)
        if media is not None and self.arch.num_layers in added_at:
            x = x.index_add(0, media.rows_M, added_at[self.arch.num_layers])
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
        if self.model.head_layer is not None:
            hidden = self.model.head_layer(hidden)
        if self.lm_head is None and isinstance(self.model.embed_tokens, RowEmbedding):
            logits = self.model.embed_tokens.rows(hidden).float()
        elif self.lm_head is None:
            logits = tied_logits(hidden, self.model.embed_tokens.weight).float()
        else:
            logits = self.lm_head(hidden).float()
        if self.model.head_bias is not None:
            logits = logits + self.model.head_bias.float()
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
    classes = (MLP, DecoderLayer, RowEmbedding, Attention, RMSNorm, LayerInput)
    modules = (__name__, *(each.__module__ for each in classes))
    is_shared = getattr(module, "mean_square", None) is not None  # a norm over numbers of several ranks
    return not hooks and not is_shared and (known or type(module).__module__ in modules)
