"""experts_of: a router and its experts as the structure that the C++ kernels read."""

from __future__ import annotations

import ctypes
from typing import Any

from flambeau.llm.backends.cpu.bindings import ACTIVATIONS, CExperts, CMatrix
from flambeau.llm.backends.cpu.packed_experts import LEAVES
from flambeau.llm.backends.cpu.weight_pointers import WeightPointers
from flambeau.llm.models.architecture import RouterKind
from flambeau.llm.models.feed_forward import PlainMLP
from flambeau.llm.models.moe import SparseMLP

ROUTER_KINDS: dict[RouterKind, int] = {  # as in csrc/experts.h
    "softmax": 0,
    "grouped_softmax": 0,
    "biased_softmax": 0,
    "biased_sigmoid": 1,
    "sigmoid": 2,
    "wide_sigmoid": 2,
    "late_sigmoid": 2,
    "sparse_mixer": 3,
}
GROUPED = ("grouped_softmax", "biased_sigmoid")  # the routers to which groups of experts make a difference


def experts_of(mlp: SparseMLP, pointers: WeightPointers) -> Any:
    experts, shared, shared_gate = mlp.experts, mlp.shared_expert, mlp.shared_expert_gate
    weight, bias = mlp.gate.weight.float(), mlp.gate.bias
    gate_up, down = (
        pointers.expert_matrices(getattr(experts, leaf), getattr(experts, f"{leaf}_bias")) for leaf in LEAVES
    )
    made = CExperts(
        router=pointers.plain(weight, None if bias is None else bias.float()),
        score_bias=pointers.pointer(None if mlp.score_bias is None else mlp.score_bias.detach().float()),
        gate_up=gate_up,
        down=down,
        count=len(weight),
        num_chosen=mlp.settings.num_chosen,
        router_kind=ROUTER_KINDS[mlp.router],
        normalizes=mlp.normalizes_experts,
        activation=ACTIVATIONS.index(experts.kind),
        weight_scale=mlp.routed_scale,
        num_groups=mlp.settings.num_groups if mlp.router in GROUPED else 1,
        num_chosen_groups=mlp.settings.num_chosen_groups,
        scales_inputs=experts.scales_inputs,
        jitter=mlp.settings.jitter,
        scales=pointers.pointer(None if mlp.expert_scales is None else mlp.expert_scales.detach().float()),
    )
    if experts.limit is not None and experts.limit.kind == "activated":
        made.late_limit = experts.limit.size
    elif experts.limit is not None:
        made.limit, made.alpha = experts.limit.size, experts.limit.alpha
    if shared is not None:
        made.shared_gate_up, made.shared_down = feed_forward_of(shared, pointers)
    if shared_gate is not None:
        made.shared_gate = pointers.matrix(shared_gate)
    if mlp.fc1_latent_proj is not None and mlp.fc2_latent_proj is not None:
        made.latent_in, made.latent_out = map(pointers.matrix, (mlp.fc1_latent_proj, mlp.fc2_latent_proj))
    pointers.keep(made)
    return ctypes.pointer(made)


def feed_forward_of(mlp: Any, pointers: WeightPointers) -> tuple[CMatrix, CMatrix]:
    """The matrices before an activation and after it."""
    up = mlp.up_proj if isinstance(mlp, PlainMLP) else mlp.gate_up_proj
    return pointers.matrix(up), pointers.matrix(mlp.down_proj)
