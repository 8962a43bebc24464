"""RecurrentPart: what a recurrent layer does between its projections, by the kernels; the plain one is its `forward`.

Shapes: T tokens of the step · E hidden · C channels of the convolution · I inner channels · N outputs of a projection
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor, nn

from flambeau.llm.backends.cuda import recurrent_scans
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.projection import Projection
from flambeau.llm.backends.cuda.recurrent_convolution import KernelConvolution
from flambeau.llm.backends.cuda.recurrent_outputs import KernelGatedNorm, split
from flambeau.llm.backends.cuda.recurrent_sequences import CHUNK, Sequences
from flambeau.llm.backends.cuda.recurrent_updates import (
    launch_options,
    new_outputs,
    rows_of,
    update_channels,
    update_heads,
    update_keys,
)
from flambeau.llm.executor.state_cache import Slots
from flambeau.llm.models.families.recurrence import Recurrence
from flambeau.llm.models.recurrent import DeltaNet, Gate, GatedNorm, Mamba, Mamba2, ShortConvolution

MIXERS = ShortConvolution, Mamba, Mamba2, DeltaNet
CLASSES = (*MIXERS, GatedNorm, Gate, nn.Conv1d, nn.Identity, nn.RMSNorm)  # which these kernels replace
MakeLinear = Callable[[nn.Module], KernelLinear]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentPart:
    """From the outputs of a layer's first projection to the inputs of its last one."""

    convolution: KernelConvolution
    second: KernelLinear | None = None  # a projection of its own, of the layer's normalized inputs
    needs_normal: bool = False  # it has more than one

    def __call__(
        self, normal_TE: Tensor, projections: Tensor, sequences: Sequences, second: Tensor | None = None
    ) -> Tensor:
        """Projections [T, N], or parts of their sums, to [T, I]. States move on.

        Without the outputs of the `second` projection, it is computed here.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionPart(RecurrentPart):
    """A short convolution between two gates."""

    def __call__(
        self, normal_TE: Tensor, projections: Tensor, sequences: Sequences, second: Tensor | None = None
    ) -> Tensor:
        return self.convolution(Projection(projections), sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Part(RecurrentPart):
    """Mamba 2."""

    shape: Recurrence
    time_bias: Tensor
    decay: Tensor
    skip: Tensor
    states: Tensor
    norm: KernelGatedNorm | None  # None: gates only
    gate_scale: float
    time_scale: float

    def __call__(
        self, normal_TE: Tensor, projections: Tensor, sequences: Sequences, second: Tensor | None = None
    ) -> Tensor:
        x = Projection(projections)
        mixed = self.convolution(x, sequences)
        y = self.update(mixed, x, sequences)
        return y if self.norm is None else self.norm(y, x)

    def update(self, mixed: Tensor, x: Projection, sequences: Sequences) -> Tensor:
        """The outputs [T, I] of the recurrence, in float32 if a norm follows, else after their gates."""
        shape, padded = self.shape, triton.next_power_of_2(self.shape.state_size)
        gates = self.norm is None
        y = new_outputs(mixed, shape.inner_size, mixed.dtype if gates else torch.float32, sequences)
        is_prompt = sequences.is_prompt
        # A product on tensor cores needs 16 numbers.
        padded = max(padded, recurrent_scans.MIN_ROWS) if is_prompt else padded
        rows = recurrent_scans.rows_of(shape.head_size, padded) if is_prompt else rows_of(shape.head_size, padded)
        launch: Any = recurrent_scans.scan_heads if is_prompt else update_heads
        launch[(shape.num_heads, sequences.num_sequences, triton.cdiv(shape.head_size, rows))](
            mixed, x.rows, self.time_bias, self.decay, self.skip, self.states,
            sequences.slots_S, sequences.positions_T, sequences.starts, *([] if is_prompt else [sequences.ends_T]),
            y, sequences.num_tokens, self.time_scale, self.gate_scale, *shape.time_step_limits,
            HEADS=shape.num_heads, SIZE=shape.head_size, STATE=shape.state_size, STATE_PADDED=padded,
            GROUPS=shape.num_groups, CHANNELS=shape.conv_size, OUTPUTS=x.width, PARTS=x.num_parts,
            TIMES_AT=shape.inner_size + shape.conv_size, ROWS=rows, GATES=gates, dtype=triton_type(mixed.dtype),
            **(scan_options(mixed.dtype, recurrent_scans.chunk_of(padded)) if is_prompt else launch_options(sequences)),
        )  # fmt: skip
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaPart(RecurrentPart):
    """Mamba 1, with the projections of its time steps, B and C."""

    shape: Recurrence
    parameters: KernelLinear
    times: KernelLinear
    gains: tuple[Tensor, Tensor, Tensor] | None  # of the norms of time steps, B and C
    epsilon: float
    decay: Tensor
    skip: Tensor
    states: Tensor

    def __call__(
        self, normal_TE: Tensor, projections: Tensor, sequences: Sequences, second: Tensor | None = None
    ) -> Tensor:
        shape, x = self.shape, Projection(projections)
        mixed = self.convolution(x, sequences)
        found = Projection(self.parameters(mixed))
        ranks, parameters = split(found, shape.time_step_rank, self.gains, self.epsilon, mixed.dtype)
        times = Projection(self.times(ranks))
        y = new_outputs(mixed, shape.inner_size, mixed.dtype, sequences)
        padded = triton.next_power_of_2(shape.state_size)
        rows = min(rows_of(shape.inner_size, padded), MAMBA_CHANNELS)
        launch: Any = update_channels
        launch[(triton.cdiv(shape.inner_size, rows), sequences.num_sequences)](
            mixed, x.rows, times.rows, parameters, self.decay, self.skip, self.states,
            sequences.slots_S, sequences.positions_T, sequences.starts, sequences.ends_T, y, sequences.num_tokens,
            CHANNELS=shape.inner_size, STATE=shape.state_size, STATE_PADDED=padded, OUTPUTS=x.width,
            PARTS=x.num_parts, TIME_PARTS=times.num_parts, ROWS=rows, **launch_options(sequences),
        )  # fmt: skip
        return y


MAMBA_CHANNELS = 32  # of a program: there are thousands of them, and few numbers of each


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPart(RecurrentPart):
    """A gated delta net."""

    shape: Recurrence
    gates: KernelLinear | None  # None: they are among the outputs of the first projection
    second: KernelLinear  # betas
    times: KernelLinear | None  # None: they are among the betas
    time_bias: Tensor
    decay: Tensor
    states: Tensor
    norm: KernelGatedNorm

    def __call__(
        self, normal_TE: Tensor, projections: Tensor, sequences: Sequences, second: Tensor | None = None
    ) -> Tensor:
        x = Projection(projections)
        gates = x if self.gates is None else Projection(self.gates(normal_TE))
        betas = Projection(self.second(normal_TE) if second is None else second)
        times = betas if self.times is None else Projection(self.times(normal_TE))
        mixed = self.convolution(x, sequences)
        if betas.num_parts != times.num_parts:  # their weights are of different types
            betas, times = (each.whole(mixed.dtype) for each in (betas, times))
        return self.norm(self.update(mixed, betas, times, sequences), gates)

    def update(self, mixed: Tensor, betas: Projection, times: Projection, sequences: Sequences) -> Tensor:
        """The outputs [T, I] of the recurrence, in float32."""
        shape, padded = self.shape, triton.next_power_of_2(self.shape.state_size)
        shared = shape.num_heads // shape.num_groups
        y = new_outputs(mixed, shape.inner_size, torch.float32, sequences)
        sizes = {
            "HEADS": shape.num_heads, "KEY": shape.state_size, "GROUPS": shape.num_groups, "CHANNELS": shape.conv_size,
            "OUTPUTS": betas.width, "PARTS": betas.num_parts, "STRIDE": 2 * shared if self.times is None else shared,
            "TIMES_AT": shared if self.times is None else 0, "dtype": triton_type(mixed.dtype),
        }  # fmt: skip
        given = mixed, betas.rows, times.rows, self.time_bias, self.decay
        places = self.states, sequences.slots_S, sequences.positions_T, sequences.starts
        num_tokens, scales = sequences.num_tokens, (shape.max_beta, shape.state_size**-0.5)
        launch: Any
        if not sequences.is_prompt:
            columns, launch = rows_of(shape.head_size, padded), update_keys
            launch[(shape.num_heads, sequences.num_sequences, triton.cdiv(shape.head_size, columns))](
                *given, *places, sequences.ends_T, y, num_tokens, *scales,
                SIZE=shape.head_size, KEY_PADDED=padded, COLUMNS=columns, **sizes, **launch_options(sequences),
            )  # fmt: skip
            return y
        assert sequences.chunks_M2 is not None
        padded = max(padded, recurrent_scans.MIN_ROWS)  # a product on tensor cores needs 16 numbers
        sizes |= {"KEY_PADDED": padded, **scan_options(mixed.dtype, CHUNK)}
        links = torch.empty(num_tokens, shape.num_heads, CHUNK, dtype=torch.float32, device=mixed.device)
        launch = recurrent_scans.invert_links
        launch[(shape.num_heads, len(sequences.chunks_M2))](
            *given, sequences.chunks_M2, sequences.starts, links, num_tokens, shape.max_beta, **sizes
        )
        columns, launch = recurrent_scans.rows_of(shape.head_size, padded), recurrent_scans.scan_keys
        launch[(shape.num_heads, sequences.num_sequences, triton.cdiv(shape.head_size, columns))](
            *given, *places, links, y, num_tokens, *scales, SIZE=shape.head_size, COLUMNS=columns, **sizes
        )
        return y


def scan_options(dtype: torch.dtype, chunk: int) -> dict[str, Any]:
    """Products of float32 numbers are rounded where the network's own numbers are."""
    precision = "ieee" if dtype == torch.float32 else "tf32"
    return {"CHUNK": chunk, "PRECISION": precision, "num_warps": 8, "num_stages": 1}


