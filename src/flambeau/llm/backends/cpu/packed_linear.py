"""PackedLinear: a linear layer whose weights are in the order in which the C++ kernels read them.

Weights are float32, bfloat16, float16, fp8, fp4 or other codes of 4 bits with a scale for each row or group of it, or
integers of 4, 5, 6 or 8 bits with a scale for each group of a row, and perhaps a minimum: int8 that is quantized here
has none, int4 has them, and files have both (`INTEGER_KINDS`). With integer weights, inputs are rounded to 8 bits in
the same groups: see `rounded_inputs`. In a network of bfloat16 they are rounded to bfloat16, as its own layers do. All
sums are in float32, or exact.

Shapes: … any leading dimensions · I inputs · O outputs · G groups of a row
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.backends.cpu.bindings import KINDS, CMatrix, kernels
from flambeau.llm.executor.huge_pages import zeros_in_huge_pages
from flambeau.llm.mapped_files import trim_heap
from flambeau.llm.quantize.coded import CodedLinear, CodeLayout
from flambeau.llm.quantize.groups import GroupedLinear
from flambeau.llm.quantize.int4 import Int4Linear, unpack_int4
from flambeau.llm.quantize.packed_layers import CpuInt4Linear, CpuInt8Linear
from flambeau.llm.quantize.quantizer import quantized_layer
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from flambeau.llm.quantize.settings import QuantizationSettings

LANES = 16  # of csrc/vectors.h
PANEL = 2 * LANES
MAX_GROUP = 128  # integers with a scale in common, as csrc/integer_panels.h has room for them
INT8_GROUP = 32  # weights, and inputs, that have a scale in common; also where files have one scale for an output
TRIM_BYTES = 64 << 20  # of replaced layers
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MIDDLE_LEVEL = 8  # of 4 bits
LEVELS_AT_ONCE = 1 << 22  # that are packed
INTEGER_KINDS = {  # by the bits of a level, and whether groups have minimums
    (8, False): "int8",
    (8, True): "int8_minimums",
    (6, False): "int6_scaled",
    (5, True): "int5",
    (5, False): "int5_scaled",
    (4, True): "int4",
    (4, False): "int4_scaled",
}
SCALED_KINDS = ("fp8", "fp4", "fp4_wide", "codes")  # numbers of 8 and 4 bits with scales
INPUTS_AT_ONCE = 256  # whose weights are read
ROUTER = (
    ".mlp.gate",
    ".mlp.sparse.gate",
    ".shortcut.gate",
)  # the layer that chooses experts stays as it is: it decides between scores that are close


class PackedLinear(nn.Module):
    """A linear layer that the kernels compute, also outside of a whole step."""

    def __init__(
        self, kind: str, panels: Tensor, in_features: int, out_features: int, bias: Tensor | None, group_size: int = 1
    ) -> None:
        super().__init__()
        self.kind, self.in_features, self.out_features, self.group_size = kind, in_features, out_features, group_size
        self.panels: Tensor
        self.bias: Tensor | None
        self.register_buffer("panels", panels)
        self.register_buffer("bias", None if bias is None else bias.detach().float().contiguous())

    @property
    def matrix(self) -> CMatrix:
        """The structure for the kernels; it points to the buffers of this layer."""
        bias = None if self.bias is None else self.bias.data_ptr()
        numbers = self.in_features, self.out_features, self.group_size
        return CMatrix(KINDS.index(self.kind), self.panels.data_ptr(), bias, *numbers)

    def part(self, start: int, count: int) -> CMatrix:
        """The structure for so many outputs; they begin with a panel, and end with one or with the last output."""
        matrix, panel_words = self.matrix, self.panels.numel() // -(-self.out_features // PANEL)
        assert start % PANEL == 0
        matrix.weights += start // PANEL * panel_words * self.panels.itemsize
        matrix.bias = None if self.bias is None else self.bias[start:].data_ptr()
        matrix.width = count
        return matrix

    @property
    def has_integers(self) -> bool:
        return self.kind in INTEGER_KINDS.values()

    def read_rows(self, ids: Tensor) -> Tensor:
        """The weights […, I] of the outputs […]; of integers only."""
        library = kernels.library
        assert library is not None
        assert self.has_integers
        flat = ids.reshape(-1).contiguous()
        found = torch.empty(len(flat), self.in_features)
        library.flambeau_read_rows(self.matrix, flat.data_ptr(), len(flat), found.data_ptr())
        return found.view(*ids.shape, self.in_features)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        if self.has_integers:
            return self.read_rows(torch.arange(self.out_features)).to(dtype)
        if self.kind in SCALED_KINDS:
            return self._read_inputs().to(dtype)
        lines = self.panels.view(-(-self.out_features // PANEL), -1, LANES)
        rows_OI = unpacked_floats(self.kind, lines).transpose(1, 2).flatten(0, 1)
        return rows_OI[: self.out_features, : self.in_features].to(dtype)

    def _read_inputs(self) -> Tensor:
        """The weights [O, I], as what comes out if one input is 1; exact, as nothing is rounded but sums."""
        matrix = self.matrix
        matrix.bias = None
        found = torch.empty(self.out_features, self.in_features)
        for start in range(0, self.in_features, INPUTS_AT_ONCE):
            some = found[:, start : start + INPUTS_AT_ONCE]
            count = some.shape[1]
            x = torch.zeros(count, self.in_features)
            x[torch.arange(count), torch.arange(start, start + count)] = 1.0
            some.copy_(multiply(matrix, x).t())
        return found

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        if torch.compiler.is_compiling():
            return packed_product(self, x)
        return multiply(self.matrix, x)


def multiply(matrix: CMatrix, x: Tensor) -> Tensor:
    """[…, I] to […, O]."""
    library = kernels.library
    assert library is not None
    flat = x.reshape(-1, matrix.size).float().contiguous()
    y = torch.empty(len(flat), matrix.width)
    library.flambeau_multiply(matrix, flat.data_ptr(), y.data_ptr(), len(flat), torch.get_num_threads())
    return y.to(x.dtype).view(*x.shape[:-1], matrix.width)


def packed_product(layer: PackedLinear, x: Tensor) -> Tensor:
    """What a packed layer gives, as an operator of a traced step."""
    y: Tensor = torch.ops.flambeau.packed_linear(
        x, layer.panels, layer.bias, KINDS.index(layer.kind), layer.out_features, layer.group_size
    )
    return y


def packed_linear(x: Tensor, panels: Tensor, bias: Tensor | None, kind: int, width: int, group: int) -> Tensor:
    matrix = CMatrix(kind, panels.data_ptr(), None if bias is None else bias.data_ptr(), x.shape[-1], width, group)
    return multiply(matrix, x)


def packed_experts(
    x_TAI: Tensor, chosen_TA: Tensor, panels: Tensor, num_experts: int, kind: int, width: int, group: int
) -> Tensor:
    """[T, A, I] to [T, A, O], each row by the weights of its own expert; `width` is O."""
    rows, chosen, size = x_TAI.flatten(0, 1), chosen_TA.flatten(), x_TAI.shape[-1]
    y = x_TAI.new_empty(len(rows), width)
    each = panels.numel() // num_experts * panels.itemsize
    for expert in torch.unique(chosen).tolist():
        own = (chosen == expert).nonzero().squeeze(1)
        y[own] = multiply(CMatrix(kind, panels.data_ptr() + expert * each, None, size, width, group), rows[own])
    return y.view(*chosen_TA.shape, width)


operators: Any = torch.library.Library("flambeau", "FRAGMENT")  # type: ignore[no-untyped-call]
operators.define("packed_linear(Tensor x, Tensor panels, Tensor? bias, int kind, int width, int group) -> Tensor")
operators.impl("packed_linear", packed_linear, "CPU")
operators._register_fake("packed_linear", lambda x, panels, bias, kind, width, group: x.new_empty(*x.shape[:-1], width))
operators.define(
    "packed_experts(Tensor x, Tensor chosen, Tensor panels, int count, int kind, int width, int group) -> Tensor"
)
operators.impl("packed_experts", packed_experts, "CPU")
operators._register_fake(
    "packed_experts", lambda x, chosen, panels, count, kind, width, group: x.new_empty(*x.shape[:-1], width)
)


def pack_layers(model: nn.Module, kinds: tuple[type[nn.Module], ...], *, packs_float32: bool = True) -> None:
    """Replace the layers of these kinds, one by one; a network can be used meanwhile.

    Packed layers lie in pages of their own, not where the others were: these go back to the system now and then, or the
    process would have both copies of a network.
    """
    freed_bytes = 0
    for name in [name for name, _ in model.named_modules()]:  # names only: replaced layers must be freed
        layer = model.get_submodule(name)
        if name.endswith(ROUTER):
            continue
        if type(layer) in kinds and (other := packed(layer, packs_float32=packs_float32)) is not None:
            freed_bytes += sum(tensor.nbytes for tensor in layer.state_dict().values())
            model.set_submodule(name, other)
            del layer
            if freed_bytes > TRIM_BYTES:
                freed_bytes = 0
                trim_heap()


def forget_plain_layers(model: nn.Module) -> None:
    """Free what PyTorch's layers keep for kernels that cannot be built here."""
    for layer in model.modules():
        if isinstance(layer, CpuInt4Linear):
            layer.forget_plain()


