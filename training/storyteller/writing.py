"""Text a network writes by itself, many sequences at a time.

Shapes: B sequences · T tokens · C tokens so far · V vocabulary · H heads · G key-value heads · D head size
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.models.attention import AttentionOptions
from flambeau.llm.models.transformer import Transformer


class Remembering:
    """Keeps the keys and values of sequences of equal length."""

    def __init__(self, batch: int, length: int) -> None:
        self._batch, self._length = batch, length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.start = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        """From q [B, T, H, D] and k, v [B, T, G, D] to [B, T, H, D]."""
        if layer not in self._layers:
            shape = (self._batch, k.shape[2], self._length, k.shape[3])
            self._layers[layer] = (k.new_zeros(shape), k.new_zeros(shape))
        keys_BGCD, values_BGCD = self._layers[layer]
        end = self.start + q.shape[1]
        keys_BGCD[:, :, self.start : end] = k.transpose(1, 2)
        values_BGCD[:, :, self.start : end] = v.transpose(1, 2)
        k, v = keys_BGCD[:, :, :end], values_BGCD[:, :, :end]
        # With a single token there is nothing to hide; query heads that share a key-value head are rows of one query.
        if q.shape[1] == 1:
            q_BGQD = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            return F.scaled_dot_product_attention(q_BGQD, k, v, scale=options.scale).reshape(q.shape)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, is_causal=True, scale=options.scale, enable_gqa=True
        )
        return y.transpose(1, 2)


@torch.no_grad()
def write(
    model: Transformer,
    prompts_BT: Tensor,
    temperature: float,
    *,
    length: int,
    generator: torch.Generator,
    eos: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Sequences [B, up to length], prompts included, and the logits [B, length - 1, V] behind each token, in float16.

    With `eos`, it stops when every sequence has one after its prompt.
    """
    model.eval()
    attend = Remembering(len(prompts_BT), length)
    ids_BT, logits = prompts_BT, []
    while True:
        new_BT = ids_BT[:, attend.start :]
        positions_T = torch.arange(attend.start, ids_BT.shape[1], device=ids_BT.device)
        logits_BTV = model.logits(model(new_BT, positions_T, attend))
        attend.start = ids_BT.shape[1]
        logits.append(logits_BTV.half())
        ids_BT = torch.cat((ids_BT, choose(logits_BTV[:, -1], temperature, generator).unsqueeze(1)), dim=1)
        has_ended = eos is not None and (ids_BT[:, prompts_BT.shape[1] :] == eos).any(1).all()
        if ids_BT.shape[1] >= length or has_ended:
            return ids_BT, torch.cat(logits, dim=1)


def choose(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """The likeliest token if the temperature is 0, else one at random."""
    if temperature == 0:
        return logits_BV.argmax(-1)
    noise_BV = torch.empty_like(logits_BV).exponential_(generator=generator).log_()
    return (logits_BV - temperature * noise_BV).argmax(-1)
