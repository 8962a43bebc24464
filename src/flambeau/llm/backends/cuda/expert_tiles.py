"""Which rows a program of the experts' products multiplies: tiles of pairs of a row and one of its experts.

Shapes: T rows · A experts of a row · P pairs, which are T·A · M tiles
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_ROWS = 16  # of a product on tensor cores
MAX_ROWS = 128
SEARCHED = (64, 256, 1024)  # pairs that each program searches for its own; more are sorted


def sorted_tiles(chosen_TA: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """The pairs [P] in the order of their experts, and tiles [M, 3] of up to `rows` of one expert.

    A tile is its expert, its first place in that order and the end of the expert's places. M depends on the shape only:
    tiles that are not needed are empty.
    """
    experts_P, order_P = torch.sort(chosen_TA.flatten(), stable=True)
    num_pairs, device = len(order_P), chosen_TA.device
    numbers = torch.arange(num_experts + 1, dtype=experts_P.dtype, device=device)
    starts = torch.searchsorted(experts_P, numbers)
    num_tiles = -(-starts.diff() // rows)
    ends = num_tiles.cumsum(0)
    tiles_M = torch.arange(min(num_experts, num_pairs) + num_pairs // rows, device=device)
    expert_M = torch.searchsorted(ends, tiles_M, right=True)
    is_used = expert_M < num_experts
    expert_M = expert_M.clamp(max=num_experts - 1)
    first_M = starts[expert_M] + (tiles_M - (ends - num_tiles)[expert_M]) * rows
    stop_M = torch.where(is_used, starts[expert_M + 1], 0)
    return order_P, torch.stack((expert_M, first_M, stop_M), dim=1)


def tile_rows(num_pairs: int, num_experts: int) -> int:
    """Pairs of a tile: most experts have one tile if rows choose them evenly."""
    return min(MAX_ROWS, max(MIN_ROWS, 1 << (-(-num_pairs // num_experts) - 1).bit_length()))


def searched_pairs(num_pairs: int) -> int:
    """How many pairs programs search; 0: pairs have to be sorted. Each number is another compilation."""
    return next((number for number in SEARCHED if number >= num_pairs), 0)
