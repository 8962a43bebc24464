"""CudaHead: passes of a head that proposes tokens, by the kernels; the plain version is `DraftHead`.

Shapes: T entries of the pass · X numbers of hidden states · E hidden · D tokens of the head's vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.backends.cuda.feed_forward import can_compute_experts
from flambeau.llm.backends.cuda.few_row_kernel import tied_head
from flambeau.llm.backends.cuda.layers import CudaLayers, Projected
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.backends.cuda.network import embedded, embeddings_of
from flambeau.llm.backends.cuda.network_layers import cuda_layers, norm_parameters
from flambeau.llm.backends.cuda.norm import normalize
from flambeau.llm.backends.cuda.parts import HEAD_PARTS
from flambeau.llm.backends.cuda.stream_products import ScaledRows
from flambeau.llm.backends.cuda.supported_networks import QUANTIZED, SPARSE, can_attend, have_type
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.executor.part_words import part_words
from flambeau.llm.models.draft_heads import DraftHead, Eagle3Head, Eagle3Layer, HeadBody, MtpHead
from flambeau.llm.models.embeddings import like_embeddings
from flambeau.llm.models.moe import Experts
from flambeau.llm.models.transformer import Transformer, is_unmodified


class CudaHead(CudaLayers):
    """A head and its cache as the kernels read them."""

    def __init__(self, head: DraftHead, target: Transformer, cache: KVCache) -> None:
        arch, body, like = head.arch, head.model, like_embeddings(target.model.embed_tokens)
        super().__init__(cuda_layers(body.layers, cache, arch, head.rotation, like), arch, like)
        self.head = head
        self._embeddings = embeddings_of(head.embeddings)
        self._last_norm = None if isinstance(body.norm, nn.Identity) else norm_parameters(body.norm, arch, like)
        shared: nn.Module = tied_head(target.model.embed_tokens) if target.lm_head is None else target.lm_head
        self._last = kernel_linear(shared if head.lm_head is None else head.lm_head)
        self._logit_scale = target.arch.logit_scale if head.lm_head is None else 1.0
        self._target_norm = None if isinstance(head, Eagle3Head) else target.model.norm
        self._norms = norms_of(head)
        self._projection = projection_of(head)

    @property
    def num_tokens(self) -> int:
        """Of the head's vocabulary."""
        return self._last.width

    def combine(self, states_TX: Tensor) -> Tensor:
        """Hidden states of the target to what the first pass takes [T, E]."""
        head = self.head
        if not isinstance(head, Eagle3Head):
            return normalized(self._target_norm, states_TX)
        if head.fc_norm:
            states_TX = head.normalize(states_TX)
        elif head.input_norm is not None:
            states_TX = normalized(head.input_norm, states_TX)
        return self._product(self._projection, states_TX)

    def run(self, ids_T: Tensor, hidden_TE: Tensor, inputs: StepInputs) -> Tensor:
        """The hidden states [T, E] from which the head goes on; `hidden_TE` may be overwritten.

        Every sequence has `inputs.query_len` entries; `ids_T` are the tokens after them.
        """
        x_TE, given = self._begin(embedded(ids_T, self._embeddings, self._dtype), hidden_TE)
        sums: Tensor | ScaledRows | None = None
        for layer, counters_CT in zip(self._layers, self._counters(len(x_TE), has_prompts=False), strict=True):
            projected = layer.project(x_TE, sums) if given is None else Projected(x_TE, given, layer.qkv(given))
            x_TE, sums = self._compute(layer, projected, inputs, None, counters_CT)
            given = None
        assert isinstance(sums, Tensor)
        if self._last_norm is None:
            return x_TE + self._whole(sums)
        normal_TE = self._last_norm(x_TE, sums)  # which adds the sums to x
        return normal_TE if self._goes_on_from_normal else x_TE

    def _begin(self, embedded_TE: Tensor, hidden_TE: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream, and what the attention of the first layer reads if that is something else."""
        head = self.head
        if isinstance(head, Eagle3Head):
            of_embedded, of_hidden = self._norms
            normal_TE = normalized(of_hidden, hidden_TE)
            both = torch.cat((normalized(of_embedded, embedded_TE), normal_TE), dim=-1)
            return normal_TE if head.settings.norm_before_residual else hidden_TE, both
        if isinstance(head, MtpHead):
            parts = [normalized(norm, x) for norm, x in zip(self._norms, (embedded_TE, hidden_TE), strict=True)]
        else:
            parts = [embedded_TE, hidden_TE]
        if head.settings.hidden_first:
            parts.reverse()
        return self._product(self._projection, torch.cat(parts, dim=-1)), None

    @property
    def _goes_on_from_normal(self) -> bool:
        return not isinstance(self.head, Eagle3Head) or self.head.settings.norms_output

    def draft_logits(self, hidden_TE: Tensor) -> Tensor:
        """Logits [T, D] of the head's own tokens, in float32."""
        if not self._goes_on_from_normal:
            hidden_TE = normalized(self.head.model.norm, hidden_TE)
        logits = self._last(hidden_TE)
        logits = logits.sum(0) if logits.dim() == 3 else logits.float()
        return logits if self._logit_scale == 1.0 else logits * self._logit_scale

    def _product(self, linear: KernelLinear, x: Tensor) -> Tensor:
        return self._whole(linear(x))

    def _whole(self, sums: Tensor) -> Tensor:
        """[T, N], or parts [S, T, N] of it, to [T, N]."""
        return (sums.sum(0) if sums.dim() == 3 else sums).to(self._dtype)


def normalized(norm: Any, x: Tensor) -> Tensor:
    return normalize(x, norm.weight, norm.epsilon)


def norms_of(head: DraftHead) -> tuple[Any, ...]:
    """The norms of embeddings and of hidden states, where there are any."""
    if isinstance(head, Eagle3Head):
        first: Any = head.model.layers[0]
        return first.input_layernorm, first.hidden_norm
    return (head.enorm, head.hnorm) if isinstance(head, MtpHead) else ()


def projection_of(head: Any) -> KernelLinear:
    """What reads hidden states: of three layers, or beside embeddings."""
    return kernel_linear(head.eh_proj if isinstance(head, MtpHead) else head.fc)


def unknown_reason(head: DraftHead, target: Transformer, cache: KVCache) -> str | None:
    """Why the kernels cannot compute a head; None: they can."""
    arch = head.arch
    # A head that is not EAGLE-3's reads what the target's last norm gives.
    is_apart = head.lm_head is not None and isinstance(head, Eagle3Head)
    parts = {*arch.extras, *(() if is_apart else target.arch.extras)} - HEAD_PARTS
    if parts:
        return f"the kernels do not know {part_words(sorted(parts))}"
    if not can_attend(arch, head.rotation):
        return "the kernels do not know its attention"
    if head.settings.num_depths > 1:
        return "the kernels do not know layers that propose one token each"
    if not all(can_compute_experts(module) for module in head.modules() if isinstance(module, Experts)):
        return "the kernels do not know its experts"
    dtype = like_embeddings(target.model.embed_tokens).dtype
    if cache.keys[0].dtype not in (dtype, torch.float8_e4m3fn) or not have_type(head, dtype):
        return "its numbers have several types"
    known = (*QUANTIZED, *SPARSE, DraftHead, HeadBody, Eagle3Layer, nn.Identity)
    changed = {type(module).__name__ for module in head.modules() if not is_unmodified(module, known)}
    return f"the kernels do not know {', '.join(sorted(changed))}" if changed else None
