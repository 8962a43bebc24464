"""Int4Linear: 4-bit weights in groups, each with a scale and a minimum.

Shapes: … any leading dimensions · I inputs · O outputs · N groups of a row · G weights of a group · P pairs of a row
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GROUP_SIZES = (32, 64, 128)
MAX_LEVEL = 15
# The range of a group is searched: clipping may reduce the error.
SHRINKS = (1.0, 0.93, 0.86)  # fractions of the whole range to try …
MOVES = (0.08, 0.04)  # … then of each end alone, inwards and outwards
NUM_FITS = 2  # of the scale and the minimum to the levels that were chosen
MAX_WEIGHTS_AT_ONCE = 1 << 18  # rows are quantized in portions that fit into a CPU's cache …
MAX_WEIGHTS_ON_GPU = 1 << 25  # … or keep a GPU busy


class Int4Linear(nn.Module):
    """A linear layer with two weights per byte, the first in the upper half."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group_size: int,
        bias: bool = False,
        scale_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.group_size = in_features, out_features, group_size
        num_groups = in_features // group_size
        self.weight: Tensor
        self.scales: Tensor
        self.minimums: Tensor
        self.register_buffer("weight", torch.empty(out_features, in_features // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.empty(out_features, num_groups, dtype=scale_dtype))
        self.register_buffer("minimums", torch.empty(out_features, num_groups, dtype=scale_dtype))
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @classmethod
    def from_linear(cls, linear: nn.Linear, group_size: int) -> Int4Linear:
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, group_size=group_size, bias=linear.bias is not None)
        layer.weight, layer.scales, layer.minimums = quantize_int4(linear.weight.detach(), group_size)
        layer.bias = linear.bias
        return layer

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weights [O, I]."""
        return dequantize_groups(self.weight, self.scales, self.minimums, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[…, I] to […, O]."""
        return F.linear(x, self.dequantize(x.dtype), self.bias)


def quantize_int4(weight_OI: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of weights [O, P], and the scales and minimums [O, N] of their groups, exact in bfloat16."""
    limit = MAX_WEIGHTS_ON_GPU if weight_OI.is_cuda else MAX_WEIGHTS_AT_ONCE
    rows = max(1, limit // weight_OI.shape[1])
    portions = [quantize_portion(portion, group_size) for portion in torch.split(weight_OI, rows)]
    weights, scales, minimums = zip(*portions, strict=True)
    return torch.cat(weights), torch.cat(scales), torch.cat(minimums)


def quantize_portion(weight_OI: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize some rows, each group with the range that has the least error of those that are tried."""
    wide_ONG = weight_OI.float().view(len(weight_OI), -1, group_size)
    search = RangeSearch(wide_ONG)
    for shrink in SHRINKS:
        search.compare(search.one_ON * shrink, search.one_ON * shrink)
    for move in MOVES:
        from_ON = search.from_ON
        for moved_ON in (from_ON - move, from_ON + move):
            search.compare(moved_ON, search.to_ON)
        to_ON = search.to_ON
        for moved_ON in (to_ON - move, to_ON + move):
            search.compare(search.from_ON, moved_ON)
    fitted = search.scale_ON, search.minimum_ON
    for _ in range(NUM_FITS):
        fitted = fit_levels(wide_ONG, *fitted)
    search.keep(*fitted)
    scale_ON, minimum_ON = search.scale_ON, search.minimum_ON
    return pack_int4(to_levels(wide_ONG, scale_ON, minimum_ON).to(torch.uint8).flatten(1)), scale_ON, minimum_ON


class RangeSearch:
    """The best range of each group so far: its ends in fractions of the smallest and the largest weight."""

    def __init__(self, wide_ONG: Tensor) -> None:
        self._wide_ONG, self._low_ON, self._high_ON = wide_ONG, wide_ONG.amin(dim=2), wide_ONG.amax(dim=2)
        self.one_ON = torch.ones_like(self._low_ON)
        self.from_ON = self.to_ON = self.one_ON
        self.scale_ON, self.minimum_ON = scale_and_minimum(self._low_ON, self._high_ON)
        self._error_ON = torch.full_like(self._low_ON, torch.inf)

    def compare(self, from_ON: Tensor, to_ON: Tensor) -> None:
        """Take this range where it has a smaller error."""
        is_better_ON = self.keep(*scale_and_minimum(self._low_ON * from_ON, self._high_ON * to_ON))
        self.from_ON = torch.where(is_better_ON, from_ON, self.from_ON)
        self.to_ON = torch.where(is_better_ON, to_ON, self.to_ON)

    def keep(self, scale_ON: Tensor, minimum_ON: Tensor) -> Tensor:
        """Take these numbers where they have a smaller error, and say where that is."""
        error_ON = rounding_error(self._wide_ONG, scale_ON, minimum_ON)
        is_better_ON = error_ON < self._error_ON
        self.scale_ON = torch.where(is_better_ON, scale_ON, self.scale_ON)
        self.minimum_ON = torch.where(is_better_ON, minimum_ON, self.minimum_ON)
        self._error_ON = torch.where(is_better_ON, error_ON, self._error_ON)
        return is_better_ON


def fit_levels(wide_ONG: Tensor, scale_ON: Tensor, minimum_ON: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum with the least squared error for the levels that these give."""
    levels_ONG = to_levels(wide_ONG, scale_ON, minimum_ON)
    size, sum_ON, weights_ON = wide_ONG.shape[2], levels_ONG.sum(dim=2), wide_ONG.sum(dim=2)
    variance_ON = size * levels_ONG.square().sum(dim=2) - sum_ON.square()
    covariance_ON = size * (levels_ONG * wide_ONG).sum(dim=2) - sum_ON * weights_ON
    fitted_ON = (covariance_ON / variance_ON).to(torch.bfloat16)
    fitted_ON = torch.where(fitted_ON > 0, fitted_ON, scale_ON)  # one level has no slope
    return fitted_ON, ((weights_ON - fitted_ON.float() * sum_ON) / size).to(torch.bfloat16)


def scale_and_minimum(low_ON: Tensor, high_ON: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and minimum of 16 levels between two limits."""
    scale_ON = ((high_ON - low_ON) / MAX_LEVEL).to(torch.bfloat16)
    return torch.where(scale_ON == 0, torch.ones_like(scale_ON), scale_ON), low_ON.to(torch.bfloat16)


def in_steps(wide_ONG: Tensor, scale_ON: Tensor, minimum_ON: Tensor) -> Tensor:
    """Each weight as a number of steps above the minimum."""
    return (wide_ONG - minimum_ON.float().unsqueeze(2)).mul_(scale_ON.float().reciprocal().unsqueeze(2))


def to_levels(wide_ONG: Tensor, scale_ON: Tensor, minimum_ON: Tensor) -> Tensor:
    return in_steps(wide_ONG, scale_ON, minimum_ON).round_().clamp_(0, MAX_LEVEL)


def rounding_error(wide_ONG: Tensor, scale_ON: Tensor, minimum_ON: Tensor) -> Tensor:
    """The squared error [O, N] of each group on its 16 levels."""
    steps_ONG = in_steps(wide_ONG, scale_ON, minimum_ON)
    off_ONG = steps_ONG.round().clamp_(0, MAX_LEVEL).sub_(steps_ONG)
    return off_ONG.square_().sum(dim=2).mul_(scale_ON.float().square())


def dequantize_groups(weight: Tensor, scales: Tensor, minimums: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights […, O, I] from the scales and minimums […, O, N] of their groups."""
    levels = unpack_int4(weight).view(*scales.shape, -1).to(dtype)
    return torch.addcmul(minimums.to(dtype).unsqueeze(-1), levels, scales.to(dtype).unsqueeze(-1)).flatten(-2)


def pack_int4(levels_OI: Tensor) -> Tensor:
    """Two weights per byte [O, P]."""
    return levels_OI[:, ::2] << 4 | levels_OI[:, 1::2]


def unpack_int4(pairs: Tensor) -> Tensor:
    """One weight per byte: […, O, P] to […, O, I]."""
    return torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten(-2)
