"""AssistantHead: Gemma 4's drafters, whose layers have queries only and read the keys and values of the target.

Shapes: T sequences · B hidden of the target · E hidden of the head · G key-value heads · D head size · C clusters ·
V vocabulary · N tokens of a cluster
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attend, AttentionOptions, SharedKeys
from flambeau.llm.models.decoder_layers import GemmaLayer
from flambeau.llm.models.draft_heads import DraftHead, HeadSettings
from flambeau.llm.models.recurrent import Recur
from flambeau.llm.models.transformer import Transformer


class Clusters(nn.Module):
    """Chooses the tokens whose logits are computed: those of the clusters that are nearest to the hidden state."""

    def __init__(self, arch: Architecture, number: int, num_chosen: int) -> None:
        super().__init__()
        self.num_chosen = num_chosen
        self.centroids = nn.Linear(arch.hidden_size, number, bias=False)
        self.tokens_CN: Tensor

    def forward(self, hidden_TE: Tensor) -> Tensor:
        """The tokens of the chosen clusters, side by side."""
        chosen = self.centroids(hidden_TE).topk(self.num_chosen, dim=-1).indices
        return self.tokens_CN[chosen].flatten(1)


class AssistantHead(DraftHead):
    """Proposes from the target's last hidden state and last token, at the place of that token, whatever it proposes.

    Its layers store nothing, so that every pass reads what the target has computed. The numbers of the target's layers
    follow those of its own layers.
    """

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__(settings)
        arch = settings.arch
        self.pre_projection = nn.Linear(2 * settings.state_size, arch.hidden_size, bias=False)
        self.post_projection = nn.Linear(arch.hidden_size, settings.state_size, bias=False)
        self.masked_embedding: Clusters | None = None
        if settings.num_clusters:
            self.masked_embedding = Clusters(arch, settings.num_clusters, settings.num_chosen_clusters)
            self.lm_head = nn.Embedding(settings.draft_vocab_size, arch.hidden_size)  # of which rows are read
        self._target_embed: Callable[[Tensor, Tensor], Tensor]

    @property
    def state_dtype(self) -> torch.dtype:
        """The type of the hidden states that it reads."""
        weight = self.model.norm.weight
        assert isinstance(weight, Tensor)
        return weight.dtype

    def share(self, target: Transformer) -> None:
        super().share(target)
        self._target_embed = target.embed

    def forward(self, ids_T: Tensor, hidden_TE: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """The hidden states [T, E] with which the next tokens are predicted, from those of the target [T, B]."""
        embedded_TB = self._target_embed(ids_T, positions_T)
        x_TE = self.pre_projection(torch.cat((embedded_TB, hidden_TE), dim=-1))
        rotations, unused = self.rotation(positions_T), self.unused_keys(x_TE)
        for layer in self.model.layers:
            assert isinstance(layer, GemmaLayer)
            x_TE = layer(x_TE, rotations, attend, unused)
        return self.finish(x_TE)

    def unused_keys(self, x_TE: Tensor) -> SharedKeys:
        """What its layers give to attention in the place of keys and values, which they do not compute."""
        own = ((self.arch.key_layer(i), self.arch.of_layer(i)) for i in range(self.arch.num_layers))
        shapes = {layer: (len(x_TE), one.num_kv_heads, one.head_size) for layer, one in own}
        return {layer: (x_TE.new_zeros(shape), x_TE.new_zeros(shape)) for layer, shape in shapes.items()}

    def further(self, hidden_TE: Tensor) -> Tensor:
        """What the next pass reads in the place of the target's hidden states [T, B]."""
        return self.post_projection(hidden_TE)  # type: ignore[no-any-return]

    def draft_logits(self, hidden_TE: Tensor) -> Tensor:
        """Logits [T, V]; tokens of clusters that are not chosen are never proposed."""
        if self.masked_embedding is None:
            return super().draft_logits(hidden_TE)
        assert isinstance(self.lm_head, nn.Embedding)
        tokens_TN = self.masked_embedding(hidden_TE)
        found_TN = torch.einsum("td,tnd->tn", hidden_TE, self.lm_head(tokens_TN)).float()
        logits_TV = found_TN.new_full((len(hidden_TE), self.settings.draft_vocab_size), -torch.inf)
        return logits_TV.scatter_(-1, tokens_TN, found_TN)


class TargetKeys:
    """Attention of a head's queries to the keys and values of its target."""

    def __init__(self, attend: Attend, num_layers: int) -> None:
        self._attend, self._num_layers = attend, num_layers

    @property
    def recur(self) -> Recur:
        raise NotImplementedError("these heads have no recurrent layers")

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """From q [T, H, D] to [T, H, D]; k and v [T, G, D] go where padding goes."""
        return self._attend(layer - self._num_layers, q, k, v, options)