def packed(layer: Any, *, packs_float32: bool = True) -> PackedLinear | None:
    """The same layer for the kernels; None: they do not know its kind, or it would need 32 bits for each weight."""
    if type(layer) is PackedLinear:
        return layer
    if type(layer) is Int4Linear:
        return pack_int4_layer(layer) if has_whole_vectors(layer.group_size) else None
    if type(layer) is CpuInt4Linear:
        return None if layer.plain is None else pack_int4_layer(layer.plain)
    if type(layer) in (Int8Linear, CpuInt8Linear):
        return pack_int8(layer.weight, layer.scale, layer.bias)
    if type(layer) is Fp8Linear:
        return pack_fp8(layer.weight, layer.scale, layer.bias)
    if type(layer) is CodedLinear:
        return pack_codes(layer.weight, layer.scales, layer.layout, layer.bias)
    if type(layer) is GroupedLinear:
        layout = layer.layout
        if not has_whole_vectors(layout.size) or layout.scale_bits != 32:
            return None
        return pack_levels(
            lambda rows: layer.weight[rows], layer.scales, layer.minimums, layout.bits, layout.size, layer.bias
        )
    if type(layer) is nn.Linear and layer.weight.dtype in FLOATS:
        return pack_floats(layer.weight, layer.bias, packs_float32=packs_float32)
    return None


