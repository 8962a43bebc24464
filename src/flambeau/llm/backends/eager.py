"""EagerBackend: plain PyTorch, one operation after another. Every faster kernel is tested against this code.

Shapes: T tokens of the step · N rows of them · S sequences · Q tokens of each in this step · C cached tokens · H heads
· G key-value heads · D head size · V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.adapters.adapter_store import AdapterStore, with_adapters
from flambeau.llm.backends.compressed import attend_paged, attend_whole
from flambeau.llm.backends.recurrent import PagedRecurrence, WholeRecurrence
from flambeau.llm.backends.sparse import chosen_keys
from flambeau.llm.executor.backend import PLAIN_PYTORCH, AsyncDecoder, Greedy
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache, load, store
from flambeau.llm.models.architecture import AlibiKind
from flambeau.llm.models.attention import Attend, AttentionOptions
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.indexer import Selection
from flambeau.llm.models.recurrent import Recur
from flambeau.llm.models.slopes import alibi_slopes
from flambeau.llm.models.step_media import StepMedia
from flambeau.llm.models.transformer import Transformer


class WholeAttention:
    """Attention without a cache: the tokens […, T] are whole sequences."""

    recur = WholeRecurrence()

    def __init__(self) -> None:
        self._chosen: Tensor | None = None  # by the last indexer

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """From q […, T, H, D] and k, v […, T, G, D] to […, T, H, D]."""
        if options.is_over_entries:
            return attend_whole(q, k, options)
        length = q.shape[-3]
        positions = torch.arange(length, device=q.device)
        mask = attention_mask(positions, positions, options.window, options.chunk)
        if options.selection is not None:
            self._chosen = chosen_keys(options.selection, options.selection.k, mask.expand(*q.shape[:-3], -1, -1))
        if options.is_sparse:
            assert self._chosen is not None
            mask = self._chosen
        q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
        y = attend_to(q, k, v, mask, options)
        return y.transpose(-3, -2)


class PagedAttention:
    """Attention over the blocks of a cache; the keys and values of the step are written first."""

    def __init__(self, cache: KVCache, inputs: StepInputs) -> None:
        self._cache = cache
        self._inputs = inputs
        self._recur = PagedRecurrence(cache.states, inputs) if cache.states.has_layers else None
        self._chosen: list[Tensor] = []  # by the last indexer: masks of all sequences, or of one after another

    @property
    def recur(self) -> Recur:
        assert self._recur is not None
        return self._recur

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """From q [T, H, D] and k, v [T, G, D] to [T, H, D]."""
        cache, inputs = self._cache, self._inputs
        cache.write(layer, inputs.slots_T, k, v)
        if options.is_over_entries:
            return attend_paged(q, cache, layer, inputs, options)
        if options.selection is not None:
            index_layer = layer if options.index_layer is None else options.index_layer
            self._chosen = self._choose(index_layer, options.selection)
        attend = attend_uniform if inputs.query_len else attend_ragged
        values = None if cache.is_latent else cache.values[layer]
        chosen = self._chosen if options.is_sparse else None
        return attend(q, cache.keys[layer], values, inputs, options, chosen)

    def _choose(self, layer: int, selection: Selection) -> list[Tensor]:
        """What the tokens of the step attend to: one mask [S, G, Q, C], or [G, Q, C] of each sequence."""
        cached, inputs = self._cache.index_keys[layer], self._inputs
        store(cached, inputs.slots_T, selection.k.unsqueeze(-2))
        q_TIK, weights_TI = selection.q, selection.weights
        if length := inputs.query_len:
            weights_SQI = None if weights_TI is None else torch.unflatten(weights_TI, 0, (-1, length))
            own = selection._replace(q=torch.unflatten(q_TIK, 0, (-1, length)), weights=weights_SQI)
            k_SCK = load(cached, inputs.block_tables_SB, q_TIK.dtype).flatten(1, 3)
            places_C = torch.arange(k_SCK.shape[1], device=cached.device)
            return [chosen_keys(own, k_SCK, attention_mask(inputs.positions_T.view(-1, length), places_C, None))]
        starts, found = inputs.query_starts.tolist(), []
        for i, context in enumerate(inputs.context_lens_S.tolist()):
            tokens = slice(starts[i], starts[i + 1])
            own = selection._replace(q=q_TIK[tokens], weights=None if weights_TI is None else weights_TI[tokens])
            blocks = inputs.block_tables_SB[i, : -(-context // cached.shape[1])]
            k_CK = load(cached, blocks, q_TIK.dtype).flatten(0, 2)[:context]
            places_C = torch.arange(context, device=cached.device)
            found.append(chosen_keys(own, k_CK, attention_mask(inputs.positions_T[tokens], places_C, None)))
        return found


def attend_uniform(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor | None,
    inputs: StepInputs,
    options: AttentionOptions,
    chosen: list[Tensor] | None = None,
) -> Tensor:
    """For sequences with the same number of tokens: shapes depend on nothing else."""
    length = inputs.query_len
    q_SHQD = q_THD.view(-1, length, *q_THD.shape[1:]).transpose(1, 2)
    k_SGCD = load(keys, inputs.block_tables_SB, q_THD.dtype).flatten(1, 2).transpose(1, 2)
    places_C = torch.arange(k_SGCD.shape[2], device=keys.device)
    positions_SQ = inputs.positions_T.view(-1, length)
    if chosen is None:
        mask_SHQC = attention_mask(positions_SQ, places_C, options.window, options.chunk).unsqueeze(1)
    else:
        mask_SHQC = chosen[0]
    # Old contents of a block may be NaN, which a weight of 0 does not remove.
    is_old = (places_C > positions_SQ.amax(1, keepdim=True))[:, None, :, None]
    k_SGCD = k_SGCD.masked_fill_(is_old, 0)
    v_SGCD = k_SGCD
    if values is not None:
        v_SGCD = load(values, inputs.block_tables_SB, q_THD.dtype).flatten(1, 2).transpose(1, 2).masked_fill_(is_old, 0)
    y_SHQD = attend_to(q_SHQD, k_SGCD, v_SGCD, mask_SHQC, options)
    return y_SHQD.transpose(1, 2).flatten(0, 1)


def attend_ragged(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor | None,
    inputs: StepInputs,
    options: AttentionOptions,
    chosen: list[Tensor] | None = None,
) -> Tensor:
    """For sequences with different numbers of tokens, one after another."""
    starts = inputs.query_starts.tolist()
    pieces = []
    for i, length in enumerate(inputs.context_lens_S.tolist()):
        tokens = slice(starts[i], starts[i + 1])
        blocks = inputs.block_tables_SB[i, : -(-length // keys.shape[1])]
        k_GCD = load(keys, blocks, q_THD.dtype).flatten(0, 1)[:length].transpose(0, 1)
        v_GCD = k_GCD
        if values is not None:
            v_GCD = load(values, blocks, q_THD.dtype).flatten(0, 1)[:length].transpose(0, 1)
        places_C = torch.arange(length, device=keys.device)
        seen_T = None if inputs.media is None or options.looks_back else inputs.media.last_seen_T
        last_seen = None if seen_T is None else seen_T[tokens]
        mask_QC = attention_mask(inputs.positions_T[tokens], places_C, options.window, options.chunk, last_seen)
        if chosen is not None:
            mask_QC = chosen[i]
        q_HQD = q_THD[tokens].transpose(0, 1)
        y_HQD = attend_to(q_HQD.unsqueeze(0), k_GCD.unsqueeze(0), v_GCD.unsqueeze(0), mask_QC, options)
        pieces.append(y_HQD[0].transpose(0, 1))
    return torch.cat(pieces)


def attend_to(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of q […, H, Q, D] to k, v […, G, C, D], where the mask […, Q, C], or […, G, Q, C], is true."""
    scale, softcap, sinks, alibi = options.scale, options.softcap, options.sinks, options.alibi
    if softcap is None and sinks is None and alibi is None:
        if mask.dim() > 2 and mask.shape[-3] > 1:  # one for each key-value head
            return attend_apart(q, k, v, mask, scale)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    num_heads, shared = q.shape[-3], q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(shared, dim=-3), v.repeat_interleave(shared, dim=-3)
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi is not None:  # a function of the place instead of the distance: the softmax is the same
        biases = alibi_biases(alibi.kind, alibi.num_heads, torch.arange(k.shape[-2], device=q.device), scale)
        scores = scores + biases[alibi.first_head : alibi.first_head + num_heads]
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        return scores.softmax(dim=-1).to(v.dtype) @ v
    sink = sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]
    return weights.to(v.dtype) @ v


