"""BlockHead: DFlash's drafters, which propose all tokens of a block in one pass.

The keys and values of the text come from the target's hidden states. Queries come from the last token and from tokens
that stand for unknown ones, which see each other and the text before them.

Shapes: T tokens · M layers of the target that are read · E hidden · G key-value heads · D head size
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from flambeau.llm.models.attention import Attend, Attention
from flambeau.llm.models.decoder_layers import DecoderLayer
from flambeau.llm.models.draft_heads import DraftHead, HeadSettings
from flambeau.llm.models.norms import make_norm
from flambeau.llm.models.transformer import Transformer


class BlockHead(DraftHead):
    """Layers of Qwen 3 whose context is the target's hidden states; embeddings and the last layer are the target's."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__(settings)
        arch, size = settings.arch, len(settings.layers) * settings.state_size
        self.fc = nn.Linear(size, arch.hidden_size, bias=False)
        self.hidden_norm = make_norm(arch)
        self._embedding_scale = 1.0

    @property
    def state_dtype(self) -> torch.dtype:
        """The type of the hidden states that it reads."""
        return self.hidden_norm.weight.dtype

    def share(self, target: Transformer) -> None:
        super().share(target)
        self._embedding_scale = target.arch.embedding_scale

    def embed(self, ids_T: Tensor) -> Tensor:
        x_TE = super().embed(ids_T)
        return x_TE if self._embedding_scale == 1.0 else x_TE * torch.tensor(self._embedding_scale, dtype=x_TE.dtype)

    def combine(self, states_TX: Tensor) -> Tensor:
        """Hidden states of the target [T, M·E] to those of the text [T, E], which are the same for all layers."""
        return self.hidden_norm(self.fc(states_TX))  # type: ignore[no-any-return]

    def context(self, hidden_TE: Tensor, positions_T: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values [T, G, D] of the text, layer by layer."""
        rotations = self.rotation(positions_T)
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            attention = layer.self_attn
            assert isinstance(attention, Attention)
            heads = attention.qkv_proj(hidden_TE).unflatten(-1, (-1, attention.head_size))
            counts = attention.num_heads + attention.num_kv_heads, attention.num_kv_heads
            qk, v_TGD = heads.split(counts, dim=-2)
            _, k_TGD = attention.split_qk(attention.rotate(attention.normalize(qk), rotations))
            yield k_TGD, v_TGD

    def run_block(self, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """The hidden states [T, E] of blocks, of which each predicts the token at its own place."""
        rotations, x_TE = self.rotation(positions_T), self.embed(ids_T)
        for layer in self.model.layers:
            x_TE = layer(x_TE, rotations, attend)
        return self.finish(x_TE)
