"""Attention to a window of tokens and to compressed entries, in plain PyTorch; all heads share keys, which are values.

Shapes: … any leading dimensions (sequences) · T tokens of the step · S sequences · Q tokens of each · H heads
· D head size · C keys of the window · N entries · B blocks
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.backends.sparse import NUMBERS_AT_ONCE, chosen_keys
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache, load, store
from flambeau.llm.models.attention import AttentionOptions, Entries


def attend_whole(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor:
    """Without a cache: q […, T, H, D] and k […, T, 1, D] are of whole sequences."""
    positions = torch.arange(q.shape[-3], device=q.device)
    keys, mask = k.squeeze(-2), seen(positions, positions, options)
    if options.entries is not None:
        rate, selection = options.entries.rate, options.entries.selection
        own = options.entries.keys[..., rate - 1 :: rate, :]
        complete = is_complete(positions, own.shape[-2], rate)
        if selection is not None:
            complete = complete.expand(*q.shape[:-3], -1, -1)
            complete = chosen_keys(selection, selection.k[..., rate - 1 :: rate, :], complete).squeeze(-3)
        keys = torch.cat((keys, own), dim=-2)
        mask = torch.cat((mask.expand(*complete.shape[:-1], -1), complete), dim=-1)
    return attend_to_keys(q, keys, mask, options)


def attend_paged(q_THD: Tensor, cache: KVCache, layer: int, inputs: StepInputs, options: AttentionOptions) -> Tensor:
    """Over a cache that has the keys of the step already; entries that are complete now are stored."""
    if options.entries is not None:
        store_entries(options.entries, cache, layer, inputs)
    if length := inputs.query_len:
        q_SQHD = torch.unflatten(q_THD, 0, (-1, length))
        positions_SQ = inputs.positions_T.view(-1, length)
        own = options_of(options, lambda x: torch.unflatten(x, 0, (-1, length)))
        return attend_some(q_SQHD, cache, layer, inputs.block_tables_SB, positions_SQ, own).flatten(0, 1)
    starts, pieces = inputs.query_starts.tolist(), []
    for i, context in enumerate(inputs.context_lens_S.tolist()):
        num_keys = context // options.entries.rate if options.entries is not None else 0
        num_keys += min(context, starts[i + 1] - starts[i] + (options.window or context))
        step = max(1, NUMBERS_AT_ONCE // (q_THD.shape[1] * num_keys))
        table_1B = inputs.block_tables_SB[i : i + 1, : -(-context // cache.block_size)]
        for start in range(starts[i], starts[i + 1], step):
            some = slice(start, min(start + step, starts[i + 1]))
            own = options_of(options, lambda x, some=some: x[some].unsqueeze(0))  # type: ignore[misc]
            positions_1Q = inputs.positions_T[some].unsqueeze(0)
            pieces.append(attend_some(q_THD[some].unsqueeze(0), cache, layer, table_1B, positions_1Q, own)[0])
    return torch.cat(pieces)


def options_of(options: AttentionOptions, part: Callable[[Tensor], Tensor]) -> AttentionOptions:
    """The options of some tokens of the step."""
    entries = options.entries
    if entries is None or entries.selection is None:
        return options
    assert entries.selection.weights is not None
    q, weights = part(entries.selection.q), part(entries.selection.weights)
    own = entries._replace(selection=entries.selection._replace(q=q, weights=weights))
    return options._replace(entries=own)


def store_entries(entries: Entries, cache: KVCache, layer: int, inputs: StepInputs) -> None:
    """Keep what these tokens complete, in the blocks of these tokens; what others have goes to the padding."""
    size, per_block = cache.block_size, cache.entries[layer].shape[1]
    slots_T = inputs.slots_T // size * per_block + inputs.slots_T % size // entries.rate
    slots_T = torch.where((inputs.positions_T + 1) % entries.rate == 0, slots_T, 0)
    store(cache.entries[layer], slots_T, entries.keys.unsqueeze(-2))
    if entries.selection is not None:
        store(cache.index_entries[layer], slots_T, entries.selection.k.unsqueeze(-2))


def attend_some(
    q_SQHD: Tensor,
    cache: KVCache,
    layer: int,
    tables_SB: Tensor,
    positions_SQ: Tensor,
    options: AttentionOptions,
) -> Tensor:
    """Tokens of several sequences, as many of each: [S, Q, H, D]."""
    keys_SCD, places_SC = recent_keys(cache, layer, tables_SB, positions_SQ, options.window, q_SQHD.dtype)
    mask_SQC = seen(positions_SQ, places_SC.unsqueeze(1), options)
    if options.entries is not None:
        rate, selection = options.entries.rate, options.entries.selection
        tables = entry_tables(tables_SB, cache.block_size, rate)
        own_SND = load(cache.entries[layer], tables, q_SQHD.dtype).flatten(1, 3)
        complete_SQN = is_complete(positions_SQ, own_SND.shape[1], rate)
        # Old contents of a block may be NaN, which a weight of 0 does not remove.
        own_SND = own_SND.masked_fill(~complete_SQN.any(dim=1).unsqueeze(-1), 0)
        if selection is not None:
            index_keys = load(cache.index_entries[layer], tables, q_SQHD.dtype).flatten(1, 3)
            complete_SQN = chosen_keys(selection, index_keys, complete_SQN).squeeze(-3)
        keys_SCD = torch.cat((keys_SCD, own_SND), dim=1)
        mask_SQC = torch.cat((mask_SQC, complete_SQN), dim=-1)
    return attend_to_keys(q_SQHD, keys_SCD, mask_SQC, options)


def recent_keys(
    cache: KVCache, layer: int, tables_SB: Tensor, positions_SQ: Tensor, window: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The keys [S, C, D] of the blocks that the windows of these tokens reach, and their places [S, C].

    Tokens of a sequence follow each other; those after the last one, at position 0, are padding.
    """
    size, last = cache.block_size, positions_SQ.amax(dim=1, keepdim=True)
    assert window is not None
    num_blocks = (window + positions_SQ.shape[1] - 2) // size + 2
    first = (positions_SQ[:, :1] - (window - 1)).clamp(min=0) // size
    numbers = first + torch.arange(num_blocks, device=tables_SB.device)
    blocks = tables_SB.gather(1, numbers.clamp(max=tables_SB.shape[1] - 1))
    places_SC = (numbers.unsqueeze(-1) * size + torch.arange(size, device=tables_SB.device)).flatten(1)
    keys_SCD = load(cache.keys[layer], blocks, dtype).flatten(1, 3)
    return keys_SCD.masked_fill((places_SC > last).unsqueeze(-1), 0), places_SC


