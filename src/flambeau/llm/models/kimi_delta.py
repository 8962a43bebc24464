"""KimiDeltaNet: linear attention by the delta rule whose states decay by key channel (KDA of Kimi Linear and Ling 3).

It differs from a gated delta net in that: each number of a key has a decay of its own, and the gate is a sigmoid.

Shapes: … any leading dimensions · S sequences · Q tokens of each · E hidden · others as in scans.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.recurrent import (
    GatedNorm,
    Recur,
    RecurrentMixer,
    States,
    by_head,
    float32_parameter,
    unit_vectors,
)
from flambeau.llm.models.scans import mask_padding, scan_channel_delta


class KimiDeltaNet(RecurrentMixer):
    """As many heads of keys as of values, of one size; decays and gates may come from a narrow projection."""

    f_a_proj: nn.Module
    f_b_proj: nn.Module
    f_proj: nn.Module
    g_a_proj: nn.Module
    g_b_proj: nn.Module
    g_proj: nn.Module

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        shape, hidden = self.shape, arch.hidden_size
        size, rank = shape.inner_size, shape.gate_rank
        self.in_proj_qkv = nn.Linear(hidden, 3 * size, bias=False)
        self.in_proj_b = nn.Linear(hidden, shape.num_heads, bias=False)
        for name in ("f", "g"):  # of decays, and of gates
            if rank:
                self.add_module(f"{name}_a_proj", nn.Linear(hidden, rank, bias=False))
                self.add_module(f"{name}_b_proj", nn.Linear(rank, size, bias=False))
            else:
                self.add_module(f"{name}_proj", nn.Linear(hidden, size, bias=False))
        self.dt_bias, self.A_log = float32_parameter(size), float32_parameter(shape.num_heads)
        self.norm = GatedNorm(shape.head_size, arch.norm_epsilon, gates_first=False, activation=torch.sigmoid)
        self.out_proj = nn.Linear(size, hidden, bias=False)

    def forward(self, x: Tensor, recur: Recur) -> Tensor:
        """[…, E] to […, E]."""
        is_narrow = self.shape.gate_rank > 0
        decay = self.f_b_proj(self.f_a_proj(x)) if is_narrow else self.f_proj(x)
        gate = self.g_b_proj(self.g_a_proj(x)) if is_narrow else self.g_proj(x)
        y = recur(self.layer, self, self.in_proj_qkv(x), self.in_proj_b(x), decay)
        return self.out_proj(self.norm(y, gate.reshape(y.shape)).flatten(-2))  # type: ignore[no-any-return]

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        qkv, beta, decay = inputs
        shape = self.shape
        qkv, window = self.convolve(qkv, states[0], lengths_S)
        q, k, v = (by_head(part, shape.num_heads) for part in F.silu(qkv).float().chunk(3, dim=-1))
        log_decay = mask_padding(self.log_decay(decay), lengths_S)
        beta = mask_padding(beta.float().sigmoid(), lengths_S)
        q, k = unit_vectors(q) * shape.state_size**-0.5, unit_vectors(k)
        y, state = scan_channel_delta(q, k, v, log_decay, beta, states[1])
        return y, (window, state)

    def log_decay(self, x: Tensor) -> Tensor:
        """For the outputs […, H·K] of their projection: […, H, K]."""
        rates_H1 = self.A_log.exp().unsqueeze(-1)
        x = by_head(x.float() + self.dt_bias, self.shape.num_heads)
        lowest = self.shape.lowest_log_decay
        return -rates_H1 * F.softplus(x) if lowest is None else lowest * torch.sigmoid(rates_H1 * x)
