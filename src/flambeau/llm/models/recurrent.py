"""Recurrent layers: Mamba 1 and 2, short convolutions and gated delta nets.

Each has projections, which compute all tokens of a step alike, and a part that goes from token to token: `advance`.
`recur` gives it the tokens of every sequence and the state that the sequence has, and keeps the new state.

Shapes: … any leading dimensions · S sequences · Q tokens of each · E hidden · C channels · others as in scans.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.families.recurrence import StateShapes
from flambeau.llm.models.norms import MeanSquare, normalized
from flambeau.llm.models.scans import convolve, mask_padding, scan_delta, scan_mamba, scan_mamba2

States = tuple[Tensor, ...]  # [S, …], in float32


class Advance(Protocol):
    """A layer whose tokens depend on a state."""

    @property
    def state_shapes(self) -> StateShapes:
        """The shapes of a sequence's state."""

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        """Outputs [S, Q, …] for inputs [S, Q, …], and the new states.

        Only `lengths_S` tokens of each sequence count; None: all.
        """


class Recur(Protocol):
    """Arranges the tokens of a step by sequence, and keeps the states of sequences."""

    def __call__(self, layer: int, recurrence: Advance, *inputs: Tensor) -> Tensor:
        """From inputs [tokens, …] to outputs [tokens, …]."""


class GatedNorm(nn.Module):
    """An RMS norm over each of a few groups, and a gate before or after it; in float32."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        *,
        gates_first: bool,
        num_groups: int = 1,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        super().__init__()
        self.activation = activation  # of the gate
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon, self.gates_first, self.num_groups = epsilon, gates_first, num_groups
        self.mean_square: MeanSquare | None = None  # None: this rank has all channels of a group

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gate, x = self.activation(gate.float()), x.float()
        groups = by_head(x * gate if self.gates_first else x, self.num_groups)
        y = normalized(groups, self.epsilon, self.mean_square).flatten(-2) * self.weight.float()
        return (y if self.gates_first else y * gate).to(self.weight.dtype)


class Gate(nn.Module):
    """A gate without a norm, in float32."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (x.float() * F.silu(gate.float())).to(gate.dtype)


class Mixer(nn.Module):
    """What all kinds share: where the state is kept."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        assert arch.recurrence is not None
        self.layer, self.shape = layer, arch.recurrence

    @property
    def state_shapes(self) -> StateShapes:
        return self.shape.state_shapes


class RecurrentMixer(Mixer):
    """A mixer with a convolution over the last tokens."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        size, width = self.shape.conv_size, self.shape.conv_width
        self.conv1d = nn.Conv1d(size, size, width, groups=size, bias=self.shape.conv_bias)

    def convolve(self, x_SQC: Tensor, window: Tensor, lengths_S: Tensor | None) -> tuple[Tensor, Tensor]:
        return convolve(x_SQC, window, self.conv1d.weight, self.conv1d.bias, lengths_S)


def float32_parameter(*shape: int) -> nn.Parameter:
    """A parameter that is float32 whatever the type of the network: decays are exponentials of it."""
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32))


def by_head(x: Tensor, number: int) -> Tensor:
    """[…, C] to […, number, C / number]."""
    return x.reshape(*x.shape[:-1], number, -1)


