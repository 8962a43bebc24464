"""Heads that propose tokens from the hidden states of a network: EAGLE-3, EAGLE, and layers of multi-token prediction.

A head reads what the target has computed for a token together with the token that came next, and predicts the one after
that. It goes on from its own hidden states, which have the form of the target's.

Shapes: T tokens of the pass · M layers of the target that are read · E hidden · D tokens of the head's vocabulary ·
V vocabulary of the target
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attend
from flambeau.llm.models.decoder_layers import DecoderLayer, make_layer
from flambeau.llm.models.norms import NoNorm, make_norm
from flambeau.llm.models.rope import Rotation, Rotations
from flambeau.llm.models.transformer import Transformer

HeadKind = Literal["eagle3", "eagle", "mtp", "assistant", "dflash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """The shape of a head."""

    kind: HeadKind
    arch: Architecture  # of its layers; its vocabulary is the target's
    layers: tuple[int, ...]  # of the target, whose inputs it reads
    state_size: int  # the target's hidden size
    draft_vocab_size: int = 0  # tokens that it can propose; 0: its logits are those of the target's last layer
    has_embeddings: bool = False  # False: those of the target are used
    has_bias: bool = False  # of the projection of EAGLE
    norm_before_residual: bool = False  # EAGLE-3: hidden states are normalized before they are added to
    norm_before_projection: bool = False  # EAGLE-3: all hidden states of a token together
    norms_each: bool = False  # EAGLE-3.1: hidden states before the projection, those of each layer for themselves
    norms_output: bool = False  # EAGLE-3: it goes on from normalized hidden states
    hidden_first: bool = False  # MTP: hidden states come before embeddings in the projection's input (MiMo)
    shares_norm: bool = False  # MTP: its last norm is the target's (Ernie)
    num_depths: int = 1  # MTP: layers that propose one token each, one after another
    num_clusters: int = 0  # assistants: of the vocabulary; 0: all logits are computed
    block_size: int = 0  # DFlash: the last token and those that are proposed at once
    mask_id: int = 0  # DFlash: the token that stands for those
    causal_layers: frozenset[int] = frozenset()  # DFlash: those in which tokens of a block see no later ones
    num_chosen_clusters: int = 0  # those whose logits are computed


class HeadBody(nn.Module):
    """The parts that have the names of a network's."""

    def __init__(self, settings: HeadSettings, layers: list[DecoderLayer]) -> None:
        super().__init__()
        arch = settings.arch
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size) if settings.has_embeddings else None
        self.layers = nn.ModuleList(layers)
        has_norm = settings.kind != "eagle" and not settings.shares_norm
        self.norm: nn.Module = make_norm(arch) if has_norm else nn.Identity()


