"""Products of a few rows with bfloat16 weights and, in the same launch, with adapters (csrc/warpgroup_rows.cu).

The matrices of all slots lie side by side, and all rows are multiplied with all of them: what is not a row's own is
multiplied by zero, or not read afterwards. In decode steps, that costs less than a launch.

A fused layer adds the product with B, for which the norm before it has computed x times A. Another one also multiplies
its inputs with A, and the norm after it adds the product with B.

Shapes: T rows · N outputs · K inputs · S parts of a sum · L slots · X ranks of all segments of a layer
"""

from __future__ import annotations

from torch import Tensor

from flambeau.llm.backends.cuda import few_row_kernel, warpgroup_kernel
from flambeau.llm.backends.cuda.few_row_kernel import BFLOAT16
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.lora_norm import can_expand, can_shrink
from flambeau.llm.backends.cuda.lora_slots import LayerSlots
from flambeau.llm.backends.cuda.warpgroup_kernel import ProductAdapters, WarpgroupDivision

MAX_ROWS = 32  # more were not measured


def expanding_division(linear: KernelLinear, slots: LayerSlots, num_rows: int) -> WarpgroupDivision | None:
    """How a product that adds its adapters is divided; None: they are added otherwise."""
    if slots.b_OY is None or not can_shrink(slots, num_rows):
        return None
    return division_of(linear, num_rows, ProductAdapters(inner=slots.b_OY.shape[1], segments=len(slots.shape.starts)))


def shrinking_division(linear: KernelLinear, slots: LayerSlots, num_rows: int) -> WarpgroupDivision | None:
    """How a product that also multiplies with A is divided; None: another kernel does that."""
    if len(slots.shape.starts) > 1 or not slots.is_together or not can_expand(slots, num_rows):
        return None
    return division_of(linear, num_rows, ProductAdapters(shrunk=slots.num_slots * slots.num_ranks))


def division_of(linear: KernelLinear, num_rows: int, adapters: ProductAdapters) -> WarpgroupDivision | None:
    """The division, if the kernel computes the layer in any case, and can be compiled here."""
    layer, gates = linear.layer, linear.gates
    if not 1 < num_rows <= MAX_ROWS or not linear.has_kernel or few_row_kernel.kind_of(layer) != BFLOAT16:
        return None
    # The weights have the type, device and size of the inputs.
    found = warpgroup_kernel.division(linear.weight, layer, linear.width, num_rows, gates=gates, adapters=adapters)
    if found is None:
        return None
    function = warpgroup_kernel.compiled(
        BFLOAT16, found.block, warpgroup_kernel.padded(num_rows), 0, gates=gates, device=linear.weight.device,
        segments=adapters.segments, appends=adapters.shrunk > 0,
    )  # fmt: skip
    return None if function is None else found


def multiply_and_expand(
    x_TK: Tensor, linear: KernelLinear, slots: LayerSlots, division: WarpgroupDivision, inner_TX: Tensor
) -> Tensor:
    """[T, N], or parts [S, T, N], with adapters; `inner_TX` [T, X·L] are x times A, zero but in each row's own slot."""
    assert slots.b_OY is not None
    return warpgroup_kernel.multiply_with_adapters(
        x_TK, linear.layer, linear.width, division, inner_TX, slots.b_OY, slots.shape.starts, gates=linear.gates
    )


def multiply_and_shrink(
    x_TK: Tensor, linear: KernelLinear, slots: LayerSlots, division: WarpgroupDivision
) -> tuple[Tensor, Tensor]:
    """[T, N], or parts [S, T, N], without adapters, and parts [S, T, L·X] of x times the A of all slots."""
    a_XK = slots.a_LXI.flatten(0, 1)
    return warpgroup_kernel.multiply_and_shrink(x_TK, linear.layer, linear.width, division, a_XK)
