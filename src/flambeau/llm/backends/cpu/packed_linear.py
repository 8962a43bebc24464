"""PackedLinear: a linear layer whose weights are in the order in which the C++ kernels read them.

Weights are float32, bfloat16, float16, int8 (a scale for each group of a row) or int4 (a scale and a minimum for each).
With integer weights, inputs are rounded to 8 bits in the same groups: see `rounded_inputs`. In a network of bfloat16
they are rounded to bfloat16, as its own layers do. All sums are in float32, or exact.

Shapes: … any leading dimensions · I inputs · O outputs · P panels of 32 outputs · G groups of a row
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.backends.cpu.bindings import KINDS, CMatrix, kernels
from flambeau.llm.executor.huge_pages import zeros_in_huge_pages
from flambeau.llm.mapped_files import trim_heap
from flambeau.llm.quantize.int4 import MAX_LEVEL, Int4Linear
from flambeau.llm.quantize.int4 import unpack_int4 as unpack_levels
from flambeau.llm.quantize.packed_layers import CpuInt4Linear, CpuInt8Linear
from flambeau.llm.quantize.quantizer import quantized_layer
from flambeau.llm.quantize.row_scaled import Int8Linear
from flambeau.llm.quantize.settings import QuantizationSettings

LANES = 16  # of csrc/vectors.h
PANEL = 2 * LANES
INT8_GROUP = 32  # weights, and inputs, that have a scale in common; also where files have one scale for an output
TRIM_BYTES = 64 << 20  # of replaced layers
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROUTER = ".mlp.gate"  # the layer that chooses experts stays as it is: it decides between scores that are close


class PackedLinear(nn.Module):
    """A linear layer that the kernels compute, also outside of a whole step."""

    def __init__(
        self, kind: str, panels: Tensor, in_features: int, out_features: int, bias: Tensor | None, group_size: int = 1
    ) -> None:
        super().__init__()
        self.kind, self.in_features, self.out_features, self.group_size = kind, in_features, out_features, group_size
        self.panels: Tensor
        self.bias: Tensor | None
        self.register_buffer("panels", panels if panels.dim() == 1 else in_huge_pages(panels))
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

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        count = -(-self.out_features // PANEL)
        weights_PIN = UNPACKED[self.kind](self.panels.view(count, -1, LANES), self.group_size)
        rows_OI = weights_PIN.transpose(1, 2).flatten(0, 1)
        return rows_OI[: self.out_features, : self.in_features].to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        return multiply(self.matrix, x)


def multiply(matrix: CMatrix, x: Tensor) -> Tensor:
    """[…, I] to […, O]."""
    library = kernels.library
    assert library is not None
    flat = x.reshape(-1, matrix.size).float().contiguous()
    y = torch.empty(len(flat), matrix.width)
    library.flambeau_multiply(matrix, flat.data_ptr(), y.data_ptr(), len(flat), torch.get_num_threads())
    return y.to(x.dtype).view(*x.shape[:-1], matrix.width)


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
        return pack_int4_layer(layer)
    if type(layer) is CpuInt4Linear:
        return None if layer.plain is None else pack_int4_layer(layer.plain)
    if type(layer) in (Int8Linear, CpuInt8Linear):
        return pack_int8(layer.weight, layer.scale, layer.bias)
    if type(layer) is nn.Linear and layer.weight.dtype in FLOATS:
        return pack_floats(layer.weight, layer.bias, packs_float32=packs_float32)
    return None


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


@torch.inference_mode()
def pack_int8(weight_OI: Tensor, scale: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """For each group of a panel its scales, then words with four levels of a column; scales are [O] or [O, G].

    A level is the integer plus 128.
    """
    out_features, in_features = weight_OI.shape
    scale_OG = scale.view(out_features, -1)
    group = INT8_GROUP if scale_OG.shape[1] == 1 else in_features // scale_OG.shape[1]
    num_groups = -(-in_features // group)
    levels_OI = F.pad(weight_OI.view(torch.uint8) ^ 128, (0, num_groups * group - in_features))
    words = padded_rows(levels_OI).view(torch.int32).view(-1, 2, LANES, num_groups, group // 4)
    lines = words.permute(0, 3, 4, 1, 2).flatten(2, 3)  # [P, G, two for every four inputs, 16]
    scales = in_pairs(scale_OG.bfloat16().expand(-1, num_groups)).unsqueeze(2)
    return PackedLinear("int8", torch.cat((scales, lines), dim=2), in_features, out_features, bias, group)


@torch.inference_mode()
def pack_quantized(weight_OI: Tensor, kind: str, group_size: int, bias: Tensor | None = None) -> PackedLinear:
    """Round float weights to int8 or int4 and pack them, in one pass of the kernels over them."""
    library = kernels.library
    assert library is not None
    out_features, in_features = weight_OI.shape
    weight_OI = weight_OI.detach().contiguous()
    weight_OI = weight_OI if weight_OI.dtype in FLOATS else weight_OI.float()
    num_groups, num_panels = -(-in_features // group_size), -(-out_features // PANEL)
    lines = num_groups * (1 + group_size // 2 if kind == "int8" else 2 + group_size // 4)
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
    return quantized_layer(linear, settings)


@torch.inference_mode()
def pack_int4_layer(layer: Int4Linear) -> PackedLinear:
    """For each group of a panel its scales, its minimums, then words with four levels of two columns."""
    size, group = layer.in_features, layer.group_size
    words = padded_rows(unpack_levels(layer.weight)).view(torch.int32).view(-1, 2, LANES, size // 4)
    lines = (words[:, 0] | words[:, 1] << 4).transpose(1, 2)  # [P, I/4, 16]
    groups = lines.reshape(len(lines), -1, group // 4, LANES)
    numbers = map(in_pairs, narrow_numbers(layer))
    panels = torch.cat((*(each.unsqueeze(2) for each in numbers), groups), dim=2)
    return PackedLinear("int4", panels, size, layer.out_features, layer.bias, group)


def narrow_numbers(layer: Int4Linear) -> tuple[Tensor, Tensor]:
    """Scales and minimums in bfloat16. Files that were made elsewhere have wider ones: the middle level stays exact."""
    scales = layer.scales.bfloat16()
    rest = layer.scales.float() - scales.float()
    return scales, (layer.minimums.float() + rest * (MAX_LEVEL / 2)).bfloat16()


def in_pairs(numbers_OG: Tensor) -> Tensor:
    """bfloat16 numbers [O, G] as words [P, G, 16], each with those of two columns."""
    columns = padded_rows(numbers_OG).view(-1, 2, LANES, numbers_OG.shape[1])
    return columns.permute(0, 3, 2, 1).contiguous().view(torch.int32).squeeze(-1)


def padded_rows(weight_OI: Tensor) -> Tensor:
    """Rows of zeros are added up to a whole panel."""
    return F.pad(weight_OI, (0, 0, 0, -len(weight_OI) % PANEL)).contiguous()


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy as words."""
    words = tensor.contiguous().view(-1).view(torch.int32)
    return zeros_in_huge_pages((len(words),), torch.int32).copy_(words)


