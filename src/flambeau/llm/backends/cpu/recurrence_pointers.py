"""recurrence_of: the weights and states of a recurrent layer as the structure that the C++ kernels read.

Weights are arranged for the kernels: decays are computed once, convolutions have their channels side by side, and the
norm of a delta net has weights for every head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.backends.cpu.bindings import ACTIVATIONS, RECURRENT_KINDS, CNorm, CRecurrence
from flambeau.llm.backends.cpu.weight_pointers import WeightPointers
from flambeau.llm.models.gated_recurrence import SHARPNESS, GatedRecurrence
from flambeau.llm.models.kimi_delta import KimiDeltaNet
from flambeau.llm.models.lightning_attention import LightningAttention
from flambeau.llm.models.receptance import ChannelMix, TimeMix
from flambeau.llm.models.recurrent import DeltaNet, GatedNorm, Mamba, Mamba2, Mixer, ShortConvolution
from flambeau.llm.models.rope import Rotation

MIXER_NORMS = ("norm", "dt_layernorm", "b_layernorm", "c_layernorm")  # of all kinds


def other_parts(mixer: Mixer) -> list[nn.Module]:
    """The modules of a mixer that are no linear layers."""
    named = [getattr(mixer, name, None) for name in ("conv1d", *MIXER_NORMS)]
    return [mixer, *(module for module in named if module is not None)]


def recurrence_of(mixer: Any, states: tuple[Tensor, ...], rotation: Rotation, pointers: WeightPointers) -> CRecurrence:
    """The structure of one layer; it points to what `pointers` keeps."""
    shape = mixer.shape
    made = CRecurrence(
        kind=RECURRENT_KINDS.index(shape.kind),
        channels=shape.conv_size,
        width=shape.conv_width,
        inner=shape.inner_size,
        heads=shape.num_heads,
        head_size=shape.head_size,
        state_size=shape.state_size,
        groups=shape.num_groups,
        rank=shape.time_step_rank,
        norm_groups=1,
        out=pointers.matrix(mixer.out_proj),
        epsilon=0.0,
        max_beta=shape.max_beta,
        input_scale=1.0,
        output_scale=1.0,
    )
    if isinstance(mixer, LightningAttention):
        made.states = pointers.pointer(states[0])
        fill_lightning(made, mixer, rotation, pointers)
        return made
    if isinstance(mixer, TimeMix):
        fill_time_mix(made, mixer, states, pointers)
        return made
    convolution = mixer.conv1d
    made.conv_weight = pointers.pointer(convolution.weight.detach().float().squeeze(1).t())
    made.conv_bias = pointers.pointer(None if convolution.bias is None else convolution.bias.detach().float())
    made.windows = pointers.pointer(states[0])
    if len(states) > 1:
        made.states = pointers.pointer(states[1])
    if isinstance(mixer, GatedRecurrence):
        fill_gated(made, mixer, states, rotation, pointers)
        return made
    if len(states) > 1:
        made.decay = pointers.pointer(-mixer.A_log.detach().float().exp())
    FILLED[type(mixer)](made, mixer, pointers)
    return made


def fill_short_convolution(made: CRecurrence, mixer: ShortConvolution, pointers: WeightPointers) -> None:
    made.in_ = pointers.matrix(mixer.in_proj)


def fill_mamba(made: CRecurrence, mixer: Mamba, pointers: WeightPointers) -> None:
    made.in_, made.parameters, made.time = map(pointers.matrix, (mixer.in_proj, mixer.x_proj, mixer.dt_proj))
    made.skip = pointers.pointer(mixer.D.detach().float())
    norms = mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm
    made.time_norm, made.b_norm, made.c_norm = (inner_norm(norm, pointers) for norm in norms)
    made.epsilon = getattr(mixer.dt_layernorm, "eps", None) or 0.0


def inner_norm(norm: nn.Module, pointers: WeightPointers) -> CNorm:
    if not isinstance(norm, nn.RMSNorm):
        return CNorm()
    weight = torch.ones(norm.normalized_shape) if norm.weight is None else norm.weight.detach().float()
    return CNorm(pointers.pointer(weight))


def fill_mamba2(made: CRecurrence, mixer: Mamba2, pointers: WeightPointers) -> None:
    shape, norm = mixer.shape, mixer.norm
    made.in_ = pointers.matrix(mixer.in_proj)
    made.time_bias, made.skip = (
        pointers.pointer(mixer.dt_bias.detach().float()),
        pointers.pointer(mixer.D.detach().float()),
    )
    made.time_low, made.time_high = shape.time_step_limits
    made.input_scale, made.output_scale = shape.input_scale, shape.output_scale
    if shape.part_scales:
        groups = shape.num_groups * shape.state_size
        sizes = torch.tensor([shape.inner_size, shape.inner_size, groups, groups, shape.num_heads])
        made.part_scales = pointers.pointer(torch.tensor(shape.part_scales).repeat_interleave(sizes))
    if isinstance(norm, GatedNorm):
        made.norm, made.epsilon = CNorm(pointers.pointer(norm.weight.detach().float())), norm.epsilon
        made.norm_groups, made.gates_first = norm.num_groups, norm.gates_first


def fill_delta_net(made: CRecurrence, mixer: DeltaNet, pointers: WeightPointers) -> None:
    shape = mixer.shape
    made.is_grouped = shape.is_grouped
    if shape.is_grouped:
        made.in_, made.beta = map(pointers.matrix, (mixer.in_proj_qkvz, mixer.in_proj_ba))
    else:
        layers = mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a
        made.in_, made.gate, made.beta, made.time = map(pointers.matrix, layers)
    made.time_bias = pointers.pointer(mixer.dt_bias.detach().float())
    weight = mixer.norm.weight.detach().float().repeat(shape.num_heads)
    made.norm, made.epsilon, made.norm_groups = CNorm(pointers.pointer(weight)), mixer.norm.epsilon, shape.num_heads


def fill_kimi_delta(made: CRecurrence, mixer: KimiDeltaNet, pointers: WeightPointers) -> None:
    shape = mixer.shape
    made.in_, made.beta = map(pointers.matrix, (mixer.in_proj_qkv, mixer.in_proj_b))
    if shape.gate_rank:
        layers = mixer.g_a_proj, mixer.g_b_proj, mixer.f_a_proj, mixer.f_b_proj
        made.gate, made.gate_up, made.time, made.time_up = map(pointers.matrix, layers)
    else:
        made.gate, made.time = map(pointers.matrix, (mixer.g_proj, mixer.f_proj))
    made.is_grouped, made.lowest_log_decay = False, shape.lowest_log_decay or 0.0
    made.time_bias = pointers.pointer(mixer.dt_bias.detach().float())
    weight = mixer.norm.weight.detach().float().repeat(shape.num_heads)
    made.norm, made.epsilon, made.norm_groups = CNorm(pointers.pointer(weight)), mixer.norm.epsilon, shape.num_heads


def fill_lightning(made: CRecurrence, mixer: LightningAttention, rotation: Rotation, pointers: WeightPointers) -> None:
    shape, scales = mixer.shape, rotation.arch.stream_scales
    made.in_, made.gate = map(pointers.matrix, (mixer.in_proj_qkv, mixer.in_proj_z))
    made.decay = pointers.pointer(mixer.log_decays(torch.device("cpu")).exp())
    made.is_grouped, made.activates = shape.is_grouped, shape.activates_inputs
    made.query_scale, made.half = shape.query_scale, shape.rotary_size // 2
    if shape.rotary_size:
        made.cos, made.sin = pointers.pointer(rotation.cos), pointers.pointer(rotation.sin)
    if mixer.q_norm is not None and mixer.k_norm is not None:
        made.b_norm, made.c_norm = (
            CNorm(pointers.pointer(norm.weight.detach().float())) for norm in (mixer.q_norm, mixer.k_norm)
        )
    made.norm = CNorm(pointers.pointer(mixer.norm.weight.detach().float()))
    made.epsilon, made.norm_groups = mixer.norm.epsilon, mixer.norm.num_groups
    made.output_scale = scales[1][1] if scales else 1.0


def fill_gated(
    made: CRecurrence, mixer: GatedRecurrence, states: tuple[Tensor, ...], rotation: Rotation, pointers: WeightPointers
) -> None:
    made.in_, made.gate = map(pointers.matrix, (mixer.in_proj_x, mixer.in_proj_y))
    made.decay = pointers.pointer(-SHARPNESS * F.softplus(mixer.recurrent_param.detach().float()))
    weights = mixer.input_gate_weight, mixer.recurrent_gate_weight
    made.input_gates, made.decay_gates = (pointers.head_matrices(weight_HIO.transpose(1, 2)) for weight_HIO in weights)
    made.input_bias, made.time_bias = (
        pointers.pointer(bias.detach().float().flatten()) for bias in (mixer.input_gate_bias, mixer.recurrent_gate_bias)
    )
    made.activation = ACTIVATIONS.index(rotation.arch.activation)
    made.begun = pointers.pointer(states[2])


def fill_time_mix(made: CRecurrence, mixer: TimeMix, states: tuple[Tensor, ...], pointers: WeightPointers) -> None:
    made.in_, made.beta, made.gate = map(pointers.matrix, (mixer.in_proj_k, mixer.in_proj_v, mixer.in_proj_r))
    made.windows, made.states, made.denominators, made.log_factors = map(pointers.pointer, states)
    shares = mixer.time_mix_key, mixer.time_mix_value, mixer.time_mix_receptance
    made.key_share, made.value_share, made.receptance_share = (
        pointers.pointer(share.detach().float()) for share in shares
    )
    made.decay = pointers.pointer(mixer.time_decay.detach().float().exp())
    made.skip = pointers.pointer(mixer.time_first.detach().float())


def channel_mix_of(mixer: ChannelMix, states: tuple[Tensor, ...], pointers: WeightPointers) -> CRecurrence:
    """The structure of a feed-forward layer that reads the token before."""
    layers = {"in_": mixer.up_proj, "out": mixer.down_proj, "gate": mixer.receptance}
    shares = {"key_share": mixer.time_mix_key, "receptance_share": mixer.time_mix_receptance}
    return CRecurrence(
        kind=RECURRENT_KINDS.index("channel_mix"),
        windows=pointers.pointer(states[0]),
        input_scale=1.0,
        **{name: pointers.matrix(layer) for name, layer in layers.items()},
        **{name: pointers.pointer(share.detach().float()) for name, share in shares.items()},
    )


FILLED: dict[type, Any] = {
    ShortConvolution: fill_short_convolution,
    Mamba: fill_mamba,
    Mamba2: fill_mamba2,
    DeltaNet: fill_delta_net,
    KimiDeltaNet: fill_kimi_delta,
}
