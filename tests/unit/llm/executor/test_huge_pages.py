"""Tensors in huge pages are ordinary tensors of zeros."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm.executor.huge_pages import HUGE_PAGE_BYTES, zeros_in_huge_pages


@pytest.mark.parametrize("shape", [(3, 5), (600, 1000), (2, 1 << 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
@pytest.mark.parametrize("first_is_small", [False, True])
def test_they_have_the_shape_and_type_and_can_be_written(shape, dtype, first_is_small):
    tensor = zeros_in_huge_pages(shape, dtype, first_is_small=first_is_small)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor[-1, -1] = 3
    assert tensor.sum() == 3


def test_large_ones_start_at_a_page():
    assert zeros_in_huge_pages((HUGE_PAGE_BYTES,), torch.float32).data_ptr() % HUGE_PAGE_BYTES == 0
