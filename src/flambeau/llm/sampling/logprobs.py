"""Log-probabilities of chosen tokens and of the likeliest ones, for those who ask.

Shapes: M tokens · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.outputs import TokenInfo


def token_infos(logits_MV: Tensor, ids: Sequence[int], counts: Sequence[int]) -> list[TokenInfo]:
    """Under the model itself, before temperature, penalties and filters; with so many of the likeliest tokens each."""
    logprobs_MV = F.log_softmax(logits_MV.float(), -1)
    chosen = logprobs_MV.gather(1, torch.tensor(ids, device=logits_MV.device).unsqueeze(1)).squeeze(1).tolist()
    best = logprobs_MV.topk(min(max(counts), logits_MV.shape[1]))
    likeliest = [
        tuple(zip(tokens[:count], values[:count], strict=True))
        for tokens, values, count in zip(best.indices.tolist(), best.values.tolist(), counts, strict=True)
    ]
    return [TokenInfo(*each) for each in zip(ids, chosen, likeliest, strict=True)]
