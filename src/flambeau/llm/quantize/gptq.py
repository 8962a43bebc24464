"""4-bit weights chosen for the inputs that a layer really gets (GPTQ).

Columns are quantized one after another. The error of each is weighed by the inputs and made up for by the columns that
are left, so that the outputs change less than with rounding alone.

Shapes: O outputs · I inputs · N groups · G inputs of a group · B columns of a portion
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.llm.quantize.int4 import MAX_LEVEL, pack_int4, scale_and_minimum

Grid = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # limits of groups → their scales and minimums
PORTION = 128  # columns whose effect on the others is computed at once; a multiple of all group sizes
SHRINKS = (0.95, 0.9, 0.85, 0.8, 0.75)  # fractions of the range of a group to try
DAMPING = (0.01, 0.1, 1.0)  # of the mean of the diagonal; more if the inputs determine too little


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Levels [O, I], and the scales and minimums [O, N] of their groups."""

    levels: Tensor
    scales: Tensor
    minimums: Tensor

    def __getitem__(self, rows: slice) -> QuantizedRows:
        return QuantizedRows(self.levels[rows], self.scales[rows], self.minimums[rows])

    def dequantize(self) -> Tensor:
        groups = self.levels.float().view(*self.scales.shape, -1)
        return (groups * self.scales.float().unsqueeze(2) + self.minimums.float().unsqueeze(2)).flatten(1)

    def packed(self) -> dict[str, Tensor]:
        """The tensors of an Int4Linear."""
        return {"weight": pack_int4(self.levels), "scales": self.scales, "minimums": self.minimums}


def integer_zeros(low_ON: Tensor, high_ON: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """A grid on which 0 is a level, as formats with integer zeros need it; scales are exact in the given type."""
    low_ON, high_ON = low_ON.clamp_max(0), high_ON.clamp_min(0)
    scale_ON = ((high_ON - low_ON) / MAX_LEVEL).to(dtype).float()
    scale_ON = torch.where(scale_ON == 0, torch.ones_like(scale_ON), scale_ON)
    return scale_ON, -(-low_ON / scale_ON).round().clamp(0, MAX_LEVEL) * scale_ON


def symmetric(low_ON: Tensor, high_ON: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """A grid on which level 8 is 0."""
    scale_ON = (torch.maximum(low_ON.abs() / 8, high_ON.abs() / 7)).to(dtype).float()
    scale_ON = torch.where(scale_ON == 0, torch.ones_like(scale_ON), scale_ON)
    return scale_ON, -8 * scale_ON


def quantize_for_inputs(
    weight_OI: Tensor, gram_II: Tensor, group_size: int, grid: Grid = scale_and_minimum
) -> QuantizedRows:
    """Quantize a layer whose inputs have the sum of products `gram_II`; the inputs divide into groups."""
    rest_IO = weight_OI.float().t().contiguous()  # a column of the weights is a row here: it is read and changed often
    weights_I = gram_II.diagonal()
    factor_II = inverse_factor(gram_II)
    levels_IO = torch.empty_like(rest_IO)
    scales, minimums = [], []
    scale_O = minimum_O = torch.empty(0)
    for start in range(0, len(rest_IO), PORTION):
        end = min(start + PORTION, len(rest_IO))
        errors_BO = torch.zeros_like(rest_IO[start:end])
        for i in range(start, end):
            if i % group_size == 0:
                group = slice(i, i + group_size)
                scale, minimum = best_grid(rest_IO[group].t(), weights_I[group], grid)
                scale_O, minimum_O = scale.float(), minimum.float()
                scales.append(scale)
                minimums.append(minimum)
            level_O = torch.div(rest_IO[i] - minimum_O, scale_O, out=levels_IO[i]).round_().clamp_(0, MAX_LEVEL)
            off_O = errors_BO[i - start]
            torch.sub(rest_IO[i], torch.addcmul(minimum_O, level_O, scale_O), out=off_O).div_(factor_II[i, i])
            rest_IO[i:end].addr_(factor_II[i, i:end], off_O, alpha=-1)
        rest_IO[end:].addmm_(factor_II[start:end, end:].t(), errors_BO, alpha=-1)
    levels_OI = levels_IO.t().to(torch.uint8).contiguous()
    return QuantizedRows(levels_OI, torch.stack(scales, 1), torch.stack(minimums, 1))


def round_to_groups(weight_OI: Tensor, group_size: int, grid: Grid) -> QuantizedRows:
    """Quantize without knowing the inputs: each group with the range that has the least error."""
    groups_ONG = weight_OI.float().reshape(len(weight_OI), -1, group_size)
    flat = groups_ONG.flatten(0, 1)
    scale, minimum = best_grid(flat, torch.ones(group_size, device=flat.device), grid)
    steps = (flat - minimum.float().unsqueeze(1)) / scale.float().unsqueeze(1)
    levels = steps.round_().clamp_(0, MAX_LEVEL).to(torch.uint8).view(weight_OI.shape)
    return QuantizedRows(levels, scale.view(groups_ONG.shape[:2]), minimum.view(groups_ONG.shape[:2]))


def best_grid(group_OG: Tensor, weights_G: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The scale and minimum of a group in each row: of some ranges, that with the least weighted error."""
    low_O, high_O = group_OG.amin(1), group_OG.amax(1)
    best = grid(low_O, high_O)
    least_O = grid_error(group_OG, weights_G, *best)
    for shrink in SHRINKS:
        other = grid(low_O * shrink, high_O * shrink)
        error_O = grid_error(group_OG, weights_G, *other)
        is_better_O = error_O < least_O
        best = torch.where(is_better_O, other[0], best[0]), torch.where(is_better_O, other[1], best[1])
        least_O = torch.minimum(error_O, least_O)
    return best


def grid_error(group_OG: Tensor, weights_G: Tensor, scale_O: Tensor, minimum_O: Tensor) -> Tensor:
    scale_O1, minimum_O1 = scale_O.float().unsqueeze(1), minimum_O.float().unsqueeze(1)
    levels_OG = ((group_OG - minimum_O1) / scale_O1).round().clamp(0, MAX_LEVEL)
    return ((minimum_O1 + levels_OG * scale_O1 - group_OG).square() * weights_G).sum(1)


def inverse_factor(gram_II: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse; inputs that are always 0 count as independent."""
    diagonal = gram_II.diagonal()
    mean = diagonal.mean().clamp_min(torch.finfo(torch.float32).tiny)
    for damping in DAMPING:
        damped = gram_II + torch.diag(damping * mean + (diagonal == 0) * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
    return torch.eye(len(gram_II), device=gram_II.device)  # no input tells anything: plain rounding