def attend_apart(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The same with a mask […, G, Q, C] for each key-value head; heads that share it have no copies."""
    q = torch.unflatten(q, -3, (k.shape[-3], -1))
    k, v = (one.unsqueeze(-3).expand(*one.shape[:-2], q.shape[-3], *one.shape[-2:]) for one in (k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(-3), scale=scale)
    return y.flatten(-4, -3)


def alibi_biases(kind: AlibiKind, num_heads: int, places_C: Tensor, scale: float) -> Tensor:
    """What is added to the scores [H, 1, C] of each head for each place."""
    slopes = alibi_slopes(num_heads, places_C.device).view(-1, 1, 1)
    return (slopes.bfloat16() * places_C).float() * scale if kind == "scaled" else slopes * places_C


def attention_mask(
    positions: Tensor,
    places_C: Tensor,
    window: int | None,
    chunk: int | None = None,
    last_seen: Tensor | None = None,
) -> Tensor:
    """Which cached places […, Q, C] the token at each position […, Q] attends to: up to its own, or to `last_seen`."""
    behind = positions.unsqueeze(-1) - places_C
    mask = behind >= 0 if last_seen is None else last_seen.unsqueeze(-1) >= places_C
    if chunk is not None:
        mask = mask & (positions.unsqueeze(-1) // chunk == places_C // chunk)
    return mask if window is None else mask & (behind < window)


AttentionFactory = Callable[[KVCache, StepInputs], Attend]


class EagerBackend:
    """Runs the network as it is written; `attention` gives the attention of a step.

    Tokens have adapters only where the backend has a store: those of a draft model are proposed without. `states` are
    written where a head reads them.
    """

    greedy: Greedy | None = None
    async_decoder: AsyncDecoder | None = None
    decode_path = PLAIN_PYTORCH

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        attention: AttentionFactory = PagedAttention,
        *,
        adapters: AdapterStore | None = None,
        states: HiddenStates | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.keys[0].device
        self._attention = attention
        self._adapters = adapters
        self._states = states
        self._adapted = model if adapters is None else with_adapters(model, adapters)

    @torch.inference_mode()
    def decode(self, inputs: StepInputs) -> Tensor:
        return self._logits(inputs, self._hidden(inputs), None)

    @torch.inference_mode()
    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        return self._logits(inputs, self._hidden(inputs)[rows_N.to(self.device)], rows_N)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        return True

    def close(self) -> None:
        """Nothing runs in the background."""

    def _hidden(self, inputs: StepInputs) -> Tensor:
        inputs = inputs.to(self.device)
        media = inputs.media
        # No kernel knows that the tokens of an image attend to each other.
        is_causal = media is None or media.last_seen_T is None
        attend = (self._attention if is_causal else PagedAttention)(self.cache, inputs)
        given = inputs.ids_T, inputs.positions_T, attend, media
        if inputs.adapters_T is None or self._adapters is None:
            return self._pass(self.model, *given)
        with self._adapters.applied(inputs.adapters_T):
            return self._pass(self._adapted, *given)

    def _logits(self, inputs: StepInputs, hidden: Tensor, rows_N: Tensor | None) -> Tensor:
        """The logits of these rows of a step, or of all; adapters may change the last layer."""
        adapters_T = inputs.adapters_T
        if adapters_T is None or self._adapters is None:
            return self.model.logits(hidden)
        with self._adapters.applied(adapters_T if rows_N is None else adapters_T[rows_N.to(adapters_T.device)]):
            return self._adapted.logits(hidden)

    def _pass(
        self, model: Transformer, ids_T: Tensor, positions_T: Tensor, attend: Attend, media: StepMedia | None
    ) -> Tensor:
        if self._states is None:
            return model(ids_T, positions_T, attend, media)  # type: ignore[no-any-return]
        hidden, found = model.with_layer_inputs(ids_T, positions_T, attend, media, self._states.layers)
        self._states.set(torch.cat(found, dim=-1))
        return hidden
