"""CudaNetwork: steps of a network by the kernels; tested against EagerBackend.

A step is a list of launches that can be captured as a graph. Only the kernels are compiled, which takes seconds. A
norm adds what the part before it has given to the residual stream; so a norm after a part is computed together with
the one before the next part.

Shapes: T tokens of the step · N rows of them · S parts of a sum · E hidden · V vocabulary · C counters of a token
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.backends.cuda.few_row_kernel import tied_head
from flambeau.llm.backends.cuda.group_scaled import GroupScaledLinear, widened
from flambeau.llm.backends.cuda.layers import CudaLayers
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.backends.cuda.network_layers import cuda_layers, last_norm, norm_parameters
from flambeau.llm.backends.cuda.recurrent_sequences import sequences_of
from flambeau.llm.backends.cuda.stream_products import ScaledRows
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.embeddings import RowEmbedding, like_embeddings
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.transformer import Transformer


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
        sums: Tensor | ScaledRows | None = None
        layers = () if self._states is None else self._states.layers
        inputs_of: dict[int, Tensor] = {}
        sequences = sequences_of(inputs) if self._has_states else None
        counters = self._counters(len(x_TE), has_prompts=tiles is not None)
        for number, (layer, counters_CT) in enumerate(zip(self._layers, counters, strict=True)):
            projected = layer.project(x_TE, sums)
            if number in layers:
                inputs_of[number] = projected.x_TE.clone()  # the next norm adds to it in place
            x_TE, sums = self._compute(layer, projected, inputs, tiles, counters_CT, sequences)
        assert not isinstance(sums, ScaledRows)  # nothing is joined with the last norm
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
