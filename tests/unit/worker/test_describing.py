"""Values in a few words."""

from __future__ import annotations

from collections import OrderedDict

import numpy
import pytest
import torch
from PIL import Image

from flambeau.worker.describing import describe, size_text

TENSOR = torch.zeros(2, 3)
OTHER = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(2, 3, 224, 224), "Tensor float32 (2, 3, 224, 224) cpu"),
        (numpy.zeros((2, 3), numpy.uint8), "ndarray uint8 (2, 3) cpu"),
        ([{}, {}], "list of 2 dict"),
        ([1, "a"], "list of 2 (int, str)"),
        ([], "list of 0"),
        ([TENSOR, TENSOR], "list of 2 Tensor float32 (2, 3) cpu"),
        ([TENSOR, OTHER], "list of 2 Tensor"),
        ((TENSOR, None), "tuple of 2 (NoneType, Tensor)"),
        (bytearray(13_200), "bytearray 13.2 kB"),
        (b"", "bytes 0 B"),
        ("four", "str of 4 characters"),
        (None, "None"),
        (True, "bool True"),
        (0.5, "float 0.5"),
        ({"ids": TENSOR, "mask": OTHER}, "{ids: Tensor float32 (2, 3) cpu, mask: Tensor int64 (4,) cpu}"),
        ({"deep": {"ids": OTHER}, "n": 1}, "{deep: {ids: Tensor int64 (4,) cpu}, n: int 1}"),
        (OrderedDict(ids=OTHER), "OrderedDict {ids: Tensor int64 (4,) cpu}"),
        ({"a": 1, "b": [2]}, "dict of 2 (a, b)"),
        ({}, "dict of 0"),
        ({i: i for i in range(9)}, "dict of 9 (0, 1, 2, 3, 4, 5, …)"),
        (Image.new("RGB", (5, 4)), "Image RGB 5×4"),
        (object(), "object"),
    ],
)
def test_values_are_described(value, words):
    assert describe(value) == words


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (7 * 10**12, "7000.0 GB")]
)
def test_sizes_have_a_unit(size, text):
    assert size_text(size) == text


def test_mappings_in_mappings_come_to_an_end():
    value: dict[str, object] = {"x": TENSOR}
    for _ in range(50):
        value = {"inner": value, "x": TENSOR}
    assert len(describe(value)) < 400
