"""RWKV 4: time mixing, whose state is a weighted mean of values, and channel mixing, which reads the token before.

Means are kept as a numerator and a denominator that share a factor, the exponential of a third number, as keys may be
large. A denominator of 0 is that of a sequence without tokens.

Shapes: … any leading dimensions · S sequences · Q tokens of each · E hidden · C channels
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.recurrent import Mixer, Recur, States, float32_parameter
from flambeau.llm.models.scans import chunks

LOWEST = -1e38  # a logarithm of nothing
Mean = tuple[Tensor, Tensor, Tensor]  # numerator, denominator, and the logarithm of their factor


def shifted(x_SQE: Tensor, before_SE: Tensor, lengths_S: Tensor | None) -> tuple[Tensor, Tensor]:
    """The token before each one, and the last one of each sequence."""
    joined = torch.cat((before_SE.to(x_SQE.dtype).unsqueeze(1), x_SQE), dim=1)
    if lengths_S is None:
        return joined[:, :-1], joined[:, -1]
    last = lengths_S.view(-1, 1, 1).expand(-1, 1, joined.shape[2])
    return joined[:, :-1], joined.gather(1, last).squeeze(1)


def mixed(x: Tensor, before: Tensor, share: Tensor) -> Tensor:
    return x * share + before * (1 - share)


class TimeMix(Mixer):
    """In the place of attention."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        size, hidden = self.shape.inner_size, arch.hidden_size
        self.time_mix_key, self.time_mix_value, self.time_mix_receptance = (
            nn.Parameter(torch.zeros(hidden)) for _ in range(3)
        )
        self.time_decay, self.time_first = float32_parameter(size), float32_parameter(size)
        self.in_proj_k, self.in_proj_v, self.in_proj_r = (nn.Linear(hidden, size, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor, recur: Recur) -> Tensor:
        """[…, E] to […, E]."""
        return self.out_proj(recur(self.layer, self, x))  # type: ignore[no-any-return]

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        x, (last, *mean) = inputs[0], states
        before, last = shifted(x, last, lengths_S)
        key = self.in_proj_k(mixed(x, before, self.time_mix_key)).float()
        value = self.in_proj_v(mixed(x, before, self.time_mix_value)).float()
        receptance = torch.sigmoid(self.in_proj_r(mixed(x, before, self.time_mix_receptance)))
        decay = self.time_decay.exp().expand_as(key)
        if lengths_S is not None:  # padding adds nothing, and nothing decays
            is_padding = (torch.arange(x.shape[1], device=x.device) >= lengths_S.unsqueeze(1)).unsqueeze(-1)
            key, decay = key.masked_fill(is_padding, LOWEST), decay.masked_fill(is_padding, 0.0)
        numerator, denominator, log_factor = mean
        state: Mean = (numerator, denominator, torch.where(denominator == 0, LOWEST, log_factor))
        pieces = []
        for chunk in chunks(x.shape[1]):
            k, v = key[:, chunk], value[:, chunk]
            after = running_means(k, v, decay[:, chunk], state)
            earlier = [
                torch.cat((one.unsqueeze(1), all_[:, :-1]), dim=1) for one, all_ in zip(state, after, strict=True)
            ]
            top, bottom, _ = joined_means(
                (earlier[0], earlier[1], earlier[2]), (v, torch.ones_like(k), k + self.time_first)
            )
            pieces.append(top / bottom)
            state = (after[0][:, -1], after[1][:, -1], after[2][:, -1])
        return receptance * torch.cat(pieces, dim=1).to(receptance.dtype), (last, *state)


def joined_means(first: Mean, second: Mean) -> Mean:
    """The sum of two."""
    factor = torch.maximum(first[2], second[2])
    own, other = (first[2] - factor).exp(), (second[2] - factor).exp()
    return first[0] * own + second[0] * other, first[1] * own + second[1] * other, factor


def running_means(key: Tensor, value: Tensor, decay: Tensor, state: Mean) -> Mean:
    """What a sequence has after each token: the spans that are added up double in length until they cover all."""
    first = joined_means(
        (state[0], state[1], state[2] - decay[:, 0]), (value[:, 0], torch.ones_like(key[:, 0]), key[:, 0])
    )
    top, bottom, factor = (
        torch.cat((one.unsqueeze(1), rest[:, 1:]), dim=1)
        for one, rest in zip(first, (value, torch.ones_like(key), key), strict=True)
    )
    span = 1
    while span < key.shape[1]:
        earlier = top[:, :-span], bottom[:, :-span], factor[:, :-span] - decay[:, span:]
        later = joined_means(earlier, (top[:, span:], bottom[:, span:], factor[:, span:]))
        top, bottom, factor = (
            torch.cat((one[:, :span], rest), dim=1) for one, rest in zip((top, bottom, factor), later, strict=True)
        )
        decay = torch.cat((decay[:, :span], decay[:, span:] + decay[:, :-span]), dim=1)
        span *= 2
    return top, bottom, factor


class ChannelMix(Mixer):
    """In the place of a feed-forward layer; its states are numbered after those of all time mixing."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, arch.num_layers + layer)
        hidden = arch.hidden_size
        self.time_mix_key, self.time_mix_receptance = (nn.Parameter(torch.zeros(hidden)) for _ in range(2))
        self.up_proj = nn.Linear(hidden, arch.intermediate_size, bias=False)
        self.receptance = nn.Linear(hidden, hidden, bias=False)
        self.down_proj = nn.Linear(arch.intermediate_size, hidden, bias=False)

    def forward(self, x: Tensor, recur: Recur) -> Tensor:
        """[…, E] to […, E]."""
        before = recur(self.layer, self, x)
        y = self.down_proj(F.relu(self.up_proj(mixed(x, before, self.time_mix_key))).square())
        return y * torch.sigmoid(self.receptance(mixed(x, before, self.time_mix_receptance)))  # type: ignore[no-any-return]

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        before, last = shifted(inputs[0], states[0], lengths_S)
        return before, (last, *states[1:])
