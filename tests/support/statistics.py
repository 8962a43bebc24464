"""A chi-square test, without the second that scipy takes to import in each process of the tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chi_square_p(observed: Sequence[float] | Tensor, expected: Sequence[float] | Tensor | None = None) -> float:
    """How probable counts at least this far from the expected ones are; without those, all are expected alike."""
    counts = torch.as_tensor(observed, dtype=torch.float64)
    wanted = counts.mean().expand_as(counts) if expected is None else torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(wanted.sum(), counts.sum(), rtol=1e-6, atol=0.0)
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor(len(counts) - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