def has_whole_vectors(group_size: int) -> bool:
    """Whether the kernels know integers in groups of this size: a border between ranks may leave smaller ones."""
    return group_size % LANES == 0 and group_size <= MAX_GROUP


@torch.inference_mode()
def pack_floats(
    weight_OI: Tensor, bias: Tensor | None = None, *, packs_float32: bool = True, dtype: torch.dtype | None = None
) -> PackedLinear | None:
    """Panels of the narrowest exact type; for a network of bfloat16, of pairs of its weights.

    `dtype` is the network's type, if the weights have a narrower one.
    """
    library, threads = kernels.library, torch.get_num_threads()
    assert library is not None
    out_features, in_features = weight_OI.shape
    weight_OI = weight_OI.detach().contiguous()
    kind = str(weight_OI.dtype).removeprefix("torch.")
    if kind == "float32":
        kind = KINDS[library.flambeau_narrowest(weight_OI.data_ptr(), weight_OI.numel(), threads)]
    if kind == "float32" and not packs_float32:
        return None
    if weight_OI.dtype == torch.bfloat16 == (dtype or weight_OI.dtype):
        kind = "bfloat16_pairs"
    words = {"float32": in_features * PANEL, "bfloat16_pairs": -(-in_features // 2) * PANEL}
    count = words.get(kind, in_features * LANES) * -(-out_features // PANEL)
    panels, numbers = zeros_in_huge_pages((count,), torch.int32), (out_features, in_features)
    from_, to = weight_OI.data_ptr(), panels.data_ptr()
    library.flambeau_pack(from_, weight_OI.itemsize, KINDS.index(kind), *numbers, to, threads)
    return PackedLinear(kind, panels, in_features, out_features, bias)


def pack_int8(weight_OI: Tensor, scale: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Scales are [O] or [O, G]."""
    out_features, in_features = weight_OI.shape
    scale_OG = scale.view(out_features, -1)
    group = INT8_GROUP if scale_OG.shape[1] == 1 else in_features // scale_OG.shape[1]
    scale_OG = scale_OG.expand(-1, -(-in_features // group))
    return pack_levels(
        lambda rows: weight_OI[rows].view(torch.uint8) ^ 128, scale_OG, None, 8, group, bias, in_features=in_features
    )


@torch.inference_mode()
def pack_levels(
    levels: Callable[[slice], Tensor],
    scales_OG: Tensor,
    minimums_OG: Tensor | None,
    bits: int,
    group_size: int,
    bias: Tensor | None = None,
    *,
    in_features: int | None = None,
) -> PackedLinear:
    """A layer of weights `scale · level + minimum`; `levels` gives those of some outputs, one in a byte.

    Without minimums the middle level stands for zero. Scales and minimums are rounded to bfloat16; the middle level
    stays exact. The default number of inputs is that of all groups.
    """
    library, threads = kernels.library, torch.get_num_threads()
    assert library is not None
    out_features, num_groups = scales_OG.shape
    in_features = in_features or num_groups * group_size
    kind = INTEGER_KINDS[bits, minimums_OG is not None]
    panel_words = integer_panel_lines(bits, minimums_OG is not None, num_groups, group_size) * LANES
    panels = zeros_in_huge_pages((-(-out_features // PANEL) * panel_words,), torch.int32)
    at_once = max(1, LEVELS_AT_ONCE // (in_features * PANEL)) * PANEL
    for start in range(0, out_features, at_once):
        rows = slice(start, min(start + at_once, out_features))
        some = levels(rows).contiguous()
        scales = scales_OG[rows].float().contiguous()
        minimums = None if minimums_OG is None else minimums_OG[rows].float().contiguous()
        library.flambeau_pack_levels(
            some.data_ptr(),
            scales.data_ptr(),
            None if minimums is None else minimums.data_ptr(),
            KINDS.index(kind),
            len(some),
            in_features,
            group_size,
            panels[start // PANEL * panel_words :].data_ptr(),
            threads,
        )
    return PackedLinear(kind, panels, in_features, out_features, bias, group_size)


def integer_panel_lines(bits: int, has_minimums: bool, num_groups: int, group_size: int) -> int:
    """As in csrc/integer_panels.h."""
    lines = group_size // 2 if bits == 8 else group_size // 4 + (bits - 4) * group_size // 16
    return num_groups * (1 + has_minimums + lines)


@torch.inference_mode()
def pack_fp8(weight_OI: Tensor, scale: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """For each group of a panel its scales, then its weights, in 4 bits if these are enough; scales: [O] or [O, G]."""
    library = kernels.library
    assert library is not None
    out_features, in_features = weight_OI.shape
    scale_OG = scale.view(out_features, -1).float().contiguous()
    num_groups = scale_OG.shape[1]
    group = in_features // num_groups
    weight_OI, threads = weight_OI.contiguous(), torch.get_num_threads()
    kind = "fp8"
    if library.flambeau_fits_fp4(weight_OI.data_ptr(), weight_OI.numel(), threads):
        kind = "fp4" if torch.equal(scale_OG.bfloat16().float(), scale_OG) else "fp4_wide"
    scale_words, weights_per_word = (LANES if kind == "fp4" else PANEL), (4 if kind == "fp8" else 8)
    count = (num_groups * scale_words + in_features * PANEL // weights_per_word) * -(-out_features // PANEL)
    panels = zeros_in_huge_pages((count,), torch.int32)
    pointers, numbers = (weight_OI.data_ptr(), scale_OG.data_ptr()), (out_features, in_features, group)
    library.flambeau_pack_fp8(*pointers, KINDS.index(kind), *numbers, panels.data_ptr(), threads)
    return PackedLinear(kind, panels, in_features, out_features, bias, group)


@torch.inference_mode()
def pack_codes(pairs: Tensor, scales_OG: Tensor, layout: CodeLayout, bias: Tensor | None = None) -> PackedLinear:
    """For each group of a panel its scales, then its codes; a panel begins with its table if codes are no fp4."""
    library = kernels.library
    assert library is not None
    out_features, in_features = len(pairs), 2 * pairs.shape[1]
    num_groups = scales_OG.shape[1]
    scales, pairs = scales_OG.float().contiguous(), pairs.contiguous()
    is_exact = layout.is_fp4 and torch.equal(scales.bfloat16().float(), scales)
    kind = "fp4" if is_exact else "fp4_wide" if layout.is_fp4 else "codes"
    words = num_groups * (LANES if is_exact else PANEL) + in_features * PANEL // 8 + (LANES if kind == "codes" else 0)
    panels = zeros_in_huge_pages((words * -(-out_features // PANEL),), torch.int32)
    table = torch.tensor(layout.table, dtype=torch.float32)
    library.flambeau_pack_codes(
        pairs.data_ptr(),
        scales.data_ptr(),
        table.data_ptr(),
        KINDS.index(kind),
        out_features,
        in_features,
        layout.size,
        panels.data_ptr(),
        torch.get_num_threads(),
    )
    return PackedLinear(kind, panels, in_features, out_features, bias, layout.size)


@torch.inference_mode()
def pack_quantized(weight_OI: Tensor, kind: str, group_size: int, bias: Tensor | None = None) -> PackedLinear:
    """Round float weights to int8 or int4 and pack them, in one pass of the kernels over them."""
    library = kernels.library
    assert library is not None
    out_features, in_features = weight_OI.shape
    weight_OI = weight_OI.detach().contiguous()
    weight_OI = weight_OI if weight_OI.dtype in FLOATS else weight_OI.float()
    num_groups, num_panels = -(-in_features // group_size), -(-out_features // PANEL)
    lines = integer_panel_lines(8 if kind == "int8" else 4, kind == "int4", num_groups, group_size)
    panels = zeros_in_huge_pages((num_panels * lines * LANES,), torch.int32)
    library.flambeau_quantize(
        weight_OI.data_ptr(),
        KINDS.index(str(weight_OI.dtype).removeprefix("torch.")),
        KINDS.index(kind),
        out_features,
        in_features,
        group_size,
        panels.data_ptr(),
        torch.get_num_threads(),
    )
    return PackedLinear(kind, panels, in_features, out_features, bias, group_size)


def quantized_for_kernels(linear: nn.Linear, settings: QuantizationSettings) -> nn.Module:
    """A quantized layer, for `quantize_on_load`: packed, if the kernels know its kind."""
    if settings.kind == "int8":
        return pack_quantized(linear.weight, "int8", INT8_GROUP, linear.bias)
    if settings.kind == "int4":
        return pack_quantized(linear.weight, "int4", settings.group_size_for(linear.in_features), linear.bias)
    made = quantized_layer(linear, settings)
    return packed(made) or made


def pack_int4_layer(layer: Int4Linear) -> PackedLinear:
    """Without minimums, if the middle level stands for zero everywhere, as in Q4_0 and symmetric GPTQ."""
    scales, minimums = layer.scales.float(), layer.minimums.float()
    given = None if torch.equal(minimums, scales * -MIDDLE_LEVEL) else minimums
    return pack_levels(lambda rows: unpack_int4(layer.weight[rows]), scales, given, 4, layer.group_size, layer.bias)


def unpacked_floats(kind: str, lines: Tensor) -> Tensor:
    """Panels [P, lines, 16] of floating-point weights as [P, I, 32] in float32."""
    if kind == "float32":
        return lines.view(torch.float32).view(len(lines), -1, PANEL)
    if kind == "float16":
        return lines.view(torch.float16).float()
    if kind == "bfloat16_pairs":  # of two inputs
        pairs = lines.view(torch.bfloat16).float().view(len(lines), -1, PANEL, 2)
        return pairs.transpose(2, 3).flatten(1, 2)
    numbers = lines.view(torch.bfloat16).float().view(*lines.shape, 2)  # of two columns
    return numbers.transpose(-1, -2).flatten(-2)


def rounded_inputs(x: Tensor, group_size: int) -> Tensor:
    """The inputs […, I] as the kernels round them for integer weights: the largest number of a group is 127 steps."""
    size = x.shape[-1]
    groups = F.pad(x.float(), (0, -size % group_size)).reshape(*x.shape[:-1], -1, group_size)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    steps = torch.where(largest > 1e-30, groups * (127.0 / largest), 0.0).round()
    return (steps * (largest / 127.0)).flatten(-2)[..., :size]