class DraftHead(nn.Module):
    """A head and what it shares with its target."""

    lm_head: nn.Module | None  # None: the target's

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__()
        arch = settings.arch
        self.settings, self.arch = settings, arch
        self.model = HeadBody(settings, [self.make_layer(i) for i in range(arch.num_layers)])
        size = settings.draft_vocab_size
        self.lm_head = nn.Linear(arch.hidden_size, size, bias=False) if size else None
        self.rotation = Rotation(arch)
        self.target_ids_D: Tensor | None = None  # None: its tokens are those of the target
        self._target_embedding: Callable[[], nn.Module]
        self._target_norm: Callable[[Tensor], Tensor]
        self._target_logits: Callable[[Tensor], Tensor]

    def make_layer(self, number: int) -> DecoderLayer:
        return make_layer(self.arch, number)

    def share(self, target: Transformer) -> None:
        """Use the embeddings, the last norm and the last layer of a target where the head has none."""
        body, norm = target.model, target.model.norm if target.arch.has_last_norm else nn.Identity()
        self._target_embedding = lambda: body.embed_tokens
        self._target_norm = lambda x: norm(x)
        self._target_logits = target.logits
        if self.settings.shares_norm:
            self.model.norm = target.model.norm

    def combine(self, states_TX: Tensor) -> Tensor:
        """Hidden states of the target [T, M·E] to what `forward` takes [T, E]."""
        return self._target_norm(states_TX)

    def forward(self, ids_T: Tensor, hidden_TE: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """The hidden states [T, E] with which the next tokens are predicted, and from which the head goes on.

        `ids_T` are the tokens after those that the hidden states belong to, and `positions_T` the positions of the
        latter.
        """
        rotations = self.rotation(positions_T)
        x_TE, both = self.begin(self.embed(ids_T), hidden_TE)
        for layer in self.model.layers:
            if both is not None and isinstance(layer, Eagle3Layer):
                x_TE = layer.run(x_TE, both, rotations, attend)
            else:
                x_TE = layer(x_TE, rotations, attend)
        return self.finish(x_TE)

    def begin(self, embedded_TE: Tensor, hidden_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        """The input of the first layer [T, E], and what its attention reads, if that is something else."""
        raise NotImplementedError

    def finish(self, x_TE: Tensor) -> Tensor:
        """What the head goes on from, after its last layer [T, E]."""
        return self.model.norm(x_TE)  # type: ignore[no-any-return]

    def draft_logits(self, hidden_TE: Tensor) -> Tensor:
        """Logits [T, D] of the head's own tokens."""
        return self._target_logits(hidden_TE) if self.lm_head is None else self.lm_head(hidden_TE).float()

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Logits [T, V] of the target's tokens; those that the head does not know are never proposed."""
        return self.to_target_tokens(self.draft_logits(hidden_TE))

    def to_target_tokens(self, logits: Tensor) -> Tensor:
        """Logits […, D] of the head's own tokens to […, V] of the target's."""
        if self.target_ids_D is None:
            return logits
        found = logits.new_full((*logits.shape[:-1], self.arch.vocab_size), -torch.inf)
        return found.index_copy_(-1, self.target_ids_D, logits)

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.embeddings(ids_T)  # type: ignore[no-any-return]

    @property
    def embeddings(self) -> Any:
        """Those of the target where the head has none."""
        return self._target_embedding() if self.model.embed_tokens is None else self.model.embed_tokens


class Eagle3Layer(DecoderLayer):
    """The first layer of EAGLE-3: its attention reads embeddings and hidden states side by side."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch, 0)
        self.hidden_norm = make_norm(arch)
        rows = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_size
        self.self_attn.qkv_proj = nn.Linear(2 * arch.hidden_size, rows, bias=arch.qkv_bias)

    def run(self, x_TE: Tensor, both: Tensor, rotations: Rotations, attend: Attend) -> Tensor:
        x_TE = x_TE + self.self_attn(both, rotations, attend)
        return x_TE + self.mlp(self.post_attention_layernorm(x_TE))  # type: ignore[no-any-return]


class Eagle3Head(DraftHead):
    """Reads three layers of the target, early, in the middle and late; its vocabulary may be a part of the target's."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__(settings)
        arch, size = settings.arch, len(settings.layers) * settings.state_size
        self.fc = nn.Linear(size, arch.hidden_size, bias=settings.has_bias)
        self.input_norm = make_norm(arch, size) if settings.norm_before_projection else None
        sizes = [settings.state_size] * len(settings.layers) if settings.norms_each else []
        self.fc_norm = nn.ModuleList(make_norm(arch, each) for each in sizes)

    def make_layer(self, number: int) -> DecoderLayer:
        if number:
            return super().make_layer(number)
        return Eagle3Layer(self.arch)

    def combine(self, states_TX: Tensor) -> Tensor:
        return self.fc(self.normalize(states_TX))  # type: ignore[no-any-return]

    def normalize(self, states_TX: Tensor) -> Tensor:
        """Hidden states of all layers as the projection reads them."""
        if self.fc_norm:
            parts = torch.split(states_TX, self.settings.state_size, dim=-1)
            states_TX = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return states_TX if self.input_norm is None else self.input_norm(states_TX)

    def begin(self, embedded_TE: Tensor, hidden_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        first = self.model.layers[0]
        assert isinstance(first, Eagle3Layer)
        normal_TE = first.hidden_norm(hidden_TE)
        both = torch.cat((first.input_layernorm(embedded_TE), normal_TE), dim=-1)
        return normal_TE if self.settings.norm_before_residual else hidden_TE, both

    def finish(self, x_TE: Tensor) -> Tensor:
        return super().finish(x_TE) if self.settings.norms_output else x_TE

    def draft_logits(self, hidden_TE: Tensor) -> Tensor:
        if not self.settings.norms_output:
            hidden_TE = self.model.norm(hidden_TE)
        return super().draft_logits(hidden_TE)


class EagleHead(DraftHead):
    """EAGLE (1 and 2): continues the last hidden states of the target, and predicts with the target's last layer."""

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__(settings)
        self.fc = nn.Linear(2 * settings.state_size, settings.arch.hidden_size, bias=settings.has_bias)

    def make_layer(self, number: int) -> DecoderLayer:
        layer = super().make_layer(number)
        if number == 0:
            layer.input_layernorm = NoNorm()
        return layer

    def begin(self, embedded_TE: Tensor, hidden_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.fc(torch.cat((embedded_TE, hidden_TE), dim=-1)), None


class MtpHead(DraftHead):
    """A layer of multi-token prediction, as in the checkpoints of DeepSeek V3, GLM, MiMo, Ernie 4.5 and Qwen3-Next.

    It was trained to predict one token from the target's normalized hidden states. For further tokens it goes on from
    its own, normalized too. MiMo's own layer and SGLang do the same; vLLM leaves out that norm for DeepSeek and GLM.
    Both are guesses, which the target verifies.

    Of several layers each goes on from the hidden states of the one before, and reads tokens that are one further.
    """

    def __init__(self, settings: HeadSettings) -> None:
        super().__init__(settings)
        arch = settings.arch
        self.enorm, self.hnorm = make_norm(arch), make_norm(arch)
        self.eh_proj = nn.Linear(2 * arch.hidden_size, arch.hidden_size, bias=False)
        self.further = nn.ModuleList(FurtherDepth(arch) for _ in range(1, settings.num_depths))

    def begin(self, embedded_TE: Tensor, hidden_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.join(self, embedded_TE, hidden_TE), None

    def join(self, depth: Any, embedded_TE: Tensor, hidden_TE: Tensor) -> Tensor:
        """The input of a layer: `depth` has its norms and its projection."""
        both = [depth.enorm(embedded_TE), depth.hnorm(hidden_TE)]
        if self.settings.hidden_first:
            both.reverse()
        return depth.eh_proj(torch.cat(both, dim=-1))  # type: ignore[no-any-return]

    def run_depth(self, depth: int, ids_T: Tensor, hidden_TE: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """As `forward`, with one of several layers: `ids_T` are the tokens `1 + depth` places further."""
        own: Any = self.further[depth - 1] if depth else self
        x_TE = self.join(own, self.embed(ids_T), hidden_TE)
        x_TE = self.model.layers[depth](x_TE, self.rotation(positions_T), attend)
        return own.norm(x_TE) if depth else self.finish(x_TE)


class FurtherDepth(nn.Module):
    """What the second and further layers of multi-token prediction have around their layer."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.enorm, self.hnorm, self.norm = (make_norm(arch) for _ in range(3))
        self.eh_proj = nn.Linear(2 * arch.hidden_size, arch.hidden_size, bias=False)