def triton_type(dtype: torch.dtype) -> Any:
    return getattr(triton.language, str(dtype).removeprefix("torch."))


def first_projection(mixer: Any) -> nn.Module:
    """The layer whose outputs a part takes."""
    if isinstance(mixer, DeltaNet):
        return mixer.in_proj_qkvz if mixer.shape.is_grouped else mixer.in_proj_qkv
    return mixer.in_proj  # type: ignore[no-any-return]


def recurrent_part(mixer: Any, slots: Slots, kernel_linear: MakeLinear) -> RecurrentPart:
    """What a layer does between its projections, with its part of the cache."""
    shape: Recurrence = mixer.shape
    convolution = {"weight": mixer.conv1d.weight, "bias": mixer.conv1d.bias, "windows": slots[0]}
    if isinstance(mixer, ShortConvolution):
        return ConvolutionPart(convolution=KernelConvolution(**convolution, is_gated=True))
    decay = -mixer.A_log.detach().float().exp()
    if isinstance(mixer, Mamba):
        norms = mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm
        return MambaPart(
            shape=shape,
            convolution=KernelConvolution(**convolution),
            parameters=kernel_linear(mixer.x_proj),
            times=kernel_linear(mixer.dt_proj),
            gains=inner_gains(norms, mixer),
            epsilon=getattr(norms[0], "eps", None) or 0.0,
            decay=decay,
            skip=mixer.D.detach(),
            states=slots[1],
        )
    if isinstance(mixer, Mamba2):
        return mamba2_part(mixer, convolution, slots[1], decay)
    assert isinstance(mixer, DeltaNet)
    return delta_part(mixer, convolution, slots[1], decay, kernel_linear)


