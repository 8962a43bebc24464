"""LightningAttention: linear attention whose states decay by a constant of each head (MiniMax, Ling 2.5, Ring linear).

Shapes: … any leading dimensions · S sequences · Q tokens of each · E hidden · H heads · D head size
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.norms import RMSNorm
from flambeau.llm.models.recurrent import GatedNorm, Mixer, Recur, States, by_head
from flambeau.llm.models.rope import Rotations, rotate
from flambeau.llm.models.scans import mask_padding, scan_mamba2
from flambeau.llm.models.slopes import alibi_slopes


class LightningAttention(Mixer):
    """Queries, keys and values of as many heads; a norm over all heads or groups of them, then a gate."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        shape, hidden = self.shape, arch.hidden_size
        size = shape.inner_size
        self.in_proj_qkv = nn.Linear(hidden, 3 * size, bias=False)
        self.in_proj_z = nn.Linear(hidden, size, bias=False)
        epsilon = arch.norm_epsilon if shape.inner_epsilon is None else shape.inner_epsilon
        self.norm = GatedNorm(size, epsilon, gates_first=False, num_groups=shape.norm_groups, activation=torch.sigmoid)
        self.out_proj = nn.Linear(size, hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_size, arch.norm_epsilon) if shape.normalizes_qk else None
        self.k_norm = RMSNorm(shape.head_size, arch.norm_epsilon) if shape.normalizes_qk else None
        # Slopes depend on the number of all heads; a rank has some of them.
        self.num_all_heads, self.first_head = shape.num_heads, 0

    def forward(self, x: Tensor, recur: Recur, rotations: Rotations) -> Tensor:
        """[…, E] to […, E]."""
        shape = self.shape
        qkv = self.in_proj_qkv(x)
        qkv = F.silu(qkv) if shape.activates_inputs else qkv
        if shape.is_grouped:  # by head: its query, its key, its value
            q, k, v = by_head(qkv, shape.num_heads).chunk(3, dim=-1)
        else:
            q, k, v = (by_head(part, shape.num_heads) for part in qkv.chunk(3, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if shape.rotary_size:
            q, k = self.rotated(q, rotations), self.rotated(k, rotations)
        y = recur(self.layer, self, *(part.flatten(-2) for part in (q, k, v)))
        return self.out_proj(self.norm(y, self.in_proj_z(x)))  # type: ignore[no-any-return]

    def rotated(self, x: Tensor, rotations: Rotations) -> Tensor:
        """Heads […, H, D] of which the first coordinates are rotated."""
        first, rest = x.tensor_split([self.shape.rotary_size], dim=-1)
        return torch.cat((rotate(first, *rotations.ordinary), rest), dim=-1)

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        """As Mamba 2 with time steps of 1: the state is the sum of values times keys, which decays."""
        shape = self.shape
        q, k, v = (by_head(part.float(), shape.num_heads) for part in inputs)
        time = mask_padding(q.new_ones(q.shape[:3]), lengths_S)
        y, state = scan_mamba2(v, time, self.log_decays(q.device), k, q * shape.query_scale, states[0])
        return y.flatten(-2), (state,)

    def log_decays(self, device: torch.device) -> Tensor:
        """Of each head [H]: constants."""
        slopes = alibi_slopes(self.num_all_heads, device)[self.first_head : self.first_head + self.shape.num_heads]
        return -slopes * self.shape.slope_factors[self.layer]
