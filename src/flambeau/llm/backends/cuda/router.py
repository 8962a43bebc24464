"""The norm before a layer of experts and its router, for a few rows, in one Triton kernel.

Each program normalizes its row again, which costs less than a launch, and computes the scores of some experts. The last
program of a row chooses its experts. The plain version is normalize and SparseMLP.choose.

Shapes: T rows · E hidden · S parts of a sum · N experts · A experts of a row
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flambeau.llm.backends.cuda.launch import MAX_ROWS, overlap_options, wait_for_previous
from flambeau.llm.models.architecture import RouterKind
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.routers import WIDE

PROGRAMS = 256  # about two for each of the 132 multiprocessors of an H200
CHUNK = 4  # experts whose scores a program computes at a time: more need too many registers
LOWEST_KEY = tl.constexpr(-(2**31))
KINDS: frozenset[RouterKind] = frozenset(
    {"softmax", "grouped_softmax", "biased_softmax", "biased_sigmoid", "sigmoid", "wide_sigmoid"}
)


class Routed(NamedTuple):
    """Rows, and the experts that compute them."""

    x_TE: Tensor  # the residual stream
    y_TE: Tensor  # normalized
    chosen_TA: Tensor
    weights_TA: Tensor


@triton.jit  # type: ignore[untyped-decorator]
def in_best_groups(  # type: ignore[no-untyped-def]
    scores, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Which experts are in the best groups: by the best score of a group or, with PAIRS, the sum of the best two."""
    each: tl.constexpr = EXPERTS // GROUPS
    grouped = tl.reshape(scores, [GROUPS, each])
    best, number = tl.max(grouped, 1, return_indices=True)
    if PAIRS:
        is_best = tl.arange(0, each)[None, :] == number[:, None]
        best += tl.max(tl.where(is_best, -float("inf"), grouped), 1)
    group = tl.arange(0, GROUPS)
    is_chosen = tl.zeros([GROUPS], tl.int32)
    for _ in range(CHOSEN_GROUPS):
        chosen = tl.argmax(tl.where(is_chosen > 0, -float("inf"), best), 0)
        is_chosen = tl.where(group == chosen, 1, is_chosen)
    return tl.reshape(tl.broadcast_to(is_chosen[:, None], [GROUPS, each]), [EXPERTS]) > 0


@triton.jit
def order_of(scores):  # type: ignore[no-untyped-def]
    """Integers in the order of the scores."""
    bits = scores.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def choose(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, chosen_ptr, weights_ptr, routed_scale,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_PADDED: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORMALIZES: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """The experts of one row, by the scores that all of its programs have stored.

    Each warp has a copy of the scores [COPIES, N], so warps do not wait for each other. The maximum of integers in a
    warp is one instruction.
    """
    i = tl.arange(0, EXPERTS_PADDED)[None, :] + tl.zeros([COPIES, EXPERTS_PADDED], tl.int32)
    is_expert = i < EXPERTS
    logits = tl.load(logits_ptr + i, mask=is_expert, other=-float("inf"), cache_modifier=".cg")
    if SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-logits))
    else:
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
    scores = weights
    if HAS_BIAS:
        scores += tl.load(bias_ptr + i, mask=is_expert, other=0.0)
    # Not a number counts as the smallest one: chosen experts are always different.
    is_number = tl.min((logits == logits).to(tl.int32), 1)[:, None] > 0
    scores = tl.where(is_number, scores, -1.0e38)
    if GROUPS > 1:
        # Beyond the best groups, weights are 0, and sums with a bias less than any other.
        is_best = in_best_groups(tl.max(scores, 0), EXPERTS, GROUPS, CHOSEN_GROUPS, SIGMOID)[None, :]
        scores = tl.where(is_best, scores, -3.0e38 if HAS_BIAS else 0.0)
        if not HAS_BIAS:
            weights = tl.where(is_best, weights, 0.0)
    keys = order_of(tl.where(is_expert, scores, -float("inf")))
    bits = weights.to(tl.int32, bitcast=True)  # in the order of the weights, which are not negative
    slots = tl.arange(0, CHOSEN_PADDED)[None, :] + tl.zeros([COPIES, CHOSEN_PADDED], tl.int32)
    chosen = tl.zeros([COPIES, CHOSEN_PADDED], tl.int32)
    kept = tl.zeros([COPIES, CHOSEN_PADDED], tl.int32)
    for slot in range(CHOSEN):  # not unrolled: fetching long code takes longer
        best = tl.max(keys, 1)[:, None]
        number = tl.min(tl.where(keys == best, i, EXPERTS_PADDED), 1)[:, None]
        weight = tl.max(tl.where(i == number, bits, 0), 1)[:, None]
        chosen = tl.where(slots == slot, number, chosen)
        kept = tl.where(slots == slot, weight, kept)
        keys = tl.where(i == number, LOWEST_KEY, keys)
    kept = kept.to(tl.float32, bitcast=True)
    if NORMALIZES:
        kept = kept / tl.sum(kept, 1)[:, None]
    kept = tl.where(is_number, kept, float("nan"))
    tl.store(chosen_ptr + slots, chosen, mask=slots < CHOSEN)
    tl.store(weights_ptr + slots, kept * routed_scale, mask=slots < CHOSEN)