def entry_tables(tables_SB: Tensor, block_size: int, rate: int) -> Tensor:
    """The blocks with entries, in their order: all of them, or each last one of the tokens of an entry."""
    every = max(1, rate // block_size)
    # At least two, so that the shapes of a traced step hold for any number; those after the last are padding.
    return F.pad(tables_SB, (0, 2 * every))[:, every - 1 :: every]


def seen(positions: Tensor, places: Tensor, options: AttentionOptions) -> Tensor:
    """Which places […, Q, C] the tokens at these positions […, Q] have in their windows."""
    behind = positions.unsqueeze(-1) - places
    mask = behind >= 0
    return mask if options.window is None else mask & (behind < options.window)


def is_complete(positions: Tensor, number: int, rate: int) -> Tensor:
    """Which of so many entries […, Q, N] the tokens at these positions […, Q] may attend to."""
    return torch.arange(number, device=positions.device) < ((positions + 1) // rate).unsqueeze(-1)


def attend_to_keys(q: Tensor, keys: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Attention of q […, Q, H, D] to keys […, C, D], where the mask […, Q, C] is true."""
    assert options.sinks is not None
    num_heads = q.shape[-2]
    flat, wide = q.flatten(-3, -2).float(), keys.float()
    scores = torch.unflatten(flat @ wide.transpose(-1, -2) * options.scale, -2, (-1, num_heads))
    scores = scores.masked_fill(~mask.unsqueeze(-2), -torch.inf)
    sinks = options.sinks.float().view(-1, 1).expand(*scores.shape[:-1], 1)
    weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    y = weights.flatten(-3, -2).to(keys.dtype) @ keys
    return torch.unflatten(y, -2, (-1, num_heads))
