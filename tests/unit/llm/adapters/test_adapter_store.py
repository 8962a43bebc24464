"""How the adapters of a step are computed."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm.adapters.adapter_store import AdapterStore, rows_of, uses_stacks
from flambeau.llm.adapters.layer_changes import AdapterChanges, LayerChange
from flambeau.llm.adapters.lora_weights import AdapterTarget, LoraPart

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_tokens", "num_used", "num_loaded", "expected"),
    [
        (8, 8, 8, True),
        (8, 2, 4, True),
        (8, 2, 5, False),  # most of the work would be for nothing
        (8, 1, 1, False),  # one adapter has all the tokens, or they are few
        (500, 8, 8, False),  # prompts
    ],
)
def test_all_adapters_are_computed_together_where_most_of_them_are_used(num_tokens, num_used, num_loaded, expected):
    assert uses_stacks(num_tokens, num_used, num_loaded) is expected


def test_neighboring_rows_are_a_slice():
    assert rows_of([0, 2, 2, 1], 2, CPU) == slice(1, 3)
    assert rows_of([2, 0, 2], 2, CPU).tolist() == [0, 2]


@pytest.mark.parametrize("num_loaded", [3, 20])  # stacked, and one after another
@pytest.mark.parametrize("has_matrix", [False, True])
def test_both_ways_compute_the_same(num_loaded, has_matrix):
    torch.manual_seed(0)
    store = AdapterStore(AdapterTarget(arch=None, local=None, shard=None, device=CPU, dtype=torch.float32), None)
    for number in range(1, num_loaded + 1):  # different ranks, and one that leaves some outputs as they are
        spans = [(0, 6), (6, 4)] if number != 2 else [(6, 4)]
        parts = [LoraPart(start, torch.randn(number, 5), torch.randn(count, number)) for start, count in spans]
        parts += [LoraPart(2, torch.randn(3, 5), None)] if has_matrix and number == 1 else []
        vectors = [torch.rand(10) if number % 2 else None, torch.randn(10) if number % 3 else None]
        store.adapters[number] = AdapterChanges(layers={"layer": LayerChange(parts, *vectors)})
    numbers, x, y = [3, 0, 1, 2, 3], torch.randn(5, 5), torch.randn(5, 10)
    expected = y.clone()
    for row, number in enumerate(numbers):
        if number:
            change = store.adapters[number].layers["layer"]
            expected[row] *= 1.0 if change.scale_O is None else change.scale_O
            expected[row] += 0.0 if change.shift_O is None else change.shift_O
            for part in change.parts:
                expected[row, part.columns] += part.delta @ x[row]
    with store.applied(torch.tensor(numbers)):
        assert store._is_stacked is (num_loaded == 3)
        y = store.apply_to(y, "layer", x)
        y = store.apply_to(y, "another layer", x)
    torch.testing.assert_close(y, expected)