class ShortConvolution(RecurrentMixer):
    """A convolution of a few tokens between two gates (LFM2)."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        size, bias = self.shape.inner_size, self.shape.projection_bias
        self.in_proj = nn.Linear(arch.hidden_size, 3 * size, bias=bias)
        self.out_proj = nn.Linear(size, arch.hidden_size, bias=bias)

    def forward(self, x: Tensor, recur: Recur) -> Tensor:
        """[…, E] to […, E]."""
        before, after, x = self.in_proj(x).chunk(3, dim=-1)
        return self.out_proj(after * recur(self.layer, self, before * x))  # type: ignore[no-any-return]

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        y, window = self.convolve(inputs[0], states[0], lengths_S)
        return y, (window,)


class Mamba2(RecurrentMixer):
    """A state-space layer whose decay is one number per head and token."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        shape = self.shape
        self.sizes = shape.inner_size, shape.conv_size, shape.num_heads
        self.in_proj = nn.Linear(arch.hidden_size, sum(self.sizes), bias=shape.projection_bias)
        self.dt_bias, self.A_log, self.D = (float32_parameter(shape.num_heads) for _ in range(3))
        self.norm = Gate() if shape.norm == "none" else self.gated_norm(arch.norm_epsilon)
        self.out_proj = nn.Linear(shape.inner_size, arch.hidden_size, bias=shape.projection_bias)

    def gated_norm(self, epsilon: float) -> GatedNorm:
        shape = self.shape
        is_first = shape.norm == "after_gate"
        return GatedNorm(shape.inner_size, epsilon, gates_first=is_first, num_groups=shape.norm_groups)

    def forward(self, x: Tensor, recur: Recur) -> Tensor:
        """[…, E] to […, E]."""
        gate, xbc, dt = self.project(x)
        y = self.out_proj(self.norm(recur(self.layer, self, xbc, dt), gate))
        return y if self.shape.output_scale == 1.0 else y * self.shape.output_scale  # type: ignore[no-any-return]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate, the input of the convolution, and the time steps."""
        shape = self.shape
        y = self.in_proj(x if shape.input_scale == 1.0 else x * shape.input_scale)
        if shape.part_scales:
            groups = shape.num_groups * shape.state_size
            parts = y.split((shape.inner_size, shape.inner_size, groups, groups, shape.num_heads), dim=-1)
            y = torch.cat([part * scale for part, scale in zip(parts, shape.part_scales, strict=True)], dim=-1)
        gate, xbc, dt = y.split(self.sizes, dim=-1)
        return gate, xbc, dt

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        xbc, dt = inputs
        shape, parts = self.shape, self.shape.num_groups * self.shape.state_size
        xbc, window = self.convolve(xbc, states[0], lengths_S)
        x, b, c = torch.split(F.silu(xbc).float(), [shape.inner_size, parts, parts], dim=-1)
        x = by_head(x, shape.num_heads)
        b, c = (by_head(part, shape.num_groups) for part in (b, c))
        dt = F.softplus(dt.float() + self.dt_bias).clamp(*shape.time_step_limits)
        y, state = scan_mamba2(x, mask_padding(dt, lengths_S), -self.A_log.exp(), b, c, states[1])
        return (y + x * self.D.unsqueeze(-1)).flatten(-2), (window, state)