# ---- panels [P, lines, 16] as float32 weights [P, I, 32] ----


def unpack_float32(panels: Tensor, group: int) -> Tensor:
    return panels.view(torch.float32).view(len(panels), -1, PANEL)


def unpack_bfloat16(panels: Tensor, group: int) -> Tensor:
    return from_pairs(panels)


def unpack_float16(panels: Tensor, group: int) -> Tensor:
    return panels.view(torch.float16).float()


def unpack_bfloat16_pairs(panels: Tensor, group: int) -> Tensor:
    pairs = panels.view(torch.bfloat16).float().view(len(panels), -1, PANEL, 2)
    return pairs.transpose(2, 3).flatten(1, 2)


def unpack_int8(panels: Tensor, group: int) -> Tensor:
    lines = panels.view(len(panels), -1, 1 + group // 2, LANES)
    words = lines[:, :, 1:].reshape(*lines.shape[:2], group // 4, 2, LANES)
    levels = words.contiguous().view(torch.uint8).view(*words.shape, 4).float() - 128
    weights = levels.permute(0, 1, 2, 5, 3, 4).flatten(4, 5).flatten(2, 3)  # [P, G, inputs, 32]
    return (weights * from_pairs(lines[:, :, :1])).flatten(1, 2)


def unpack_int4(panels: Tensor, group: int) -> Tensor:
    lines = panels.view(len(panels), -1, 2 + group // 4, LANES)
    both = lines[:, :, 2:].contiguous().view(torch.uint8).view(*lines.shape[:2], group // 4, LANES, 4)
    levels = torch.stack((both & 15, both >> 4), dim=3).float()  # [P, G, fours, 2, 16, 4]
    weights = levels.permute(0, 1, 2, 5, 3, 4).flatten(4, 5).flatten(2, 3)
    return (weights * from_pairs(lines[:, :, :1]) + from_pairs(lines[:, :, 1:2])).flatten(1, 2)


def from_pairs(words: Tensor) -> Tensor:
    """bfloat16 numbers of 32 columns from words […, 16], each with those of two columns."""
    numbers = words.contiguous().view(torch.bfloat16).float().view(*words.shape, 2)
    return numbers.transpose(-1, -2).flatten(-2)


UNPACKED = {
    "float32": unpack_float32,
    "bfloat16": unpack_bfloat16,
    "float16": unpack_float16,
    "bfloat16_pairs": unpack_bfloat16_pairs,
    "int8": unpack_int8,
    "int4": unpack_int4,
}


def rounded_inputs(x: Tensor, group_size: int) -> Tensor:
    """The inputs […, I] as the kernels round them for integer weights: the largest number of a group is 127 steps."""
    size = x.shape[-1]
    groups = F.pad(x.float(), (0, -size % group_size)).reshape(*x.shape[:-1], -1, group_size)
    largest = groups.abs().amax(dim=-1, keepdim=True)
    steps = torch.where(largest > 1e-30, groups * (127.0 / largest), 0.0).round()
    return (steps * (largest / 127.0)).flatten(-2)[..., :size]
