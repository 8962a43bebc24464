"""What attention layers of transformers ask for, and which of it blocks can give."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flambeau.llm.backends.hugging_face.attention import CausalMask, NotPageable, Probe, check_options, window_of


def sliding(window):
    return lambda batch, head, query, key: (key <= query) & (key > query - window)


def test_window_of_a_mask_is_found_from_its_function():
    assert window_of(lambda batch, head, query, key: key <= query) is None
    assert window_of(sliding(512)) == 512
    assert window_of(sliding(1)) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, head, query, key: (key <= query) & (key // 64 == query // 64),  # chunks
        lambda batch, head, query, key: key <= query + 1,  # sees the next token
        lambda batch, head, query, key: key >= 0,
        lambda batch, head, query, key: (key <= query) & torch.ones(8, dtype=torch.bool)[key],  # padding of a batch
    ],
)
def test_other_masks_are_not_pageable(function):
    with pytest.raises(NotPageable, match="mask"):
        window_of(function)


def test_options_that_change_the_scores_are_named():
    check_options({"scaling": 0.5, "softcap": 3.0, "s_aux": torch.zeros(2), "position_bias": None, "use_cache": False})
    with pytest.raises(NotPageable, match="position_bias"):
        check_options({"position_bias": torch.zeros(2)})
    with pytest.raises(NotPageable, match="dropout"):
        check_options({"dropout": 0.1})


def tensors(num_heads=4, num_kv_heads=2, length=3):
    return torch.zeros(1, num_heads, length, 8), torch.zeros(1, num_kv_heads, length, 8), torch.zeros(1, 2, length, 6)


def test_shapes_of_a_layer_are_recorded():
    probe = Probe()
    output, _ = probe.attend(nn.Identity(), *tensors(), CausalMask(5), sliding_window=5)
    assert output.shape == (1, 3, 4, 6)
    layer = probe.layers[0]
    assert (layer.num_kv_heads, layer.key_size, layer.value_size, layer.window) == (2, 8, 6, 5)
    assert layer.token_size == 28


@pytest.mark.parametrize(
    ("mask", "options", "word"),
    [
        (None, {}, "masks of their own"),
        (torch.zeros(1), {}, "masks of their own"),
        (CausalMask(None), {"sliding_window": 4}, "window"),
        (CausalMask(None), {"is_causal": False}, "causal"),
    ],
)
def test_what_blocks_cannot_give_is_a_reason(mask, options, word):
    with pytest.raises(NotPageable, match=word):
        Probe().attend(nn.Identity(), *tensors(), mask, **options)


def test_a_module_that_attends_twice_is_not_pageable():
    probe, module = Probe(), nn.Identity()
    probe.attend(module, *tensors(), CausalMask(None))
    with pytest.raises(NotPageable, match="share"):
        probe.attend(module, *tensors(), CausalMask(None))
