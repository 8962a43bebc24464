"""CudaGroupedLinear and CudaGroupedStack: integers in groups in the order of the Triton kernels.

Levels of 4 to 6 bits have their lower 4 bits in one plane: a byte has those of two inputs that are half a group apart,
as in CudaInt4Linear. A second plane has the others: a byte has the upper bits of 8 inputs (5 bits) or 4 (6 bits) that
are an eighth or a quarter of a group apart, the first in its lowest bits. Levels of 8 bits are bytes; without minimums,
signed ones.

Shapes: … any leading dimensions · I inputs · O outputs · N groups of a row
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.quantize.groups import GroupedLinear, GroupLayout, JoinedLinear, dequantize_levels, wide_scales
from flambeau.llm.quantize.quantizer import ExpertStack

KNOWN_BITS = (4, 5, 6, 8)
WEIGHTS_AT_ONCE = 1 << 24  # which are reordered, or widened
Order = Callable[[Tensor, GroupLayout], Tensor]


def pair_bits(layout: GroupLayout) -> int:
    """The bits of levels that are in pairs; 0: each is a byte."""
    return layout.bits if layout.bits < 8 else 0


def has_whole_octets(layout: GroupLayout) -> bool:
    """Whether the bits of a group fill the bytes of its planes; a border between ranks may leave too few weights."""
    return layout.bits == 8 or layout.size % 8 == 0


def in_groups(values: Tensor, size: int) -> Tensor:
    """[…, I] to […, N, size]."""
    return values.reshape(*values.shape[:-1], -1, size)


def main_plane(levels: Tensor, layout: GroupLayout) -> Tensor:
    """The lower 4 bits of levels […, I] in pairs […, I / 2], or all of 8 bits."""
    if layout.bits == 8:
        return levels if layout.has_minimums else (levels ^ 128).view(torch.int8)
    first, second = (in_groups(levels, layout.size) & 15).chunk(2, dim=-1)
    return (first << 4 | second).flatten(-2)


def more_plane(levels: Tensor, layout: GroupLayout) -> Tensor:
    """The bits above the lower 4 […, I · bits / 8]."""
    bits = layout.bits - 4
    parts = (in_groups(levels, layout.size) >> 4).chunk(8 // bits, dim=-1)
    octets = torch.zeros_like(parts[0])
    for i, part in enumerate(parts):
        octets |= part << (i * bits)
    return octets.flatten(-2)


def to_levels(weight: Tensor, more: Tensor | None, layout: GroupLayout) -> Tensor:
    """The inverse of both: levels […, I]."""
    if layout.bits == 8:
        return weight if layout.has_minimums else weight.view(torch.uint8) ^ 128
    pairs = in_groups(weight, layout.size // 2)
    levels = torch.cat((pairs >> 4, pairs & 15), dim=-1)
    if more is not None:
        bits = layout.bits - 4
        octets = in_groups(more, layout.size * bits // 8)
        mask = (1 << bits) - 1
        levels |= torch.cat([octets >> shift & mask for shift in range(0, 8, bits)], dim=-1) << 4
    return levels.flatten(-2)


def some_rows_at_a_time(order: Order, levels: Tensor, layout: GroupLayout) -> Tensor:
    """A plane of levels […, I]; what is computed on the way takes little memory."""
    rows = levels.flatten(0, -2)
    portions = torch.split(rows, max(1, WEIGHTS_AT_ONCE // rows.shape[1]))
    first = order(portions[0], layout)
    plane = first.new_empty(len(rows), first.shape[1])
    start = 0
    for portion in portions:
        plane[start : start + len(portion)] = order(portion, layout)
        start += len(portion)
    return plane.view(*levels.shape[:-1], -1)


def register_planes(module: nn.Module, plain: nn.Module, layout: GroupLayout) -> None:
    """The buffers of a plain layer or stack in the order of the kernels."""
    if layout.bits not in KNOWN_BITS:
        raise ValueError(f"the GPU kernels do not know groups of {layout.bits} bits")
    levels, given = plain.get_buffer("weight"), dict(plain.named_buffers())
    module.register_buffer("weight", some_rows_at_a_time(main_plane, levels, layout))
    has_more = layout.bits in (5, 6)
    module.register_buffer("more", some_rows_at_a_time(more_plane, levels, layout) if has_more else None)
    for name in ("scales", "minimums"):
        module.register_buffer(name, given.get(name))
    factors = given.get("factors")  # those of scales and of minimums follow each other in turns
    module.register_buffer("factors", None if factors is None else factors.flatten(-2))


def dequantize_planes(buffers: dict[str, Tensor], layout: GroupLayout) -> Tensor:
    """The weights […, I] in float32."""
    scales, minimums = wide_scales(buffers["scales"], buffers.get("minimums"), buffers.get("factors"))
    return dequantize_levels(to_levels(buffers["weight"], buffers.get("more"), layout), scales, minimums, layout)


class CudaGroupedLinear(nn.Module):
    """GroupedLinear in the order of the kernels."""

    def __init__(self, plain: GroupedLinear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.layout = plain.in_features, plain.out_features, plain.layout
        self.dtype = plain.dtype
        self.weight: Tensor
        self.more: Tensor | None
        self.scales: Tensor
        self.minimums: Tensor | None
        self.factors: Tensor | None
        register_planes(self, plain, plain.layout)
        self.bias = plain.bias

    def read_rows(self, ids: Tensor | slice) -> Tensor:
        """The weights […, I] of the outputs […]."""
        buffers = {name: buffer[ids] for name, buffer in self.named_buffers()}
        return dequantize_planes(buffers, self.layout).to(self.dtype)

    def append(self, other: CudaGroupedLinear) -> None:
        """Let the outputs of a layer with the same layout follow; neither has a bias."""
        assert self.bias is None
        assert other.bias is None
        for name, buffer in [*self.named_buffers()]:
            setattr(self, name, torch.cat((buffer, other.get_buffer(name))))
        self.out_features += other.out_features

    def _portions(self) -> list[slice]:
        """Outputs whose weights are widened at a time."""
        each = max(1, WEIGHTS_AT_ONCE // self.in_features)
        return [slice(start, start + each) for start in range(0, self.out_features, each)]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        wide = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.weight.device)
        for rows in self._portions():
            buffers = {name: buffer[rows] for name, buffer in self.named_buffers()}
            wide[rows] = dequantize_planes(buffers, self.layout)
        return wide

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O], without the kernels: some weights at a time are widened first."""
        y = torch.cat([F.linear(x, self.read_rows(rows).to(x.dtype)) for rows in self._portions()], dim=-1)
        return y if self.bias is None else y + self.bias


class CudaGroupedStack(ExpertStack):
    """Integers of all experts in the order of the kernels."""

    def __init__(self, plain: ExpertStack) -> None:
        nn.Module.__init__(self)
        assert isinstance(plain.layout, GroupLayout)
        self.dtype, self.layout = plain.dtype, plain.layout
        register_planes(self, plain, plain.layout)

    def __getitem__(self, chosen: object) -> Tensor:
        """The weights [O, I] of an expert, or […, O, I] of several."""
        assert isinstance(self.layout, GroupLayout)
        buffers = {name: buffer[chosen] for name, buffer in self.named_buffers()}  # type: ignore[index]
        return dequantize_planes(buffers, self.layout).to(self.dtype)


# ---- projections in several forms ----


def join_neighbors(joined: JoinedLinear) -> None:
    """Make one part of neighbors with the same layout: they are multiplied by one launch."""
    parts: list[nn.Module] = []
    for part in joined.parts:
        last = parts[-1] if parts else None
        if isinstance(part, CudaGroupedLinear) and isinstance(last, CudaGroupedLinear) and part.layout == last.layout:
            last.append(part)
        else:
            parts.append(part)
    joined.parts = nn.ModuleList(parts)