def inner_gains(norms: tuple[Any, ...], mixer: Mamba) -> tuple[Tensor, Tensor, Tensor] | None:
    """The weights of norms inside of a layer; ones if they have none; None: there are no norms."""
    if isinstance(norms[0], nn.Identity):
        return None
    like = mixer.conv1d.weight
    found = [
        torch.ones(norm.normalized_shape, device=like.device) if norm.weight is None else norm.weight for norm in norms
    ]
    return found[0], found[1], found[2]


def mamba2_part(mixer: Mamba2, convolution: dict[str, Any], states: Tensor, decay: Tensor) -> Mamba2Part:
    shape, norm = mixer.shape, mixer.norm
    gate_scale, *middle, time_scale = shape.part_scales or (1.0,) * 5
    if shape.part_scales:
        numbers = shape.num_groups * shape.state_size
        scales = zip(middle, (shape.inner_size, numbers, numbers), strict=True)
        device = mixer.conv1d.weight.device
        convolution["scales"] = torch.cat([torch.full((size,), scale, device=device) for scale, size in scales])
    return Mamba2Part(
        shape=shape,
        convolution=KernelConvolution(**convolution, first=shape.inner_size),
        time_bias=mixer.dt_bias.detach(),
        decay=decay,
        skip=mixer.D.detach(),
        states=states,
        norm=None
        if isinstance(norm, Gate)
        else KernelGatedNorm(
            gain=norm.weight,
            epsilon=norm.epsilon,
            num_groups=norm.num_groups,
            gates_first=norm.gates_first,
            gate_scale=gate_scale,
        ),
        gate_scale=gate_scale,
        time_scale=time_scale,
    )


def delta_part(
    mixer: DeltaNet, convolution: dict[str, Any], states: Tensor, decay: Tensor, kernel_linear: MakeLinear
) -> DeltaPart:
    shape, norm = mixer.shape, mixer.norm
    size, values = shape.state_size, mixer.shared * shape.head_size
    stride = 2 * (size + values)
    if shape.is_grouped:
        convolution["groups"] = shape.num_groups * size, size, values, stride
    grouped = {"first": 2 * size + values, "shared": mixer.shared, "stride": stride} if shape.is_grouped else {}
    return DeltaPart(
        shape=shape,
        convolution=KernelConvolution(**convolution),
        gates=None if shape.is_grouped else kernel_linear(mixer.in_proj_z),
        second=kernel_linear(mixer.in_proj_ba if shape.is_grouped else mixer.in_proj_b),
        times=None if shape.is_grouped else kernel_linear(mixer.in_proj_a),
        time_bias=mixer.dt_bias.detach(),
        decay=decay,
        states=states,
        needs_normal=not shape.is_grouped,
        norm=KernelGatedNorm(
            gain=norm.weight,
            epsilon=norm.epsilon,
            num_groups=shape.num_heads,
            gates_first=norm.gates_first,
            **grouped,
        ),
    )
