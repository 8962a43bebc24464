"""Perplexity of a network on a text, to measure what quantization costs.

Shapes: B windows at a time · T tokens of a window · V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.packed_layers import use_fast_layers
from flambeau.llm.text.tokenizer import load_tokenizer


@torch.inference_mode()
def perplexity(model: Transformer, ids: Sequence[int], *, window: int = 512, windows_at_once: int = 4) -> float:
    """exp of the mean negative log-likelihood of each token but the first of its window; windows do not overlap."""
    window = min(window, model.arch.max_length, len(ids))
    if window < 2:
        raise InvalidRequest("perplexity needs a text of at least two tokens", "ids")
    device = model.model.embed_tokens.weight.device
    ids_BT = torch.tensor(ids[: len(ids) // window * window], device=device).view(-1, window)
    positions_T = torch.arange(window, device=device)
    total = 0.0
    for part_BT in torch.split(ids_BT, windows_at_once):
        with model.rotation.for_length(window):
            logits_BTV = model.logits(model(part_BT, positions_T.expand_as(part_BT), WholeAttention()))
        total += F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), part_BT[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (len(ids_BT) * (window - 1)))


def perplexity_of(folder: Path, text: str, *, device: torch.device | str = "cpu", window: int = 512) -> float:
    """The perplexity of a checkpoint, quantized or not, on a text."""
    ids = load_tokenizer(folder).encode(text)
    dtype = torch.float32 if torch.device(device).type == "cpu" else None
    model = load_model(folder, device=device, dtype=dtype)
    use_fast_layers(model, model.model.embed_tokens.weight.dtype)
    return perplexity(model, ids, window=window)
