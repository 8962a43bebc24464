"""Embeddings that each layer has of its own: a token has one for every layer, beside that of the network (Gemma 3n).

Shapes: … any leading dimensions · E hidden · L layers · P the size of a layer's own embeddings
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.models.activations import ACTIVATIONS
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.norms import make_norm


class LayerInputs(nn.Module):
    """The embeddings of all layers: those of the token, and some that are computed from the network's."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        size = arch.layer_input_size
        self.size, self.embedding_scale, self.projection_scale = size, size**0.5, arch.hidden_size**-0.5
        self.embed_tokens: Any = nn.Embedding(arch.layer_input_vocab, arch.num_layers * size)  # or a RowEmbedding
        self.projection = nn.Linear(arch.hidden_size, arch.num_layers * size, bias=False)
        self.norm = make_norm(arch, size)
        self.num_own = arch.layer_input_vocab
        self.has_fewer = arch.layer_input_vocab < arch.vocab_size

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """Tokens […] and their embeddings […, E] to […, L, P]."""
        computed = (self.projection(x) * self.projection_scale).unflatten(-1, (-1, self.size))
        if self.has_fewer:  # tokens of pictures and sounds have none of their own
            ids = torch.where(ids < self.num_own, ids, 0)
        own = self.embed_tokens(ids)
        own = own * torch.tensor(self.embedding_scale, dtype=own.dtype)  # rounded as the network's numbers are
        return (self.norm(computed) + own.unflatten(-1, (-1, self.size))) * 2.0**-0.5  # type: ignore[no-any-return]


class LayerInput(nn.Module):
    """What a layer adds for its own embedding of a token."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate = nn.Linear(arch.hidden_size, arch.layer_input_size, bias=False)
        self.projection = nn.Linear(arch.layer_input_size, arch.hidden_size, bias=False)
        self.norm = make_norm(arch)
        self.activate = ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        """[…, E] and […, P] to […, E]."""
        return self.norm(self.projection(self.activate(self.gate(x)) * own))  # type: ignore[no-any-return]