class Mamba(RecurrentMixer):
    """A state-space layer whose decay is a number per channel, state and token."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        shape, bias = self.shape, self.shape.projection_bias
        size, rank, state = shape.inner_size, shape.time_step_rank, shape.state_size
        self.sizes = rank, state, state
        self.in_proj = nn.Linear(arch.hidden_size, 2 * size, bias=bias)
        self.x_proj = nn.Linear(size, sum(self.sizes), bias=False)
        self.dt_proj = nn.Linear(rank, size)
        self.A_log, self.D = float32_parameter(size, state), float32_parameter(size)
        self.out_proj = nn.Linear(size, arch.hidden_size, bias=bias)
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (inner_norm(arch, size) for size in self.sizes)

    def forward(self, x: Tensor, recur: Recur) -> Tensor:
        """[…, E] to […, E]."""
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        y = recur(self.layer, self, x) * F.silu(gate.float())
        return self.out_proj(y.to(gate.dtype))  # type: ignore[no-any-return]

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        x, window = self.convolve(inputs[0], states[0], lengths_S)
        x = F.silu(x)
        dt, b, c = self.x_proj(x).split(self.sizes, dim=-1)
        b, c = self.b_layernorm(b).float(), self.c_layernorm(c).float()
        dt = mask_padding(F.softplus(self.dt_proj(self.dt_layernorm(dt)).float()), lengths_S)
        y, state = scan_mamba(x.float(), dt, -self.A_log.exp(), b, c, states[1])
        return y + x.float() * self.D, (window, state)


def inner_norm(arch: Architecture, size: int) -> nn.Module:
    """A norm inside of a Mamba 1 layer."""
    assert arch.recurrence is not None
    kind = arch.recurrence.inner_norms
    if kind == "none":
        return nn.Identity()
    epsilon = arch.recurrence.inner_epsilon
    return nn.RMSNorm(size, arch.norm_epsilon if epsilon is None else epsilon, kind == "learned")


class DeltaNet(RecurrentMixer):
    """Linear attention by the gated delta rule (Qwen3-Next): a token replaces what the state has for its key."""

    in_proj_qkvz: nn.Module
    in_proj_ba: nn.Module
    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        shape = self.shape
        self.shared = shape.num_heads // shape.num_groups  # value heads of a key head
        # Rows are grouped by key head: its query, its key, its values, their gates; and its betas, its time steps.
        self.sizes = shape.state_size, shape.state_size, self.shared * shape.head_size, self.shared * shape.head_size
        hidden, heads = arch.hidden_size, shape.num_heads
        if shape.is_grouped:
            self.in_proj_qkvz = nn.Linear(hidden, shape.num_groups * sum(self.sizes), bias=False)
            self.in_proj_ba = nn.Linear(hidden, 2 * heads, bias=False)
        else:
            self.in_proj_qkv = nn.Linear(hidden, shape.conv_size, bias=False)
            self.in_proj_z = nn.Linear(hidden, shape.inner_size, bias=False)
            self.in_proj_b, self.in_proj_a = (nn.Linear(hidden, heads, bias=False) for _ in range(2))
        self.dt_bias, self.A_log = float32_parameter(shape.num_heads), float32_parameter(shape.num_heads)
        epsilon = arch.norm_epsilon if shape.inner_epsilon is None else shape.inner_epsilon
        activation = torch.sigmoid if shape.has_sigmoid_gates else F.silu
        self.norm = GatedNorm(shape.head_size, epsilon, gates_first=False, activation=activation)
        self.out_proj = nn.Linear(shape.inner_size, arch.hidden_size, bias=False)

    def forward(self, x: Tensor, recur: Recur) -> Tensor:
        """[…, E] to […, E]."""
        qkv, gate, beta, dt = self.project_groups(x) if self.shape.is_grouped else self.project(x)
        y = recur(self.layer, self, qkv, beta, dt)
        return self.out_proj(self.norm(y, gate.reshape(y.shape)).flatten(-2))  # type: ignore[no-any-return]

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values; gates; betas; time steps."""
        return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)

    def project_groups(self, x: Tensor) -> tuple[Tensor, ...]:
        """The same, from rows that are grouped by key head."""
        groups = self.shape.num_groups
        q, k, v, gate = self.in_proj_qkvz(x).unflatten(-1, (groups, -1)).split(self.sizes, dim=-1)
        beta, dt = self.in_proj_ba(x).unflatten(-1, (groups, 2, self.shared)).unbind(-2)
        qkv = torch.cat([part.flatten(-2) for part in (q, k, v)], dim=-1)
        return qkv, gate, beta.flatten(-2), dt.flatten(-2)

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        qkv, beta, dt = inputs
        shape, keys = self.shape, self.shape.num_groups * self.shape.state_size
        qkv, window = self.convolve(qkv, states[0], lengths_S)
        q, k, v = torch.split(F.silu(qkv).float(), [keys, keys, shape.inner_size], dim=-1)
        q, k = (by_head(part, shape.num_groups) for part in (q, k))
        q, k = (unit_vectors(part).repeat_interleave(self.shared, dim=2) for part in (q, k))
        v = by_head(v, shape.num_heads)
        log_decay = mask_padding(-self.A_log.exp() * F.softplus(dt.float() + self.dt_bias), lengths_S)
        beta = mask_padding(beta.float().sigmoid() * shape.max_beta, lengths_S)
        y, state = scan_delta(q * shape.state_size**-0.5, k, v, log_decay, beta, states[1])
        return y, (window, state)


def unit_vectors(x: Tensor) -> Tensor:
    """Vectors of length 1."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)
