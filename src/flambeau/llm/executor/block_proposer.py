"""BlockProposer: a head proposes all tokens of a block at once, from the target's hidden states of the text before it.

The keys and values of the text are in the target's blocks. Those of the proposed block are kept nowhere.

Shapes: S sequences · N tokens of a block · T tokens of a pass · C cached tokens · H heads · G key-value heads ·
D head size · E hidden · X numbers of hidden states
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.core.sequence import Sequence
from flambeau.llm.executor.head import HeadModel, HeadRound
from flambeau.llm.executor.inputs import InputBuilder, to_tensor
from flambeau.llm.executor.kv_cache import KVCache, load
from flambeau.llm.models.attention import AttentionOptions
from flambeau.llm.models.block_head import BlockHead
from flambeau.llm.models.recurrent import Recur
from flambeau.llm.sampling.sampler import Sampler
from flambeau.llm.speculation.rounds import sample_round
from flambeau.llm.speculation.speculator import Proposal, TokenSpan


class BlockProposer:
    """Proposes what the head samples with the random numbers that the target will use."""

    reads_states = True

    def __init__(self, model: HeadModel, inputs: InputBuilder, sampler: Sampler) -> None:
        assert isinstance(model.head, BlockHead)
        self._model, self._head = model, model.head
        self._inputs, self._sampler = inputs, sampler
        self._device = model.cache.keys[0].device
        self._ends: dict[Sequence, int] = {}  # of the text whose keys and values are there

    def observe(self, spans: Many[TokenSpan]) -> None:
        """Store the keys and values of these tokens."""
        states_TX, builder, head = self._model.states.take(), self._inputs, self._head
        lengths = [span.length for span in spans]
        rows_T = np.repeat(builder.tables.rows([span.sequence for span in spans]), lengths)
        positions_T = np.concatenate([np.arange(span.start, span.start + span.length) for span in spans])
        slots_T = to_tensor(builder.tables.slots(rows_T, positions_T, builder.block_size)).to(self._device)
        given_TX = torch.cat([states_TX[span.row : span.row + span.length] for span in spans]).to(head.state_dtype)
        context = head.context(head.combine(given_TX), to_tensor(positions_T).to(self._device))
        for layer, (k_TGD, v_TGD) in enumerate(context):
            self._model.cache.write(layer, slots_T, k_TGD, v_TGD)
        self._ends |= {span.sequence: span.start + span.length for span in spans}

    def propose(self, sequences: Many[Sequence], limits: Many[int], num_ahead: int) -> Proposal | None:
        """Up to `limits` tokens for each sequence whose text is known, as many as a block has; None: for none."""
        most = self._head.settings.block_size - 1
        known = [self._ends.get(sequence) == len(sequence.tokens) - 1 for sequence in sequences]
        lengths = [min(limit, most) if is_known else 0 for is_known, limit in zip(known, limits, strict=True)]
        if not any(lengths):
            return None
        states, round_ = [sequence.sampling for sequence in sequences], self._round(sequences, known)
        if not self._sampler.takes_argmax(states):
            return sample_round(self._sampler, states, lengths, num_ahead, round_.logits)
        return Proposal(round_.most_likely(num_ahead), lengths, None)

    def record_accepted(self, sequence: Sequence, num_before: int, num_proposed: int, num_accepted: int) -> None:
        """Nothing to do: nothing is kept of what was proposed."""

    def forget(self, sequence: Sequence) -> None:
        self._ends.pop(sequence, None)

    def _round(self, sequences: Many[Sequence], known: Many[bool]) -> BlockRound:
        """A block of every sequence; where the text is not known, it sees nothing but itself."""
        settings, builder = self._head.settings, self._inputs
        last_S = np.array([len(sequence.tokens) - 1 for sequence in sequences])
        seen_S = np.where(known, last_S, 0)
        rows = builder.tables.rows(sequences)
        ids_SN = np.full((len(sequences), settings.block_size), settings.mask_id)
        ids_SN[:, 0] = [sequence.tokens[-1] for sequence in sequences]
        positions_SN = last_S[:, None] + np.arange(settings.block_size)
        tables_SB = builder.tables.columns(rows, -(-int(seen_S.max()) // builder.block_size))
        given = (to_tensor(each).to(self._device) for each in (ids_SN, positions_SN, tables_SB, seen_S))
        ids, positions, tables, seen = given
        attend = BlockAttention(self._model.cache, positions, tables, seen, settings.causal_layers)
        hidden_TE = self._head.run_block(ids.flatten(), positions.flatten(), attend)
        return BlockRound(self._head, hidden_TE.view(*ids.shape, -1))


class BlockRound(HeadRound):
    """The tokens of a block, which do not depend on each other."""

    def __init__(self, head: BlockHead, hidden_SNE: Tensor) -> None:
        super().__init__((), head.run_block, head)
        self._hidden_SNE = hidden_SNE

    def _advance(self, place: int, last_S: Tensor | None) -> None:
        last = self._hidden_SNE.shape[1] - 1  # no more are proposed
        self.hidden_SE = self._hidden_SNE[:, min(place + 1, last)]


class BlockAttention:
    """Attention of blocks to themselves and to the cached text before them.

    It goes in both directions, and a window counts the tokens on either side, without the token itself. In causal
    layers it goes back only, and windows are those of all other networks.
    """

    def __init__(
        self, cache: KVCache, positions_SN: Tensor, tables_SB: Tensor, seen_S: Tensor, causal_layers: frozenset[int]
    ) -> None:
        self._cache, self._tables_SB, self._shape = cache, tables_SB, positions_SN.shape
        self._causal_layers = causal_layers
        num_places = tables_SB.shape[1] * cache.block_size
        places_SC = torch.arange(num_places, device=seen_S.device).expand(len(seen_S), -1)
        self._is_seen_SC = places_SC < seen_S[:, None]
        keys_SL = torch.cat((places_SC, positions_SN), dim=1)
        self._distances_SNL = positions_SN[:, :, None] - keys_SL[:, None]
        is_there_SL = torch.cat((self._is_seen_SC, torch.ones_like(positions_SN, dtype=torch.bool)), dim=1)
        self._mask_SNL = is_there_SL[:, None].expand_as(self._distances_SNL)

    @property
    def recur(self) -> Recur:
        raise NotImplementedError("these heads have no recurrent layers")

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """From q [T, H, D] and k, v [T, G, D] to [T, H, D]."""
        keys, values = (
            torch.cat((self._cached(cached[layer], own), torch.unflatten(own, 0, self._shape)), dim=1).transpose(1, 2)
            for cached, own in ((self._cache.keys, k), (self._cache.values, v))
        )
        mask_SNL, distances_SNL, is_causal = self._mask_SNL, self._distances_SNL, layer in self._causal_layers
        if is_causal:
            mask_SNL = mask_SNL & (distances_SNL >= 0)
        if options.window is not None:
            mask_SNL = mask_SNL & (distances_SNL.abs() <= options.window - int(is_causal))
        queries = torch.unflatten(q, 0, self._shape).transpose(1, 2)
        found = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask_SNL.unsqueeze(1), scale=options.scale, enable_gqa=True
        )
        return found.transpose(1, 2).flatten(0, 1)

    def _cached(self, cached: Tensor, own: Tensor) -> Tensor:
        """Keys or values of the text [S, C, G, D]; old contents of a block may be NaN."""
        found = load(cached, self._tables_SB, own.dtype).flatten(1, 2)
        return found.masked_fill(~self._is_seen_SC[:, :, None, None], 0)
