"""What scales belong to, by their shape."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm.checkpoints.scaled_numbers import scale_blocks


@pytest.mark.parametrize(
    ("scale", "block", "found"),
    [
        ((), None, ((1, 1), (64, 96))),
        ((1,), None, ((1, 1), (64, 96))),
        ((1, 1), (128, 128), ((1, 1), (128, 128))),
        ((64,), None, ((64, 1), (1, 96))),
        ((64, 1), (32, 32), ((64, 1), (1, 96))),
        ((1, 64), None, ((64, 1), (1, 96))),
        ((64, 3), None, ((64, 3), (1, 32))),
        ((2, 3), (32, 32), ((2, 3), (32, 32))),
        ((2, 1, 3, 1), (32, 32), ((2, 3), (32, 32))),
        ((3, 2), (32, 32), None),
        ((2, 3), None, None),
        ((96,), None, None),
    ],
)
def test_scales_belong_to_rows_groups_or_blocks(scale, block, found):
    assert scale_blocks(torch.Size((64, 96)), torch.Size(scale), block) == found


def test_as_many_blocks_as_rows_are_blocks():
    """One row of 128 blocks, in a layer of 128 rows."""
    found = scale_blocks(torch.Size((128, 128 * 128)), torch.Size((1, 128)), (128, 128))
    assert found == ((1, 128), (128, 128))