@triton.jit(do_not_specialize=["T"])  # type: ignore[untyped-decorator]
def normalize_and_route(  # type: ignore[no-untyped-def]
    x_ptr, sums_ptr, gain_ptr, kept_ptr, y_ptr, gate_ptr, gate_bias_ptr, bias_ptr, logits_ptr, counters_ptr,
    chosen_ptr, weights_ptr,
    epsilon, residual_scale, routed_scale, T,
    SIZE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    CHOSEN: tl.constexpr, CHOSEN_PADDED: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    EACH: tl.constexpr, CHUNK: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GATE_BIAS: tl.constexpr, NORMALIZES: tl.constexpr,
    COPIES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Add the parts of a sum to a row of the residual stream, normalize it, and compute the scores of some experts."""
    share, row = tl.program_id(0), tl.program_id(1)
    e = tl.arange(0, PADDED)
    is_element = e < SIZE
    gain = tl.load(gain_ptr + e, mask=is_element, other=0.0).to(tl.float32)
    experts = share * EACH + tl.arange(0, CHUNK)
    rows = gate_ptr + experts[:, None] * SIZE + e[None, :]
    gate = tl.load(rows, mask=is_element[None, :] & (experts < EXPERTS)[:, None], other=0.0)
    wait_for_previous(OVERLAPS)
    x = tl.load(x_ptr + row * SIZE + e, mask=is_element, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        sums = tl.load(sums_ptr + (part * T + row) * SIZE + e, mask=is_element, other=0.0)
        x += sums.to(tl.float32) * residual_scale
    kept = x.to(x_ptr.dtype.element_ty)
    x = kept.to(tl.float32)
    y = x * gain
    root = tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    if share == 0:
        # Not in place: the other programs of the row read it, too.
        tl.store(kept_ptr + row * SIZE + e, kept, mask=is_element)
        tl.store(y_ptr + row * SIZE + e, (y * root).to(y_ptr.dtype.element_ty), mask=is_element)
    for first in range(0, EACH, CHUNK):
        is_expert = experts + first < EXPERTS
        if first > 0:
            gate = tl.load(rows + first * SIZE, mask=is_element[None, :] & is_expert[:, None], other=0.0)
        logits = tl.sum(gate.to(tl.float32) * y[None, :], 1) * root
        if HAS_GATE_BIAS:
            logits += tl.load(gate_bias_ptr + experts + first, mask=is_expert, other=0.0).to(tl.float32)
        tl.store(logits_ptr + row * EXPERTS + experts + first, logits, mask=is_expert)
    tl.debug_barrier()
    num_before = tl.atomic_add(counters_ptr + row, 1, sem="acq_rel", scope="gpu")
    if num_before == tl.num_programs(0) - 1:
        choose(
            logits_ptr + row * EXPERTS, bias_ptr, chosen_ptr + row * CHOSEN, weights_ptr + row * CHOSEN, routed_scale,
            EXPERTS, EXPERTS_PADDED, CHOSEN, CHOSEN_PADDED, GROUPS, CHOSEN_GROUPS, SIGMOID, HAS_BIAS, NORMALIZES,
            COPIES,
        )  # fmt: skip


def can_route(mlp: SparseMLP) -> bool:
    """Whether the kernel chooses as the router does."""
    groups, num_experts = groups_of(mlp)[0], mlp.gate.weight.shape[0]
    can_group = is_power(groups) and is_power(num_experts) and num_experts > groups
    return mlp.router in KINDS and (groups == 1 or can_group)


def groups_of(mlp: SparseMLP) -> tuple[int, int]:
    """Of how many groups a router chooses, and how many it chooses first."""
    settings = mlp.settings
    has_groups = mlp.router in ("grouped_softmax", "biased_sigmoid")
    return (settings.num_groups, settings.num_chosen_groups) if has_groups else (1, 1)


def is_power(number: int) -> bool:
    """Of two."""
    return number & (number - 1) == 0


def route(
    x_TE: Tensor,
    sums: Tensor | None,
    gain_E: Tensor,
    epsilon: float,
    mlp: SparseMLP,
    counters_T: Tensor,
    residual_scale: float = 1.0,
) -> Routed:
    """Rows after the sums [T, E] or [S, T, E] were added, normalized, and their experts; `counters_T` are zeros."""
    num_rows, size = x_TE.shape
    num_experts, num_chosen = mlp.gate.weight.shape[0], mlp.settings.num_chosen
    each = experts_of_a_program(num_experts, num_rows)
    groups, chosen_groups = groups_of(mlp)
    gate_bias = None if mlp.router in WIDE else mlp.gate.bias
    warps = num_warps(size, each)
    device = x_TE.device
    kept_TE, y_TE = torch.empty_like(x_TE), torch.empty_like(x_TE)
    logits_TN = torch.empty(num_rows, num_experts, device=device)
    chosen_TA = torch.empty(num_rows, num_chosen, dtype=torch.int32, device=device)
    weights_TA = torch.empty(num_rows, num_chosen, device=device)
    launch: Any = normalize_and_route
    launch[(triton.cdiv(num_experts, each), num_rows)](
        x_TE, sums, gain_E, kept_TE, y_TE, mlp.gate.weight, gate_bias, mlp.score_bias, logits_TN, counters_T,
        chosen_TA, weights_TA, epsilon, residual_scale, mlp.routed_scale, num_rows,
        SIZE=size, PADDED=triton.next_power_of_2(size), PARTS=0 if sums is None else sums.numel() // x_TE.numel(),
        EXPERTS=num_experts, EXPERTS_PADDED=triton.next_power_of_2(num_experts), CHOSEN=num_chosen,
        CHOSEN_PADDED=triton.next_power_of_2(num_chosen), GROUPS=groups, CHOSEN_GROUPS=chosen_groups,
        EACH=each, CHUNK=min(each, CHUNK),
        SIGMOID=mlp.router.endswith("sigmoid"), HAS_BIAS=mlp.score_bias is not None,
        HAS_GATE_BIAS=gate_bias is not None, NORMALIZES=mlp.normalizes_experts, COPIES=warps,
        **overlap_options(num_rows, MAX_ROWS), num_warps=warps,
    )  # fmt: skip
    return Routed(kept_TE, y_TE, chosen_TA, weights_TA)


def experts_of_a_program(num_experts: int, num_rows: int) -> int:
    """Of how many experts a program computes the scores."""
    each = 1
    while -(-num_experts // each) * num_rows > PROGRAMS and each < num_experts:
        each *= 2
    return each


def num_warps(size: int, each: int) -> int:
    """Warps of a program: with few of them, they wait less for each other while experts are chosen."""
    return (2 if each == 1 else 4) if size <= 2048 else 4 if size <= 4096 and each == 1 else 8
